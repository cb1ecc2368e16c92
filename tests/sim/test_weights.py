"""Weights over thousands of seeds: each delta is applied once, answers are states of the weights, and the bound on staleness holds."""

from __future__ import annotations

import heapq
import random

import pytest
from sim_weights import WeightsJob, check

from psgc.layout.update_rule import UpdateRule

RULES = ("add", "add", "add:staleness=0", "add:staleness=1", "add:staleness=4", "average", "nesterov", "average:round=0,staleness=2")


def drawn(seed: int) -> WeightsJob:
    rng = random.Random(seed)
    workers, rule = rng.choice((1, 2, 2, 3, 4, 5)), rng.choice(RULES)
    steps = [rng.randint(0, 12) for _ in range(workers)]
    work_s = [rng.choice((0.001, 0.02, 0.3)) for _ in range(workers)]
    return WeightsJob(
        seed, rule, steps, work_s, rng.choice((0, 0, 1, 5, 20)), rng.choice((0.0, 0.3)), init_s=rng.choice((0.0, 0.5))
    )  # fmt: skip


def simulate(first: int, last: int) -> int:
    """Returns how far ahead a rank without a bound was at most."""
    ahead = 0
    for seed in range(first, last):
        job = drawn(seed).run()
        check(job)
        if UpdateRule.parse(job.rule).staleness < 0:
            ahead = max(ahead, job.ahead)
    return ahead


def test_every_delta_is_applied_once_and_no_rank_is_further_ahead_than_the_bound() -> None:
    assert simulate(0, 400) > 4, "without a bound fast ranks do get ahead, so that the bound means something"


@pytest.mark.long
def test_the_same_over_many_more_seeds() -> None:
    simulate(400, 40_000)


def test_ranks_that_end_early_hold_nobody_up() -> None:
    for rule in ("add:staleness=0", "average"):
        job = WeightsJob(3, rule, [0, 2, 9], [0.01] * 3).run()
        check(job)
        assert len(job.order) == {"add:staleness=0": 11, "average": 9}[rule]


def test_a_rank_whose_bye_is_lost_holds_nobody_up_once_the_scheduler_has_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [("add:staleness=0", 11), ("average", 9)]
    for rule, updates in jobs:
        job = WeightsJob(3, rule, [0, 2, 9], [0.01] * 3, byes_lost=1.0).run()
        check(job)
        assert len(job.order) == updates
    monkeypatch.setattr("psgc.server.state.ServerState.left", lambda *_: [])
    for rule, _ in jobs:
        assert not all(WeightsJob(3, rule, [0, 2, 9], [0.01] * 3, byes_lost=1.0).run().ended), "without that word they wait"


def test_without_initial_values_nobody_is_answered_and_who_waits_says_for_whom() -> None:
    job = WeightsJob(1, "add", [1, 1], [0.01] * 2, init_s=1e9)
    while job._calls[0][0] < 1e8:
        job.now, _, call, args = heapq.heappop(job._calls)
        call(*args)
    assert not job.answers
    job.server.step_timeout_s = 9.0
    texts, (fault,) = job.server.tick(job.server_now + 10.0)
    assert "(w) has awaited its initial values from rank(s) 0 for 10 s" in texts[0] and "PSGC_STEP_TIMEOUT_S" in fault.text
    job.server.departed.add(0)
    _, faults = job.server.tick(job.server_now + 10.0)
    assert "rank(s) 0 left the job before the initial values of" in faults[0].text


def test_a_bound_that_makes_ranks_wait_names_the_slow_one_and_the_bound() -> None:
    job = WeightsJob(1, "add:staleness=2", [9, 9], [0.01, 1e9])
    while job._calls and job._calls[0][0] < 1e3:
        job.now, _, call, args = heapq.heappop(job._calls)
        call(*args)
    assert job.pushed == [3, 0], "two pushes ahead it may begin a third, and waits for the answer to it"
    texts, _ = job.server.tick(job.server_now + 20.0)
    assert "rank(s) 0, more than 2 steps (PSGC_STALENESS) ahead" in texts[0] and "awaited rank(s) 1 for 20 s" in texts[0]


@pytest.mark.parametrize("broken", ["twice", "early", "reused"])
def test_a_broken_rule_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.server.weights.key import WeightsKey
    from psgc.server.weights.pace import Pace

    if broken == "twice":  # repeats are applied again
        original = WeightsKey._again

        def again(self: WeightsKey, rank: int, step: int) -> list[object]:
            if step == self._ranks[rank].step > 1 and not self._applying:
                self._waiting.append(rank)
                self._payloads[rank] = (rank, step)
                return [*original(self, rank, step), *self._advance()]
            return list(original(self, rank, step))

        monkeypatch.setattr(WeightsKey, "_again", again)
    elif broken == "early":
        monkeypatch.setattr(Pace, "holds_up", lambda self, rank: [])
    else:
        monkeypatch.setattr(WeightsKey, "_free_slot", lambda self: 1 - max(self.current, 0))
    with pytest.raises((AssertionError, KeyError)):
        simulate(0, 400)
