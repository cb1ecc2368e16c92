"""torch.amp.GradScaler and DistributedOptimizer: averaged before unscaled, skipped alike, and what is skipped is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.small_models import linear


def make(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Linear, Any, torch.amp.GradScaler]:
    model = linear()
    optimizer = psgc.DistributedOptimizer(kind(model.parameters(), lr=0.1, **options), model.named_parameters())
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)


def backward(model: nn.Module, scaler: torch.amp.GradScaler, value: float) -> None:
    scaler.scale(model(torch.full((1, 3), value)).sum()).backward()


@pytest.mark.parametrize("explicit", [True, False])
def test_gradients_are_averaged_then_unscaled_then_clipped(ranks: Any, explicit: bool) -> None:
    def train(rank: int) -> list[float]:
        model, optimizer, scaler = make()
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, scaler, rank + 1.0)
            if explicit:
                scaler.unscale_(optimizer)
                assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5))
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[1.5] * 6] * 2
    assert [(s.previous_skipped, s.rescale) for s in ranks.steps] == [(False, 1.0)] * 3


@pytest.mark.parametrize("explicit", [True, False])
def test_gradients_that_the_script_puts_in_place_of_the_means_are_applied_and_not_sent_again(ranks: Any, explicit: bool) -> None:
    def train(rank: int) -> list[float]:
        model, optimizer, scaler = make()
        weight = model.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, scaler, rank + 1.0)
            if explicit:
                scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clamp(max=1.0 if explicit else 256.0) + rank
            scaler.step(optimizer)
            scaler.update()
        return ((weight - model.weight) / 0.1).detach().reshape(-1).tolist()

    first, second = ranks.run(2, train)
    assert first == pytest.approx([3.0] * 6) and second == pytest.approx([6.0 if explicit else 3.0 + 3 / 256] * 6)
    assert len(ranks.steps) == 3


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_is_told_with_the_next(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model, optimizer, scaler = make()
        applied = []
        for step in range(4):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            backward(model, scaler, float("inf") if (rank, step) == (1, 1) else 1.0)
            scaler.step(optimizer)
            scaler.update()
            applied.append(not torch.equal(before, model.weight))
        assert scaler.get_scale() == 128.0
        return applied

    assert ranks.run(2, train) == [[True, False, True, True]] * 2
    assert [s.previous_skipped for s in ranks.steps] == [False, False, True, False]


class Based(torch.optim.Optimizer):
    """Wraps an optimizer, which the script steps by itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)


def test_an_overflow_is_told_where_the_scaler_steps_an_optimizer_that_the_distributed_one_wraps(ranks: Any) -> None:
    def train(rank: int) -> None:
        model, optimizer, scaler = make(Based)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, scaler, float("inf") if (rank, step) == (1, 1) else 1.0)
            scaler.step(optimizer.base)
            scaler.update()
        assert scaler.get_scale() == 128.0

    ranks.run(2, train)
    assert [(s.previous_skipped, s.rescale) for s in ranks.steps] == [(False, 1.0), (False, 1.0), (True, 0.5), (False, 1.0)]


def test_residuals_are_rescaled_with_the_loss_scale(ranks: Any) -> None:
    def train(rank: int) -> None:
        model, optimizer, scaler = make()
        for step in range(4):
            optimizer.zero_grad()
            backward(model, scaler, 1.0)
            scaler.step(optimizer)
            scaler.update(512.0 if step == 1 else None)

    ranks.run(2, train)
    assert [s.rescale for s in ranks.steps] == [1.0, 1.0, 2.0, 1.0]


def test_fused_optimizers_are_synchronized_before_they_look_for_overflow(ranks: Any) -> None:
    def train(rank: int) -> list[bool]:
        model, optimizer, scaler = make(torch.optim.AdamW, fused=True)
        applied = []
        for step in range(3):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            backward(model, scaler, float("inf") if (rank, step) == (0, 1) else rank + 1.0)
            scaler.step(optimizer)
            scaler.update()
            applied.append(not torch.equal(before, model.weight))
        return [*applied, model.weight.sum().item()]

    first, second = ranks.run(2, train)
    assert first == second and first[:3] == [True, False, True]
    assert [s.previous_skipped for s in ranks.steps] == [False, False, True]


def test_a_disabled_scaler_changes_nothing(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model, optimizer, _ = make()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, scaler, rank + 1.0)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[1.5] * 6] * 2
    assert len(ranks.steps) == 2


@pytest.mark.usefixtures("alone")
def test_other_optimizers_pass_through_the_scaler_unchanged() -> None:
    make()
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.weight.detach().clone()
    backward(model, scaler, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.weight, before - 0.1)
