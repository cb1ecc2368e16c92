"""Averaged gradients that the trainer does not step with, and backwards that raise."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgc.errors import UsageError
from psgc.torch.session import api
from psgc.worker.residuals.residual import TensorMemory
from psgc.worker.session import RAISED
from tests.torch.backwards import BUCKETS, LATE, TINY, grads, squares, two_layers
from tests.torch.small_models import batch, linear, sgd, weights

# torch 2.4's own checkpoint uses what torch 2.4 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")


def by_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def by_module(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def by_module_in_place(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def by_none(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_putting_back(model: nn.Module, optimizer: Any) -> None:
    optimizer.put_back()


def by_discarding(model: nn.Module, optimizer: Any) -> None:
    optimizer.discard()


@BUCKETS
@pytest.mark.parametrize("clear", [by_optimizer, by_module, by_module_in_place, by_none, by_discarding, by_putting_back])
def test_a_result_without_a_step_is_the_scripts_unless_it_is_put_back(ranks: Any, clear: Any, buckets: dict[str, Any]) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        for step in range(4):
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5)), step
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
            else:
                clear(model, optimizer)
                assert all(grad is None or not grad.any() for grad in (p.grad for p in model.parameters()))
        return weights(model)

    first, second = ranks.run(2, train, **buckets)
    assert first == second
    flags = [s.previous_skipped for s in ranks.steps if "weight" in s.tensors]
    assert flags == [False, False, clear is by_putting_back, False]


def test_of_several_backwards_that_are_put_back_together_the_last_is_told(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = two_layers()
        optimizer = sgd(model)
        for step in range(2):
            squares(rank, step)(model).backward()
        optimizer.put_back()
        for step in range(2):
            squares(rank, step)(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    ranks.run(2, train)
    assert [s.previous_skipped for s in ranks.steps] == [False, False, True, False]


@pytest.mark.parametrize("late", [False, True])
def test_a_result_is_put_back_once_and_only_where_there_is_one(ranks: Any, late: bool) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait"):
            optimizer.put_back()
        squares(rank, 0)(model).backward()
        optimizer.put_back()
        with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait"):
            optimizer.put_back()
        squares(rank, 1)(model).backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"put_back\(\): no averaged gradients wait"):
            optimizer.put_back()

    ranks.run(2, train, late_synchronization=late)
    assert [s.previous_skipped for s in ranks.steps] == [False, True]


@pytest.mark.parametrize(("clear", "kept"), [(by_optimizer, 0.0), (by_module, 0.0), (by_none, 0.0), (by_putting_back, 5.0), (None, 5.0)])
def test_a_state_saved_after_an_exceptional_result_was_left_has_forgotten_what_codecs_kept(ranks: Any, clear: Any, kept: float) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(rank, 1)).sum().backward()
        if clear is None:
            optimizer.step()
        else:
            clear(model, optimizer)
        session: Any = api.current_session()
        session.memories["weight"] = TensorMemory(np.full(6, 5.0, np.float32), np.full(6, 5.0, np.float32), np.full(2, 7.0, np.float32))
        memory = optimizer.residual_state_dict()["memories"]["gradients"]["weight"]
        assert memory["factors"].tolist() == [7.0] * 2, "what is equal on all ranks is no gradient"
        assert memory["residual"].tolist() == memory["velocity"].tolist()
        return memory["residual"].tolist()

    assert ranks.run(2, train) == [[kept] * 6] * 2


def test_gradients_that_module_zero_grad_lets_go_are_freed(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = linear()
        optimizer = sgd(model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        alive = [weakref.ref(p.grad) for p in model.parameters()]
        model.zero_grad()
        gc.collect()
        assert [reference() for reference in alive] == [None, None]

    ranks.run(1, train)


class Boom(Exception):
    """A user's own error."""


def failing(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss whose backward raises when the last layer's gradients are done, and the first one's are not."""
    middle = model[0](batch(rank, step))

    def explode(grad: torch.Tensor) -> None:
        raise Boom

    middle.register_hook(explode)
    return model[1](middle).square().mean()


@pytest.mark.parametrize("buckets", [TINY, {}, LATE], ids=["a bucket each", "one bucket", "late"])
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("throw_away", [by_optimizer, by_module, by_none])
def test_a_backward_that_raises_costs_a_step_and_nothing_else(
    ranks: Any, throw_away: Any, failing_step: int, buckets: dict[str, Any]
) -> None:
    def train(rank: int) -> list[float]:
        model = two_layers()
        optimizer = sgd(model)
        for step in range(5):
            throw_away(model, optimizer)
            if step == failing_step:
                with pytest.raises(Boom):
                    failing(model, rank, step).backward()
                continue
            squares(rank, step)(model).backward()
            optimizer.step()
        return weights(model)

    first, second = ranks.run(2, train, **buckets)
    reference = two_layers()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        if step != failing_step:
            optimizer.zero_grad()
            (sum(squares(rank, step)(reference) for rank in range(2)) / 2).backward()
            optimizer.step()
    assert first == second == pytest.approx(weights(reference), abs=1e-6)
    if buckets is TINY and failing_step:
        sent = [s for s in ranks.steps if s.tensors == ("1.weight",)]
        rest = [s for s in ranks.steps if s.tensors == ("0.weight",)]
        assert [s.skip for s in sent] == [False] * 5
        assert [s.skip for s in rest] == [False, False, True, False, False]  # every step is whole, on every rank
        assert [s.previous_skipped for s in sent] == [s.previous_skipped for s in rest] == [False, False, False, RAISED, False]


def test_after_a_backward_that_raised_a_step_is_refused(ranks: Any) -> None:
    def train(rank: int) -> None:
        model = two_layers()
        optimizer = sgd(model)
        for step in range(2):
            with pytest.raises(Boom):
                failing(model, rank, step).backward()
            with pytest.raises(UsageError, match=r"raised before it was over.*call optimizer.zero_grad\(\)"):
                optimizer.step()
            with pytest.raises(UsageError, match=r"raised before it was over.*call optimizer.zero_grad\(\)"):
                squares(rank, step)(model).backward()
            optimizer.zero_grad()
            squares(rank, step)(model).backward()
            optimizer.step()

    ranks.run(2, train, **TINY)


def test_an_end_that_never_came_since_another_callback_raised_is_noticed(ranks: Any) -> None:
    def train(rank: int) -> list[float]:
        model = linear()
        optimizer = sgd(model)
        broken = True

        def other(parameter: torch.Tensor) -> None:
            def callback() -> None:
                if broken:
                    raise Boom

            torch.autograd.Variable._execution_engine.queue_callback(callback)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(other)
        with pytest.raises(Boom):
            squares(rank, 0)(model).backward()
        broken = False
        optimizer.zero_grad()
        squares(rank, 1)(model).backward()
        return torch.cat([g.reshape(-1) for g in grads(model)]).tolist()

    first, second = ranks.run(2, train)
    assert first == second
