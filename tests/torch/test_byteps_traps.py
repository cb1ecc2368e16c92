"""What goes wrong under BytePS without a word, or by a crash, either works here or is an error that says what to do. A test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import LayoutMismatch, UsageError
from tests.torch.small_models import batch, linear, seeded, sgd, weights


def test_tensors_without_a_name_do_not_share_a_key(ranks: Any) -> None:
    def work(rank: int) -> list[list[float]]:
        tensors = [torch.full((2,), 1.0 + rank), torch.full((3,), 2.0 + rank), torch.full((2,), 3.0 + rank)]
        handles = [psgc.push_pull_async(tensor) for tensor in tensors]
        return [psgc.synchronize(handle).tolist() for handle in handles]

    assert ranks.run(2, work) == [[[1.5] * 2, [2.5] * 3, [3.5] * 2]] * 2


def test_parameters_need_no_names(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        model = linear()
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=None)
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
        return weights(model)

    first, second = ranks.run(2, work)
    assert first == second


def test_two_parameters_of_one_name_are_refused_by_name(ranks: Any) -> None:
    def work(_: int) -> None:
        model = linear()
        with pytest.raises(UsageError, match="named_parameters: 'p' named more than once; give each parameter its own name"):
            psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("p", p) for p in model.parameters()])

    ranks.run(1, work)


def test_options_that_are_none_are_broadcast_and_the_parameters_stay_as_they_are(ranks: Any) -> None:
    def work(rank: int) -> tuple[Any, list[float]]:
        model = linear()
        before = weights(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1), foreach=None, fused=None, weight_decay=0.5)
        psgc.broadcast_optimizer_state(optimizer, root_rank=0)
        assert weights(model) == before and optimizer.param_groups[0]["foreach"] is None
        return optimizer.param_groups[0]["lr"], before

    (first, _), (second, _) = ranks.run(2, work)
    assert first == second == 0.1


def test_names_may_be_called_in_another_order_on_each_rank(ranks: Any) -> None:
    def work(rank: int) -> dict[str, float]:
        names = ["a", "b"] if rank else ["b", "a"]
        for name in names:
            psgc.declare(name)
        handles = {name: psgc.push_pull_async(torch.tensor(float(ord(name))), name=name) for name in names}
        return {name: psgc.synchronize(handles[name]).item() for name in sorted(names)}

    assert ranks.run(2, work) == [{"a": 97.0, "b": 98.0}] * 2


def test_parameters_in_another_order_on_one_rank_are_named(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = seeded(lambda: nn.Linear(3, 2))
        named = list(model.named_parameters())
        parameters = [p for _, p in (named if rank else named[::-1])]
        optimizer = psgc.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named)
        model(batch(rank, 0)).sum().backward()
        optimizer.step()

    with pytest.raises(LayoutMismatch, match=r"'weight'|'bias'"):
        ranks.run(2, work)


MISMATCHES: list[dict[str, Any]] = [
    {"average": False},
    {"compression": "fp16"},
    {"tensor": torch.ones(5)},
    {"tensor": torch.ones(4, dtype=torch.int8)},
]


def test_calls_of_one_name_that_differ_between_ranks_end_with_what_differs(ranks: Any) -> None:
    for other in MISMATCHES:

        def work(rank: int, other: dict[str, Any] = other) -> None:
            given = {"tensor": torch.ones(4), "name": "x", **(other if rank else {})}
            psgc.push_pull(**given)

        with pytest.raises(LayoutMismatch, match="x"):
            ranks.run(2, work)


def test_one_name_may_be_under_way_several_times_and_results_come_in_order(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        handles = [psgc.push_pull_async(torch.tensor([10.0 * i + rank]), average=False, name="x") for i in range(3)]
        return [psgc.synchronize(handle).item() for handle in handles]

    assert ranks.run(2, work) == [[1.0, 21.0, 41.0]] * 2


def test_a_name_used_for_another_tensor_on_the_same_rank_is_refused(ranks: Any) -> None:
    def work(_: int) -> None:
        psgc.push_pull(torch.ones(2), name="x")
        for given in (
            {"tensor": torch.ones(3)},
            {"tensor": torch.ones(2), "average": False},
            {"tensor": torch.ones(2), "compression": "fp16"},
        ):
            with pytest.raises(UsageError, match=r"push_pull of 'x': was the mean of .* is the .*; use another name"):
                psgc.push_pull(**given, name="x")

    ranks.run(1, work)


def test_synchronize_clip_step_sends_each_gradient_once(ranks: Any) -> None:
    def work(rank: int) -> None:
        model = linear()
        optimizer: Any = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    ranks.run(2, work)
    assert len([s for s in ranks.steps if s.layout == "optimizer0"]) == 2  # one bucket, two steps


def test_bare_tensors_in_a_broadcast_are_refused_with_the_remedy(ranks: Any) -> None:
    def work(_: int) -> None:
        with pytest.raises(UsageError, match=r"expected \(name, tensor\) pairs, got Tensor; pass named_parameters\(\)"):
            psgc.broadcast_parameters([torch.ones(1), torch.ones(2)], root_rank=0)  # type: ignore[list-item]

    ranks.run(1, work)


def test_a_second_object_of_another_size_comes_through(ranks: Any) -> None:
    objects = [{"a": 1}, {"b": list(range(5000))}, {}]
    assert ranks.run(2, lambda rank: [psgc.broadcast_object(each if rank == 0 else None) for each in objects]) == [objects] * 2


def test_two_wrapped_models_count_their_gradients_apart(ranks: Any) -> None:
    def work(rank: int) -> list[float]:
        models = [psgc.DistributedDataParallel(linear(seed)) for seed in range(2)]
        for model in models:
            model(batch(rank, 0)).sum().backward()
        models[0](models[1](batch(rank, 1)).sum().reshape(1, 1).expand(1, 3)).sum().backward()
        return [p.grad.sum().item() for model in models for p in model.parameters()]

    first, second = ranks.run(2, work)
    assert first == second


@pytest.mark.usefixtures("alone")
def test_an_unknown_handle_is_an_error_for_poll_and_synchronize_alike() -> None:
    for call in (psgc.poll, psgc.synchronize):
        with pytest.raises(UsageError, match="handle 12345678 is unknown"):
            call(12345678)
