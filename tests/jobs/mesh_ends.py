"""A worker of four, 2 x 2, whose groups train different models one after the other; then the last rank raises. Run by tests."""

from __future__ import annotations

import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import psgc.torch as psgc


def train(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict({name: nn.Linear(20, 30)}))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    psgc.init(mesh=mesh, dim="replicate")
    column = dist.get_rank() % 2
    if column == 0:
        train("first")
    psgc.barrier()
    if column == 1:
        train("second")
    psgc.barrier()
    if dist.get_rank() == 3:
        raise ValueError("out of data on rank 3 of the job")
    psgc.barrier()


main()
