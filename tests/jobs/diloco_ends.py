"""A worker that trains a small model by DiLoCo in one of the ways that users end it, or begin it. Run by tests.

Prints what it trained to (a digest), or the line by which it was refused.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc
from psgc.errors import UsageError

EVERY = 4


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    draw = torch.Generator().manual_seed(psgc.rank())
    for _ in range(steps):
        x = torch.randn(16, 12, generator=draw)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        for optimizer in optimizers:
            optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()[:12]


def mean_of(codec: str, outer: str, on: str) -> None:
    """How far finish() leaves ranks from the mean of their parameters, as a share of how far they had come; and whether residuals have changed."""
    model = model_of()
    begun, inner = flat(model), sgd(model)
    with psgc.DiLoCo(model, inner, every=EVERY, codec=codec, outer=outer, on=on) as outside:  # type: ignore[arg-type]
        train(model, [inner], EVERY)
        before = outside.state_dict()["residuals"]
        train(model, [inner], 3)
        mean = psgc.push_pull(flat(model), name=f"wanted.{codec}.{on}")
        outside.finish()
        off = float((flat(model) - mean).norm() / (mean - begun).norm())
        same = same_tensors(before, outside.state_dict()["residuals"])
        met = digest(model)
        outside.finish()
        print(f"mean: {codec} {on}: {off:.4f} {same} {met == digest(model)} {met}", flush=True)


def same_tensors(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_tensors(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same_tensors, one, other))
    return one == other


def refused(how: str) -> None:
    model = model_of()
    inner: torch.optim.Optimizer = sgd(model)
    wrapped: nn.Module = model
    if how in ("ddp", "site"):
        dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
        groups = [dist.new_group([rank]) for rank in range(psgc.size())]
        wrapped = DistributedDataParallel(model, process_group=groups[psgc.rank()] if how == "site" else None)
    if how == "own-ddp":
        wrapped = psgc.DistributedDataParallel(model)
    if how == "optimizer":
        inner = psgc.DistributedOptimizer(inner, model.named_parameters())
    try:
        with psgc.DiLoCo(wrapped, inner, every=EVERY) as outside:
            if how == "later":
                inner = psgc.DistributedOptimizer(inner, model.named_parameters())
            train(wrapped, [inner], EVERY + 1)
        print(f"trained {outside.steps}", flush=True)
    except UsageError as error:
        print(f"refused: {error}", flush=True)


def main() -> None:
    psgc.init()
    how, model = sys.argv[1], model_of()
    inner = sgd(model)
    if how == "mean":
        for codec, outer in (("none", "average"), ("int4", "average"), ("topk:k=0.01", "nesterov"), ("sparseloco", "average")):
            mean_of(codec, outer, "workers")
        mean_of("topk:k=0.01", "nesterov", "servers")
    elif how == "two":  # the optimizer that is not counted steps last
        matrices, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
        inner, other = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.1)
        with psgc.DiLoCo(model, inner, every=EVERY):
            train(model, [inner, other], 2 * EVERY)
        print(f"ended: {digest(model)}", flush=True)
    elif how == "uneven":  # beyond the last exchange
        with psgc.DiLoCo(model, inner, every=EVERY):
            train(model, [inner], 10 - psgc.rank())
        print(f"ended: {digest(model)}", flush=True)
    elif how in ("unfinished", "saved"):
        outside = psgc.DiLoCo(model, inner, every=EVERY, codec="int4", fragments=2)
        train(model, [inner], 11)
        if how == "saved":
            outside.state_dict()
    elif how == "never-stepped":
        psgc.DiLoCo(model, inner, every=EVERY)
        train(model, [sgd(model)], 10)
    elif how == "never-stepped-block":
        with psgc.DiLoCo(model, inner, every=EVERY):
            train(model, [sgd(model)], 10)
        print(f"ended: {digest(model)}", flush=True)
    else:
        refused(how)
    psgc.shutdown()


main()
