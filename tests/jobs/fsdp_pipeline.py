"""A worker of four, two stages of a pipeline of two replicas, that trains by torch's pipelining, which has FSDP2 reduce gradients behind all backwards:
natively (HSDP), or between the replicas by psgc. Run by tests.

Prints a line for each run: its name, a digest of this rank's pieces, and the last loss on the last stage.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import psgc.torch as psgc

STEPS, WIDTH, MICROBATCHES = 4, 24, 2
STAGES = {"interleaved": 2}  # of a rank


class Block(nn.Module):
    """Has a parameter beside the blocks that are sharded in it, so that FSDP reduces the outermost module, too; and one of which forward makes no use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def stages_on(mesh: DeviceMesh, how: str) -> list[Any]:
    """This rank's, in the pipeline's order. how: "plain"; "accumulate": two of the schedule's steps between the optimizer's; "bf16-reduce": FSDP computes with
    what it has reduced at once; "apart": the outermost module has no parameters of its own that are trained; "interleaved": two stages on each rank."""
    torch.manual_seed(0)
    count = 2 * STAGES.get(how, 1)
    blocks = [Block() for _ in range(count)]
    stages = blocks[mesh.get_local_rank("pp") :: 2]
    over = mesh["dp_replicate", "dp_shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if how == "bf16-reduce" else MixedPrecisionPolicy()
    for stage in stages:
        stage.scale.requires_grad_(how != "apart")
        if how == "bf16-reduce":  # FSDP itself fails over a module without a forward there
            del stage.unused
        for layer in stage.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=over, mp_policy=policy)
        fully_shard(stage, mesh=over, mp_policy=policy)
    return stages


def train(mesh: DeviceMesh, stages: list[Any], how: str) -> str:
    place, count = mesh.get_local_rank("pp"), 2 * len(stages)
    group = mesh.get_group("pp")
    parts = [PipelineStage(stage, place + 2 * each, count, torch.device("cpu"), group=group) for each, stage in enumerate(stages)]
    given: dict[str, Any] = {"n_microbatches": MICROBATCHES, "loss_fn": nn.functional.mse_loss}
    schedule = ScheduleInterleaved1F1B(parts, **given) if how == "interleaved" else Schedule1F1B(parts[0], **given)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    draw, losses = torch.Generator().manual_seed(mesh.get_local_rank("dp_replicate")), list[torch.Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(1 + (how == "accumulate")):
            x = torch.randn(8, WIDTH, generator=draw)
            if place == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.flip(1), losses=losses)
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.to_local().detach().numpy().tobytes())
    return f"{digest.hexdigest()[:12]} {float(torch.stack(losses[-MICROBATCHES:]).mean().detach()) if place else 0.0:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hows", nargs="+", default=["plain"])
    given = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    psgc.init(mesh=mesh, dim="dp_replicate")
    for how in given.hows:
        print(f"native {how} {train(mesh, stages_on(mesh, how), how)}", flush=True)
        for codec in ("none", "int8"):
            stages = stages_on(mesh, how)
            hooks = [psgc.fsdp_hook(stage, codec) for stage in stages]
            print(f"{codec} {how} {train(mesh, stages, how)}", flush=True)
            steps = STEPS * (1 + (how == "accumulate"))
            assert all(hook.statistics() == {"steps": steps} for hook in hooks), [hook.statistics() for hook in hooks]
    psgc.barrier()
    dist.destroy_process_group()
    psgc.shutdown()


main()
