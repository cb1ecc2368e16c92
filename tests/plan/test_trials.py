"""What a job keeps of candidates that were tried in turns, with figures that scatter as a busy machine's do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from psgc.plan.live.trials import MOST_ROUNDS, MOST_WINDOWS, Trials

LOSSES = (0.0, 0.002, 0.007, 0.118)  # of none, bf16, int8, int4


def tried(losses: tuple[float, ...], figure: Callable[[int], float]) -> Trials:
    """Trials to their end. figure: of a candidate's window, called window by window."""
    trials = Trials(losses, figure(0))
    while not trials.over:
        trials.take(figure(trials.next))
    assert trials.windows <= MOST_WINDOWS
    return trials


def best(losses: tuple[float, ...], *steady_ms: float) -> int:
    return tried(losses, lambda one: steady_ms[one]).best


@pytest.mark.parametrize(("times", "kept"), [
    ((100.0, 98.0, 96.0, 95.5), 0), ((100.0, 94.0, 92.0, 90.0), 1), ((100.0, 98.0, 90.0, 60.0), 3), ((100.0, 50.0, 49.0, 48.0), 1),
    ((50.0, 100.0, 200.0, 60.0), 0),
])  # fmt: skip
def test_one_that_loses_more_must_save_five_percent(times: tuple[float, ...], kept: int) -> None:
    assert best(LOSSES, *times) == kept


def test_of_those_about_as_quick_the_one_that_loses_least_is_kept_and_then_the_present_one() -> None:
    assert best((0.007, 0.0), 100.0, 104.0) == 1
    assert best((0.007, 0.0), 100.0, 106.0) == 0
    assert best((0.007, 0.007), 100.0, 97.0) == 0
    assert best((0.007, 0.007), 100.0, 94.0) == 1


def test_where_all_are_as_quick_noise_brings_compression_into_few_jobs() -> None:
    """Windows that differ by a tenth (one standard deviation), and every tenth one takes half as long again."""
    numbers = random.Random(0)

    def figure(_: int) -> float:
        return 20.0 * numbers.lognormvariate(0, 0.1) * (1.5 if numbers.random() < 0.1 else 1.0)

    kept = [tried(LOSSES, figure).best for _ in range(1000)]
    assert kept.count(0) >= 750 and kept.count(3) <= 50
    assert [tried((0.118, 0.0), figure).best for _ in range(1000)].count(1) >= 500, "and a job that compresses does without, mostly"


def test_a_gain_is_found_in_spite_of_noise() -> None:
    numbers = random.Random(1)
    steady = (100.0, 97.0, 70.0, 75.0)
    kept = [tried(LOSSES, lambda one: steady[one] * numbers.lognormvariate(0, 0.03)).best for _ in range(300)]
    assert kept.count(2) >= 290


@pytest.mark.parametrize("growth", [0.9, 1.1])
def test_a_machine_that_becomes_slower_or_faster_meanwhile_does_not_decide(growth: float) -> None:
    """Each window by a tenth: one after the other, five windows of each, the last would be 1.6 times as slow as the first."""
    pace = 1.0

    def figure(_: int) -> float:
        nonlocal pace
        pace *= growth
        return 20.0 * pace

    assert tried((0.0, 0.118), figure).best == 0


def held_up(times: tuple[float, ...], windows: range, slower: float) -> Callable[[int], float]:
    """Figures of candidates with these steady times, of which these windows of the trials are so many times slower."""
    number = iter(range(MOST_WINDOWS))
    return lambda one: times[one] * (slower if next(number) in windows else 1.0)


@pytest.mark.parametrize("slower", [1.95, 2.5, 4.0, 5.0, 50.0])
def test_a_single_slow_window_does_not_decide(slower: float) -> None:
    """Neither the uncompressed job's first window, nor any other candidate's."""
    for window in range(MOST_WINDOWS):
        for losses in ((0.0, 0.007), LOSSES):
            assert tried(losses, held_up((20.0,) * 4, range(window, window + 1), slower)).best == 0


@pytest.mark.parametrize("slower", [2.5, 3.0, 4.0, 5.0])
@pytest.mark.parametrize(
    ("losses", "times"), [((0.007, 0.118), (100.0, 140.0)), ((0.007, 0.0), (100.0, 190.0)), ((0.0, 0.002), (100.0, 120.0))]
)
def test_a_burst_that_makes_a_job_plan_does_not_cost_it_what_it_has(
    slower: float, losses: tuple[float, ...], times: tuple[float, ...]
) -> None:
    """However many windows it lasts, the present candidate stays, which is quicker by far or loses less."""
    for lasts in range(1, 4):
        assert tried(losses, held_up(times, range(lasts), slower)).best == 0, lasts


def test_what_is_far_behind_is_not_run_again() -> None:
    trials = tried(LOSSES, lambda one: (1000.0, 400.0, 100.0, 90.0)[one])
    assert [trials.windows_of(one) for one in range(4)] == [2, 1, 3, 3]
    assert trials.best == 3
    assert trials.figure_ms(0) == 1000.0


def test_there_are_no_more_rounds_than_settle_it() -> None:
    assert tried((0.0, 0.007), lambda one: (100.0, 80.0)[one]).windows_of(1) == 3
    numbers = random.Random(2)
    assert tried((0.0, 0.007), lambda one: (100.0, 80.0)[one] * numbers.uniform(0.8, 1.3)).windows_of(1) <= MOST_ROUNDS


def test_with_one_candidate_there_is_nothing_to_try() -> None:
    trials = Trials((0.0,), 10.0)
    assert trials.over and trials.best == 0
