"""Steps that do not wait for every rank, over connections that delay and are cut, on servers whose processes end: every rank gets the same result of every
step, made of the contributions that it was closed with and of what the step before was closed without; so each contribution is in exactly one sum.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from broken_rules import Rules, method
from sim_members import check
from sim_network import Weather
from sim_oracle import Chances
from sim_worker import SimWorker, Ticket
from simulation import Scenario, World, simulate

from psgc.server.late import NOTHING_LATE, Late
from psgc.server.step import Action, KeepLate, KeyState, Result
from psgc.wire.frames import Flag

SAMPLE = 120
CHUNK = 40
LONG = 50_000
LONG_CHUNK = 1000
PAUSE = 0.1  # chance that a rank pauses before a bucket
PAUSE_S = 30  # in the scenario's usual time of work


class BackupWorld(World):
    """A World whose ranks pause now and then, and whose steps are closed without some of them."""

    def __init__(self, scenario: Scenario) -> None:
        self.late: Counter[int] = Counter()  # by rank, contributions that came late
        self.kept = self.tardy = 0  # of these: that were kept; that came while the step was being completed
        super().__init__(scenario)

    def run(self) -> BackupWorld:
        world, commit, take = self, KeyState._commit, Late.take

        def noting(state: KeyState, result: Result) -> list[Action]:
            world.closed(state, result)
            return commit(state, result)

        def taking(late: Late, rank: int, contribution: Any) -> int:
            world.kept += 1
            return take(late, rank, contribution)

        with patch.object(KeyState, "_commit", noting), patch.object(Late, "take", taking):
            super().run()
        return self

    def closed(self, state: KeyState, result: Result) -> None:
        """Told before the result is sent."""
        without = frozenset(state.spec.ranks).difference(state.contributions)
        layout = self.oracle.layout(state.spec.key)
        most = self.scenario.backup if layout.name == "model" else 0
        if result.flags & Flag.SKIPPED:
            skipping = self.oracle.word(layout, state.spec.key >> 24 & 0xFFFFFF, result.step).skipping
            check(
                skipping.issuperset(state.spec.ranks),
                lambda: f"step {result.step} of key {state.spec.key:#x} is SKIPPED, but only {set(skipping)} skip",
            )
        check(len(without) <= most, lambda: f"step {result.step} of key {state.spec.key:#x} is without {set(without)}, at most {most}")
        self.oracle.late[state.spec.key, result.step] = without
        self.late.update(without)
        self.tardy += 0 if state.late is None else len(state.late.tardy)

    def script(self, worker: SimWorker) -> Iterator[float | list[Ticket]]:
        for wish in super().script(worker):
            yield wish
            if isinstance(wish, float) and self.rng.random() < PAUSE:
                yield PAUSE_S * self.scenario.work_s * self.rng.random()

    def _check_end(self) -> None:
        super()._check_end()
        for server in self.servers:
            for key, kept in server.kept.items():
                owed = {owed.rank for owed in kept.late.owed}
                check(
                    owed == set(self.oracle.late[key, self.scenario.steps]), lambda k=key, o=owed: f"key {k:#x} ends with {o} in its slots"
                )
                check(all(owed.came for owed in kept.late.owed), lambda k=kept: f"the last step is over, but {k.late} is awaited")


def backing(seed: int) -> Scenario:
    """A scenario of the simulation at large, of more steps, that are closed without ranks; servers' processes end now and then."""
    rng = random.Random(f"backup {seed}")
    drawn = Scenario.drawn(seed)
    workers = rng.choice((2, 3, 4, 4, 5)) if rng.random() < 0.9 else rng.choice((9, 10, 17, 20))
    return replace(
        drawn, workers=workers, node_sizes=(), codec=rng.choice(("none", "onebit")), steps=rng.choice((4, 8, 16)), parts=drawn.parts[:2], saves=0.0,
        weather=replace(drawn.weather, rate=max(drawn.weather.rate, 2e6)), backup=rng.choice((1, 1, 2, workers // 2, workers - 1)) % workers or 1,
        crashes=rng.choice((0, 0, 1, 3)), crash_every_s=rng.choice((0.02, 0.1, 0.3)), restart_s=rng.choice((0.01, 0.1, 0.5)),
    )  # fmt: skip


def run(scenario: Scenario) -> BackupWorld:
    world = simulate(scenario, BackupWorld)
    assert isinstance(world, BackupWorld)
    return world


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_every_contribution_is_in_one_sum_whoever_is_late(first: int) -> None:
    worlds = [run(backing(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.late.total() for world in worlds) > 20 * CHUNK


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_every_contribution_is_in_one_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        run(backing(seed))


def test_a_sample_contains_what_it_is_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = run(backing(seed))
        kept = [kept for server in world.servers for kept in server.kept.values()]
        seen["a contribution came late"] += world.late.total()
        seen["a contribution came while its step was being completed"] += world.tardy
        seen["more than a block came late"] += any(len(without) > 8 for without in world.oracle.late.values())
        seen["several ranks were late"] += any(len(without) > 1 for without in world.oracle.late.values())
        seen["a server ended"] += any(server.incarnation > 1 for server in world.servers)
        seen["a late contribution was a skip"] += any(owed.skipped for of in kept for owed in of.late.owed)
        seen["a late contribution was poisoned"] += any(owed.nonfinite for of in kept for owed in of.late.owed)
        trees = [value[3] for server in world.servers for value in server.slots.values() if len(value) > 3 and value[0] == "r"]
        seen["late ones changed their unit"] += any(block[0][0] == "u" for tree in trees for block in tree)
        for worker in world.workers:
            assert worker.client is not None
            seen["a push was sent again"] += worker.client.counts.resent
    assert all(seen.values()) and len(seen) == 9, seen


# broken rules

ROUGH = Scenario(
    workers=4, servers=2, parts=(2, 1), steps=12, codec="onebit", names=1, broadcasts=1, backup=1, work_s=0.002, cuts=8, cut_every_s=0.02,
    weather=Weather(delay_s=0.002, slow=0.1, repeats=0.1, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.3, 0.3, 0.1),
)  # fmt: skip
CRASHING = replace(ROUGH, backup=2, crashes=6, crash_every_s=0.02, restart_s=0.02)
CUT = replace(
    ROUGH, servers=1, parts=(1,), names=0, broadcasts=0, steps=24, backup=2, local=0.0, cuts=40, cut_every_s=0.01
)  # nothing else holds quick ranks back
PLAIN = replace(ROUGH, codec="none")  # nothing gives a step back that the trainer drops
MANY = replace(ROUGH, workers=20, servers=1, parts=(1,), steps=6, backup=12, work_s=0.01)


def _answers_first(take_late: Any) -> Any:
    return lambda *said: sorted(take_late(*said), key=lambda action: isinstance(action, KeepLate))


def _keeps_all(keep_late: Any) -> Any:
    def wrong(self: KeyState, late: Late, rank: int, contribution: Any) -> Any:
        result = self.result
        assert result is not None
        self.result = result._replace(flags=Flag.NONE)
        kept = keep_late(self, late, rank, contribution)
        self.result = result
        return kept._replace(commit=kept.commit._replace(result=result))

    return wrong


def _never_closed(contribute: Any) -> Any:
    def wrong(self: KeyState, rank: int, header: Any, payload: Any) -> Any:
        closed = self.late is not None and self.late.closed
        if closed and self.late is not None:
            self.late.closed = False
        try:
            return contribute(self, rank, header, payload)
        finally:
            if closed and self.late is not None:
                self.late.closed = True

    return wrong


def _forgets_the_earlier(completed: Any) -> Any:
    def wrong(self: Late, *arguments: Any) -> None:
        completed(self, *arguments)
        self.earlier = None

    return wrong


RULES: Rules[Scenario] = Rules(run, 15, {
    "what is late is in no sum": (ROUGH, lambda: patch.object(Late, "slots", property(lambda _: []))),
    "who was in a sum owes it again": (ROUGH, method(Late, "completed", lambda completed: lambda self, result, queued, ranks, contributions: (
        completed(self, result, queued, ranks, {r: c for r, c in contributions.items() if r or len(contributions) == 1})))),
    "a repeat of what is late is taken again": (ROUGH, method(Late, "owes", lambda _: lambda self, rank: any(owed.rank == rank for owed in self.owed))),
    "a step does not wait for what is late": (ROUGH, lambda: patch.object(Late, "awaited", property(lambda _: []))),
    "a step is closed without more than it may": (ROUGH, method(KeyState, "_may_close", lambda _: lambda self, late: (
        not late.awaited and len(self.contributions) >= len(self.spec.ranks) - late.most - 1))),
    "a late rank is answered before its contribution is kept": (CRASHING, method(KeyState, "_take_late", _answers_first)),
    "what comes while a step is being completed is taken for part of it": (MANY, method(KeyState, "contribute", _never_closed)),
    "the process that follows forgets who owes what": (CRASHING, method(KeyState, "take_up", lambda take_up: lambda self, kept: take_up(
        self, kept._replace(late=NOTHING_LATE)))),
    "the result before the last is forgotten, though a rank may lack it": (CUT, method(Late, "completed", _forgets_the_earlier)),
    "what is late keeps its own step's unit": (ROUGH, method(KeyState, "_fold_late", lambda fold_late: lambda self, late: (
        fold := fold_late(self, late)) and fold._replace(rescale=1.0))),
    "NaN that comes late is not heeded": (ROUGH, lambda: patch.object(Late, "poisoned", property(lambda _: False))),
    "a step of which only skips have come is closed": (ROUGH, method(KeyState, "_needs_no_more", lambda _: lambda self, late, missing: missing <= late.most)),
    "what comes late for a step that is not finite is in the next sum": (ROUGH, method(KeyState, "_keep_late", _keeps_all)),
    "what comes late for a step that the trainer drops is in the next sum": (PLAIN, lambda: patch.object(Late, "_summed", property(lambda late: late.owed))),
    "of many who are late only a block is added": (MANY, method(KeyState, "_fold_late", lambda fold_late: lambda self, late: (
        None if late.folded else fold_late(self, late)))),
})  # fmt: skip


@pytest.mark.parametrize("scenario", [ROUGH, CRASHING, CUT, PLAIN, MANY], ids=["rough", "crashing", "cut", "plain", "many"])
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Scenario) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
