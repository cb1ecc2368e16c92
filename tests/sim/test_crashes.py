"""Servers' processes that end at any moment and are followed by others: every rank still gets exactly the published sum of every step.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from broken_rules import Mutation, Rules, method
from sim_members import SimServer
from sim_network import Weather
from sim_oracle import Chances
from simulation import Scenario, simulate

from psgc.scheduler.rendezvous import Declarations
from psgc.scheduler.roster import Roster
from psgc.server.state import Commit, ServerState
from psgc.server.step import NO_SLOT, Kept, KeyState
from psgc.server.window import Window
from psgc.worker.client import Client

SAMPLE = 150
CHUNK = 50
LONG = 100_000
LONG_CHUNK = 1000


def crashing(seed: int) -> Scenario:
    """A scenario of the simulation at large, in which servers' processes end as well."""
    rng = random.Random(f"crashes {seed}")
    return replace(
        Scenario.drawn(seed), crashes=rng.choice((1, 2, 3, 6)), crash_every_s=rng.choice((0.005, 0.02, 0.1, 0.3)), restart_s=rng.choice((0.01, 0.1, 0.5))
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_servers_that_end_at_any_moment_change_no_sum(first: int) -> None:
    worlds = [simulate(crashing(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.crashes for world in worlds) > CHUNK


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_servers_that_end_at_any_moment_change_no_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        simulate(crashing(seed))


def test_a_sample_contains_what_it_is_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = simulate(crashing(seed))
        seen["a server ended twice"] += any(server.incarnation > 2 for server in world.servers)
        for worker in world.workers:
            assert worker.client is not None
            seen["a push was sent again"] += worker.client.counts.resent
            seen["a result was asked for"] += worker.client.counts.asked
        for server in world.servers:
            followed = server.incarnation > 1
            seen["a result was added back"] += followed and sum(len(value) > 4 and value[5] is not None for value in server.slots.values())
            seen["one key at a time"] += followed and world.scenario.window_bytes == 1
            seen["a residual went on"] += followed and bool(server.residuals)
    assert all(seen.values()) and len(seen) == 6, seen


# broken rules

ROUGH = Scenario(
    workers=3, servers=2, parts=(2, 1), steps=6, codec="onebit", names=1, crashes=6, crash_every_s=0.01, restart_s=0.02, work_s=0.0005,
    weather=Weather(delay_s=0.002, slow=0.1, repeats=0.02, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.5, 0.5, 0.1),
)  # fmt: skip
NARROW = replace(ROUGH, codec="none", window_bytes=1, chances=Chances(skip=0.1))
RESTORING = replace(ROUGH, restores=True, saves=0.5)
POISONED = replace(
    ROUGH, servers=1, parts=(1,), names=0, steps=12, crashes=8, crash_every_s=0.08, restart_s=0.01, chances=Chances(0.1, 0.3, 0.7, 0.5, 0.2)
)
DECLARING = replace(
    ROUGH, workers=2, servers=2, steps=2, names=6, crashes=12, crash_every_s=0.004, restart_s=0.002, chances=Chances(),
    weather=Weather(delay_s=0.002, slow=0.3, repeats=0.0, reconnect_s=0.02),
)  # fmt: skip


def _taking_up(change: Callable[[Kept], Kept]) -> Mutation:
    """A process takes up something else than what was kept."""
    return method(KeyState, "take_up", lambda take_up: lambda self, kept: take_up(self, change(kept)))


def _commits_late(commit: Any) -> Any:
    """Results leave before they are durable."""
    return lambda self, result: sorted(commit(self, result), key=lambda action: isinstance(action, Commit))


def _other_slot(kept: Kept) -> Kept:
    return kept._replace(newest=1 - kept.newest) if kept.newest != NO_SLOT else kept


def _hears_former_processes(_: Any) -> Any:
    def wrong(self: Roster, member: Any, peer: bytes, register: Any, now: float) -> None:
        member.peer, member.register, member.last_seen = peer, register, now
        member.named = member.gone = member.report = None
        self._names[peer] = self._registered[register] = member

    return wrong


RULES: Rules[Scenario] = Rules(simulate, 25, {
    "what was committed is forgotten": (ROUGH, _taking_up(lambda _: Kept(None))),
    "a result is sent before it is committed": (ROUGH, method(KeyState, "_commit", _commits_late)),
    "the kept result is not taken up": (ROUGH, _taking_up(lambda kept: kept._replace(result=None))),
    "the newest result's buffer is forgotten": (ROUGH, _taking_up(_other_slot)),
    "what is to be added back is forgotten": (POISONED, _taking_up(lambda kept: kept._replace(add_back=False))),
    "a change of unit is forgotten": (ROUGH, _taking_up(lambda kept: kept._replace(rescale=1.0))),
    "workers do not send again what was lost": (ROUGH, method(Client, "_error", lambda _: lambda *_: [])),
    "workers are let in before their keys are served": (ROUGH, method(ServerState, "serves", lambda _: lambda *_: True)),
    "former processes are heard": (DECLARING, method(Roster, "replace", _hears_former_processes)),
    "layouts are not served again": (ROUGH, method(Declarations, "begins_anew", lambda _: lambda *_: None)),
    "windows begin anew": (NARROW, method(Window, "__init__", lambda init: lambda self, costs, budget, steps=(): init(self, costs, budget))),
    "a restored residual's unit is forgotten": (RESTORING, _taking_up(lambda kept: kept._replace(rescale=1.0) if kept.result is None else kept)),
    "residuals that are not committed are taken up": (ROUGH, lambda: patch.object(SimServer, "crash", _keeps_all(SimServer.crash))),
})  # fmt: skip


def _keeps_all(crash: Any) -> Any:
    def wrong(self: SimServer) -> None:
        self.residuals.update(self._pending)
        crash(self)

    return wrong


@pytest.mark.parametrize("scenario", RULES.scenarios, ids=["rough", "poisoned", "declaring", "narrow", "restoring"])
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Scenario) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
