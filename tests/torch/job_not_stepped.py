"""A worker of a real job whose loops do with averaged gradients what they like: skip guards, SAM, hand-written updates, statistics, closures.

Each loop is trained by psgc, and beside it by the definition on every rank: the mean of all ranks' gradients, computed from all ranks' batches. Prints a
line of JSON for each loop, front and codec: how far the weights are from the definition's, as a share of how far these have moved, after a half of the
steps and at the end. Run by test_not_stepped.py.

job_not_stepped.py optimizer|hook CODEC...
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc

STEPS, SPIKE, RATE = 24, 8, 0.05
Grads = Callable[..., float]  # (step, factor of rank 1's loss): fills p.grad with the mean; returns the loss


class Sam(torch.optim.Optimizer):
    """As users copy it: two calls of their own, or one step with a closure (Foret et al. 2021)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "rho": 0.02})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["climbed"] = p.grad * (group["rho"] / norm)
                p.add_(self.state[p]["climbed"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["climbed"])
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class Extragradient(torch.optim.Optimizer):
    """Steps by the gradient at the point that a first step leads to (Korpelevich 1976): two evaluations a step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        lr = self.param_groups[0]["lr"]
        with torch.enable_grad():
            closure()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.sub_(p.grad, alpha=lr)
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old).sub_(p.grad, alpha=lr)
        return loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def norm_of(model: nn.Module) -> float:
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def plain(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    optimizer.zero_grad()
    grads(step)
    optimizer.step()


def guarded(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Rank 1 has one bad batch, whose loss is 10,000 times as large."""
    optimizer.zero_grad()
    grads(step, 1e4 if step == SPIKE else 1.0)
    if norm_of(model) > 50:
        optimizer.zero_grad()
        skipped.append(step)
        return
    optimizer.step()


def guarded_against_nan(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Rank 1 has one bad batch, whose loss is not a number."""
    optimizer.zero_grad()
    grads(step, math.nan if step == SPIKE else 1.0)
    if not math.isfinite(norm_of(model)):
        optimizer.zero_grad()
        skipped.append(step)
        return
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    grads(step)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=RATE)
    model.zero_grad()


def statistics(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """A backward whose gradients are only looked at."""
    grads(step + 1000)
    norm_of(model)
    optimizer.zero_grad()
    plain(model, optimizer, grads, step)


def sam_twice(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    grads(step)
    optimizer.first_step(zero_grad=True)
    grads(step)
    optimizer.second_step(zero_grad=True)


def sam_closure(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    grads(step)
    optimizer.step(lambda: grads(step))
    optimizer.zero_grad()


def closure(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    def evaluate() -> float:
        optimizer.zero_grad()
        return grads(0 if isinstance(optimizer, torch.optim.LBFGS) else step)

    optimizer.step(evaluate)


class Halves:
    """An optimizer for each layer, as Lightning's manual optimization toggles them."""

    def __init__(self, params: Any) -> None:
        own = list(params)
        self.halves = [own[:2], own[2:]]
        self.optimizers = [sgd(half) for half in self.halves]


def toggled(model: nn.Module, optimizer: Halves, grads: Grads, step: int) -> None:
    """Only one layer's parameters require a gradient, from before the first backward on."""
    for number, half in enumerate(optimizer.halves):
        for p in half:
            p.requires_grad_(number == step % 2)
    grads(step)
    optimizer.optimizers[step % 2].step()
    for p in model.parameters():
        p.grad = None


LOOPS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "plain": (sgd, plain), "guarded": (sgd, guarded), "guarded_against_nan": (sgd, guarded_against_nan),
    "by_hand": (sgd, by_hand), "statistics": (sgd, statistics),
    "sam_twice": (lambda p: Sam(p, RATE), sam_twice), "sam_closure": (lambda p: Sam(p, RATE), sam_closure),
    "extragradient": (lambda p: Extragradient(p, RATE), closure),
    "lbfgs": (lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3, history_size=4), closure),
    "toggled": (Halves, toggled),
}  # fmt: skip
FRONTS = {
    "optimizer": ("plain", "guarded", "guarded_against_nan", "by_hand", "statistics", "sam_twice", "sam_closure", "extragradient", "lbfgs"),
    "hook": ("plain", "guarded", "guarded_against_nan", "by_hand", "statistics", "sam_twice", "sam_closure", "extragradient", "toggled"),
}
skipped: list[int] = []


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))


def loss_of(model: nn.Module, rank: int, step: int, factor: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    loss = (model(x) - x[:, :32].sin()).square().mean()
    return factor * loss if rank == 1 else loss


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def trained(loop: str, model: nn.Module, optimizer: Any, grads: Grads) -> tuple[torch.Tensor, torch.Tensor, int]:
    skipped.clear()
    halfway = weights(model)
    for step in range(STEPS):
        LOOPS[loop][1](model, optimizer, grads, step)
        if step == STEPS // 2:
            halfway = weights(model)
    return halfway, weights(model), len(skipped)


def by_definition(loop: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    model = made()

    def grads(step: int, factor: float = 1.0) -> float:
        loss = sum(loss_of(model, rank, step, factor) for rank in range(psgc.size())) / psgc.size()
        loss.backward()
        return float(loss)

    return trained(loop, model, LOOPS[loop][0](model.parameters()), grads)


def by_optimizer(loop: str, codec: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    model = made()
    optimizer = psgc.DistributedOptimizer(LOOPS[loop][0](model.parameters()), model.named_parameters(), compression=codec)
    return trained(loop, model, optimizer, of_rank(model))


def by_hook(loop: str, codec: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    model = DistributedDataParallel(made(), find_unused_parameters=loop == "toggled")
    model.register_comm_hook(None, psgc.ddp_hook(codec))
    return trained(loop, model, LOOPS[loop][0](model.parameters()), of_rank(model))


def of_rank(model: nn.Module) -> Grads:
    def grads(step: int, factor: float = 1.0) -> float:
        loss = loss_of(model, psgc.rank(), step, factor)
        loss.backward()
        return float(loss)

    return grads


def main(front: str, *codecs: str) -> None:
    torch.set_num_threads(1)
    psgc.init()
    if front == "hook":
        dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    start = weights(made())
    for loop in FRONTS[front]:
        wanted = by_definition(loop)
        for codec in codecs:
            found = (by_hook if front == "hook" else by_optimizer)(loop, codec)
            apart = [float((mine - right).norm() / (right - start).norm()) for mine, right in zip(found[:2], wanted[:2], strict=True)]
            case = {"loop": loop, "codec": codec, "apart": apart, "skipped": found[2], "wanted": wanted[2]}
            print(json.dumps(case | {"weights": float(found[1].double().sum())}), flush=True)
    if front == "hook":
        dist.destroy_process_group()
    psgc.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
