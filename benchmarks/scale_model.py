"""A job as threads that share cores, and messages that share links, in virtual time: what a start, a step, a failure and a new plan take with so many
nodes. Pure; ``scale.py`` measures the costs and holds this model against real jobs.

A thread does one task after the other. A machine's cores are shared evenly: where more threads want to work than it has cores, each gets its share. A message
leaves its machine after those before it, takes the latency, and enters the other machine after those before it; within a machine it takes the latency alone,
since what moving its bytes costs is in the tasks at both ends. Nothing else is modelled: no caches, no loss, no slow start, no jitter.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

Then = Callable[[], None]
SOON: Final = 1e-12  # seconds by which two ends that are computed in different ways may differ


class Clock:
    """Events in order of their times, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def at(self, when: float, then: Then) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), then))

    def run(self) -> float:
        """Until nothing is due; the time of the last event."""
        while self._due:
            self.now, _, then = heapq.heappop(self._due)
            then()
        return self.now


class Machine:
    """cores: may be a fraction, where other work takes part of them. gbps: of its link, either way; inf: never waited for. threads: that it has at most; with
    a core for each, nothing is shared, which is the same only quicker."""

    def __init__(self, clock: Clock, cores: float, gbps: float = float("inf"), threads: float = float("inf")) -> None:
        self.clock, self.cores, self.seconds_a_byte, self._shares = clock, cores, 8e-9 / gbps, threads > cores
        self.leaving = self.entering = 0.0  # until when the link is busy
        self._done, self._since = 0.0, 0.0  # what each thread that works has been given, in seconds; since when
        self._working: list[tuple[float, int, Then]] = []
        self._numbers, self._turn = count(), 0

    def work(self, seconds: float, then: Then) -> None:
        """A thread works for so many seconds of a core's time."""
        if not self._shares:
            self.clock.at(self.clock.now + seconds, then)
            return
        self._catch_up()
        heapq.heappush(self._working, (self._done + seconds, next(self._numbers), then))
        self._plan()

    @property
    def _rate(self) -> float:
        return min(1.0, self.cores / len(self._working)) if self._working else 0.0

    def _catch_up(self) -> None:
        self._done += (self.clock.now - self._since) * self._rate
        self._since = self.clock.now

    def _plan(self) -> None:
        self._turn += 1
        if self._working:
            turn = self._turn
            self.clock.at(self.clock.now + max(0.0, self._working[0][0] - self._done) / self._rate, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:  # somebody has begun or ended since
            return
        self._catch_up()
        ended = []
        while self._working and self._working[0][0] <= self._done + SOON:
            ended.append(heapq.heappop(self._working)[2])
        self._plan()
        for then in ended:
            then()


class Thread:
    """Of a process on a machine. Does its tasks in the order in which they come."""

    __slots__ = ("_busy", "_tasks", "machine")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._tasks: deque[tuple[float, Then]] = deque()
        self._busy = False

    def do(self, seconds: float, then: Then) -> None:
        self._tasks.append((seconds, then))
        if not self._busy:
            self._busy = True
            self._next()

    def _next(self) -> None:
        seconds, then = self._tasks.popleft()

        def done() -> None:
            if self._tasks:
                self._next()
            else:
                self._busy = False
            then()

        self.machine.work(seconds, done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What workers agree on through the scheduler, and then do with the servers, in processor seconds. worker: of each, half before and half after the
    scheduler has answered; scheduler: for each member; server: of each, for each worker; beyond: seconds besides, once."""

    worker: float
    scheduler: float
    server: float
    beyond: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor seconds. launcher: until it has started its processes; worker, server, scheduler: of a process until it registers; again: of a server in a
    dead one's place; reached: of such a server for each worker that connects to it. compute: of a worker's own step; send: of a worker for a contribution, and
    as much for a result; contribution: of a server for one, its result included. *_beyond: seconds besides, once."""

    launcher: float
    worker: float
    server: float
    scheduler: float
    again: float
    reached: float
    join: Phase
    first: Phase
    replan: Phase
    compute: float
    send: float
    contribution: float
    step_beyond: float = 0.0
    recovery_beyond: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A job. parts: of each the server that it is on, and its payload's bytes, the same both ways. cores: of each machine. one_machine: all processes are on
    one; else a worker and a server on each, the scheduler on the first. latency_s: of a message, one way."""

    workers: int
    servers: int
    parts: Sequence[tuple[int, int]]
    cores: float
    one_machine: bool = False
    gbps: float = float("inf")
    latency_s: float = 0.0


class Simulated:
    """A job's processes. Each method simulates one thing from its beginning to its end, and returns the seconds; an object is for one call."""

    def __init__(self, shape: Shape, costs: Costs) -> None:
        self.shape, self.costs, self.clock = shape, costs, Clock()
        count_of = 1 if shape.one_machine else max(shape.workers, shape.servers)
        threads = 1 + -(-shape.servers // count_of) + 2 * -(-shape.workers // count_of)
        self.machines = [Machine(self.clock, shape.cores, shape.gbps, threads) for _ in range(count_of)]
        self.scheduler = Thread(self.machines[0])
        self.servers = [Thread(self.machines[number % count_of]) for number in range(shape.servers)]
        self.workers = [Thread(self.machines[number % count_of]) for number in range(shape.workers)]  # training threads
        self.networks = [Thread(worker.machine) for worker in self.workers]

    def send(self, at: Thread, to: Thread, nbytes: int, then: Then) -> None:
        """A message; ``then`` when it is there."""
        here, there = at.machine, to.machine
        if here is there:
            self.clock.at(self.clock.now + self.shape.latency_s, then)
            return
        here.leaving = max(here.leaving, self.clock.now) + nbytes * here.seconds_a_byte
        there.entering = max(there.entering + nbytes * there.seconds_a_byte, here.leaving + self.shape.latency_s)
        self.clock.at(there.entering, then)

    def start(self) -> float:
        """From the launchers' start until every worker has joined. Each machine's launcher starts its own."""
        costs, waiting = self.costs, len(self.workers) + len(self.servers)

        def registered() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._phase(costs.join)

        def launched(machine: Machine) -> None:
            if machine is self.machines[0]:
                self.scheduler.do(costs.scheduler, lambda: None)  # who registers before waits in its queue
            for thread, seconds in [(each, costs.server) for each in self.servers] + [(each, costs.worker) for each in self.workers]:
                if thread.machine is machine:
                    thread.do(seconds, lambda thread=thread: self.send(thread, self.scheduler, 0, lambda: self.scheduler.do(0, registered)))  # type: ignore[misc]

        for machine in self.machines:
            machine.work(costs.launcher, lambda machine=machine: launched(machine))  # type: ignore[misc]
        return self.clock.run() + costs.join.beyond

    def first_step(self) -> float:
        """From there until every worker has the first step's result: declarations, the layout, connections, and the step."""
        self._phase(self.costs.first)
        return self.clock.run() + self.costs.first.beyond

    def replan(self) -> float:
        """What a step takes longer in which every worker declares another layout. The search for a plan is not in it."""
        self._phase(self.costs.replan)
        return self.clock.run() + self.costs.replan.beyond

    def step(self) -> float:
        """From backward's begin until every worker has all results, and has applied them."""
        for worker, network in zip(self.workers, self.networks, strict=True):
            worker.do(self.costs.compute, lambda network=network: self._push(network, self.shape.parts))  # type: ignore[misc]
        self._expect(self.shape.parts)
        return self.clock.run() + self.costs.step_beyond

    def recovery(self) -> float:
        """From the death of server 0 until the step that was under way has ended: another process, connections again, and every worker's contributions to that
        server once more. The other servers' results have come meanwhile."""
        lost = [part for part in self.shape.parts if part[0] == 0]
        server, join = self.servers[0], self.costs.join
        reached = 0

        def connected() -> None:
            nonlocal reached
            reached += 1
            if reached == len(self.workers):
                self._expect(lost)
                for network in self.networks:
                    self._push(network, lost)

        def registered() -> None:
            for network in self.networks:
                self.scheduler.do(
                    join.scheduler / 2,
                    lambda network=network: self.send(self.scheduler, network, 0, lambda: server.do(self.costs.reached, connected)),  # type: ignore[misc]
                )

        server.do(self.costs.again, lambda: self.send(server, self.scheduler, 0, registered))
        return self.clock.run() + self.costs.recovery_beyond

    def _phase(self, phase: Phase) -> None:
        """Every worker speaks; when all have, the scheduler answers each; then each server that has parts does something for each worker."""
        lacking, busy = len(self.workers), [self.servers[index] for index in sorted({index for index, _ in self.shape.parts})]

        def heard() -> None:
            nonlocal lacking
            lacking -= 1
            if lacking:
                return
            for worker in self.workers:
                self.scheduler.do(phase.scheduler / 2, lambda worker=worker: self.send(self.scheduler, worker, 0, lambda: answered(worker)))  # type: ignore[misc]

        def answered(worker: Thread) -> None:
            def ready() -> None:
                for server in busy:
                    self.send(worker, server, 0, lambda server=server: server.do(phase.server, lambda: None))  # type: ignore[misc]

            worker.do(phase.worker / 2, ready)

        def spoken(worker: Thread) -> None:
            self.send(worker, self.scheduler, 0, lambda: self.scheduler.do(phase.scheduler / 2, heard))

        for worker in self.workers:
            worker.do(phase.worker / 2, lambda worker=worker: spoken(worker))  # type: ignore[misc]

    def _expect(self, parts: Sequence[tuple[int, int]]) -> None:
        self._lacking = [len(self.workers)] * len(parts)

    def _push(self, network: Thread, parts: Sequence[tuple[int, int]]) -> None:
        for number, (index, nbytes) in enumerate(parts):
            server = self.servers[index]

            def there(number: int = number, server: Thread = server, nbytes: int = nbytes) -> None:
                server.do(self.costs.contribution, lambda: self._added(number, server, nbytes))

            network.do(self.costs.send, lambda server=server, nbytes=nbytes, there=there: self.send(network, server, nbytes, there))  # type: ignore[misc]

    def _added(self, number: int, server: Thread, nbytes: int) -> None:
        self._lacking[number] -= 1
        if not self._lacking[number]:
            for network in self.networks:
                self.send(server, network, nbytes, lambda network=network: network.do(self.costs.send, lambda: None))  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rarely:
    """Learners around a syncer. every_s: that each trains between two exchanges. learner, syncer: processor seconds for an exchange. cores, gbps: of the
    syncer's machine; one_machine: the learners' too."""

    learners: int
    every_s: float
    learner: float
    syncer: float
    nbytes: int
    cores: float
    one_machine: bool = False
    gbps: float = float("inf")
    latency_s: float = 0.0


def exchanges(shape: Rarely, rounds: int) -> tuple[float, float, float]:
    """Each learner exchanges so often, the first time after a part of every_s that is drawn for it. Returns the seconds of an exchange, mean
    and longest, and the share of the time in which the syncer's thread works."""
    clock = Clock()
    machine = Machine(clock, shape.cores, shape.gbps)
    syncer, took, rng = Thread(machine), list[float](), random.Random(0)

    first = shape.every_s

    def learner() -> None:
        nonlocal first
        own = machine if shape.one_machine else Machine(clock, 1.0, threads=1)
        thread, left = Thread(own), rounds

        def push() -> None:
            began = clock.now

            def arrived() -> None:
                machine.entering = max(machine.entering, clock.now) + (0 if shape.one_machine else shape.nbytes * machine.seconds_a_byte)
                clock.at(machine.entering, lambda: syncer.do(shape.syncer, answer))

            def answer() -> None:
                machine.leaving = max(machine.leaving, clock.now) + (0 if shape.one_machine else shape.nbytes * machine.seconds_a_byte)
                clock.at(machine.leaving + shape.latency_s, lambda: thread.do(shape.learner / 2, end))

            def end() -> None:
                nonlocal left
                took.append(clock.now - began)
                left -= 1
                if left:
                    clock.at(clock.now + shape.every_s, push)

            thread.do(shape.learner / 2, lambda: clock.at(clock.now + shape.latency_s, arrived))

        phase = shape.every_s * rng.random()
        first = min(first, phase)
        clock.at(phase, push)

    for _ in range(shape.learners):
        learner()
    lasted = clock.run() - first
    return sum(took) / len(took), max(took), shape.syncer * shape.learners * rounds / lasted
