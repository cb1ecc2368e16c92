"""Backwards that leave some parameters, or some ranks, without a gradient of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.backwards import BUCKETS, equal, grads, local, squares
from tests.torch.small_models import linear, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


@BUCKETS
def test_gradients_that_nobody_zeroes_add_up_over_steps_with_ranks_that_skip_some(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for step in range(3):
            used = [0, 1] if rank == 0 or step == 0 else [0]
            sum(model[i](torch.full((1, 3), 2.0)).sum() for i in used).backward()
            seen = [half.weight.grad[0, 0].item() for half in model]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **buckets) == [[6.0, 4.0]] * 2


def test_gradients_kept_by_a_rank_without_a_backward_count_once(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            if rank == 0 or step != 1:
                model(torch.full((1, 3), 2.0)).sum().backward()
            optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[5.0] * 6] * 2


def test_a_rank_without_a_backward_takes_part_in_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            if (rank, step) not in ((1, 0), (0, 2)):
                model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return [*weights(model), *model.weight.grad.reshape(-1).tolist()]

    first, second = ranks.run(2, train)
    assert first == second and first[-1] == 0.5


def test_autograd_grad_changes_nothing(ranks: Any) -> None:
    def train(rank: int) -> int:
        model = linear()
        optimizer = sgd(model)
        squares(rank, 0)(model).backward()
        before, sent = grads(model), len(psgc.session.api.current_session().submissions)
        own = torch.autograd.grad(squares(rank, 1)(model), list(model.parameters()))
        assert equal(list(own), local(linear, squares(rank, 1))) and equal(before, grads(model))
        optimizer.step()
        return len(psgc.session.api.current_session().submissions) - sent

    assert ranks.run(2, train) == [0, 0]


@BUCKETS
def test_a_backward_for_some_inputs_averages_those_and_skips_the_rest(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[Any]:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward(inputs=[model.weight])
        optimizer.step()
        return [model.weight.grad[0, 0].item(), model.bias.grad is None or model.bias.grad.abs().sum().item() == 0]

    assert ranks.run(2, train, **buckets) == [[1.5, True]] * 2


def test_parameters_unfrozen_or_added_later_are_averaged_in_their_first_backward(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1), linear(2)])
        model[1].requires_grad_(False)
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1))
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                model[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters())})
            sum(layer(torch.full((1, 3), rank + 1.0)).sum() for layer in model).backward()
            seen = [layer.weight.grad[0, 0].item() for layer in model] if step else []
            optimizer.step()
        return [*seen, *weights(model)]

    first, second = ranks.run(2, train)
    assert first == second and first[:3] == [1.5] * 3


def test_a_frozen_parameter_that_is_unfrozen_alone_is_averaged_by_step(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        model[1].requires_grad_(False)
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                model[0].requires_grad_(False)
                model[1].requires_grad_(True)
            sum(layer(torch.full((1, 3), rank + 1.0)).sum() for layer in model).backward()
            optimizer.step()
        return [*model[1].weight.grad.reshape(-1).tolist(), *weights(model)]

    first, second = ranks.run(2, train)
    assert first == second and first[:6] == [1.5] * 6
