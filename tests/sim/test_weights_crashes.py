"""Servers' processes that end at any moment while they hold weights, and are followed by others: every delta is still in the weights once, and every answer
is a state that they had.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from sim_weights import WeightsJob, check
from test_weights import drawn

from psgc.server.weights.kept import AnswerCommit, KeptWeights, VersionCommit
from psgc.server.weights.key import WeightsKey

Change = Callable[[KeptWeights], KeptWeights]


def crashing(seed: int) -> WeightsJob:
    """A job of the simulation of weights, in which the server's processes end as well."""
    rng = random.Random(f"crashes {seed}")
    job = drawn(seed)
    return replace(
        WeightsJob(job.seed, job.rule, job.steps, job.work_s, job.cuts, job.pulls, job.byes_lost, init_s=job.init_s),
        crashes=rng.choice((1, 2, 4, 9)), restart_s=rng.choice((0.001, 0.05, 0.5)),
    )  # fmt: skip


def simulate(first: int, last: int) -> int:
    """Returns how often a process has followed another."""
    restarts = 0
    for seed in range(first, last):
        job = crashing(seed).run()
        check(job)
        restarts += job.restarts
    return restarts


def test_servers_that_end_at_any_moment_lose_no_delta_and_apply_none_twice() -> None:
    assert simulate(0, 400) > 400


@pytest.mark.long
@pytest.mark.parametrize("first", range(400, 100_400, 1000))
def test_the_same_over_very_many_seeds(first: int) -> None:
    simulate(first, first + 1000)


def taking_up(change: Change) -> Any:
    """A process takes up something else than what was kept."""
    take_up = WeightsKey.take_up
    return patch.object(WeightsKey, "take_up", lambda self, kept: take_up(self, change(kept)))


def of_ranks(**changed: Any) -> Change:
    return lambda kept: kept._replace(ranks=tuple(rank._replace(**changed) for rank in kept.ranks))


def late(kind: type) -> Any:
    """What follows a commit leaves before it."""
    effects = WeightsJob._effects
    return patch.object(WeightsJob, "_effects", lambda self, said: effects(self, sorted(said, key=lambda each: isinstance(each, kind))))


def unheard() -> Any:
    """A rank of which this process has not heard is answered, though nobody is there."""

    def take_up(self: WeightsKey, kept: KeptWeights) -> None:
        original(self, kept)
        for rank in self._ranks:
            rank.heard = True

    original = WeightsKey.take_up
    return patch.object(WeightsKey, "take_up", take_up)


BROKEN = {
    "the version is forgotten": lambda: taking_up(lambda kept: kept._replace(version=1, slot=0)),
    "which deltas were applied is forgotten": lambda: taking_up(of_ranks(applied=0)),
    "how many were applied is forgotten": lambda: taking_up(of_ranks(pushes=0)),
    "which steps were answered is forgotten": lambda: taking_up(of_ranks(answered=0)),
    "which versions are being read is forgotten": lambda: taking_up(of_ranks(slot=9)),
    "a delta is acknowledged before it is committed": lambda: late(VersionCommit),
    "an answer leaves before it is committed": lambda: late(AnswerCommit),
    "ranks are answered of whom nothing was heard": unheard,
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule: str) -> None:
    with BROKEN[rule](), pytest.raises((AssertionError, KeyError)):
        simulate(0, 400)
