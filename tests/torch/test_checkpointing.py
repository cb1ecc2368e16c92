"""Backward through checkpointed segments, of which each runs a backward of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from psgc.errors import UsageError
from tests.torch.backwards import BUCKETS, LATE, TINY, equal, grads, local, mean
from tests.torch.small_models import batch, linear, seeded, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


class Segments(nn.Module):
    """A stem, checkpointed layers, and a head; ``spare`` is used on request."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.stem, self.head, self.spare = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor, how: str = "plain", spare: bool = False) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).tanh() if how == "plain" else checkpoint(lambda y, f=layer: f(y).tanh(), x, use_reentrant=how == "reentrant")
        return self.head(x) + self.spare(x) if spare else self.head(x)


def test_ranks_make_the_same_model_though_a_checkpoint_of_another_rank_sets_torchs_generator_meanwhile() -> None:
    def disturbed(seed: int) -> Segments:
        torch.manual_seed(seed)
        return Segments()

    first, second = (weights(seeded(lambda seed=seed: disturbed(seed))) for seed in range(2))  # type: ignore[misc]
    assert first == second


@BUCKETS
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointed_segments_are_synchronized_once_when_all_is_over(ranks: Any, how: str, buckets: dict[str, Any]) -> None:
    def loss(rank: int, step: int, how: str) -> Callable[[Any], torch.Tensor]:
        # One rank goes without the spare layer: its skips must wait for the last gradient.
        return lambda model: model(batch(rank, step), how, spare=rank == 0 or step == 0).square().mean()

    def train(rank: int) -> list[list[torch.Tensor]]:
        model = seeded(Segments)
        optimizer = sgd(model)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss(rank, step, how)(model).backward()
            seen.append(grads(model))
        optimizer.step()
        return seen

    first, second = ranks.run(2, train, **buckets)
    for step in range(3):
        assert equal(first[step], second[step])
        with_spare = local(lambda: seeded(Segments), loss(0, step, "plain"))
        model = seeded(Segments)
        loss(1, step, "plain")(model).backward()
        without = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first[step], mean([with_spare, without]), strict=True))
    assert len(ranks.steps) == 3 * (12 if buckets else 1)


def test_a_model_within_one_reentrant_checkpoint_is_synchronized_when_backward_is_over(ranks: Any) -> None:
    """No hook runs in the outer graph, and not all parameters are used."""

    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((1, 3), rank + 1.0, requires_grad=True)
            used = [0, 1] if rank == 0 or step == 0 else [0]
            checkpoint(lambda y, used=used: sum(model[i](y) for i in used), x, use_reentrant=True).sum().backward()
            seen = [half.weight.grad[0, 0].item() for half in model]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **TINY) == [[1.5, 0.5]] * 2
    assert len(ranks.steps) == 3 * 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_within_checkpoints_are_synchronized_when_backward_is_over(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Segments)
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            x = batch(rank, step).requires_grad_()
            checkpoint(lambda y: model(y, "reentrant"), x, use_reentrant=True).square().mean().backward()
            seen = torch.cat([g.reshape(-1) for g in grads(model)]).tolist()
            optimizer.step()
        return seen

    first, second = ranks.run(2, train, **TINY)
    assert first == second
    assert len(ranks.steps) == 2 * 12


class Shared(nn.Module):
    """One layer used in several segments, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        for layer in (self.shared, self.other, self.shared):
            x = checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x)
        return x


@BUCKETS
def test_a_parameter_shared_by_reentrant_checkpoints_leaves_when_it_is_whole(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[list[torch.Tensor]]:
        model = seeded(Shared)
        optimizer = sgd(model)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step).requires_grad_(), True).square().mean().backward()
            seen.append(grads(model))
        return seen

    first, second = ranks.run(2, train, **buckets)
    for step in range(3):
        assert equal(first[step], second[step])
        plain = [local(lambda: seeded(Shared), lambda m, r=rank, s=step: m(batch(r, s), False).square().mean()) for rank in range(2)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first[step], mean(plain), strict=True))


def test_a_parameter_that_is_shared_only_in_a_later_step_is_refused_and_no_sync_mends_it(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Shared)
        optimizer = sgd(model)
        model(batch(rank, 0), False).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"'shared.(weight|bias)' was added to in several parts .*no_sync"):
            model(batch(rank, 1).requires_grad_(), True).sum().backward()
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch(rank, 1).requires_grad_(), True).sum().backward()
        optimizer.synchronize()
        return torch.cat([g.reshape(-1) for g in grads(model)]).tolist()

    first, second = ranks.run(2, train, **TINY)
    assert first == second


def test_both_modes_train_alike(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = seeded(Segments)
        optimizer = sgd(model, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step), spare=rank == 0 or step % 2 == 0).square().mean().backward()
            optimizer.step()
        return weights(model)

    assert ranks.run(2, train) == ranks.run(2, train, **LATE)
