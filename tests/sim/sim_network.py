"""Virtual time, and connections that delay, repeat, break and lose what is under way. Knows messages, not what they mean.

Within a connection nothing overtakes anything; between connections anything may. A broken connection loses a suffix of what is in flight,
in each direction; either end learns of it later, and the client makes a new one.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psgc.wire.frames import Header

TORN = "torn"  # what a slot holds while somebody writes it


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
    """How bad connections are. delay_s: mean of most delays; slow: share of messages that take 50 times as long."""

    delay_s: float = 0.001
    slow: float = 0.02
    repeats: float = 0.02
    reconnect_s: float = 0.3


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.clock, self.rng, self.weather = clock, rng, weather
        self.links: list[Link] = []
        self.lost = self.repeated = self.cuts = 0

    def delay(self) -> float:
        chance = self.rng.random()
        slow = 50.0 if chance < self.weather.slow else 1.0
        return self.weather.delay_s * slow * (0.05 + 2 * self.rng.random())

    def cut_one(self) -> None:
        """Break a connection: mostly one that carries something now, for there it matters."""
        busy = [link for link in self.links if link.busy] if self.rng.random() < 0.8 else []
        self.rng.choice(busy or self.links).cut()


class Channel:
    """One direction of one connection."""

    __slots__ = ("_deliver", "_flight", "_network", "broken", "last")

    def __init__(self, network: Network, deliver: Callable[[Header, Any], None]) -> None:
        self._network, self._deliver = network, deliver
        self._flight: deque[tuple[Header, Any]] = deque()
        self.last = 0.0
        self.broken = False

    @property
    def in_flight(self) -> int:
        return 0 if self.broken else len(self._flight)

    def put(self, header: Header, payload: Any) -> None:
        if self.broken:
            self._network.lost += 1
            return
        clock = self._network.clock
        self.last = max(self.last, clock.now + self._network.delay())
        self._flight.append((header, payload))
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
        header, payload = self._flight.popleft()
        if self._network.rng.random() < self._network.weather.repeats and not self.broken:
            self._network.repeated += 1
            self.put(header, payload)
        self._deliver(header, payload)


@dataclass(slots=True, eq=False)
class Client:
    """The connecting end's ears."""

    up: Callable[[], None]
    down: Callable[[], None]
    hear: Callable[[Header, Any], None]


@dataclass(slots=True, eq=False)
class Host:
    """The accepting end's ears. A peer is whatever has ``reply``."""

    hear: Callable[[Any, Header, Any], None]
    lost: Callable[[Any], None]


class Connection:
    """One connection of a link. Over shared memory, and to who comes too late, it is the peer that the host knows."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.out = Channel(link.network, self._to_host)
        self.back = Channel(link.network, link.to_client)

    def reply(self, header: Header, payload: Any = None) -> None:
        self.back.put(header, payload)

    def _to_host(self, header: Header, payload: Any) -> None:
        link = self.link
        if link.local:
            link.host.hear(self, header, payload)
        else:  # by name: a renewed connection is the same peer, and an old one is nobody's
            link.host.hear(link if link.current is self else self, header, read(payload))


class Link:
    """A client's way to one host, over one connection after another. local: shared memory (payloads are read where they lie, the host
    hears of the end of a connection); else TCP by ZeroMQ (payloads are read when they arrive, the host hears nothing, and what is
    said while the connection is away may go out on the next)."""

    def __init__(self, network: Network, client: Client, host: Host, local: bool) -> None:
        self.network, self.client, self.host, self.local = network, client, host, local
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
        elif not self.local and (not self._knows_up or self.network.rng.random() < 0.5):
            self._queued.append((header, payload))
        else:
            self.network.lost += 1

    def reply(self, header: Header, payload: Any = None) -> None:
        """By the client's name, as ZeroMQ does it: to its newest connection."""
        if self.current is not None:
            self.current.reply(header, payload)

    def to_client(self, header: Header, payload: Any) -> None:
        if not self.closed:
            self.client.hear(header, payload if self.local else read(payload))

    def cut(self, everything: bool = False) -> None:
        """Break the connection; ``everything`` in flight is lost, or an end of it."""
        connection, network = self.current, self.network
        if connection is None or connection.out.broken or self.closed:
            return
        network.cuts += 1
        connection.out.lose(everything)
        connection.back.lose(everything)
        away = network.weather.reconnect_s * network.rng.random()
        if self.local:
            gone = max(network.clock.now, connection.out.last) + away * 2 * network.rng.random()
            network.clock.at(gone, self.host.lost, connection)
        self._notice(max(network.clock.now, connection.back.last) + network.delay(), up=False)
        network.clock.at((self._noticed if self.local else network.clock.now) + away, self._connect)

    def close(self) -> None:
        """The client is done. What it said before still arrives."""
        self.closed = True
        if self.local and self.current is not None and not self.current.out.broken:
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
