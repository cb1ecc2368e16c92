"""A scheduler's processes that end at any moment and are followed by others: every rank still gets exactly the published sum of every step.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import sim_members
import simulation
from broken_rules import Mutation, Rules, method
from sim_network import Weather
from sim_oracle import Chances
from simulation import Scenario, simulate

from psgc.scheduler.actions import Keep
from psgc.scheduler.agreements import Agreements
from psgc.scheduler.records import LaidOut, Left, Passed, Succeeded, Value
from psgc.scheduler.rendezvous import Barriers, Declarations
from psgc.worker.requests import Requests

SAMPLE = 150
CHUNK = 50
LONG = 100_000
LONG_CHUNK = 1000
OFTEN = 0.08  # chance that a process ends between two things that it does, where rules are broken


def crashing(seed: int) -> Scenario:
    """A scenario of the simulation at large, in which processes of the scheduler end, and in some of the servers as well."""
    rng = random.Random(f"scheduler {seed}")
    return replace(
        Scenario.drawn(seed), scheduler_crashes=rng.choice((1, 2, 3, 6)), crashes=rng.choice((0, 0, 1, 3)),
        crash_every_s=rng.choice((0.005, 0.02, 0.1, 0.3)), restart_s=rng.choice((0.01, 0.1, 0.5)),
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_schedulers_that_end_at_any_moment_change_no_sum(first: int) -> None:
    worlds = [simulate(crashing(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.scheduler.processes - 1 for world in worlds) > CHUNK


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_schedulers_that_end_at_any_moment_change_no_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        simulate(crashing(seed))


def test_a_sample_contains_what_it_is_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = simulate(crashing(seed))
        written = Counter(line.split(b'"')[3].decode() for line in world.scheduler.journal)
        seen["a scheduler ended twice"] += world.scheduler.processes > 2
        seen["a server and a scheduler ended"] += bool(world.crashes) and world.scheduler.processes > 1
        for kind in ("LaidOut", "Served", "Passed", "Value", "Left"):
            seen[kind] += written[kind]
    assert all(seen.values()), seen


# broken rules

ROUGH = Scenario(
    workers=3, servers=2, parts=(2, 1), steps=4, codec="onebit", names=4, scheduler_crashes=150, crash_every_s=0.3, restart_s=0.02, work_s=0.002,
    barriers=0.7, publishes=True, weather=Weather(delay_s=0.002, slow=0.1, repeats=0.02, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.5, 0.5, 0.1),
)  # fmt: skip
BOTH = replace(ROUGH, crashes=12, crash_every_s=0.05, restart_s=0.01)


def _unwritten(kind: type) -> Mutation:
    """Records of a kind are never written."""
    keep = sim_members.Keep

    class Forgetful(keep):  # type: ignore[misc, valid-type]
        pass

    def is_kept(action: Any) -> bool:
        return isinstance(action, Keep) and not isinstance(action.record, kind)

    class Meta(type):
        def __instancecheck__(cls, action: Any) -> bool:
            return is_kept(action)

    return lambda: patch.multiple(sim_members, Keep=Meta("Keep", (), {}), WRITTEN_ANEW=-1.0)


def _said_before_it_is_written(apply: Any) -> Any:
    def wrong(self: Any, actions: list[Any]) -> None:
        kept = [action for action in actions if isinstance(action, Keep)]
        apply(self, [action for action in actions if not isinstance(action, Keep)])
        if not self.world.network.desk.away:
            apply(self, kept)

    return wrong


def _simulate_often(scenario: Scenario) -> None:
    with patch.object(simulation, "CRASH_IN_EFFECTS", OFTEN):
        simulate(scenario)


RULES: Rules[Scenario] = Rules(_simulate_often, 25, {
    "layouts are not written down": (ROUGH, _unwritten(LaidOut)),
    "barriers that were passed are not written down": (replace(ROUGH, steps=8), _unwritten(Passed)),
    "members that have left are not written down": (ROUGH, _unwritten(Left)),
    "published values are not written down": (ROUGH, _unwritten(Value)),
    "a server's next process is not written down": (BOTH, _unwritten(Succeeded)),
    "what was said is written down later": (replace(ROUGH, steps=8), method(sim_members.SimScheduler, "_apply", _said_before_it_is_written)),
    "workers do not say again what is unanswered": (ROUGH, method(Requests, "say_again", lambda _: lambda self: None)),
    "passed barriers are left out of a journal that is written anew": (
        replace(ROUGH, steps=8), method(Barriers, "have_passed", lambda _: lambda *_: None),
    ),
    "a server that begins anew is taken for one that serves": (BOTH, method(Declarations, "begins_anew", lambda _: lambda *_: None)),
    "servers are not told again": (BOTH, method(Agreements, "again", lambda _: lambda *_: iter(()))),
})  # fmt: skip


@pytest.mark.parametrize("scenario", RULES.scenarios, ids=["rough", "longer", "both"])
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Scenario) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
