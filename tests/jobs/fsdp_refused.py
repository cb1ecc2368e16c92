"""A worker of two that shards models as ``fsdp_hook`` does not take them, and prints what each is told. Run by tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import psgc.torch as psgc
from psgc.errors import PsgcError
from psgc.plan.model.plan import Plan, PlannedBucket


def told(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except PsgcError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: nothing", flush=True)


class Two(nn.Module):
    """Of which forward uses the second layer, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.used = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.used else self.first(x)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


def plan(*names: str) -> Plan:
    option = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    return Plan("small", "two nodes", tuple(PlannedBucket((name,), 4, 1, 0, "none", option) for name in names))


def main() -> None:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    nodes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    whole = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    told("plain", lambda: psgc.fsdp_hook(nn.Linear(4, 4)))
    told("native", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes)))
    told("no replicas", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=whole)))
    told("codec", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), "int9"))
    told("plan", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), "auto"))
    told("plan of others", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), plan("layer.weight")))
    told("plan within nodes", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), plan("weight", "bias")))
    mixed = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), fully_shard(nn.Linear(4, 4), mesh=whole))
    told("two meshes", lambda: psgc.fsdp_hook(mixed))
    divided = fully_shard(nn.Linear(4, 4), mesh=nodes["shard"])
    psgc.fsdp_hook(divided)
    backward(divided)
    divided.set_gradient_divide_factor(3.0)
    told("divided", lambda: backward(divided))
    unused = fully_shard(Two(), mesh=nodes["shard"])
    psgc.fsdp_hook(unused)
    unused.used = False
    told("unused", lambda: backward(unused))
    unused = fully_shard(Two(), mesh=nodes["shard"])
    psgc.fsdp_hook(unused)
    unused.set_reduce_scatter_unused_params(True)
    unused.used = False
    told("unused and told", lambda: backward(unused))
    parted = Two()
    fully_shard(parted.first, mesh=nodes["shard"])
    fully_shard(parted.second, mesh=nodes["shard"])
    parted = fully_shard(parted, mesh=nodes["shard"])
    psgc.fsdp_hook(parted)
    backward(parted)
    parted.used = False
    told("a module that nobody uses", lambda: backward(parted))
    parted.used = psgc.rank() == 0
    told("a module of rank 0 alone", lambda: backward(parted))


main()
