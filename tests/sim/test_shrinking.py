"""Workers' processes that end at any moment while the others go on without them, and come back or not: every rank gets the same result of every step, made of
the contributions of exactly the ranks that it says; nobody who lives is left out; nobody waits for ever.

And: the simulation sees each rule that this rests on, when it is broken."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
from broken_rules import Rules, method
from sim_members import SimServer, check
from sim_network import Weather
from sim_oracle import Chances
from simulation import Scenario, simulate
from test_lost_workers import Deaths, MortalWorker, MortalWorld

from psgc.scheduler.losses import TOO_LATE
from psgc.scheduler.rendezvous import Gathering
from psgc.server.state import Fold, ServerState
from psgc.server.step import Action, KeyState, Result
from psgc.worker import client

SAMPLE = 100
CHUNK = 50
LONG = 20_000
LONG_CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinks(Deaths):
    """comes_back: chance that another process takes a dead one's place. machine: so many ranks, the first, are on a machine that is lost again and again,
    and nobody else dies; 0: each dies alone. lags_s: how much longer the first of the others takes until it has taken a result, on average."""

    comes_back: float = 0.7
    machine: int = 0
    lags_s: float = 0.0


@dataclass(slots=True)
class Gap:
    """Training steps, from 0, of which a rank may be missing. first: that its process was in when it died; last: that its successor began with."""

    first: int
    last: float = math.inf


class AveragingServer(SimServer):
    """Means are of as many ranks as they are made of."""

    def _begin_fold(self, fold: Fold) -> None:
        assert isinstance(self.world, ShrinkingWorld) and self.state is not None
        spec = self.state.keys[fold.key].state.spec
        if fold.last and spec.root is None:
            missing = len(self.world.missing(fold.key))
            wanted = len(spec.ranks) - missing if spec.divisor == len(spec.ranks) else spec.divisor
            check(
                fold.divisor == wanted,
                lambda: f"server {self.index}: {fold} is divided by {fold.divisor}, {missing} of {len(spec.ranks)} are missing",
            )
        super()._begin_fold(fold)


class ReturningWorker(MortalWorker):
    """See MortalWorker. The rank may be missing before its process has begun a step."""

    def _arrive(self, number: int) -> None:
        before = self.taken
        super()._arrive(number)
        if before is None and self.taken is not None:
            assert isinstance(self.world, ShrinkingWorld)
            self.world.back(self.node, self.taken.step)

    def decode_time(self) -> float:
        scenario = self.world.scenario
        assert isinstance(scenario, Shrinks)
        lags = scenario.lags_s * self.rng.expovariate(1.0) if scenario.lags_s and self.node == scenario.machine else 0.0
        return super().decode_time() + lags

    def failed(self, text: str, cut_off: bool = False) -> None:
        if TOO_LATE not in text:
            super().failed(text)
        self.world.bury(self)

    def step_now(self) -> int:
        """The training step that it is in."""
        return 0 if self.beginning is None else self.beginning.step


class ShrinkingWorld(MortalWorld):
    """A World in which workers' processes end, and the others go on."""

    scenario: Shrinks
    on_worker_loss = "shrink"

    def __init__(self, scenario: Shrinks) -> None:
        self.gaps: dict[int, list[Gap]] = {rank: [] for rank in range(scenario.workers)}
        self.returns = self.short = self.late = (
            0  # ranks that came back; steps of keys that were taken without somebody; ranks that came too late
        )
        self._machine_s = 0.0  # until the lost machine's ranks come back
        self.behind: set[tuple[int, int, int]] = set()  # key, step, rank: the step's sum was past the rank when it came back
        with patch("test_lost_workers.MortalWorker", ReturningWorker), patch("simulation.SimServer", AveragingServer):
            super().__init__(scenario)

    def run(self) -> ShrinkingWorld:
        world, commit, replaced = self, KeyState._commit, KeyState.replaced

        def noting(state: KeyState, result: Result) -> list[Action]:
            world.taken(state, result)
            return commit(state, result)

        def coming(state: KeyState, rank: int) -> None:
            replaced(state, rank)
            if rank in state.without:
                world.behind.add((state.spec.key, state.step, rank))

        with (
            patch.object(KeyState, "_commit", noting),
            patch.object(KeyState, "replaced", coming),
            patch("test_lost_workers.MortalWorker", ReturningWorker),
        ):
            super().run()
        return self

    def missing(self, key: int) -> set[int]:
        """Ranks that the step under way of a key is without."""
        state = next(server.state for server in self.servers if server.state is not None and key in server.state.keys).keys[key].state
        check(
            state.without.union(state.contributions) == set(state.spec.ranks),
            lambda: f"key {key:#x} is neither with a rank nor without it: {state}",
        )
        return state.without

    def taken(self, state: KeyState, result: Result) -> None:
        """A step is complete: told before its result is sent."""
        left_out = frozenset(state.without)
        self.oracle.left_out[state.spec.key, result.step] = left_out
        self.short += bool(left_out)
        step = result.step - 1
        for rank in left_out:
            late = (state.spec.key, result.step, rank) in self.behind  # its process may have begun with the step before
            alive = not any(gap.first <= step <= gap.last + late for gap in self.gaps[rank])
            check(
                not alive, lambda r=rank: f"step {step} of key {state.spec.key:#x} was taken without rank {r}, which lives: {self.gaps[r]}"
            )

    def may_say(self, body: bytes) -> bool:
        return TOO_LATE.encode() in body

    def bury(self, worker: MortalWorker) -> None:
        """It came too late, and its process ends."""
        worker.die()
        self.dead.add((worker.node, worker.incarnation))
        self.late += 1

    def back(self, rank: int, step: int) -> None:
        self.returns += 1
        self.gaps[rank][-1].last = step

    def _kill(self) -> None:
        living = {worker.node: worker for worker in self.workers if isinstance(worker, ReturningWorker) and not worker.dead}
        super()._kill()
        for node, worker in living.items():
            if worker.dead:
                gaps = self.gaps[node]
                if worker.beginning is None and gaps:  # it had not come back yet
                    gaps[-1].last = math.inf
                else:
                    gaps.append(Gap(worker.step_now()))

    def _end(self, victim: MortalWorker) -> None:
        if not self.scenario.machine:
            super()._end(victim)
            return
        self._machine_s = super()._until_followed()
        for worker in self.workers[: self.scenario.machine]:
            if isinstance(worker, MortalWorker) and worker.client is not None and not worker.dead:
                super()._end(worker)

    def _until_followed(self) -> float:
        return self._machine_s + self.work_time() if self.scenario.machine else super()._until_followed()

    def _follow(self, former: MortalWorker) -> None:
        if self.rng.random() < self.scenario.comes_back and self.scheduler.ended is None:
            super()._follow(former)

    def _ended(self) -> bool:
        """Whoever comes too late is ended by its launcher."""
        self._end_late()
        return super()._ended()

    def _end_late(self) -> None:
        for worker in self.workers:
            if self.scheduler.ended is not None and worker.client is None and not worker.ended and isinstance(worker, MortalWorker):
                self.bury(worker)

    def _check_end(self) -> None:
        dead = [worker for worker in self.workers if isinstance(worker, MortalWorker) and worker.dead]
        self.workers = [worker for worker in self.workers if worker not in dead]
        check(bool(self.workers), lambda: "nobody has come to the end")
        super()._check_end()


def shrinking(seed: int) -> Shrinks:
    """A scenario of the simulation at large, of more and longer steps, in which workers' processes end as well, and servers' and the scheduler's now and
    then."""
    rng, drawn = random.Random(f"shrinks {seed}"), Scenario.drawn(seed)
    fields = {name: getattr(drawn, name) for name in Scenario.__dataclass_fields__}
    fields |= {"workers": rng.choice((2, 3, 4, 4, 5)) if rng.random() < 0.9 else rng.choice((9, 10, 17)), "node_sizes": (), "restores": False, "saves": 0.0,
               "publishes": False, "hurry": 0.0, "barriers": 0.0, "broadcasts": 0, "cuts_early": False, "steps": rng.choice((8, 16, 32)),
               "parts": drawn.parts[:2], "work_s": rng.choice((0.005, 0.02, 0.05)), "crashes": rng.choice((0, 0, 2)),
               "restart_s": rng.choice((0.01, 0.3)), "scheduler_crashes": rng.choice((0, 1, 3)), "crash_every_s": 0.3}  # fmt: skip
    scenario = Shrinks(
        **fields,
        deaths=rng.choice((1, 2, 4, 8)),
        death_every_s=rng.choice((0.05, 0.2, 0.5)),
        replace_s=rng.choice((0.05, 1.0, 3.0)),
        comes_back=rng.choice((0.0, 0.5, 1.0, 1.0)),
        hand_s=rng.choice((0.0, 0.1, 2.0)),
        scheduler_dies_behind=rng.choice((0.0, 0.5, 1.0)),
    )
    return replace(scenario, machine=8, lags_s=rng.choice((0.0, 0.3, 1.0))) if scenario.workers > 9 and rng.random() < 0.5 else scenario


def run(scenario: Shrinks) -> ShrinkingWorld:
    world = simulate(scenario, ShrinkingWorld)  # type: ignore[arg-type]
    assert isinstance(world, ShrinkingWorld)
    return world


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_workers_die_and_come_back_and_every_mean_is_of_those_who_are_there(first: int) -> None:
    worlds = [run(shrinking(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.deaths for world in worlds) > CHUNK
    assert sum(world.short for world in worlds) > 10 * CHUNK, "steps are taken without somebody"
    assert sum(world.returns for world in worlds) > CHUNK // 2


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_workers_die_and_come_back_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        run(shrinking(seed))


# broken rules

ROUGH = Shrinks(
    workers=4, servers=2, parts=(2, 1), steps=24, codec="onebit", names=1, deaths=6, death_every_s=0.3, replace_s=1.0, work_s=0.02, cuts=4, crashes=2,
    weather=Weather(delay_s=0.002, slow=0.1, repeats=0.02, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.3, 0.3, 0.1),
)  # fmt: skip
MANY = replace(ROUGH, workers=10, servers=1, parts=(1,), steps=16, deaths=12, death_every_s=0.15, work_s=0.05)
MACHINE = replace(
    MANY,
    machine=8,
    lags_s=1.0,
    steps=12,
    work_s=0.01,
    deaths=3,
    death_every_s=2.0,
    replace_s=3.0,
    comes_back=1.0,
    names=0,
    cuts=0,
    crashes=0,
    weather=Weather(delay_s=0.002, slow=0.0, repeats=0.02, reconnect_s=0.02),
    chances=Chances(0.85, 0.0, 0.1, 0.3),
)  # nearly all skip; and whoever comes back is given the state of a rank that is behind
DECLARING = replace(ROUGH, names=4, workers=3, work_s=0.2, steps=4, deaths=4, replace_s=2.0)


def _stays_away(replaced: Any) -> Any:
    def wrong(self: KeyState, rank: int) -> None:
        away = rank in self.absent
        replaced(self, rank)
        if away:
            self.absent.add(rank)

    return wrong


RULES: Rules[Shrinks] = Rules(run, 40, {
    "a dead rank is awaited": (ROUGH, method(KeyState, "leave_out", lambda _: lambda *_: [])),
    "a mean counts those who are missing": (ROUGH, lambda: patch.object(KeyState, "_divisor", property(lambda self: self.spec.divisor))),
    "what a dead rank has contributed does not count, but is in the sum": (MANY, method(KeyState, "leave_out", lambda leave_out: lambda self, rank: (
        self.contributions.pop(rank, None) and None) or leave_out(self, rank))),
    "a rank that has come back is missing": (ROUGH, method(KeyState, "replaced", _stays_away)),
    "a server is told of a death late, and heeds it": (ROUGH, method(ServerState, "leave_out", lambda leave_out: lambda self, rank, process, now: leave_out(
        self, rank, max(process, self.incarnations.get(rank, 1)), now))),
    "a rank that has come back has heard of one step that was taken without it, and takes that for all": (
        MACHINE, lambda: patch.object(client, "MAYBE_WITHOUT", 1)),
    "declarations await the dead": (DECLARING, lambda: patch.object(Gathering, "complete", property(lambda self: len(self.came) == self.size))),
})  # fmt: skip


@pytest.mark.parametrize("scenario", [ROUGH, MANY, MACHINE, DECLARING], ids=["rough", "many", "machine", "declaring"])
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Shrinks) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
