"""Virtual time, and channels that delay, repeat, break and lose messages under way. Knows messages, not what they mean.

Within a connection nothing overtakes anything; between connections anything may. A broken connection loses a suffix of what is in flight,
in each direction; either end learns of it later, and the client makes a new one. No payload may be put twice on one connection.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psgc.wire.frames import HEADER_BYTES, Header, Kind

TORN = "torn"  # what a slot holds while somebody writes it


CARRIES = (Kind.PUSH, Kind.RESULT, Kind.RESTORE)


class SentTwice(AssertionError):
    """A payload was put once more on a connection that carries it already."""


class Clock:
    """Calls in the order of their times; those of one time in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, call, *args)

    def step(self) -> None:
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)


@dataclass(slots=True)
class Place:
    """The simulation's own of ``psgc.transport.memory.segment.Place``: a payload in its writer's memory. What is read depends on when it is read."""

    memory: dict[Any, Any]
    name: Any

    @property
    def bytes(self) -> Any:
        return self.memory[self.name]


def read(payload: Any) -> Any:
    return payload.bytes if isinstance(payload, Place) else payload


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad connections are. delay_s: mean of most delays; slow: share of messages that take 50 times as long; rate: bytes a second that a
    TCP connection carries in each direction."""

    delay_s: float = 0.001
    slow: float = 0.02
    repeats: float = 0.02
    reconnect_s: float = 0.3
    rate: float = math.inf


class Desk:
    """The scheduler's socket, where processes follow one another: while none is there, connections wait for the next one."""

    def __init__(self) -> None:
        self.away = False
        self.process = 0  # which one is there, or comes next
        self.waiting: list[Callable[[], None]] = []

    def leave(self) -> None:
        self.away, self.process = True, self.process + 1

    def back(self) -> None:
        self.away = False
        waiting, self.waiting = self.waiting, []
        for connect in waiting:
            connect()


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock, self.rng, self.weather = clock, rng, weather
        self.lines: list[Any] = []  # everything that may be cut
        self.lost = self.repeated = self.cuts = 0
        self.repeating = False  # what is delivered just now is a repeat
        self.desk = Desk()
        self.carried = 0  # bytes of payloads of pushes and results that were put on connections, whole or not

    def delay(self) -> float:
        chance = self.rng.random()
        slow = 50.0 if chance < self.weather.slow else 1.0
        return self.weather.delay_s * slow * (0.05 + 2 * self.rng.random())

    def cut_one(self) -> None:
        """Break a connection: mostly one that carries something now, for there it matters."""
        busy = [line for line in self.lines if line.busy] if self.rng.random() < 0.8 else []
        self.rng.choice(busy or self.lines).cut()


class Channel:
    """One direction of one connection. departed: called when a push's payload has left its sender's queue, with how many are
    still there."""

    __slots__ = ("_carried", "_deliver", "_departed", "_flight", "_free", "_network", "_rate", "broken", "last", "unsent")

    def __init__(
        self,
        network: Network,
        deliver: Callable[[Header, Any], None],
        rate: float = math.inf,
        departed: Callable[[int], None] | None = None,
    ) -> None:
        self._network, self._deliver, self._rate, self._departed = network, deliver, rate, departed
        self._flight: deque[tuple[Header, Any, bool]] = deque()
        self._carried: set[tuple[int, ...]] = set()
        self._free = self.last = 0.0
        self.unsent = 0
        self.broken = False

    @property
    def in_flight(self) -> int:
        return 0 if self.broken else len(self._flight)

    def put(self, header: Header, payload: Any) -> None:
        if self.broken:
            self._network.lost += 1
            return
        start = max(self._free, self._network.clock.now)
        self._free = start + (HEADER_BYTES + header.payload_bytes) / self._rate
        if header.kind in CARRIES and header.payload_bytes:
            self._account(header)
        if header.kind == Kind.PUSH and header.payload_bytes and self._departed is not None:
            self.unsent += 1
            self._network.clock.at(start + (self._free - start) * self._network.rng.random(), self._depart)
        self._launch(header, payload, repeated=False)

    def _account(self, header: Header) -> None:
        what = header.kind, header.key, header.step, header.contributors if header.kind == Kind.RESTORE else 0
        if what in self._carried:
            raise SentTwice(f"{Kind(header.kind).name} of step {header.step} of key {header.key:#x} is sent twice on one connection")
        self._carried.add(what)
        if header.kind != Kind.RESTORE:
            self._network.carried += header.payload_bytes

    def _depart(self) -> None:
        self.unsent -= 1
        if not self.broken and self._departed is not None:
            self._departed(self.unsent)

    def _launch(self, header: Header, payload: Any, repeated: bool) -> None:
        clock = self._network.clock
        self.last = max(self.last, max(self._free, clock.now) + self._network.delay())
        self._flight.append((header, payload, repeated))
        clock.at(self.last, self._arrive)

    def lose(self, everything: bool) -> None:
        """Of what is in flight only the first few still arrive."""
        self.broken = True
        kept = 0 if everything else self._network.rng.randint(0, len(self._flight))
        self._network.lost += len(self._flight) - kept
        while len(self._flight) > kept:
            self._flight.pop()

    def _arrive(self) -> None:
        if not self._flight:
            return
        header, payload, repeated = self._flight.popleft()
        network = self._network
        if network.rng.random() < network.weather.repeats and not self.broken:
            network.repeated += 1
            self._launch(header, payload, repeated=True)
        network.repeating = repeated
        self._deliver(header, payload)
        network.repeating = False
