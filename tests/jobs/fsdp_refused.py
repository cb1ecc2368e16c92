"""A worker of two that shards models as ``fsdp_hook`` does not take them, and prints what each is told. Run by tests."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import psgc.torch as psgc
from psgc.plan.model.plan import Plan, PlannedBucket
from tests.refusing import told


class Two(nn.Module):
    """Of which forward uses the second layer, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.used = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.used else self.first(x)


class Reversed(nn.Module):
    """Runs its layers in the reverse order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x))


def backward(model: nn.Module, freeze: nn.Module | None = None) -> None:
    """freeze: between forward and backward."""
    model.zero_grad()
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    if freeze is not None:
        freeze.requires_grad_(False)
    loss.backward()


class Twice(nn.Module):
    """Runs its first layer twice; or once, and its backward then breaks behind it. again: without a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice, self.again, self.breaks = nn.Linear(4, 4), nn.Linear(4, 4), False, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            x.register_hook(breaks)
        x = self.first(x) if self.again else x
        for _ in range(1 + self.twice):  # a reentrant checkpoint has a backward of its own
            x = checkpoint(self.first, x, use_reentrant=True) if self.twice else self.first(x)
        return self.second(x)


hooks: list[Any] = []


def breaks(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a hook of the script's")


def hooked(
    nodes: DeviceMesh, *frozen: str, elsewhere: DeviceMesh | None = None, given: Any = None, narrow: torch.dtype | None = None
) -> Twice:
    """Each of its layers is a unit. frozen: when it is hooked; elsewhere: where its second layer is sharded instead; narrow: what that computes in."""
    model = Twice()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    fully_shard(model.first, mesh=nodes["shard"])
    fully_shard(model.second, mesh=elsewhere or nodes["shard"], mp_policy=MixedPrecisionPolicy(narrow))
    hooks.append(psgc.fsdp_hook(model, given))
    return model


def plan(*names: str, option: tuple[str, ...] = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")) -> Plan:
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
    replicated = replicate(nn.Linear(4, 4), mesh=nodes["replicate"])
    told("replicate", lambda: psgc.fsdp_hook(replicated))
    told("replicate under diloco", lambda: psgc.DiLoCo(replicated, torch.optim.SGD(replicated.parameters(), lr=0.1), every=100))
    beside = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), replicate(nn.Linear(4, 4), mesh=nodes["replicate"]))
    beside[1].requires_grad_(False)
    told("frozen replicate", lambda: psgc.fsdp_hook(beside))
    told("codec", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), "int9"))
    told("plan", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), "auto"))
    told("plan of others", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), plan("layer.weight")))
    told("plan within nodes", lambda: psgc.fsdp_hook(fully_shard(nn.Linear(4, 4), mesh=nodes["shard"]), plan("weight", "bias")))
    parts = {"weight": nodes["shard"], "bias": whole}
    several = nn.Linear(4, 4)
    own = {id(parameter): name for name, parameter in several.named_parameters()}
    fully_shard(several, mesh=nodes["shard"], shard_placement_fn=lambda parameter: ShardPlacementResult(
        Shard(0), FSDPMeshInfo(parts[own[id(parameter)]], shard_mesh_dim=0)
    ))  # fmt: skip
    told("several meshes", lambda: psgc.fsdp_hook(several))
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
    thawed = hooked(nodes, "second", elsewhere=whole)
    backward(thawed)
    thawed.second.requires_grad_(True)
    told("trained elsewhere", lambda: backward(thawed))
    uncast = hooked(nodes, "second", narrow=torch.bfloat16)
    backward(uncast)
    uncast.second.requires_grad_(True)
    told("trained as it comes", lambda: backward(uncast))
    planned = hooked(nodes, "second", given=plan("first.weight", "first.bias", option=("flat.push", "flat.pull")))
    backward(planned)
    planned.second.requires_grad_(True)
    told("trained without a plan", lambda: backward(planned))
    late = hooked(nodes)
    told("frozen before backward", lambda: backward(late, freeze=late.second))
    late = hooked(nodes)
    late.second.set_requires_gradient_sync(False)
    backward(late)
    late.second.set_requires_gradient_sync(True)
    late.second.requires_grad_(False)
    told("frozen while gradients wait", lambda: backward(late))
    used = hooked(nodes)
    used.twice = True
    told("twice", lambda: backward(used))
    used = hooked(nodes)
    used.again = True
    used.first.set_reduce_scatter_unused_params(True)
    told("a forward twice", lambda: backward(used))
    around = Twice()
    around.again = True
    hooks.append(psgc.fsdp_hook(fully_shard(around, mesh=nodes["shard"])))
    told("around both", lambda: backward(around))
    used = hooked(nodes)
    told("a backward each", lambda: [backward(used) for _ in range(2)])
    broken = hooked(nodes)
    broken.breaks = True
    with contextlib.suppress(RuntimeError):
        backward(broken)
    took = hooks[-1]._gradients.take  # FSDP itself may reduce nothing any more after that
    told("raised", lambda: took(0, torch.zeros(20)))
    turned = Reversed()
    for layer in (turned.first, turned.second):
        fully_shard(layer, mesh=nodes["shard"])
    names = [name for name, _ in turned.named_parameters()]
    psgc.fsdp_hook(turned, plan(*names, option=("flat.reduce_scatter", "flat.all_gather")))
    backward(turned)
    told("registered otherwise", lambda: turned(torch.ones(2, 4, requires_grad=True)).sum().backward())
    parted.used = psgc.rank() == 0
    told("a module of rank 0 alone", lambda: backward(parted))


main()
