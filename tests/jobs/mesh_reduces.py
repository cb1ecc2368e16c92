"""A worker of six, 3 x 2: the groups of three that a mesh's dimension makes average tensors among some of their own ranks. Run by tests."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import psgc.torch as psgc

STEPS = 3


def of(rank: int, step: int, numel: int = 20_000) -> torch.Tensor:
    """What a rank of the job brings to a step."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicate", "shard"))
    psgc.init(mesh=mesh, dim="replicate")
    job, own = dist.get_rank(), psgc.rank()
    ranks = mesh["replicate"].mesh.tolist()
    for step in range(STEPS):
        for groups in ([(0, 1)], [(1, 2)], [(0, 2), (1,)], [(0,), (1, 2)], [(0, 1, 2)]):
            name, mine = str(groups), next((group for group in groups if own in group), (own,))
            taking_part = [of(ranks[member], step) for member in mine]
            mean, total, counts = of(job, step), of(job, step, 7), torch.tensor([job, 1])
            psgc.reduce([mean, total.clone()], groups, name)
            psgc.reduce([counts], groups, f"{name} counts", average=False)
            assert torch.equal(mean, sum(taking_part) / len(mine)), (groups, step)
            assert counts.tolist() == [sum(ranks[member] for member in mine), len(mine)], (groups, step)
    lossy = of(job, 0, 50_000)
    psgc.reduce([lossy], [(1, 2)], "lossy", compression="int8")
    exact = (of(ranks[1], 0, 50_000) + of(ranks[2], 0, 50_000)) / 2 if own else of(job, 0, 50_000)
    apart = float((lossy - exact).abs().max())
    assert 0 < apart < 0.1 if own else apart == 0, apart
    psgc.barrier()
    print("all right in", ranks, flush=True)
    psgc.shutdown()
    dist.destroy_process_group()


main()
