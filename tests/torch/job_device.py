"""A worker of a real job that trains each case twice: with its gradients on the CPU, and with the same tensors counting as on a recorded device. Prints
the digests of both, and what raced."""

from __future__ import annotations

import sys
from typing import Any

import torch
from job_train import Branching, train  # type: ignore[import-not-found]

import psgc.torch as psgc
from psgc.torch.device import engines
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
    cases = [case.partition("+")[::2] for case in sys.argv[1:]]
    here = [train(codec, how) for codec, how in cases]
    runtime = RecordingRuntime()
    use_recorded(runtime, slots=2, slot_bytes=16384)
    watched(runtime)
    there = [train(codec, how) for codec, how in cases]
    engines.use()
    for (codec, how), one, other in zip(cases, here, there, strict=True):
        print(f"{codec}+{how} {'same' if one == other else 'differs'}", flush=True)
    print(f"uses {min(runtime.races.uses, 1000)} races {len(runtime.races.found)} {runtime.races.found[:3]}", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
