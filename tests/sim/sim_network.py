"""Virtual time, and connections that delay, repeat, break and lose what is under way. Knows messages, not what they mean.

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
from typing import Any, Literal

from psgc.wire.frames import HEADER_BYTES, Header, Kind

TORN = "torn"  # what a slot holds while somebody writes it


CARRIES = (Kind.PUSH, Kind.RESULT, Kind.RESTORE)
Way = Literal["shm", "tcp", "zmq"]


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
class Ref:
    """A payload that lies in its writer's memory: what is read depends on when it is read."""

    memory: dict[Any, Any]
    place: Any

    def read(self) -> Any:
        return self.memory[self.place]


def read(payload: Any) -> Any:
    return payload.read() if isinstance(payload, Ref) else payload


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad connections are. delay_s: mean of most delays; slow: share of messages that take 50 times as long; rate: bytes a second that a
    TCP connection carries in each direction."""

    delay_s: float = 0.001
    slow: float = 0.02
    repeats: float = 0.02
    reconnect_s: float = 0.3
    rate: float = math.inf


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock, self.rng, self.weather = clock, rng, weather
        self.links: list[Link] = []
        self.lost = self.repeated = self.cuts = 0
        self.repeating = False  # what is delivered just now is a repeat
        self.carried = 0  # bytes of payloads of pushes and results that were put on connections, whole or not

    def delay(self) -> float:
        chance = self.rng.random()
        slow = 50.0 if chance < self.weather.slow else 1.0
        return self.weather.delay_s * slow * (0.05 + 2 * self.rng.random())

    def cut_one(self) -> None:
        """Break a connection: mostly one that carries something now, for there it matters."""
        busy = [link for link in self.links if link.busy] if self.rng.random() < 0.8 else []
        self.rng.choice(busy or self.links).cut()


class Channel:
    """One direction of one connection. departed: called when a push's payload has left its sender's queue, with how many are
    still there."""

    __slots__ = ("_carried", "_deliver", "_departed", "_flight", "_free", "_network", "_rate", "_unsent", "broken", "last")

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
        self._unsent = 0
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
            self._unsent += 1
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
        self._unsent -= 1
        if not self.broken and self._departed is not None:
            self._departed(self._unsent)

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


@dataclass(slots=True, eq=False)
class Client:
    """The connecting end's ears."""

    up: Callable[[], None]
    down: Callable[[], None]
    hear: Callable[[Header, Any], None]
    departed: Callable[[int], None] | None = None


@dataclass(slots=True, eq=False)
class Host:
    """The accepting end's ears. A peer is whatever has ``reply``."""

    hear: Callable[[Any, Header, Any], None]
    lost: Callable[[Any], None]


class Connection:
    """One connection of a link. But for ZeroMQ, and to who comes too late, it is the peer that the host knows."""

    def __init__(self, link: Link) -> None:
        self.link = link
        rate = link.network.weather.rate if link.way == "tcp" else math.inf
        self.out = Channel(link.network, self._to_host, rate, self._departed if link.queues else None)
        self.back = Channel(link.network, self._to_client, rate)

    def reply(self, header: Header, payload: Any = None) -> None:
        self.back.put(header, payload)

    def _departed(self, unsent: int) -> None:
        if self.link.current is self and self.link.client.departed is not None:
            self.link.client.departed(unsent)

    def _to_host(self, header: Header, payload: Any) -> None:
        link = self.link
        if link.way == "shm":
            link.host.hear(self, header, payload)
        elif link.way == "tcp":
            link.host.hear(self, header, read(payload))
        else:  # by name: a renewed connection is the same peer, and an old one is nobody's
            link.host.hear(link if link.current is self else self, header, read(payload))

    def _to_client(self, header: Header, payload: Any) -> None:
        self.link.to_client(header, payload)


class Link:
    """A client's way to one host, over one connection after another. way: shared memory (payloads are read where they lie); plain TCP
    (payloads are read when they arrive; they wait in a queue, and the client hears when they leave it); or ZeroMQ over TCP (the host knows
    the client and not its connections, and what is said while the connection is away may go out on the next)."""

    def __init__(self, network: Network, client: Client, host: Host, way: Way) -> None:
        self.network, self.client, self.host, self.way = network, client, host, way
        self.queues = way == "tcp"
        self.current: Connection | None = None
        self.closed = False
        self._queued: list[tuple[Header, Any]] = []
        self._noticed = 0.0  # when the client has noticed all that has happened
        self._knows_up = False
        network.links.append(self)
        self._connect()

    @property
    def busy(self) -> bool:
        return self.current is not None and bool(self.current.out.in_flight or self.current.back.in_flight)

    def send(self, header: Header, payload: Any = None) -> None:
        if self.current is not None and not self.current.out.broken:
            self.current.out.put(header, payload)
        elif self.way == "zmq" and (not self._knows_up or self.network.rng.random() < 0.5):
            self._queued.append((header, payload))
        else:
            self.network.lost += 1

    def reply(self, header: Header, payload: Any = None) -> None:
        """By the client's name, as ZeroMQ does it: to its newest connection."""
        if self.current is not None:
            self.current.reply(header, payload)

    def to_client(self, header: Header, payload: Any) -> None:
        if not self.closed:
            self.client.hear(header, payload if self.way == "shm" else read(payload))

    def cut(self, everything: bool = False) -> None:
        """Break the connection; ``everything`` in flight is lost, or an end of it."""
        connection, network = self.current, self.network
        if connection is None or connection.out.broken or self.closed:
            return
        network.cuts += 1
        connection.out.lose(everything)
        connection.back.lose(everything)
        away = network.weather.reconnect_s * network.rng.random()
        if self.way != "zmq":
            gone = max(network.clock.now, connection.out.last) + away * 2 * network.rng.random()
            network.clock.at(gone, self.host.lost, connection)
        self._notice(max(network.clock.now, connection.back.last) + network.delay(), up=False)
        network.clock.at((network.clock.now if self.way == "zmq" else self._noticed) + away, self._connect)

    def close(self) -> None:
        """The client is done. What it said before still arrives."""
        self.closed = True
        if self.way != "zmq" and self.current is not None and not self.current.out.broken:
            self.network.clock.at(self.current.out.last + self.network.delay(), self.host.lost, self.current)

    def _connect(self) -> None:
        if self.closed:
            return
        self.current = Connection(self)
        for header, payload in self._queued:
            self.current.out.put(header, payload)
        self._queued.clear()
        self._notice(self.network.clock.now + self.network.delay(), up=True)

    def _notice(self, when: float, up: bool) -> None:
        self._noticed = max(self._noticed, when)
        self.network.clock.at(self._noticed, self._tell, up)

    def _tell(self, up: bool) -> None:
        self._knows_up = up
        if not self.closed:
            (self.client.up if up else self.client.down)()
