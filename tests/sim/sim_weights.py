"""A simulated job on one key of weights: the real client and server state machines over connections that delay, and are cut, and servers' processes that end.

Deltas are names. A version of the weights is the list of the deltas in it, in order, so that every answer tells what it was made of. Everything follows from
the seed. A buffer that is written while a rank may still read it shows as a version that changes after it was sent. What a process leaves to the next is the
buffers and the real records, as of the action that it was about to carry out when it ended.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.layout.update_rule import UNBOUNDED, UpdateRule
from psgc.server.state import Fault, Fold, Send, ServerState, specs_of
from psgc.server.weights.kept import AnswerCommit, VersionCommit
from psgc.server.weights.memory import WeightsMemory
from psgc.server.weights.rules import RuleState
from psgc.transport.memory.segment import Place
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import Notice, decode_body
from psgc.worker.client import Action, Client, Failed, Greet, Result, Transmit

PAYLOAD_BYTES = 8
BOOT_S = 1e6  # what the server's clock has at the job's beginning: it counts from when the machine was started
Delta = tuple[int, int]  # rank, its number


@dataclass(slots=True, eq=False)
class _Connection:
    """One of a rank's connections: within it, messages keep their order."""

    rank: int
    up: bool = True
    last: float = 0.0


@dataclass
class WeightsJob:
    """steps: by rank, how many pushes it makes. work_s: by rank, how long a step takes on average. pulls: share of steps before which a rank pulls as well.
    byes_lost: share of the ranks whose BYE to the server is lost, as are those that are said on a connection that is not there yet. The scheduler tells the
    server of every rank that has ended, a while later."""

    seed: int
    rule: str
    steps: list[int]
    work_s: list[float]
    cuts: int = 0
    pulls: float = 0.0
    byes_lost: float = 0.0
    delay_s: float = 0.01
    init_s: float = 0.0  # when the root begins
    crashes: int = 0
    restart_s: float = 0.05
    versions: dict[int, tuple[Delta, ...]] = field(default_factory=dict)  # buffer -> its contents
    answers: list[tuple[int, int, tuple[Delta, ...]]] = field(default_factory=list)  # rank, pushes it has made, weights it was given
    order: list[tuple[Delta, ...]] = field(default_factory=list)  # each update's deltas
    ahead: int = 0  # most pushes that a rank, when it began its next step, was ahead of another that was still there
    faults: list[str] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.rng, self.now = random.Random(self.seed), 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        workers = len(self.steps)
        declaration = Declaration("weights.w", "weights", (TensorSpec("w", (4,), "float32"),), "none", False, rule=self.rule)
        self.layout: Layout = build_layout(declaration, layout_id=1, servers=1, workers=workers)
        self.key = self.layout.buckets[0].parts[0].key
        needed = WeightsMemory.bytes_needed(workers, RuleState(UpdateRule.parse(self.rule), 0, np.float32))
        self._block = np.zeros(needed, np.uint8)
        self.incarnation, self.alive = 0, False
        self._dying: int | None = None  # actions that the server's process still carries out
        self._start()
        self.clients = [Client(rank, 7, 1, 1) for rank in range(workers)]
        self.connections = [_Connection(rank) for rank in range(workers)]
        self.pushed = [0] * workers  # pushes that were begun
        self.ended = [False] * workers
        self._reading: dict[int, tuple[int, tuple[Delta, ...]]] = {}  # rank -> buffer and what it held when it was sent
        self._updates: dict[int, tuple[Delta, ...]] = {}  # buffer -> the deltas that its version has and the one before had not
        self._skips: deque[bool]
        for rank, client in enumerate(self.clients):
            client.add_layout(self.layout, {self.key: 0})
            client.servers[0].measured = True
            self.server.joined(self.connections[rank], rank)
            self._act(rank, client.connected(0, 0.0))
            self._at(self.init_s if rank == 0 else 0.0, self._begin, rank, rank > 0)
        for call, times in ((self._cut, self.cuts), (self._crash, self.crashes)):
            for _ in range(times):
                self._at(self.rng.random() * sum(self.steps) * max(self.work_s), call)

    def _start(self) -> None:
        """A process of the server begins, from what the one before has left."""
        workers, rule = len(self.steps), UpdateRule.parse(self.rule)
        self.incarnation += 1
        self.memory = WeightsMemory(Place(None, 0, self._block), workers, RuleState(rule, 0, np.float32))
        self.server = ServerState(0, workers, 7, 1)
        kept = self.memory.kept
        self.server.register(self.layout, *specs_of(self.layout, 0, workers), {} if kept is None else {self.key: kept})
        self._dying, self.alive = None, True

    def run(self) -> WeightsJob:
        """To the end of all ranks, or until nothing happens any more."""
        while self._calls and not all(self.ended):
            self.now, _, call, args = heapq.heappop(self._calls)
            call(*args)
        return self

    # ranks

    def _begin(self, rank: int, skip: bool) -> None:
        self._act(rank, self.clients[rank].submit(self.key, self.now, 0 if skip else PAYLOAD_BYTES, skip=skip))

    def _decoded(self, rank: int, buffer: int) -> None:
        held, was = self._reading.pop(rank)
        assert held == buffer and self.versions[buffer] == was, "a version was written while a rank read it"
        self.answers.append((rank, self.pushed[rank], was))
        self.clients[rank].taken(self.key)
        others = [self.pushed[other] for other in range(len(self.steps)) if not self.ended[other]]
        self.ahead = max(self.ahead, self.pushed[rank] - min(others))
        if self.rng.random() < self.pulls:
            self._begin(rank, True)
        elif self.pushed[rank] == self.steps[rank]:
            self.ended[rank] = True
            self._at(self.now + 1.0, self._tell_left, rank)
            if not self.byes_lost or self.rng.random() >= self.byes_lost:
                self._put(self.connections[rank], self._hear_worker, Header(Kind.BYE, job=7, epoch=1, sender=rank), None)
        else:
            self._at(self.now + self.work_s[rank] * self.rng.expovariate(1.0), self._push, rank)

    def _push(self, rank: int) -> None:
        self.pushed[rank] += 1
        self._begin(rank, False)

    def _act(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Transmit):
                payload = (rank, self.pushed[rank]) if action.payload else action.body
                self._put(self.connections[rank], self._hear_worker, action.header, payload)
            elif isinstance(action, Greet):
                self._put(self.connections[rank], self._hear_worker, Header(Kind.HELLO, job=7, epoch=1, sender=rank), None)
            elif isinstance(action, Result):
                self._at(self.now + self.rng.random() * self.delay_s, self._decoded, rank, action.payload)
            elif isinstance(action, Failed):
                self.faults.append(action.text)

    def _hear_server(self, connection: _Connection, header: Header, payload: Any) -> None:
        if connection is self.connections[connection.rank]:
            self._act(connection.rank, self.clients[connection.rank].receive(0, header, payload, self.now))

    # the server

    @property
    def server_now(self) -> float:
        return BOOT_S + self.now

    def _hear_worker(self, connection: _Connection, header: Header, payload: Any) -> None:
        if self.alive and self.server.peers.get(connection.rank) is connection:
            self._effects(self.server.receive(connection, header, payload, self.server_now))
            if self.restarts:
                self.faults += [fault.text for fault in self.server.tick(self.server_now)[1]]

    def _tell_left(self, rank: int) -> None:
        if self.alive:  # else the scheduler tells it again
            self._effects(self.server.left(rank, self.server_now))

    def _effects(self, effects: Any) -> None:
        for effect in effects:
            if self._dying is not None:
                self._dying -= 1
                if self._dying < 0:
                    self._die()
                    return
            if isinstance(effect, VersionCommit):
                self.memory.commit(effect)
                self.order += [self._updates[effect.slot]] if effect.version > 1 else []
            elif isinstance(effect, AnswerCommit):
                self.memory.answer(effect)
            elif isinstance(effect, Send):
                payload: Any = effect.body or None
                if effect.header.kind == Kind.RESULT:
                    assert effect.result_slot is not None
                    payload = effect.result_slot
                    self._reading[effect.peer.rank] = payload, self.versions[payload]
                self._put(effect.peer, self._hear_server, effect.header, payload)
            elif isinstance(effect, Fold):
                self._at(self.now + self.rng.random() * self.delay_s, self._fold, effect, self.incarnation)
            elif isinstance(effect, Fault):
                self.faults.append(effect.text)

    def _crash(self) -> None:
        """The server's process ends in the middle of what it does next."""
        if self._dying is None and self.alive:
            self._dying = self.rng.randint(0, 4)

    def _die(self) -> None:
        self.incarnation += 1  # folds that are under way come to nothing
        self._dying, self.alive = None, False
        after = self.rng.random() * self.restart_s
        for connection in self.connections:  # what it had sent arrives until the rank notices
            self._at(self.now + self.rng.random() * after, self._notice, connection)
        self._at(self.now + after, self._start_again)

    def _notice(self, connection: _Connection) -> None:
        if connection.up and connection is self.connections[connection.rank]:
            connection.up = False
            self.clients[connection.rank].disconnected(0)

    def _start_again(self) -> None:
        self.restarts += 1
        self._start()
        for rank, ended in enumerate(self.ended):
            self._notice(self.connections[rank])
            if ended:
                self._at(self.now + 1.0, self._tell_left, rank)
            new = self.connections[rank] = _Connection(rank, last=self.now)
            self._at(self.now + self.rng.random() * self.delay_s, self._joined, new)

    def _fold(self, fold: Fold, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        assert all(held != fold.slot for held, _ in self._reading.values()), "the buffer of the next version is being read"
        if fold.add_back >= 0:
            self.versions[fold.slot] = self.versions[fold.add_back] + fold.payloads
            self._updates[fold.slot] = fold.payloads
        else:
            assert fold.payloads == ((0, 0),), "the initial values are the root's"
            self.versions[fold.slot] = ()
        self._effects(self.server.folded(self.key, True, PAYLOAD_BYTES, False, fold.slot, self.server_now))

    # connections

    def _cut(self) -> None:
        rank = self.rng.randrange(len(self.steps))
        if self.ended[rank] or not self.connections[rank].up or not self.alive:
            return
        self.connections[rank].up = False
        self.server.lost(self.connections[rank])
        self.clients[rank].disconnected(0)
        new = self.connections[rank] = _Connection(rank, last=self.now)
        self._at(self.now + self.rng.random() * self.delay_s, self._joined, new)

    def _joined(self, connection: _Connection) -> None:
        if connection.up and connection is self.connections[connection.rank] and self.alive:
            self.server.joined(connection, connection.rank)
            self._act(connection.rank, self.clients[connection.rank].connected(0, self.now))

    def _put(self, connection: _Connection, hear: Callable[..., None], header: Header, payload: Any) -> None:
        connection.last = max(connection.last, self.now) + self.rng.random() * self.delay_s
        self._at(connection.last, self._arrive, connection, hear, header, payload)

    def _arrive(self, connection: _Connection, hear: Callable[..., None], header: Header, payload: Any) -> None:
        if connection.up:  # what was under way on a connection that has been cut is lost
            hear(connection, header, payload)

    def _at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._calls, (when, self._count, call, args))


def check(job: WeightsJob) -> None:
    """Whatever the luck: the job ends, every delta is in the weights once, and every answer has its rank's own deltas in it."""
    rule, workers = UpdateRule.parse(job.rule), len(job.steps)
    assert all(job.ended) and not job.faults, f"seed {job.seed}: stuck at {job.pushed} of {job.steps}, {job.faults}"
    applied = [delta for of_update in job.order for delta in of_update]
    assert sorted(applied) == sorted((rank, n) for rank in range(workers) for n in range(1, job.steps[rank] + 1)), f"seed {job.seed}"
    for rank, pushes, weights in job.answers:
        own = [number for other, number in weights if other == rank]
        assert own == list(range(1, pushes + 1)), f"seed {job.seed}: rank {rank} pushed {pushes} deltas and was given {own}"
        assert weights == tuple(applied[: len(weights)]), f"seed {job.seed}: the answer is no state that the weights ever had"
    for rank in range(workers):
        seen = [len(weights) for other, _, weights in job.answers if other == rank]
        assert seen == sorted(seen), "no rank is given weights that are older than what it has"
    if rule.staleness != UNBOUNDED:
        assert job.ahead <= rule.staleness, f"seed {job.seed}: a rank was {job.ahead} pushes ahead"
    if rule.in_rounds:
        for of_round in job.order:
            assert list(of_round) == sorted(of_round) and len({number for _, number in of_round}) == 1, "a round's deltas, in rank order"
    assert len(job.versions) <= workers + 2, "versions are bounded"


def notice(body: bytes) -> str:
    return decode_body(Notice, body).text
