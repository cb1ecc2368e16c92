"""A worker of a real job whose models DistributedDataParallel wraps, in many ways. Prints a line of JSON for each case. Run by test_ddp_job.py.

A case trains one model under stock DDP and its twin under psgc's hook on the same batches.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import psgc.torch as psgc

STEPS = 6
SMALL = 0.05  # MB: several buckets for a model this small


class Branches(nn.Module):
    """Uses the branches that it is told to; ``spare`` none ever does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(32, 200), nn.Linear(200, 150), nn.Linear(200, 150)
        self.spare = nn.Linear(200, 100)

    def forward(self, x: torch.Tensor, branches: tuple[str, ...] = ("left", "right")) -> torch.Tensor:
        x = self.stem(x).relu()
        return sum((getattr(self, name)(x) for name in branches), torch.zeros(()))


class Convolutions(nn.Module):
    """Dense parameters that are not contiguous, and buffers that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 3, 8, 8)).mean((2, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 200), nn.ReLU(), nn.Linear(200, 150), nn.ReLU(), nn.Linear(150, 10))


def batches(features: int = 32) -> Iterator[torch.Tensor]:
    """Other ones on every rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(8, features, generator=generator)


def digest(model: nn.Module) -> str:
    flat = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(model: Any, step: Callable[[Any, int, torch.Tensor], torch.Tensor], features: int = 32) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number, x in enumerate(batches(features)):
        optimizer.zero_grad()
        loss = step(model, number, x)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def branching(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    """On some steps a rank leaves a branch out, on some all do."""
    rank = dist.get_rank()
    branches = (("left", "right"), ("left",), ("right",) if rank else ("left", "right"), ("left", "right"))[number % 4]
    loss = model(x, branches).square().mean()
    loss.backward()
    return loss


def accumulating(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    halves = x.chunk(2)
    for place, half in enumerate(halves):
        with model.no_sync() if place + 1 < len(halves) else nullcontext():
            loss = model(half).square().mean() / len(halves)
            loss.backward()
    return loss


def accumulating_aloud(model: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    """Two backwards without no_sync: DDP reduces twice."""
    for half in x.chunk(2):
        loss = model(half).square().mean() / 2
        loss.backward()
    return loss


def twins(build: Callable[[], nn.Module], codec: str, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = build()
    stock = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL, **options)
    mine = DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)
    hook = psgc.ddp_hook(codec)
    mine.register_comm_hook(None, hook)
    return stock, mine, hook


def reduced_bytes(what: Callable[[], Any], item_bytes: int) -> tuple[Any, int]:
    """What ``what`` gives, and the bytes that gloo reduced meanwhile, of elements of so many bytes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        result = what()
    recorded: Any = seen.profiler  # ``seen.events()`` builds a tree of all events, which takes ten times as long as the training
    shapes = [event.shapes() for event in recorded.kineto_results.events() if event.name() == "gloo:all_reduce"]
    return result, sum(item_bytes * torch.Size(shape).numel() for event in shapes for shape in event if shape)


def compared(build: Callable[[], nn.Module], step: Any = plain, codec: str = "none", features: int = 32, **options: Any) -> dict[str, Any]:
    stock, mine, hook = twins(build, codec, **options)
    item_bytes = next(mine.parameters()).element_size()
    theirs, reduced_by_stock = reduced_bytes(lambda: train(stock, step, features), item_bytes)
    before = psgc.current_session().statistics()["wire_bytes"]
    ours, reduced_by_mine = reduced_bytes(lambda: train(mine, step, features), item_bytes)
    return {
        "losses": [theirs, ours], "digests": [digest(stock), digest(mine)], "reduced": [reduced_by_stock, reduced_by_mine],
        "wire_bytes": psgc.current_session().statistics()["wire_bytes"] - before, **hook.statistics(),
        "parameter_bytes": sum(item_bytes * p.numel() for p in mine.parameters()),
    }  # fmt: skip


def scaled() -> dict[str, Any]:
    """A loss scaler that grows and, where a rank overflows, skips: parameters must move as without the scaler under stock DDP, and what a
    skipped step had sent must not be lost."""
    stock, mine, _ = twins(mlp, "none")
    result = []
    for model in (stock, mine):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for number, x in enumerate(batches()):
            optimizer.zero_grad()
            factor = float("inf") if (dist.get_rank(), number) == (1, 3) else 1.0
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        result.append(digest(model))
    return {"digests": result}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(32, 200), nn.Sequential(nn.Linear(200, 200), nn.Tanh()), nn.Linear(200, 10)
        self.reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, self.first(x).relu(), use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    """The nested backward of the middle runs before the others' gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant = True


def resumed() -> dict[str, Any]:
    """Six steps at a stretch, and six of which a new hook and a new wrapper take the last three, from what was saved after the third."""
    given = list(batches())
    result = []
    for stops in ((), (3,)):
        torch.manual_seed(7)
        model, hook, state = mlp(), None, None
        for begin, end in pairwise((0, *stops, STEPS)):
            hook = psgc.ddp_hook("onebit")
            if state is not None:
                hook.load_residual_state_dict(state)
            wrapped = DistributedDataParallel(model, bucket_cap_mb=SMALL)
            wrapped.register_comm_hook(None, hook)
            for x in given[begin:end]:
                wrapped.zero_grad()
                wrapped(x).square().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(p.grad, alpha=0.05)
            state = hook.residual_state_dict()
        result.append(digest(model))
    return {"digests": result}


def joined() -> dict[str, Any]:
    """Rank 1 runs out of batches first: DDP then hands over zeros for it."""
    stock, mine, _ = twins(mlp, "none")
    result = []
    for model in (stock, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join():
            for x in list(batches())[: STEPS - 2 * dist.get_rank()]:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        result.append(digest(model))
    return {"digests": result}


def conserved() -> dict[str, Any]:
    """With onebit on the way up and nothing lost on the way down, what was delivered and what the ranks keep is all that they had."""
    torch.manual_seed(7)
    mine = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    own, hook = copy.deepcopy(mine.module), psgc.ddp_hook("onebit/none")
    mine.register_comm_hook(None, hook)
    still = torch.optim.SGD(
        mine.parameters(), lr=0.0
    )  # results are applied, or what they left behind would be given up with them; the models stay alike
    names = [name for name, _ in own.named_parameters()]
    given, delivered = ({name: torch.zeros_like(p) for name, p in own.named_parameters()} for _ in range(2))
    for x in batches():
        for model, totals in ((mine, delivered), (own, given)):
            model.zero_grad()
            model(x).square().mean().backward()
            for name, p in zip(names, model.parameters(), strict=True):
                totals[name] += p.grad
        still.step()
    kept = {
        name: torch.from_numpy(memory.residual)
        for name, memory in hook._models.all[0].exchange.residuals.collect(dropped=False).tensors.items()
    }
    worst = largest = 0.0
    for name in names:
        residual = kept[name].reshape(given[name].shape)
        largest = max(largest, residual.abs().max().item())
        for summed in (given[name], residual):
            dist.all_reduce(summed)
        worst = max(worst, (delivered[name] * dist.get_world_size() + residual - given[name]).abs().max().item())
    return {"worst": worst, "largest": largest}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: compared(mlp),
    "views": lambda: compared(mlp, gradient_as_bucket_view=True),
    "static": lambda: compared(mlp, static_graph=True),
    "accumulating": lambda: compared(mlp, accumulating),
    "accumulating_views": lambda: compared(mlp, accumulating, gradient_as_bucket_view=True),
    "accumulating_aloud": lambda: compared(mlp, accumulating_aloud),
    "unused": lambda: compared(Branches, branching, find_unused_parameters=True),
    "channels_last": lambda: compared(lambda: Convolutions().to(memory_format=torch.channels_last), features=192),
    "scaled": scaled,
    "joined": joined,
    "resumed": resumed,
    "checkpointed": lambda: compared(Checkpointed),
    "reentrant": lambda: compared(Reentrant, static_graph=True),
    "unused_views": lambda: compared(Branches, branching, find_unused_parameters=True, gradient_as_bucket_view=True),
    "conserved": conserved,
    "int8": lambda: compared(mlp, codec="int8"),
    "powersgd": lambda: compared(mlp, accumulating, codec="powersgd:rank=2"),
    "unused_onebit": lambda: compared(Branches, branching, codec="onebit", find_unused_parameters=True),
    "bf16": lambda: compared(lambda: mlp().bfloat16(), lambda m, n, x: plain(m, n, x.bfloat16())),
}


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    for name in sys.argv[1:] or CASES:
        print(json.dumps({"case": name, "rank": psgc.rank(), **CASES[name]()}), flush=True)
    psgc.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
