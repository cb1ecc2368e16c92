"""Saved residuals: what all ranks together hold stays the same, whatever the number of ranks it is loaded into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.torch.session import api
from psgc.torch.state.saved import check_states, share_of
from psgc.worker.residuals.residual import Int8Residual
from tests.torch.conftest import FakeSession

Ranks = Any  # the fixture ``ranks`` of conftest
KIND = "gradients"


def state(rank: int, size: int, value: float, velocity: float | None = None) -> dict[str, Any]:
    parts = {"residual": torch.full((3,), value)} | ({} if velocity is None else {"velocity": torch.full((3,), velocity)})
    return {"format": 1, "rank": rank, "size": size, "loss_scale": 1.0, "rates": [0.1], "memories": {KIND: {"w": parts}}}


@pytest.mark.parametrize("saved", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_mean_over_all_ranks_stays(saved: int, size: int) -> None:
    values = [float(2**rank) for rank in range(saved)]
    states = [state(rank, saved, value, -value) for rank, value in enumerate(values)]
    shares = [share_of(check_states(states, rank, size), KIND, rank, size) for rank in range(size)]
    for field in ("residual", "velocity"):
        total = sum(getattr(share.tensors["w"], field) for share in shares if share.tensors)
        sign = 1 if field == "residual" else -1
        np.testing.assert_allclose(total / size, sign * sum(values) / saved, rtol=1e-6)
    if size > saved:
        assert all(share.tensors for share in shares), "no rank is left without"


def test_a_rank_takes_its_own_as_it_is() -> None:
    own = state(1, 2, 0.3)
    (taken,) = share_of(check_states(own, 1, 2), KIND, 1, 2).tensors.values()
    assert taken.residual is not None
    assert taken.residual.tobytes() == np.full(3, 0.3, np.float32).tobytes()
    assert taken.velocity is None


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "expected what residual_state_dict() returned"),
        ({"weights": 1}, "expected what residual_state_dict() returned"),
        (state(1, 2, 0.0), "this is rank 0 of 2, the states are of ranks 1 of 2 (missing: 0)"),
        (state(0, 3, 0.0), "(missing: 1, 2)"),
        ([state(0, 2, 0.0), state(1, 3, 0.0)], "jobs of different sizes"),
        ([state(0, 3, 0.0), state(0, 3, 0.0), state(2, 3, 0.0)], "(missing: 1)"),
    ],
)
def test_states_that_do_not_fit_are_refused(states: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_states(states, 0, 2)
    assert message in str(caught.value)


def train(optimizer: Any, steps: int) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(steps):
        optimizer.zero_grad()
        (weight * torch.arange(3.0)).sum().backward()
        optimizer.step()


def test_what_is_loaded_waits_for_the_layout_and_comes_out_again(ranks: Ranks) -> None:
    def work(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
        optimizer.load_residual_state_dict(state(rank, 2, 1.0 + rank, 5.0))
        before = optimizer.residual_state_dict()
        train(optimizer, 1)
        after = optimizer.residual_state_dict()
        for saved in (before, after):
            assert saved["memories"][KIND]["w"]["residual"].tolist() == [1.0 + rank] * 3
            assert saved["memories"][KIND]["w"]["velocity"].tolist() == [5.0] * 3
        optimizer.load_residual_state_dict(state(rank, 2, 7.0))
        assert optimizer.residual_state_dict()["memories"][KIND]["w"]["residual"].tolist() == [7.0] * 3

    ranks.run(2, work)


@pytest.mark.parametrize(("follows", "first"), [(True, 2.0), (False, 1.0)])
def test_the_first_step_after_loading_knows_the_units_of_the_saved(ranks: Ranks, follows: bool, first: float) -> None:
    def work(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.05), [("w", weight)], residuals_follow_lr=follows)
        optimizer.load_residual_state_dict(state(rank, 2, 1.0))  # saved at a rate of 0.1
        train(optimizer, 2)
        submissions = api.current_session().submissions  # type: ignore[attr-defined]
        assert [s.rescale for s in submissions] == [first, 1.0]

    ranks.run(2, work)


def test_layouts_are_retired_once_every_rank_has_declared_those_that_replace_them(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    retired: list[tuple[int, str]] = []
    monkeypatch.setattr(FakeSession, "retire", lambda session, layout: retired.append((session.rank, layout.name)), raising=False)

    def train(rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer: Any = psgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="onebit"
        )

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        step()
        optimizer.load_residual_state_dict(optimizer.residual_state_dict())
        assert retired == [], "another rank may still read what is kept of it"
        psgc.barrier()
        step()
        psgc.barrier()
        optimizer.switch_plan("int8")
        step()

    ranks.run(2, train)
    assert sorted(retired) == [(rank, name) for rank in (0, 1) for name in ("optimizer0", "optimizer0.2")]


def test_another_models_residual_and_the_middle_of_a_step_are_refused(ranks: Ranks) -> None:
    def work(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)], backward_passes_per_step=2)
        weight.sum().backward()
        with pytest.raises(UsageError, match="between two steps"):
            optimizer.residual_state_dict()
        weight.sum().backward()
        optimizer.step()
        with pytest.raises(UsageError, match="the saved residual of 'w' has 3 elements, the tensor 4"):
            optimizer.load_residual_state_dict(state(rank, 2, 1.0))

    ranks.run(2, work)


def test_a_residual_in_eight_bits_loses_little() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    kept = Int8Residual(1000)
    assert not kept.load().any()
    kept.keep(values)
    assert np.abs(kept.load() - values).max() <= np.abs(values).max() / 254
    first = kept.load()
    kept.keep(first)
    np.testing.assert_allclose(kept.load(), first, rtol=1e-6)
