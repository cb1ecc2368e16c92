"""A worker of a real job that trains each case once: with its gradients on the CPU (``cpu``), or with the same tensors counting as on a recorded device
(``device``). Prints each case's weights. Two such jobs draw the same random numbers, which follow from the names of what is trained, so they have to end with
the same weights. Cases: ``CODEC+HOW`` as of job_train; ``plan CODEC``, encoded on a GPU by a plan; ``ddp CODEC``, under DistributedDataParallel."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from job_ddp import SMALL, digest, mlp, plain  # type: ignore[import-not-found]
from job_ddp import train as train_ddp
from job_device import watched  # type: ignore[import-not-found]
from job_train import Branching, train  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.torch.ddp.hook import DdpHook
from tests.device.random_plans import on_cpus
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded

ON_GPU = ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu")


def told_by_ddp(runtime: RecordingRuntime) -> None:
    """Have the recorder told that DDP has written a bucket."""
    call = DdpHook.__call__

    def called(hook: Any, state: object, bucket: Any) -> Any:
        runtime.trainer_writes([bucket.buffer()])
        return call(hook, state, bucket)

    DdpHook.__call__ = called  # type: ignore[method-assign]


def planned(codec: str) -> Plan:
    sizes = {name: parameter.numel() for name, parameter in Branching().named_parameters()}
    return Plan("planned", "any", (PlannedBucket(tuple(sizes), sum(sizes.values()), 1, 0, codec, ON_GPU),))


def under_ddp(codec: str) -> str:
    torch.manual_seed(7)
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    model.register_comm_hook(None, psgc.ddp_hook(codec))
    train_ddp(model, plain)
    return str(digest(model))


def weights(case: str, there: bool) -> str:
    kind, _, codec = case.partition(" ")
    if kind == "ddp":
        return under_ddp(codec)
    if kind == "plan":
        return str(train(planned(codec) if there else on_cpus(planned(codec)), "branches"))
    codec, _, how = case.partition("+")
    return str(train(codec, how))


def main() -> None:
    torch.set_num_threads(1)
    where, *cases = sys.argv[1:]
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    runtime = RecordingRuntime()
    if where == "device":
        engine = use_recorded(runtime, slots=2, slot_bytes=16384)
        watched(runtime)
        told_by_ddp(runtime)
    for case in cases:
        races, uses = len(runtime.races.found), runtime.races.uses
        print(f"case {case}: {weights(case, where == 'device')}", flush=True)
        if where == "device":
            # DDP's own threads wait for results on the host, which the recorder does not see
            raced = runtime.races.found[races:][:2] if not case.startswith("ddp") else []
            print(
                f"on the device, {case}: used {runtime.races.uses > uses}, encoded {engine.launches.parts > 0}, races {raced}", flush=True
            )
            engine.launches.parts = 0
    psgc.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main()
