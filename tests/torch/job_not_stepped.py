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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc

STEPS, SPIKE, RATE = 24, 8, 0.05
Trained = tuple[torch.Tensor, torch.Tensor, int]  # weights after a half of the steps and at the end, and how many steps were skipped
Grads = Callable[
    ..., Any
]  # (step, factor of rank 1's loss): fills p.grad with the mean; returns the loss. apart: returns this rank's gradients instead


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


class GuardedSam(Sam):
    """Evaluates both gradients itself, and applies nothing where the first one is too large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        torch.enable_grad()(closure)()
        if torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm() > 50:
            return
        self.first_step()
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


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE / 2)


def norm_of(model: nn.Module) -> float:
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def plain(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    optimizer.zero_grad()
    grads(step)
    optimizer.step()


def guarded(
    model: nn.Module, optimizer: Any, grads: Grads, step: int, spikes: tuple[int, ...] = (SPIKE,), then: Callable[[Any], None] | None = None,
    base: bool = False,
) -> None:  # fmt: skip
    """Rank 1 has bad batches, whose loss is 10,000 times as large. then: called after such a step, before anything is cleared. base: the optimizer that this
    one wraps steps."""
    optimizer.zero_grad()
    grads(step, 1e4 if step in spikes else 1.0)
    if norm_of(model) > 50:
        skipped.append(step)
        if then is not None:
            then(optimizer)
        optimizer.zero_grad()
        return
    (optimizer.base if base else optimizer).step()


def saved(optimizer: Any) -> None:
    """What codecs keep is saved between the bad batch and the next one, and the training goes on from it."""
    optimizer.zero_grad()
    keeper = current.get("hook", optimizer)
    if hasattr(keeper, "residual_state_dict"):
        keeper.load_residual_state_dict(keeper.residual_state_dict())


def clipped(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Gradients beyond a norm are skipped, and others are clipped."""
    model.zero_grad()
    grads(step, 1e4 if step == SPIKE else 1.0)
    if norm_of(model) > 50:
        skipped.append(step)
        return
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def discarding(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """As ``guarded``, with ``discard()`` where there is one."""
    grads(step, 1e4 if step == SPIKE else 1.0)
    if norm_of(model) > 50:
        keeper = current.get("hook", optimizer)
        getattr(keeper, "discard", optimizer.zero_grad)()
        skipped.append(step)
        return
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Two backwards a step, of which nothing is declared; the first one of a step is bad."""
    optimizer.zero_grad()
    grads(step, 1e4 if step == SPIKE else 1.0)
    grads(step + 500)
    if norm_of(model) > 50:
        skipped.append(step)
        return
    for p in model.parameters():
        p.grad.div_(2)
    optimizer.step()


def twice(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Two steps on one gradient."""
    optimizer.zero_grad()
    grads(step)
    optimizer.step()
    optimizer.step()


def retained(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """A backward to look at gradients, and another one through the same graph to step on."""
    optimizer.zero_grad()
    grads(step, look=lambda: (norm_of(model), optimizer.zero_grad()))
    optimizer.step()


def averaged(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Weights change places with their moving average between backward and step, to be evaluated."""
    own = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    grads(step)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        for p, mine in zip(model.parameters(), own, strict=True):
            p.copy_(mine)
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


def by_hand_guarded(model: nn.Module, optimizer: Any, grads: Grads, step: int, data: bool = False) -> None:
    """Updates of the script's own, but of bad batches. data: as older scripts write them."""
    model.zero_grad()
    grads(step, 1e4 if step == SPIKE else 1.0)
    if norm_of(model) > 50:
        skipped.append(step)
        return
    with torch.no_grad():
        for p in model.parameters():
            (p.data if data else p).sub_(p.grad, alpha=RATE)


def based(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """The optimizer that SAM wraps steps by itself, but on bad batches."""
    guarded(model, optimizer, grads, step, base=True)


def guarded_frozen(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """A layer is frozen and taken from the optimizer, and its last gradients stay."""
    if step == SPIKE // 2:
        for p in list(model.parameters())[:2]:
            p.requires_grad_(False)
        optimizer.param_groups[0]["params"] = list(model.parameters())[2:]
    guarded(model, optimizer, grads, step)


def rolled_back(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """A bad batch takes the training back to where it was some steps before."""
    if step % 4 == 0:
        current["checkpoint"] = {name: values.clone() for name, values in model.state_dict().items()}
    guarded(model, optimizer, grads, step, then=lambda _: model.load_state_dict(current["checkpoint"]))


def set_by_hand(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """Gradients of ``torch.autograd.grad`` are put into p.grad, and averaged when the script asks for it; bad ones are let go of."""
    for p, gradient in zip(model.parameters(), grads(step, 1e4 if step == SPIKE else 1.0, apart=True), strict=True):
        p.grad = gradient
    getattr(optimizer, "synchronize", nothing)()
    if norm_of(model) > 50:
        skipped.append(step)
        for p in model.parameters():
            p.grad = None
        return
    optimizer.step()


def nothing() -> None:
    """What there is to synchronize without psgc."""


def by_hand_on_data(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    """As older scripts write it."""
    grads(step)
    for p in model.parameters():
        p.data -= RATE * p.grad.data
        p.grad.data.zero_()


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


def sam_guarded(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    def evaluate() -> None:
        optimizer.zero_grad()
        grads(step, 1e4 if step == SPIKE else 1.0)

    optimizer.step(evaluate)
    if norm_of(model) > 50:
        skipped.append(step)


def closure(model: nn.Module, optimizer: Any, grads: Grads, step: int) -> None:
    def evaluate() -> float:
        optimizer.zero_grad()
        return grads(0 if isinstance(optimizer, torch.optim.LBFGS) else step)

    optimizer.step(evaluate)


def alternating(model: nn.Module, optimizer: Halves, grads: Grads, step: int) -> None:
    """Each layer has an optimizer, of which one steps at a time; all gradients are computed and cleared."""
    for each in optimizer.optimizers:
        each.zero_grad()
    grads(step)
    optimizer.optimizers[step % 2].step()


class Gan(nn.Module):
    """A critic that grades two kinds of samples, and a generator that learns from its grades."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.g = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))


def adversarial(wrapped: tuple[nn.Module, nn.Module], optimizers: tuple[Any, Any], ranks: list[int], spared: Any, step: int) -> None:
    """The generator's backward goes through the discriminator, whose gradients of it are thrown away. ranks: whose batches. spared: a context in which these
    gradients are not sent."""
    (d, g), (d_step, g_step) = wrapped, optimizers
    batches = [torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank)) for rank in ranks]

    def mean(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return sum(map(loss, batches), torch.zeros(())) / len(ranks)

    def grade(x: torch.Tensor) -> torch.Tensor:
        grades = d(torch.cat([g(x).detach(), x[:, :32].sin()]))
        return grades[:32].square().mean() + (grades[32:] - 1).square().mean()

    d_step.zero_grad()
    mean(grade).backward()
    d_step.step()
    g_step.zero_grad()
    with spared:
        mean(lambda x: (d(g(x)) - 1).square().mean()).backward()
    g_step.step()


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
    "plain": (sgd, plain), "guarded": (sgd, guarded), "guarded_early": (sgd, partial(guarded, spikes=(1, 3))),
    "guarded_frozen": (sgd, guarded_frozen), "guarded_first": (sgd, partial(guarded, spikes=(0, 1))), "rolled_back": (sgd, rolled_back),
    "guarded_and_saved": (sgd, partial(guarded, then=saved)), "guarded_against_nan": (sgd, guarded_against_nan),
    "clipped": (sgd, clipped), "discarding": (sgd, discarding), "accumulated": (sgd, accumulated), "twice": (sgd, twice),
    "retained": (sgd, retained), "averaged": (sgd, averaged),
    "by_hand": (sgd, by_hand), "by_hand_on_data": (sgd, by_hand_on_data), "statistics": (sgd, statistics),
    "by_hand_guarded": (sgd, by_hand_guarded), "by_hand_on_data_guarded": (sgd, partial(by_hand_guarded, data=True)),
    "based_guarded": (lambda p: Sam(p, RATE), based), "sam_guarded": (lambda p: GuardedSam(p, RATE), sam_guarded),
    "set_by_hand": (sgd, set_by_hand),
    "sam_twice": (lambda p: Sam(p, RATE), sam_twice), "sam_closure": (lambda p: Sam(p, RATE), sam_closure),
    "extragradient": (lambda p: Extragradient(p, RATE), closure),
    "lbfgs": (lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3, history_size=4), closure),
    "toggled": (Halves, toggled), "alternating": (Halves, alternating),
}  # fmt: skip
GAN, GANS = "gan", ("gan", "gan_spared")
BOTH = tuple(loop for loop in LOOPS if loop not in ("lbfgs", "toggled", "retained", "set_by_hand"))
FRONTS = {
    "optimizer": (*BOTH, "retained", "lbfgs", "set_by_hand", *GANS),
    "hook": (*BOTH, "toggled", *GANS),  # a second backward through one graph is local under DDP
}
current: dict[str, Any] = {}  # hook: where there is one
skipped: list[int] = []


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def made() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)))


def loss_of(model: nn.Module, rank: int, step: int, factor: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    loss = (model(x) - x[:, :32].sin()).square().mean()
    return factor * loss if rank == 1 else loss


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def trained_gan(loop: str, gan: Gan, wrapped: Any, optimizers: Any, ranks: list[int] | None = None) -> Trained:
    skipped.clear()
    holder = next((each for each in (optimizers[0], wrapped[0]) if hasattr(each, "no_sync")), None)
    halfway = weights(gan)
    for step in range(STEPS):
        spared = nullcontext() if loop == GAN or holder is None else holder.no_sync()
        adversarial(wrapped, optimizers, [psgc.rank()] if ranks is None else ranks, spared, step)
        if step == STEPS // 2:
            halfway = weights(gan)
    return halfway, weights(gan), 0


def trained(loop: str, model: nn.Module, optimizer: Any, grads: Grads) -> Trained:
    skipped.clear()
    halfway = weights(model)
    for step in range(STEPS):
        LOOPS[loop][1](model, optimizer, grads, step)
        if step == STEPS // 2:
            halfway = weights(model)
    return halfway, weights(model), len(skipped)


def by_definition(loop: str) -> Trained:
    current.clear()
    if loop in GANS:
        gan = seeded(Gan)
        return trained_gan(loop, gan, (gan.d, gan.g), (slow(gan.d), slow(gan.g)), list(range(psgc.size())))
    model = made()
    return trained(loop, model, LOOPS[loop][0](model.parameters()), of_ranks(model, range(psgc.size())))


def by_optimizer(loop: str, codec: str) -> Trained:
    current.clear()
    if loop in GANS:
        gan = seeded(Gan)
        return trained_gan(loop, gan, (gan.d, gan.g), tuple(distributed(slow(half), half, codec) for half in (gan.d, gan.g)))
    model = made()
    optimizer = LOOPS[loop][0](model.parameters())
    if isinstance(optimizer, Halves):
        optimizer.optimizers = [psgc.DistributedOptimizer(each, compression=codec) for each in optimizer.optimizers]
    else:
        distributed(optimizer, model, codec)
    return trained(loop, model, optimizer, of_ranks(model, [psgc.rank()]))


def distributed(optimizer: Any, model: nn.Module, codec: str) -> Any:
    return psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)


def by_hook(loop: str, codec: str) -> Trained:
    hook = current["hook"] = psgc.ddp_hook(codec)

    def wrapped(module: nn.Module) -> DistributedDataParallel:
        model = DistributedDataParallel(module, find_unused_parameters=loop in ("toggled", "guarded_frozen"))
        model.register_comm_hook(None, hook)
        return model

    if loop in GANS:
        gan = seeded(Gan)
        return trained_gan(loop, gan, (wrapped(gan.d), wrapped(gan.g)), (slow(gan.d), slow(gan.g)))
    model = wrapped(made())
    return trained(loop, model, LOOPS[loop][0](model.parameters()), of_ranks(model, [psgc.rank()]))


def of_ranks(model: nn.Module, ranks: Sequence[int]) -> Grads:
    def grads(step: int, factor: float = 1.0, look: Callable[[], Any] | None = None, apart: bool = False) -> Any:
        loss = sum((loss_of(model, rank, step, factor) for rank in ranks), torch.zeros(())) / len(ranks)
        if apart:
            return torch.autograd.grad(loss, list(model.parameters()))
        if look is not None:
            loss.backward(retain_graph=True)
            look()
        loss.backward()
        return float(loss.detach())

    return grads


def main(front: str, *codecs: str) -> None:
    torch.set_num_threads(1)
    psgc.init()
    if front == "hook":
        dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    for loop in FRONTS[front]:
        start = weights(seeded(Gan) if loop in GANS else made())
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
