"""Workers' processes that end at any moment and are followed by others: every rank still gets exactly the published sum of every step, and nobody waits
for ever.

The state that a process goes on from is that of another rank at the beginning of its present step, as psgc.torch.Elastic keeps it. And: the simulation sees
each rule that this rests on, when it is broken."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
from broken_rules import Rules, method
from sim_members import check
from sim_network import Weather
from sim_oracle import Chances
from sim_worker import SimWorker, Ticket
from simulation import Scenario, World, simulate

from psgc.scheduler.handovers import Handovers
from psgc.scheduler.losses import Losses
from psgc.scheduler.records import Record
from psgc.scheduler.rendezvous import Declarations
from psgc.server.state import ServerState
from psgc.server.step import KeyState
from psgc.wire.messages import Register, Topology
from psgc.worker import client as worker_client
from psgc.worker.session import Handover

SAMPLE = 300
CHUNK = 50
LONG = 20_000
LONG_CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths(Scenario):
    """deaths: of workers' processes, once steps are under way; replace_s: until another one begins, on average; hand_s: until that one has got the state, from
    when both ends know, on average. scheduler_dies_behind: chance that the scheduler's process ends before such a process has the state."""

    deaths: int = 0
    death_every_s: float = 0.05
    replace_s: float = 0.2
    hand_s: float = 0.0
    scheduler_dies_behind: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """Of a rank at the beginning of a step: its number, and steps taken of each layout."""

    step: int
    taken: dict[str, int]


class MortalWorker(SimWorker):
    """One process in a worker's place. It declares again what is declared, and counts steps from the state that it is given."""

    def __init__(self, world: World, node: int, incarnation: int = 1) -> None:
        self.incarnation, self.dead = incarnation, False
        self.beginning: State | None = None
        self.taken: State | None = None
        self.got: Ticket | None = None
        self.failed_handovers = self.number = 0
        super().__init__(world, node, incarnation)

    def joined(self, topology: Topology) -> None:
        super().joined(topology)
        assert self.client is not None
        self.client.incarnation = topology.incarnation

    def hand_over(self, handover: Handover) -> None:
        """The giver's state is read at once, and arrives after a while, if both still live."""
        if handover.takes and not handover.number and self.taken is not None:
            return
        if handover.takes and not handover.number:
            self.failed_handovers += 1
            self.coordinator.requests.ask_state(self.failed_handovers)
        elif handover.takes:
            new, self.number = handover.number != self.number, handover.number
            if new:
                self._meet(handover.number)
        else:
            check(self.beginning is not None, lambda: "a rank without a state is to give it")
            self.world.offers.setdefault(handover.number, (self, self.beginning))

    def _meet(self, number: int) -> None:
        """The giver has read its state at once, and it arrives after a while, if both still live."""
        if number in self.world.offers:
            self.clock.after(10 * self.world.work_time() + self.world.hand_time(), self._arrive, number)
        elif number == self.number and not self.dead:
            self.clock.after(0.01, self._meet, number)

    def _arrive(self, number: int) -> None:
        giver, state = self.world.offers[number]
        if giver.dead or self.dead or number != self.number or self.taken is not None:
            return
        self.taken = state
        self.membership.taken.update(state.taken)
        self.coordinator.requests.tell_state()
        if self.got is not None:
            self.got.set()

    @property
    def done(self) -> bool:
        """Whether it has taken the last step: once the others have left, nobody can give a state."""
        return self.beginning is not None and self.beginning.step == self.world.scenario.steps

    def begin(self, step: int) -> None:
        assert self.client is not None
        parts = {name: [part for _, part in layout.parts()] for name, layout in self.layouts.items()}
        self.beginning = State(step, {name: self.client.parts[of[0].key].step for name, of in parts.items() if of})

    def laid_out(self, layout: Any) -> None:
        super().laid_out(layout)
        assert self.client is not None
        taken = self.membership.taken.get(layout.name, 0)
        for bucket in layout.served.buckets:
            self._buckets[layout.id, bucket.index].step = taken
            for part in bucket.parts:
                self.client.parts[part.key].step = taken

    def die(self) -> None:
        """As by SIGKILL."""
        self.dead = self.ended = True
        for line in (*self.links, self.dealer.link):
            line.cut()
            line.closed = True

    # nothing that a process has begun goes on after its end

    def _resume(self) -> None:
        if not self.dead:
            super()._resume()

    def _apply(self, actions: Iterable[worker_client.Action]) -> None:
        if not self.dead:
            super()._apply(actions)

    def _encoded(self, running: Any, key: int) -> None:
        if not self.dead:
            super()._encoded(running, key)

    def _submit(self, running: Any, key: int, skip: bool) -> None:
        if not self.dead:
            super()._submit(running, key, skip)

    def _decoded(self, action: Any, payload: Any) -> None:
        if not self.dead:
            super()._decoded(action, payload)

    def _hear(self, server: int, header: Any, payload: Any) -> None:
        if not self.dead:
            super()._hear(server, header, payload)

    def _up(self, server: int) -> None:
        if not self.dead:
            super()._up(server)


class MortalWorld(World):
    """A World in which workers' processes end, and others follow."""

    scenario: Deaths

    def __init__(self, scenario: Deaths) -> None:
        self.deaths_left, self.deaths = scenario.deaths, 0
        self.behind_back = 0  # ends of the scheduler's process while a worker's had no state yet
        self.dead: set[tuple[int, int]] = set()  # nodes and incarnations
        self.offers: dict[int, tuple[MortalWorker, Any]] = {}  # by number of the handover
        with patch("simulation.SimWorker", MortalWorker):
            super().__init__(scenario)

    def alive(self, register: Register) -> bool | None:
        return False if register.role == "worker" and (register.node, register.incarnation) in self.dead else None

    def begin_cuts(self) -> None:
        if not self._cutting and self.deaths_left:
            self.clock.after(self._until_death(), self._kill)
        super().begin_cuts()

    def _until_death(self) -> float:
        return self.scenario.death_every_s * 2 * self.rng.random()

    def _kill(self) -> None:
        everyone = [worker for worker in self.workers if isinstance(worker, MortalWorker)]
        losses = self.scheduler.state.losses
        without = losses._handovers.without if losses is not None else {worker.node for worker in everyone}  # as the scheduler knows
        able = [worker for worker in everyone if worker.beginning is not None and not worker.dead and worker.node not in without]
        if not self.deaths_left or any(worker.coordinator.left or (worker.ended and not worker.dead) for worker in everyone):
            return
        if len(able) > 1:
            mortal = [worker for worker in everyone if not worker.dead and worker.client is not None and not worker.done]
            victim = self.rng.choice(mortal or everyone)
            if victim in mortal and any(worker is not victim for worker in able):
                self.deaths_left -= 1
                self._end(victim)
        self.clock.after(self._until_death(), self._kill)

    def _end(self, victim: MortalWorker) -> None:
        self.deaths += 1
        victim.die()
        self.dead.add((victim.node, victim.incarnation))
        self.clock.after(self._until_followed(), self._follow, victim)

    def _until_followed(self) -> float:
        return self.scenario.replace_s * 2 * self.rng.random()

    def _follow(self, former: MortalWorker) -> None:
        self.progress()  # nobody could go on before
        self.workers[former.node] = MortalWorker(self, former.node, former.incarnation + 1)
        if self.scenario.scheduler_dies_behind and self.rng.random() < self.scenario.scheduler_dies_behind:
            self.clock.after(0.001, self._end_scheduler, former.node)

    def _end_scheduler(self, node: int) -> None:
        """At any moment from when the rank's process is known to when it is known to have the state."""
        worker, losses = self.workers[node], self.scheduler.state.losses
        if self.scheduler.ended or self.network.desk.away or losses is None or not isinstance(worker, MortalWorker) or worker.dead:
            return
        if worker.taken is not None and node not in losses._handovers.without:
            return
        if worker.client is not None and node in losses._handovers.without and self.rng.random() < 0.3:
            self.behind_back += 1
            self.scheduler.crash()
        else:
            self.clock.after((self.scenario.hand_s + 0.01) * self.rng.random(), self._end_scheduler, node)

    def hand_time(self) -> float:
        return self.scenario.hand_s * 2 * self.rng.random() if self.scenario.hand_s else 0.0

    def script(self, worker: SimWorker) -> Iterator[float | list[Ticket]]:
        assert isinstance(worker, MortalWorker) and worker.client is not None
        first = 0
        if worker.incarnation > 1:
            while not worker.client.greeted:
                yield 0.001
            worker.got = Ticket(worker)
            worker.coordinator.requests.ask_state(0)
            yield [worker.got]
            assert worker.taken is not None
            first = worker.taken.step
        worker.begin(first) if worker.incarnation == 1 else setattr(worker, "beginning", worker.taken)
        yield [worker.declare(self.model())]
        model, named = worker.layouts["model"], self.named()
        for step in range(first, self.scenario.steps):
            if step > first:
                worker.begin(step)
            jobs: list[Any] = [*(bucket.index for bucket in model.buckets), *named]
            self.rng.shuffle(jobs)
            tickets = []
            for job in jobs:
                yield self.work_time()
                tickets.append(worker.submit(model, job) if isinstance(job, int) else worker.submit_named(job))
            yield tickets
        worker.begin(self.scenario.steps)
        yield [worker.barrier(1)]
        worker.leave()

    def _check_end(self) -> None:
        end = self.scheduler.ended
        check(end is not None and end.status == 0, lambda: f"the scheduler ends with {end}")
        for worker in self.workers:
            assert worker.client is not None
            steps = {part.step for part in worker.client.parts.values()}
            check(steps <= {self.scenario.steps}, lambda w=worker, s=steps: f"worker {w.node} has taken {s} steps of its keys")
            credit = [(server.sending.in_flight, server.sending.parts_in_flight) for server in worker.client.servers]
            check(set(credit) == {(0, 0)}, lambda w=worker, c=credit: f"worker {w.node} never got credit back: {c}")


def dying(seed: int) -> Deaths:
    """A scenario of the simulation at large, in which workers' processes end as well, and servers' now and then."""
    rng, drawn = random.Random(f"deaths {seed}"), Scenario.drawn(seed)
    fields = {name: getattr(drawn, name) for name in Scenario.__dataclass_fields__}
    fields |= {"workers": max(2, drawn.workers), "node_sizes": (), "restores": False, "saves": 0.0, "publishes": False, "hurry": 0.0, "barriers": 0.0,
               "broadcasts": 0, "cuts_early": False, "steps": drawn.steps + 2,
               "crashes": rng.choice((0, 0, 2)), "restart_s": rng.choice((0.01, 0.1)), "scheduler_crashes": rng.choice((0, 0, 1, 3)),
               "crash_every_s": rng.choice((0.05, 0.3))}  # fmt: skip
    return Deaths(
        **fields, deaths=rng.choice((1, 2, 3, 6)), death_every_s=rng.choice((0.005, 0.02, 0.1, 0.3)), replace_s=rng.choice((0.01, 0.1, 0.5)),
        hand_s=rng.choice((0.0, 0.1, 2.0)), scheduler_dies_behind=rng.choice((0.0, 0.5, 1.0)),
    )  # fmt: skip


def run(scenario: Deaths) -> MortalWorld:
    world = simulate(scenario, MortalWorld)  # type: ignore[arg-type]
    assert isinstance(world, MortalWorld)
    return world


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_workers_that_die_at_any_moment_change_no_sum(first: int) -> None:
    worlds = [run(dying(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.deaths for world in worlds) > CHUNK
    assert sum(world.behind_back for world in worlds) > CHUNK // 3, "the scheduler's process ends while a worker's has no state yet"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_workers_that_die_at_any_moment_change_no_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        run(dying(seed))


# broken rules

ROUGH = Deaths(
    workers=3, servers=2, parts=(2, 1), steps=6, codec="onebit", names=1, deaths=5, death_every_s=0.05, replace_s=0.02, work_s=0.0005, cuts=4,
    weather=Weather(delay_s=0.002, slow=0.1, repeats=0.02, reconnect_s=0.02), chances=Chances(0.1, 0.05, 0.3, 0.3, 0.1),
)  # fmt: skip
MANY = replace(ROUGH, workers=9, servers=1, parts=(1,), steps=4, deaths=8, death_every_s=0.02)
BEHIND = replace(ROUGH, hand_s=0.3, scheduler_dies_behind=1.0, restart_s=0.1, workers=4, deaths=8)
DECLARING = Deaths(
    workers=4, parts=(3,), names=4, codec="onebit", window_bytes=1, local=0.0, deaths=4, death_every_s=0.03, replace_s=0.05, work_s=0.0002,
    weather=Weather(delay_s=0.01, slow=0.0, repeats=0.0),
)  # fmt: skip


def _deletes_all(self: KeyState, rank: int) -> None:
    """What has been folded is thought to be out of the sum."""
    self.wants.discard(rank)
    self.reconnected(rank)
    self.contributions.pop(rank, None)


def _counts_anew(heed: Any) -> Any:
    def wrong(self: Losses, record: Record, now: float) -> bool:
        known = heed(self, record, now)
        self._handovers.count = 0
        return bool(known)

    return wrong


def _forgets_steps(begin: Any) -> Any:
    def wrong(self: MortalWorker, step: int) -> None:
        begin(self, step)
        self.beginning = State(step, {})

    return wrong


RULES: Rules[Deaths] = Rules(run, 40, {
    "what a dead process has contributed counts": (ROUGH, method(KeyState, "replaced", lambda _: lambda self, rank: self.reconnected(rank))),
    "servers do not hear of another process": (ROUGH, method(ServerState, "_greeted", lambda _: lambda *_: [])),
    "what has been folded is added again": (MANY, lambda: patch.object(KeyState, "replaced", _deletes_all)),
    "a rank without a state gives it": (ROUGH, method(Handovers, "replaced", lambda _: lambda *_: None)),
    "the scheduler's next process does not know who has no state": (BEHIND, method(Handovers, "resumed", lambda _: lambda *_: None)),
    "handovers are counted anew": (BEHIND, method(Losses, "heed", _counts_anew)),
    "requests of a dead process are answered": (DECLARING, method(Declarations, "forget", lambda _: lambda *_: None)),
    "steps are counted anew": (ROUGH, method(MortalWorker, "begin", _forgets_steps)),
})  # fmt: skip


@pytest.mark.parametrize("scenario", RULES.scenarios, ids=["rough", "many", "behind", "declaring"])
def test_while_no_rule_is_broken_nothing_is_seen(scenario: Deaths) -> None:
    RULES.simulate(scenario)


@pytest.mark.parametrize("rule", RULES.broken)
def test_a_broken_rule_is_seen(rule: str) -> None:
    RULES.see(rule)
