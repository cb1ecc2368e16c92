"""Tensor parallelism along one dimension of a device mesh, and psgc along the other, here 2 x 2 ranks on one machine:
psgc run --workers 4 --servers 1 --codec int8 -- python examples/mesh_tensor_parallel.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc


def model_on(mesh: DeviceMesh) -> DistributedDataParallel:
    """Cut over the ranks of "tp"; replicated, with torch's DDP around it, over those of "dp_replicate"."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _pre_dp_module_transform(model)  # DDP takes plain tensors: this rank's pieces
    return DistributedDataParallel(model, process_group=mesh.get_group("dp_replicate"))


def train(model: nn.Module, replica: int, steps: int = 20) -> list[float]:
    """This rank's losses. Ranks of a replica have the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + replica)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", os.environ.get("DMLC_WORKER_ID", "0")))
    world = int(os.environ.get("WORLD_SIZE", os.environ.get("DMLC_NUM_WORKER", "1")))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_replicate", "tp"))
    psgc.init(mesh=mesh, dim="dp_replicate")  # psgc is among the ranks that hold the same pieces
    model = model_on(mesh)
    model.register_comm_hook(None, psgc.ddp_hook())
    losses = train(model, psgc.rank())
    print(f"rank {dist.get_rank()}, psgc's losses: {losses[0]:.6f}, then {losses[-1]:.6f}")
    if "--compare" in sys.argv:
        losses = train(model_on(mesh), psgc.rank())
        print(f"rank {dist.get_rank()}, torch's losses: {losses[0]:.6f}, then {losses[-1]:.6f}")
    psgc.barrier()
    dist.destroy_process_group()
