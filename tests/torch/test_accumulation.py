"""Several backwards before a step: declared, inside no_sync, or neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from tests.torch.backwards import BUCKETS, TINY, equal, grads, local, mean, squares
from tests.torch.small_models import linear, sgd

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


@BUCKETS
def test_between_passes_p_grad_is_this_ranks_own_and_after_the_last_the_mean(ranks: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model, passes=3)
        for _ in range(2):
            optimizer.zero_grad()
            seen = []
            for _ in range(3):
                model(torch.full((1, 3), rank + 1.0)).sum().backward()
                seen.append(model.weight.grad[0, 0].item())
            optimizer.step()
        return seen

    assert ranks.run(2, train, **buckets) == [[1.0, 2.0, 4.5], [2.0, 4.0, 4.5]]


def test_no_sync_accumulates_and_the_next_backward_sends_the_sum(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                (model[0](torch.full((1, 3), rank + 1.0)) + model[1](torch.full((1, 3), rank + 1.0))).sum().backward()
                own = model[0].weight.grad[0, 0].item()
            model[0](torch.full((1, 3), rank + 1.0)).sum().backward()  # the other takes part with what it has
            seen = [own, *(half.weight.grad[0, 0].item() for half in model)]
            optimizer.step()
        return seen

    assert ranks.run(2, train, **TINY) == [[1.0, 3.0, 1.5], [2.0, 3.0, 1.5]]
    assert len(ranks.steps) == 3 * 4


def test_a_step_after_no_sync_alone_sends_the_sum(ranks: Any) -> None:
    def train(rank: int) -> float:
        model = linear()
        optimizer = sgd(model)
        with optimizer.no_sync():
            for _ in range(2):
                model(torch.full((1, 3), rank + 1.0)).sum().backward()
        optimizer.step()
        return model.weight.grad[0, 0].item()

    assert ranks.run(2, train) == [3.0, 3.0]


def test_what_no_sync_gathered_can_be_thrown_away_and_nothing_was_sent(ranks: Any) -> None:
    def train(rank: int) -> int:
        model = linear()
        optimizer = sgd(model)
        for _ in range(2):
            with optimizer.no_sync():
                model(torch.ones(1, 3)).sum().backward()
            optimizer.zero_grad()
        return len(psgc.session.api.current_session().submissions)

    assert ranks.run(2, train) == [0, 0]


@BUCKETS
@pytest.mark.parametrize("size", [2, 3])
def test_an_undeclared_second_backward_adds_the_mean_of_what_it_added(ranks: Any, size: int, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[list[torch.Tensor]]:
        model = linear()
        optimizer = sgd(model)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                squares(rank, 2 * step + part)(model).backward()
                seen.append(grads(model))
        optimizer.step()
        return seen

    results = ranks.run(size, train, **buckets)
    for step in range(2):
        first, second = (mean([local(linear, squares(rank, 2 * step + part)) for rank in range(size)]) for part in range(2))
        assert all(equal(result[2 * step], first) for result in results)
        assert all(equal(result[2 * step + 1], [a + b for a, b in zip(first, second, strict=True)]) for result in results)
    assert len(ranks.steps) == 4 * (2 if buckets else 1)


def test_only_what_a_second_backward_added_travels_again(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = nn.ModuleList([linear(0), linear(1)])
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            for half in model:
                half(torch.full((1, 3), rank + 1.0)).sum().backward()
            optimizer.step()
        return [half.weight.grad[0, 0].item() for half in model]

    assert ranks.run(2, train, **TINY) == [[1.5, 1.5]] * 2
    # The first synchronization declares all; each backward is a trip of its own, in which the other half is skipped.
    trips = [ranks.steps[at : at + 4] for at in range(0, len(ranks.steps), 4)]
    assert [sorted(s.tensors[0] for s in trip if not s.skip) for trip in trips] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]] * 2


def test_clipping_between_two_backwards_clips_the_first_alone(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        optimizer.step()
        return model.weight.grad.reshape(-1).tolist()

    assert ranks.run(2, train) == [[0.75 + 1.5] * 6] * 2
    assert not any(s.previous_skipped for s in ranks.steps)
