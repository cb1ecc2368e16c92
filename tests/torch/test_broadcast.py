"""Broadcasts: every rank ends with the root's bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import LayoutMismatch, UsageError
from psgc.torch.tensors.broadcast import CHUNK_BYTES, HEAD_BYTES, broadcast_from_root
from psgc.worker.session import ROOT_OF
from tests.torch.small_models import seeded, weights


def model_of(seed: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), seed)


@pytest.mark.parametrize("root", [0, 2])
def test_parameters_and_buffers_become_the_roots(ranks: Any, root: int) -> None:
    def work(rank: int) -> str:
        model = model_of(rank)
        psgc.broadcast_parameters(model.state_dict(), root_rank=root)
        return str(model.state_dict())

    assert ranks.run(3, work) == [str(model_of(root).state_dict())] * 3


class WithMore(nn.Module):
    """Tied weights, a buffer that is not saved, and something that is saved and is no tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(2, 2), nn.Linear(2, 2), {"rank": rank}
        self.second.weight = self.first.weight
        self.register_buffer("saved", torch.full((2,), float(rank)))
        self.register_buffer("unsaved", torch.full((3,), float(rank)), persistent=False)

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


def test_an_elastic_training_begins_with_the_roots_buffers_that_are_not_saved_too(ranks: Any) -> None:
    def work(rank: int) -> tuple[str, int]:
        model = seeded(lambda: WithMore(rank), rank)
        broadcast_from_root(model, torch.optim.SGD(model.parameters(), lr=0.1), "Elastic.")
        assert model.second.weight is model.first.weight
        return str([*model.named_parameters(), *model.named_buffers()]), model.more["rank"]

    root = seeded(lambda: WithMore(0), 0)
    assert ranks.run(3, work) == [(str([*root.named_parameters(), *root.named_buffers()]), rank) for rank in range(3)]


@pytest.mark.parametrize("form", ["mapping", "pairs", "iterator"])
def test_names_and_tensors_come_in_any_form(ranks: Any, form: str) -> None:
    def work(rank: int) -> float:
        model = model_of(rank)
        named = {"mapping": dict(model.named_parameters()), "pairs": list(model.named_parameters()), "iterator": model.named_parameters()}
        psgc.broadcast_parameters(named[form])
        return sum(p.sum().item() for p in model.parameters())

    first, second = ranks.run(2, work)
    assert first == second


def test_nan_strides_and_odd_dtypes_travel_as_they_are(ranks: Any) -> None:
    def work(rank: int) -> str:
        mine = float(rank + 1)
        tensors: list[torch.Tensor] = [
            torch.tensor([float("nan") * mine, mine]), torch.full((4, 3), mine).t(), torch.tensor(mine, dtype=torch.bfloat16),
            torch.tensor([rank == 0]), torch.full((2,), complex(mine, -mine), dtype=torch.complex64), torch.empty(0),
        ]  # fmt: skip
        psgc.broadcast_parameters([(str(i), tensor) for i, tensor in enumerate(tensors)])
        return str(tensors)

    first, second = ranks.run(2, work)
    assert first == second and "nan" in first and "1.-1.j" in first


def test_the_same_set_again_uses_the_same_layout_another_set_its_own(ranks: Any) -> None:
    def work(rank: int) -> None:
        for _ in range(3):
            psgc.broadcast_parameters([("a", torch.ones(2))])
        psgc.broadcast_parameters([("a", torch.ones(2)), ("b", torch.ones(2))])
        psgc.broadcast_parameters([("a", torch.ones(2))], root_rank=1)

    ranks.run(2, work)
    layouts = [s.layout for s in ranks.steps if not s.layout.startswith(ROOT_OF)]
    assert layouts == ["broadcast.Parameter.0"] * 3 + ["broadcast.Parameter.1", "broadcast.Parameter.2"]


def test_different_models_are_named(ranks: Any) -> None:
    with pytest.raises(Exception, match="shape of tensor 'a' on rank"):
        ranks.run(2, lambda rank: psgc.broadcast_parameters([("a", torch.ones(2 + rank))]))


def test_what_is_no_tensor_is_refused_by_name_and_none_is_passed_over(ranks: Any) -> None:
    def work(rank: int) -> None:
        psgc.broadcast_parameters({"bias": None})
        with pytest.raises(UsageError, match="'extra' is a dict, not a tensor; send it with broadcast_object"):
            psgc.broadcast_parameters({"extra": {}})
        with pytest.raises(UsageError, match=r"expected .name, tensor. pairs"):
            psgc.broadcast_parameters([torch.ones(2)])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="root_rank=2, but ranks are 0 to 1"):
            psgc.broadcast_parameters({"a": torch.ones(2)}, root_rank=2)

    ranks.run(2, work)


SIZES = [0, 1, HEAD_BYTES - 100, HEAD_BYTES, CHUNK_BYTES, 3 * CHUNK_BYTES + 7]


def test_objects_of_any_size_follow_one_another_over_the_same_keys(ranks: Any) -> None:
    def work(rank: int) -> list[bool]:
        return [psgc.broadcast_object(bytes([rank + 1]) * n) == b"\1" * n for n in [*SIZES, *reversed(SIZES)]]

    assert ranks.run(2, work) == [[True] * 2 * len(SIZES)] * 2
    assert len({s.layout for s in ranks.steps if not s.layout.startswith(ROOT_OF)}) == 2


def test_objects_come_from_the_root_that_is_named(ranks: Any) -> None:
    def work(rank: int) -> list[Any]:
        return [psgc.broadcast_object({"rank": rank}, root, name="config") for root in (1, 0)]

    assert ranks.run(2, work) == [[{"rank": 1}, {"rank": 0}]] * 2


def test_ranks_that_name_different_roots_are_refused_by_both(ranks: Any) -> None:
    calls: list[Callable[[int], Any]] = [
        lambda rank: psgc.broadcast_object("x", rank),
        lambda rank: psgc.broadcast_parameters([("a", torch.ones(2))], rank),
        lambda rank: psgc.broadcast_optimizer_state(torch.optim.SGD(model_of(0).parameters(), lr=0.1), rank),
    ]
    for call in calls:
        with pytest.raises(LayoutMismatch, match=r"root_rank on rank (0 is 0, on rank 1 it is 1|1 is 1, on rank 0 it is 0) "):
            ranks.run(2, call)


@pytest.mark.parametrize("roots", [(1, 0), (0, 1), (0, 2)])
def test_ranks_that_name_different_roots_later_are_refused_by_both_too(ranks: Any, roots: tuple[int, int]) -> None:
    """Also where each of the roots has been named before, so that no rank declares anything anew."""
    calls: list[tuple[str, Callable[[int], Any]]] = [
        ("broadcast_object", lambda root: psgc.broadcast_object("x", root)),
        ("broadcast_parameters", lambda root: psgc.broadcast_parameters([("a", torch.ones(2))], root)),
    ]
    for name, call in calls:

        def work(rank: int, name: str = name, call: Callable[[int], Any] = call) -> None:
            call(0)
            call(1)
            with pytest.raises(UsageError) as caught:
                call(roots[rank % 2])
            assert (
                str(caught.value) == f"{name}: root_rank on rank 0 is {roots[0]}, on rank 1 it is {roots[1]}; every rank must name the same"
            )

        ranks.run(3, work)


def test_an_object_that_is_not_plain_is_refused_on_every_rank_at_once_unless_pickles_are_allowed(ranks: Any) -> None:
    def work(rank: int) -> int:
        said = r"broadcast_object: args is a types\.SimpleNamespace, which is not a plain type"
        with pytest.raises(UsageError, match=("^" if rank == 0 else "^rank 0: ") + said):
            psgc.broadcast_object(SimpleNamespace(lr=rank), name="args")
        return psgc.broadcast_object(SimpleNamespace(lr=rank + 1), name="args", allow_pickle=True).lr

    assert ranks.run(2, work) == [1, 1]


def test_a_pickle_is_not_read_by_a_rank_that_does_not_allow_it(ranks: Any) -> None:
    def work(rank: int) -> Any:
        if rank == 0:
            return psgc.broadcast_object(Runs(), allow_pickle=True) is not None
        with pytest.raises(UsageError, match="rank 0 sent a pickle, which is not read"):
            psgc.broadcast_object()
        return True

    assert ranks.run(2, work) == [True, True]


class Runs:
    """Code that unpickling would run."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


def trained(kind: Any, seed: int, steps: int, **options: Any) -> Any:
    model = model_of(seed)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("kind", "options"), [
    (torch.optim.SGD, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1, "foreach": None}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
])  # fmt: skip
def test_an_optimizer_without_state_becomes_the_roots(ranks: Any, kind: Any, options: Any) -> None:
    def work(rank: int) -> str:
        optimizer = trained(kind, rank, 0 if rank else 3, **{**options, "lr": options["lr"] * (rank + 1)})
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        psgc.broadcast_optimizer_state(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
        return str(optimizer.state_dict())

    first, second = ranks.run(2, work)
    assert first == second == str(trained(kind, 0, 3, **options).state_dict())


class WithMasters(torch.optim.Optimizer):
    """Keeps weights, and moments of them in a list and a tuple, in a wider dtype than the parameters'. rounds: what it loads by itself, as others that do so
    on purpose."""

    def __init__(self, params: Any, rank: int, rounds: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rounds = rounds
        for p in self.param_groups[0]["params"]:
            wide = p.detach().double() + 1e-9 * (rank + 1)
            self.state[p] = {
                "step": torch.tensor(1.0),
                "master": wide,
                "of": [wide + 1, (wide + 2, rank)],
                "seen": torch.tensor(2**40 + 1 + rank),
            }

    def state_dict(self) -> Any:
        found: Any = super().state_dict()
        if self.rounds:
            found["state"] = {number: {**of, "master": of["master"].half()} for number, of in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for of in self.state.values():
            of["master"] = of["master"].double()


@pytest.mark.parametrize("rounds", [False, True])
def test_state_of_another_dtype_than_its_parameter_becomes_the_roots_bit_for_bit(ranks: Any, rounds: bool) -> None:
    def state(optimizer: WithMasters) -> list[Any]:
        return [value for of in optimizer.state.values() for value in (of["step"], of["master"], of["of"][0], of["of"][1][0], of["seen"])]

    def work(rank: int) -> list[Any]:
        optimizer = WithMasters(model_of(0).bfloat16().parameters(), rank, rounds)
        psgc.broadcast_optimizer_state(optimizer)
        return state(optimizer)

    first, second = ranks.run(2, work)
    assert [one.dtype for one in first] == [one.dtype for one in second]
    assert [torch.equal(one, two) for one, two in zip(first, second, strict=True)] == [True, not rounds, True, True, True] * (
        len(first) // 5
    )


def test_a_distributed_optimizer_resumes_on_every_rank(ranks: Any) -> None:
    saved = copy.deepcopy(trained(torch.optim.AdamW, 0, 2, lr=0.1).state_dict())

    def work(rank: int) -> str:
        model = model_of(0)
        optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1.0))
        if rank == 0:
            optimizer.load_state_dict(saved)
        psgc.broadcast_optimizer_state(optimizer)
        model(torch.arange(6.0).reshape(2, 3) * (rank + 1)).sum().backward()
        optimizer.step()
        return str(optimizer.state_dict()) + str(model.state_dict())[:200]

    first, second = ranks.run(2, work)
    assert first == second


def test_lbfgs_goes_on_on_every_rank_from_the_roots_directions(ranks: Any) -> None:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))

    def stepped(model: nn.Module, optimizer: torch.optim.LBFGS, steps: int) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    def work(rank: int) -> tuple[list[float], list[float]]:
        model = seeded(lambda: nn.Linear(3, 1), rank)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3 if rank == 0 else 1.0, max_iter=2)
        if rank == 0:
            stepped(model, optimizer, 3)
        psgc.broadcast_parameters(model.state_dict())
        psgc.broadcast_optimizer_state(optimizer)
        return stepped(model, optimizer, 2), weights(model)

    first, second = ranks.run(2, work)
    whole = seeded(lambda: nn.Linear(3, 1), 0)
    losses = stepped(whole, torch.optim.LBFGS(whole.parameters(), lr=0.3, max_iter=2), 5)
    assert first == second == (losses[3:], weights(whole))
