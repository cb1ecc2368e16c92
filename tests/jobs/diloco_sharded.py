"""A worker of two sites of two ranks that trains a model by DiLoCo between the sites, sharded within each by FSDP2, and beside it by a loop that does the same
to whole parameters. Run by tests.

Prints a line for each run: its name, a digest of this rank's pieces at the end, how far they are from the loop's, and whether both sites end alike.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import psgc.torch as psgc
from tests.refusing import told

STEPS, AT = 17, 10


class Scaled(nn.Module):
    """Has a parameter of one element, of which one of two ranks has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def model_on(mesh: DeviceMesh, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)  # sites begin differently: the first one's parameters count
    model = nn.Sequential(nn.Linear(12, 41), nn.Tanh(), Scaled(), nn.Linear(41, 5))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def inner_step(model: nn.Module, optimizer: Any, draw: torch.Generator) -> None:
    x = torch.randn(16, 12, generator=draw)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
    optimizer.step()


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_hand(mesh: DeviceMesh, every: int, parts: list[list[int]]) -> list[torch.Tensor]:
    """DiLoCo of whole parameters, of which each rank writes its piece back. Returns the mean of the sites' parameters at the end."""
    model = model_on(mesh["dp_shard"], 0)
    inner, draw, sites = adam(model), drawn(), mesh.get_group("dp_replicate")
    local: list[Any] = list(model.parameters())
    outer = [nn.Parameter(parameter.full_tensor().detach().clone()) for parameter in local]
    optimizers = [torch.optim.SGD([outer[i] for i in part], lr=0.7, momentum=0.9, nesterov=True) for part in parts]

    def progress(i: int) -> torch.Tensor:
        mean = outer[i].detach() - local[i].full_tensor().detach()
        dist.all_reduce(mean, group=sites)
        return mean / 2

    def exchange(part: int) -> None:
        for i in parts[part]:
            outer[i].grad = progress(i)
        optimizers[part].step()
        with torch.no_grad():
            for i in parts[part]:
                rows = -(-len(outer[i]) // 2)
                place = mesh.get_local_rank("dp_shard") * rows
                local[i].to_local().copy_(outer[i][place : place + rows])

    for step in range(1, STEPS + 1):
        inner_step(model, inner, draw)
        for part in range(len(parts)):
            if step % every == (part + 1) * every // len(parts) % every:
                exchange(part)
    return [parameter.detach() - progress(i) for i, parameter in enumerate(outer)]


def diloco(mesh: DeviceMesh, every: int, codec: str, pick: Callable[[nn.Sequential], Any], resumed: bool = False) -> list[Any]:
    model = model_on(mesh["dp_shard"], mesh.get_local_rank("dp_replicate"))
    inner, draw = adam(model), drawn()
    with psgc.DiLoCo(model, inner, every=every, codec=codec, fragments=pick(model)) as outside:
        for step in range(1, STEPS + 1):
            inner_step(model, inner, draw)
            if step == AT:
                saved = copy.deepcopy((outside.state_dict(), model.state_dict(), inner.state_dict())), draw.get_state()
    if resumed:
        (of_outside, of_model, of_inner), at = saved
        draw.set_state(at)
        model = model_on(mesh["dp_shard"], 9)
        inner = adam(model)
        with psgc.DiLoCo(model, inner, every=every, codec=codec, fragments=pick(model)) as outside:
            model.load_state_dict(of_model)
            inner.load_state_dict(of_inner)
            outside.load_state_dict(of_outside)
            for _ in range(STEPS - AT):
                inner_step(model, inner, draw)
    return list(model.parameters())


def evaluated(mesh: DeviceMesh, every: int, codec: str, delay: int = 0) -> list[Any]:
    """As ``diloco``, with a forward without a backward before it and after each step: the outermost module then has its whole parameters still."""
    model = model_on(mesh["dp_shard"], mesh.get_local_rank("dp_replicate"))
    inner, draw = adam(model), drawn()

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.ones(3, 12))
        return found

    evaluate()
    with psgc.DiLoCo(model, inner, every=every, codec=codec, delay=delay, mix=0.5 if delay else 0.0) as outside:
        for _ in range(STEPS):
            inner_step(model, inner, draw)
            evaluate()
    computed = evaluate()
    model.reshard()
    assert torch.equal(computed, evaluate()), "what it computes with is what was exchanged"
    assert outside.steps == STEPS
    model.reshard()
    return list(model.parameters())


def tell(name: str, parameters: list[Any], wanted: list[torch.Tensor] | None = None) -> None:
    digest = hashlib.sha256(b"".join(parameter.to_local().detach().numpy().tobytes() for parameter in parameters)).hexdigest()[:12]
    whole = [parameter.full_tensor().detach() for parameter in parameters]
    off = max(float((own - its).abs().max()) for own, its in zip(whole, wanted, strict=True)) if wanted else -1.0
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [tensor.tolist() for tensor in whole])
    print(f"{name} {digest} {off:.2e} {all(each == every[0] for each in every)}", flush=True)


def refused(mesh: DeviceMesh) -> None:
    """What each is told of a job that is not parted by a mesh."""
    model = model_on(mesh["dp_shard"], 0)
    told("diloco", lambda: psgc.DiLoCo(model, adam(model), every=2))
    told("servers", lambda: psgc.DiLoCo(model, adam(model), every=2, on="servers"))
    told("demo", lambda: psgc.DeMo(model.named_parameters()))
    told("decoupled", lambda: psgc.Decoupled(model, adam(model), every=2, at="localhost:1", name="a"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--apart", choices=("every", "uneven"), help="what the second site has otherwise, and nothing else is trained")
    given = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", rank=int(os.environ["DMLC_WORKER_ID"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if given.refused:
        psgc.init()
        refused(mesh)
    elif given.apart:
        psgc.init(mesh=mesh, dim="dp_replicate")
        model, second = model_on(mesh["dp_shard"], 0), mesh.get_local_rank("dp_replicate")
        inner = adam(model)
        with psgc.DiLoCo(model, inner, every=5 + (given.apart == "every" and second)):
            for _ in range(7 if given.apart == "uneven" and second else 10):
                inner_step(model, inner, drawn())
    else:
        psgc.init(mesh=mesh, dim="dp_replicate")
        everything = list(range(5))
        # parameters in order: 0.weight, 0.bias, 2.scale, 3.weight, 3.bias
        for name, every, parts, pick in (
            ("whole", 5, [everything], lambda model: 1),
            ("parts", 6, [[2], [0, 1], [3, 4]], lambda model: [model[2], model[0]]),
        ):
            wanted = by_hand(mesh, every, parts)
            tell(name, diloco(mesh, every, "none", pick), wanted)
            tell(f"{name}-int4", diloco(mesh, every, "int4", pick))
            if name == "whole":
                tell(f"{name}-evaluated", evaluated(mesh, every, "int4"))
                tell(f"{name}-delayed", evaluated(mesh, every, "int4", delay=2))
            tell(f"{name}-resumed", diloco(mesh, every, "int4", pick, resumed=True))
    dist.destroy_process_group()
    psgc.shutdown()


main()
