"""The rule for changes that come when they like: the published algorithm, the hinge of staleness, and what it is among learners of equal speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psgc.errors import UsageError
from psgc.layout.update_rule import UpdateRule
from psgc.server.weights.rules import RuleState, apply_rule

SIZES = (1, 7, 63, 4097)


def published(deltas: list[Any], weights: list[float], learners: int, lr: float, beta: float) -> Any:
    """Liu et al. 2024, delayed Nesterov with c = 0, in the paper's letters: pseudo-gradients g, in float64."""
    theta, m, gathered = (np.zeros(deltas[0].size) for _ in range(3))
    for t, (delta, w) in enumerate(zip(deltas, weights, strict=True)):
        g = -w * delta.astype(np.float64)
        gathered = gathered + g
        if (t + 1) % learners == 0:
            m = beta * m + gathered / learners
            theta = theta - lr * (beta * m + g / learners)
            gathered = np.zeros_like(g)
        else:
            theta = theta - lr * g / learners
    return theta


def run(text: str, deltas: list[Any], staleness: list[int], cut: int) -> Any:
    rule = UpdateRule.parse(text)
    state, values = RuleState(rule, deltas[0].size, np.float32), np.zeros(deltas[0].size, np.float32)
    for delta, stale in zip(deltas, staleness, strict=True):
        new, total = np.empty_like(values), delta.copy()
        state.begin(stale)
        for lo, hi in ((0, cut), (cut, values.size)):
            state.apply(lo, hi, values[lo:hi], total[lo:hi], 1, new[lo:hi])
        values = new
    return values


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("learners", [1, 2, 3])
def test_it_is_the_published_algorithm_whatever_the_cut(numel: int, learners: int) -> None:
    rng = np.random.default_rng(numel)
    deltas = [rng.normal(size=numel).astype(np.float32) for _ in range(11)]
    staleness = [int(rng.integers(0, 40)) for _ in deltas]
    text = f"delayed:lr=0.5,momentum=0.8,learners={learners},slack=4,decline=0.25"
    weights = [1.0 if s <= 4 else 1 / (1 + 0.25 * (s - 4)) for s in staleness]
    wanted = published(deltas, weights, learners, 0.5, 0.8)
    for cut in {0, numel // 2}:
        assert np.allclose(run(text, deltas, staleness, cut), wanted, atol=1e-5)


def test_a_round_of_learners_of_equal_speed_is_one_outer_step() -> None:
    rng, learners = np.random.default_rng(0), 4
    deltas = [rng.normal(size=64).astype(np.float32) for _ in range(3 * learners)]
    by_delay = run("delayed:learners=4,momentum=0.9", deltas, [learners - 1] * len(deltas), 0)
    rule, values, momentum = UpdateRule.parse("nesterov"), np.zeros(64, np.float32), np.zeros(64, np.float32)
    for first in range(0, len(deltas), learners):
        new = np.empty_like(values)
        apply_rule(rule, values, np.sum(deltas[first : first + learners], axis=0), learners, momentum, new)
        values = new
    assert np.allclose(by_delay, values, atol=1e-5)


def test_a_late_delta_counts_less_and_never_nothing() -> None:
    rule = UpdateRule.parse("delayed:learners=3")
    weights = [rule.weight(s) for s in range(100)]
    assert weights[:7] == [1.0] * 7 and weights[7] == pytest.approx(1 / 1.1)
    assert weights == sorted(weights, reverse=True) and weights[-1] > 0
    assert UpdateRule.parse("nesterov").weight(1000) == UpdateRule.parse("add").weight(1000) == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("delayed:learners=0", "learners of at least 1"),
        ("delayed:slack=-2", "slack and decline of at least 0"),
        ("delayed:decline=x", "numbers for lr, momentum and decline"),
        ("delayed:round=1", "unknown option 'round'; it takes lr, momentum, learners, slack, decline"),
        ("delayed:lr=0", "lr above 0"),
        ("delaid", "did you mean delayed?"),
    ],
)
def test_what_does_not_fit_is_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r".*") as raised:
        UpdateRule.parse(text)
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["delayed", "delayed:learners=8,slack=3", "delayed:lr=1.0,momentum=0.0,decline=0.0"])
def test_its_text_is_read_as_it_is_written(text: str) -> None:
    rule = UpdateRule.parse(text)
    assert UpdateRule.parse(rule.canonical) == rule and not rule.in_rounds


def rounds_of(rule: UpdateRule, learners: int, solved: float, rounds: int, seed: int = 0) -> list[float]:
    """How far a parameter is from its optimum after each round, at first 1. Learners take a share ``solved`` of what is left of their own way in a round, and
    push one after another, in another order each time; each goes on from what comes back."""
    order, state = np.random.default_rng(seed), RuleState(rule, 1, np.dtype(np.float64))
    outer, bases, after = np.ones(1), [1.0] * learners, []
    for _ in range(rounds):
        for learner in order.permutation(learners):
            state.begin(learners - 1)
            new = np.empty(1)
            state.apply(0, 1, outer, np.array([-solved * bases[learner]]), 1, new)
            outer, bases[learner] = new, float(new[0])
        after.append(abs(float(outer[0])))
    return after


@pytest.mark.parametrize("learners", [1, 2, 4, 8, 16])
def test_by_default_delayed_steps_come_to_rest_whatever_share_a_round_solves(learners: int) -> None:
    rule = UpdateRule.parse(f"delayed:learners={learners}")
    for solved in (0.05, 0.3, 0.6, 1.0):
        found = rounds_of(rule, learners, solved, 40)
        assert max(found[5:]) < 0.85, f"{learners} learners, {solved}: {found[5:]}"
        assert found[-1] < 0.25


def test_with_the_momentum_of_rounds_eight_learners_would_swing_ever_further() -> None:
    swings = rounds_of(UpdateRule.parse("delayed:learners=8,momentum=0.9"), 8, 1.0, 60)
    assert max(swings[50:]) > 2 * max(swings[:10]) > 2
    four = rounds_of(UpdateRule.parse("delayed:learners=4,momentum=0.9"), 4, 1.0, 60)
    assert max(four[4:]) > 1, "with four further than where it began"
    assert four[-1] < 0.5, "and to rest in the end"
    assert UpdateRule.parse("nesterov").momentum == 0.9
