"""From observed iterations to a profile: medians, order, outliers and spread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.observed import Iteration, profile_of, unsteady

NUMEL = {"first.weight": 12, "first.bias": 3, "last.weight": 9, "unused": 5}


def iteration(slower: float = 1.0, forward_us: float = 100.0) -> Iteration:
    return Iteration({"last.weight": 0.0, "first.bias": 10.0 * slower, "first.weight": 30.0 * slower}, 2.0, forward_us)


def test_tensors_stand_once_in_the_order_of_readiness() -> None:
    profile = profile_of([iteration()] * 4, NUMEL, model="net")
    assert [(t.name, t.numel, t.ready_us) for t in profile.tensors] == [
        ("last.weight", 9, 0.0), ("first.bias", 3, 10.0), ("first.weight", 12, 30.0), ("unused", 5, 30.0),
    ]  # fmt: skip
    assert (profile.model, profile.forward_us, profile.backward_us) == ("net", 100.0, 30.0)
    assert profile.source == "measured: medians of 4 iterations"


def test_an_iteration_far_from_the_others_does_not_count() -> None:
    steady = [iteration(1 + 0.01 * n) for n in range(8)]
    profile, undisturbed = profile_of([*steady, iteration(forward_us=5000.0), iteration(50.0)], NUMEL), profile_of(steady, NUMEL)
    assert profile == replace(undisturbed, source="measured: medians of 8 of 10 iterations, the others were outliers")


def test_the_spread_is_median_and_interquartile_range_of_each_total() -> None:
    profile = profile_of([iteration(forward_us=us) for us in (90.0, 95.0, 100.0, 105.0, 110.0)], NUMEL)
    assert (profile.spread["forward_us"].median, profile.spread["forward_us"].iqr) == (100.0, 10.0)
    assert (profile.spread["compute_us"].median, profile.spread["compute_us"].iqr) == (132.0, 10.0)
    assert profile.spread["backward_us"].iqr == 0


def test_totals_that_vary_much_are_named() -> None:
    assert not unsteady(profile_of([iteration()] * 4, NUMEL))
    warning = unsteady(profile_of([iteration(slower) for slower in (1.0, 1.3, 1.6, 1.9)], NUMEL))
    assert "backward_us (44 us, interquartile range" in warning and warning.count("too much to plan by") == 1


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(UsageError, match="2 iterations observed, expected at least 3"):
        profile_of([iteration()] * 2, NUMEL)


def test_an_iteration_is_stretched_to_that_of_the_slowest_rank() -> None:
    own = Iteration({"last": 0.0, "first": 30.0}, 2.0, 68.0)  # 100 us of computation
    slower = own.stretched(150.0)
    assert (slower.ready_us, slower.tail_us, slower.forward_us) == ({"last": 0.0, "first": 45.0}, 3.0, 102.0)
    assert slower.compute_us == 150.0
    assert (
        profile_of([own] * 3, {"last": 1, "first": 1}, of_ranks=2).source
        == "measured: medians of 3 iterations, each of the slowest of 2 ranks"
    )
    idle = Iteration({"one": 0.0}, 0.0, 0.0)
    assert idle.stretched(5.0) == idle, "nothing to stretch"
