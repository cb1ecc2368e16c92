"""Machines that are lost while servers have standbys elsewhere, and processes of the scheduler end: every rank still gets exactly the published sum of every
step.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from broken_rules import Mutation, Rules, method
from sim_network import Weather
from sim_oracle import Chances
from sim_replicas import Losses, ReplicatedServer, ReplicatedWorld
from simulation import Scenario, simulate

from psgc.scheduler.actions import Keep
from psgc.scheduler.admission import Admission
from psgc.scheduler.deaths import Deaths
from psgc.scheduler.rendezvous import Declarations
from psgc.server.held import Held
from psgc.server.state import Fold, Send
from psgc.wire.frames import Kind

SAMPLE = 150
CHUNK = 50
LONG = 50_000
LONG_CHUNK = 1000


def losing(seed: int) -> Losses:
    """A scenario of the simulation at large, in which a machine is lost, and servers', standbys' and in some of them the scheduler's processes end as well."""
    rng, drawn = random.Random(f"losses {seed}"), Scenario.drawn(seed)
    fields = {name: getattr(drawn, name) for name in Scenario.__dataclass_fields__}
    fields |= {"servers": rng.choice((2, 2, 3, 4)), "crashes": rng.choice((0, 0, 1, 3)), "crash_every_s": rng.choice((0.005, 0.02, 0.1)),
               "restart_s": rng.choice((0.01, 0.1)), "steps": drawn.steps + 2}  # fmt: skip
    lost = {"lost_after_s": rng.choice((0.005, 0.02, 0.1, 0.3)), "standby_crashes": rng.choice((0, 0, 2))}
    fields["scheduler_crashes"] = rng.choice((0, 1, 3)) if lost["standby_crashes"] else 0
    return Losses(**fields, **lost)


def run(scenario: Losses) -> ReplicatedWorld:
    world = simulate(scenario, ReplicatedWorld)  # type: ignore[arg-type]
    assert isinstance(world, ReplicatedWorld)
    return world


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_a_machine_that_is_lost_at_any_moment_changes_no_sum(first: int) -> None:
    worlds = [run(losing(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.moves > 0 for world in worlds) > CHUNK / 4


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_a_machine_that_is_lost_at_any_moment_changes_no_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        run(losing(seed))


def test_a_sample_contains_what_it_is_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = run(losing(seed))
        for server in world.servers:
            assert isinstance(server, ReplicatedServer)
            moved = server.standby
            seen["a server moved"] += moved
            seen["a server's process ended after it had moved"] += moved and server.incarnation > 1
            seen["a residual moved"] += moved and bool(server.residuals)
            seen["a server went on without a standby"] += not moved and server.held is None
            seen["one key at a time"] += moved and world.scenario.window_bytes == 1
        follows = any(standby.incarnation > 1 for standby in world.standbys)
        seen["a standby's process ended"] += follows
        seen["and a scheduler's"] += follows and world.scheduler.processes > 1
    assert all(seen.values()) and len(seen) == 7, seen


# broken rules

ROUGH = Losses(
    workers=3, servers=2, parts=(2, 1), steps=8, codec="onebit", names=1, lost_after_s=0.05, work_s=0.0005,
    weather=Weather(delay_s=0.002, slow=0.1, repeats=0.02, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.5, 0.5, 0.1),
)  # fmt: skip
CUTTING = replace(ROUGH, cuts=30, cut_every_s=0.003, crashes=2, crash_every_s=0.01, restart_s=0.01)
AIMED = replace(ROUGH, aimed="link", lost_after_s=0.02, chances=Chances(), names=0, steps=12)
FOLLOWED = replace(AIMED, aimed="process", restart_s=0.01, codec="none", parts=(1, 1, 1))
SENT = replace(
    AIMED,
    aimed="sent",
    parts=(3, 3, 3),
    work_s=0.02,
    codec="none",
    weather=Weather(delay_s=0.003, slow=0.0, repeats=0.02, reconnect_s=0.002),
)  # sums end while a connection is sent what is kept
WRITTEN = replace(ROUGH, lost_after_s=0.3, standby_crashes=6, scheduler_crashes=12, crash_every_s=0.3, restart_s=0.02)
NARROW = replace(ROUGH, codec="none", window_bytes=1, parts=(3, 3), chances=Chances(skip=0.1))


def _does_not_wait(what: Callable[[Any], bool]) -> Mutation:
    return method(Held, "_before", lambda before: lambda self, effect: 0 if what(effect) else before(self, effect))


def _says(kind: Kind) -> Callable[[Any], bool]:
    return lambda effect: isinstance(effect, Send) and effect.header.kind == kind


def _not_lost(disconnected: Any) -> Any:
    def wrong(self: Held) -> None:
        before = self._all
        disconnected(self)
        self._all = before

    return wrong


def _forgets(committed: Any) -> Any:
    def wrong(self: Held, key: int) -> int | None:
        rest = None if self._rest is None else dict(self._rest)
        mark = committed(self, key)
        self._rest = rest
        return mark  # type: ignore[no-any-return]

    return wrong


def _sends_nothing(self: ReplicatedServer) -> None:
    assert self.held is not None
    self.held.connected(())
    self._feed()


def _tells_no_worker(go_on_without: Any) -> Any:
    def wrong(self: Deaths, *args: Any) -> Any:
        actions = go_on_without(self, *args)
        workers = {worker.peer for worker in self._job.roster.workers()}
        return actions and [a for a in actions if getattr(a, "peer", None) not in workers]

    return wrong


def _tells_no_server(go_on_without: Any) -> Any:
    def wrong(self: Deaths, *args: Any) -> Any:
        actions = go_on_without(self, *args)
        servers = {server.peer for server in self._job.roster.server_members()}
        return actions and [a for a in actions if getattr(a, "peer", None) not in servers]

    return wrong


def _keeps_no_standby(succeeded: Any) -> Any:
    def wrong(self: Admission, *args: Any) -> Any:
        return [action for action in succeeded(self, *args) if not (isinstance(action, Keep) and action.record.register["standby"])]

    return wrong


RULES: Rules[Losses] = Rules(run, 40, {
    "results leave before the standby has them": (ROUGH, _does_not_wait(_says(Kind.RESULT))),
    "memory is written again before the standby has what was there": (ROUGH, _does_not_wait(lambda effect: isinstance(effect, Fold | Send))),
    "windows grow before the standby knows of it": (NARROW, _does_not_wait(_says(Kind.WINDOW))),
    "what was under way on a broken connection counts as come": (AIMED, method(Held, "disconnected", _not_lost)),
    "a new connection is not told what the last one has lost": (AIMED, method(ReplicatedServer, "_standby_up", lambda _: _sends_nothing)),
    "what a former process has kept is not sent": (FOLLOWED, method(ReplicatedServer, "_take_up", lambda _: lambda *_: None)),
    "what is committed while a connection is sent what is kept is forgotten": (SENT, method(Held, "committed", _forgets)),
    "layouts are not served again": (ROUGH, method(Declarations, "begins_anew", lambda _: lambda *_: None)),
    "workers do not hear where a server has moved": (ROUGH, method(Deaths, "_go_on_without", _tells_no_worker)),
    "servers do not hear that there is no standby any more": (ROUGH, method(Deaths, "_go_on_without", _tells_no_server)),
    "a standby's next process is not written down": (WRITTEN, method(Admission, "_succeeded", _keeps_no_standby)),
})  # fmt: skip


@pytest.mark.parametrize(
    "scenario",
    [ROUGH, CUTTING, AIMED, FOLLOWED, SENT, NARROW, WRITTEN],
    ids=["rough", "cutting", "aimed", "followed", "sent", "narrow", "written"],
)
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Losses) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
