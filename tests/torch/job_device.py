"""A worker of a real job that trains each case twice: with its gradients on the CPU, and with the same tensors counting as on a recorded device. Prints
whether both end with the same weights, and what raced. A case ``plan N`` is the plan that is drawn at random by seed N, with all of it on the CPU the first
time; last comes a plan of floats alone, from device to device and through the host."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from job_train import Branching, train  # type: ignore[import-not-found]

import psgc.torch as psgc
from psgc.torch.device import engines
from tests.device.random_plans import float_plan, on_cpus, random_plan
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded


def watched(runtime: RecordingRuntime) -> None:
    """Have the recorder told of what the trainer does on its stream: backward's writes before psgc's hooks run, and the optimizer's reads."""
    init, step = Branching.__init__, torch.optim.SGD.step

    def built(model: Any) -> None:
        init(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: runtime.trainer_writes([p.grad]))

    Branching.__init__ = built

    def stepped(optimizer: Any, *args: Any) -> Any:
        runtime.trainer_reads([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        return step(optimizer, *args)

    torch.optim.SGD.step = stepped  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    sizes = {name: parameter.numel() for name, parameter in Branching().named_parameters()}
    plans = {case: random_plan(int(case.split()[1]), sizes) for case in sys.argv[1:] if case.startswith("plan ")}
    cases = [case.partition("+")[::2] for case in sys.argv[1:]]
    here = [train(on_cpus(plans[codec]) if codec in plans else codec, how) for codec, how in cases]
    figures = psgc.current_session().figures
    assert figures is not None
    noted = figures.made_at
    runtime = RecordingRuntime()
    use_recorded(runtime, slots=2, slot_bytes=16384)
    watched(runtime)
    there = [train(plans.get(codec, codec), how) for codec, how in cases]
    use_recorded(apart := RecordingRuntime(gpus=lambda: f"gpu of {os.getpid()}"), slots=2, slot_bytes=16384)
    watched(apart)
    floats = float_plan(sizes)
    digests = {train(floats, "branches")}  # its floats go from device to device, by gloo in NCCL's place
    engines.use()
    digests.add(train(floats, "branches"))
    for (codec, how), one, other in zip(cases, here, there, strict=True):
        print(f"{codec}{'+' if how else ''}{how} {'same' if one == other else 'differs'}", flush=True)
    print(f"computed on a device: {noted > 0} {figures.made_at > 0}", flush=True)
    print(f"uses {min(runtime.races.uses, 1000)} races {len(runtime.races.found)} {runtime.races.found[:3]}", flush=True)
    weights = "same" if len(digests) == 1 else "differ"
    print(f"groups on devices: {runtime.streams > 3} {apart.streams > 3}, weights {weights}, races {apart.races.found[:3]}", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
