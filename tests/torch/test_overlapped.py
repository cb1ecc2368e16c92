"""overlapped_step=True: the updates of a whole step, bit for bit; when buckets are updated, when the step is the whole one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.optimizers.partial_step import PartialSteps
from tests.torch.small_models import batch, seeded
from tests.torch.test_cross_barrier import OPTIMIZERS, WIDTH, Attention, losses, mlp


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer, overlapped: bool = True, **options: Any) -> torch.optim.Optimizer:
    return psgc.DistributedOptimizer(optimizer, model.named_parameters(), overlapped_step=overlapped, **options)


@pytest.mark.parametrize("make", [mlp, Attention])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_losses_are_those_of_whole_steps_bit_for_bit(ranks: Any, make: Any, codec: str) -> None:
    def run(kind: str, overlapped: bool) -> Any:
        options = {"backward_passes_per_step": 2, "compression": codec}
        return ranks.run(2, lambda r: losses(r, lambda m, o: wrapped(m, o, overlapped, **options), make, kind), fuse_bytes=64)

    for kind in OPTIMIZERS:
        assert run(kind, True) == run(kind, False), kind


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of parameters that each partial update of rank 0 has."""
    seen: list[list[int]] = []
    apply = PartialSteps.apply

    def noted(self: PartialSteps, parameters: Any, gradients: Any) -> None:
        if parameters:
            seen.append([parameter.numel() for parameter in parameters])
        apply(self, parameters, gradients)

    monkeypatch.setattr(PartialSteps, "apply", noted)
    return seen


def train(rank: int, model: nn.Module, optimizer: Any, steps: int = 1, clip: float | None = None) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step, WIDTH)).square().mean().backward()
        if clip is not None:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(updated: list[list[int]], ranks: Any, **options: Any) -> Any:
    """A job of two ranks, of which the second takes whole steps."""

    def work(rank: int) -> list[torch.Tensor]:
        model = seeded(mlp)
        optimizer = wrapped(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank == 0, late_synchronization=None if rank == 0 else True
        )
        if options.get("hook"):
            optimizer.register_step_pre_hook(lambda *_: None)
        return train(rank, model, optimizer, 3, options.get("clip"))

    first, second = ranks.run(2, work, fuse_bytes=0)
    assert all(map(torch.equal, first, second))


def test_each_bucket_is_updated_by_itself(ranks: Any, updated: list[list[int]]) -> None:
    alone(updated, ranks)
    assert sorted(map(len, updated)) == [1] * 18, "three steps of six parameters, a bucket each"


def test_a_script_that_synchronizes_and_clips_gets_the_whole_step(ranks: Any, updated: list[list[int]]) -> None:
    alone(updated, ranks, clip=0.1)
    assert not updated


def test_a_hook_that_runs_before_the_step_sees_all_means(ranks: Any, updated: list[list[int]]) -> None:
    alone(updated, ranks, hook=True)
    assert not updated


def test_hooks_after_the_step_and_schedulers_see_one_step(ranks: Any) -> None:
    def work(rank: int) -> int:
        model, calls = seeded(mlp), list[int]()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(rank, model, optimizer)
        scheduler.step()  # warns where it comes before a step: the tests' warnings are errors
        return len(calls)

    assert ranks.run(2, work) == [1, 1]


def test_a_gradient_that_is_changed_when_it_may_be_under_way_is_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(batch(rank, 0, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(UsageError, match="was changed between backward and its synchronization"):
            optimizer.step()

    ranks.run(2, work)


def test_a_loss_scaler_unscales_all_gradients_before_a_whole_step(ranks: Any, updated: list[list[int]]) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        model, scaler = seeded(mlp), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(model(batch(rank, step, WIDTH)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = ranks.run(2, work)
    assert all(map(torch.equal, first, second))
    assert not updated


def test_an_optimizer_whose_step_is_more_than_a_step_of_each_parameter_is_refused(ranks: Any) -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    def work(rank: int) -> None:
        model = seeded(mlp)
        optimizer = wrapped(model, Counting(model.parameters(), lr=0.1))
        model(batch(rank, 0, WIDTH)).square().mean().backward()
        with pytest.raises(
            UsageError,
            match=r"overlapped_step=True\) updates .*Counting changes its attribute 'steps', .*; use D",
        ):
            optimizer.step()

    ranks.run(2, work)


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ({"compression": "auto"}, {}, "overlapped_step: auto and PSGC_PROFILE observe"),
        ({"late_synchronization": False}, {}, "leave late_synchronization=False out"),
        ({}, {"async_mode": True}, "overlapped_step: under PSGC_ASYNC=1"),
    ],
)
def test_what_does_not_go_together_with_it_is_refused(ranks: Any, options: dict[str, Any], config: dict[str, Any], said: str) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        with pytest.raises(UsageError, match=said):
            wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    ranks.run(2, work, **config)


def test_lbfgs_is_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(mlp)
        with pytest.raises(UsageError, match="LBFGS"):
            wrapped(model, torch.optim.LBFGS(model.parameters()))

    ranks.run(2, work)
