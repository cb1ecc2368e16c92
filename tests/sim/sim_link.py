"""Simulated connections: a worker's to a server by psgc's own interface of links, a member's to the scheduler as ZeroMQ makes them.

A broken connection loses a suffix of what is in flight, in each direction; either end learns of it later, and the client makes a new one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sim_network import Channel, Network, Place, read

from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Link
from psgc.transport.security.handshake import Proof, ServerProof, WorkerProof
from psgc.wire.frames import Header


class SimLink(Link):
    """One end of a payload connection. Payloads are read where they lie, when somebody wants them."""

    in_place: ClassVar[bool] = True

    def __init__(self, network: Network, line: Line, proof: Proof, peer: str, ready: Callable[[SimLink], None]) -> None:
        super().__init__(proof, peer)
        self.owner: Line = line
        self.other: SimLink | None = None
        rate = math.inf if self.in_place else network.weather.rate
        self.out = Channel(network, self._arrive_there, rate, self._departed if self.queues else None)
        self._ready = ready
        self._said = b""  # of the handshake, by the other end
        self._inbox: deque[tuple[Header, Any]] = deque()

    def fileno(self) -> int:
        raise NotImplementedError("virtual time polls nothing: whoever is ready is called")

    def _say(self, data: bytes) -> int:
        assert self.other is not None
        self.other._said += data
        return len(data)

    def _hear(self, nbytes: int) -> bytes:
        data, self._said = self._said[:nbytes], self._said[nbytes:]
        if not data:
            raise BlockingIOError
        return data

    def send(self, header: Header, body: Any = None, place: Any = None) -> None:
        self.out.put(header, body or None if place is None else place)
        self.unsent = self.out.unsent

    @property
    def queued(self) -> bool:
        return self.unsent > 0

    def flush(self) -> None:
        """Channels take everything at once, and carry it when there is time."""

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        while self._inbox and messages > 0 and nbytes > 0:
            header, payload = self._inbox.popleft()
            messages, nbytes = messages - 1, nbytes - header.payload_bytes
            yield header, payload
        self.more = bool(self._inbox)

    def close(self) -> None:
        self.fail("closed")

    def _arrive_there(self, header: Header, payload: Any) -> None:
        assert self.other is not None
        self.other._inbox.append((header, payload if self.in_place else read(payload)))
        self.other._ready(self.other)

    def _departed(self, unsent: int) -> None:
        self.unsent = unsent
        self.owner.departed(self)


class SimSocket(SimLink):
    """Payloads are read when they arrive; a push waits in the link until it departs, and the worker then hears of it."""

    queues = True
    in_place = False


class HostSocket(SimSocket):
    """A server's end of it: results wait, too, and nobody asks."""

    queues = False


def proved(one: Link, other: Link) -> bool:
    """Whether both ends have proved themselves, as far as they can at once."""
    return [link.prove() for _ in range(3) for link in (one, other)][-2:] == [True, True]


@dataclass(slots=True, eq=False)
class Client:
    """What the connecting end is called for. ``ready``: messages can be received from the link."""

    up: Callable[[], None]
    down: Callable[[], None]
    ready: Callable[[SimLink], None]
    departed: Callable[[int], None]
    proof: Callable[[], WorkerProof]


@dataclass(slots=True, eq=False)
class Host:
    """What the accepting end is called for."""

    ready: Callable[[SimLink], None]
    lost: Callable[[SimLink], None]
    proof: Callable[[], ServerProof]
    away: bool = False  # its process has ended, and the next does not answer yet
    waiting: list[_Line] = field(default_factory=list)  # whose connections the kernel keeps until then

    def back(self) -> None:
        self.away = False
        waiting, self.waiting = self.waiting, []
        for line in waiting:
            line._connect()


class _Line:
    """A client's connections to one host, one after another: they are cut, and made again after a while."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.closed = False
        self._noticed = 0.0  # when the client has noticed all that has happened
        self._knows_up = False
        network.lines.append(self)
        self._connect()

    def _channels(self) -> tuple[Channel, Channel] | None:
        """Of the connection, to the host and back."""
        raise NotImplementedError

    def _renew(self) -> None:
        """Make a connection."""
        raise NotImplementedError

    def _tell(self, up: bool) -> None:
        raise NotImplementedError

    def _lost(self, away: float) -> None:
        """The connection was cut, for so long."""

    def _back_at(self, away: float) -> float:
        """When there is a new connection."""
        return self._noticed + away

    @property
    def busy(self) -> bool:
        channels = self._channels()
        return channels is not None and bool(channels[0].in_flight or channels[1].in_flight)

    def cut(self, everything: bool = False) -> None:
        """Break the connection; ``everything`` in flight is lost, or the last part of it."""
        channels, network = self._channels(), self.network
        if channels is None or channels[0].broken or self.closed:
            return
        network.cuts += 1
        for channel in channels:
            channel.lose(everything)
        away = network.weather.reconnect_s * network.rng.random()
        self._lost(away)
        self._notice(max(network.clock.now, channels[1].last) + network.delay(), up=False)
        network.clock.at(self._back_at(away), self._connect)

    def _waits(self) -> bool:
        """Whether nobody answers at the host for now; ``_connect`` is called once somebody does."""
        return False

    def _connect(self) -> None:
        if not self.closed and not self._waits():
            self._renew()
            self._notice(self.network.clock.now + self.network.delay(), up=True)

    def _notice(self, when: float, up: bool) -> None:
        self._noticed = max(self._noticed, when)
        self.network.clock.at(self._noticed, self._heard_of, up)

    def _heard_of(self, up: bool) -> None:
        self._knows_up = up
        if not self.closed:
            self._tell(up)


class Line(_Line):
    """A worker's connections to one server, each a pair of links. ends: the classes of the worker's and of the server's."""

    def __init__(self, network: Network, client: Client, host: Host, ends: tuple[type[SimLink], type[SimLink]]) -> None:
        self.client, self.host = client, host
        self._ends = ends
        self.current: SimLink | None = None
        super().__init__(network)

    @property
    def queues(self) -> bool:
        return self._ends[0].queues

    def send(self, header: Header, body: Any = None, place: Any = None) -> None:
        if self._knows_up and self.current is not None and not self.current.out.broken:  # nothing goes out before HELLO
            self.current.send(header, body, place)
        else:
            self.network.lost += 1

    def is_current(self, link: SimLink) -> bool:
        """Whether this end, either, is of the connection that there is now."""
        return self.current is not None and link in (self.current, self.current.other)

    def departed(self, link: SimLink) -> None:
        if self.is_current(link):
            self.client.departed(link.unsent)

    def close(self) -> None:
        """The client is done. What it said before still arrives."""
        self.closed = True
        if self.current is not None and not self.current.out.broken:
            self.network.clock.at(self.current.out.last + self.network.delay(), self.host.lost, self.current.other)

    def _channels(self) -> tuple[Channel, Channel] | None:
        return None if self.current is None or self.current.other is None else (self.current.out, self.current.other.out)

    def _waits(self) -> bool:
        if self.host.away:
            self.host.waiting.append(self)
        return self.host.away

    def _renew(self) -> None:
        own, others = self._ends
        self.current = own(self.network, self, self.client.proof(), "server", self._hear)
        self.current.other = others(self.network, self, self.host.proof(), "worker", self.host.ready)
        self.current.other.other = self.current
        assert proved(self.current, self.current.other), "both ends know the key"

    def _hear(self, link: SimLink) -> None:
        if not self.closed:
            self.client.ready(link)

    def _tell(self, up: bool) -> None:
        (self.client.up if up else self.client.down)()

    def _lost(self, away: float) -> None:
        network, connection = self.network, self.current
        assert connection is not None
        gone = max(network.clock.now, connection.out.last) + away * 2 * network.rng.random()
        network.clock.at(gone, self.host.lost, connection.other)


class ControlLine(_Line):
    """A member's connections to the scheduler. The scheduler knows the member and not its connections, as a ROUTER does, and what is said while
    the connection is away may go out on the next, as a DEALER does it."""

    def __init__(
        self, network: Network, event: Callable[[str], None], hear: Callable[[Header, Any], None], host: Callable[..., None]
    ) -> None:
        self.event, self.hear, self._host = event, hear, host
        self._current: tuple[Channel, Channel] | None = None
        self._queued: list[tuple[Header, Any]] = []
        super().__init__(network)

    def send(self, header: Header, payload: Any = None) -> None:
        if self._current is not None and not self._current[0].broken:
            self._current[0].put(header, payload)
        elif not self._knows_up or self.network.rng.random() < 0.5:
            self._queued.append((header, payload))
        else:
            self.network.lost += 1

    def reply(self, header: Header, payload: Any = None) -> None:
        """By the member's name: to its newest connection."""
        if self._current is not None:
            self._current[1].put(header, payload)

    def close(self) -> None:
        """The member is done. What it said before still arrives."""
        self.closed = True

    def _channels(self) -> tuple[Channel, Channel] | None:
        return self._current

    def _renew(self) -> None:
        old: list[Any] = []
        desk, process = self.network.desk, self.network.desk.process

        def to_host(header: Header, payload: Any) -> None:
            """A renewed connection is the same peer; an old one is nobody's, whose answers nobody hears. What was said to a process nobody else hears."""
            if desk.process != process:
                self.network.lost += 1
                return
            self._host(self if self._current is not None and self._current[0] is old[0] else old[1], header, payload)

        def to_member(header: Header, payload: Any) -> None:
            if not self.closed:
                self.hear(header, payload)

        out, back = Channel(self.network, to_host), Channel(self.network, to_member)
        old += [out, _Stale(back)]
        self._current = out, back
        for header, payload in self._queued:
            out.put(header, payload)
        self._queued.clear()

    def _tell(self, up: bool) -> None:
        self.event("up" if up else "down")

    def _back_at(self, away: float) -> float:
        return self.network.clock.now + away

    def _waits(self) -> bool:
        if self.network.desk.away:
            self.network.desk.waiting.append(self._connect)
        return self.network.desk.away


class _Stale:
    """The peer that an old connection is to the scheduler."""

    def __init__(self, back: Channel) -> None:
        self._back = back

    def reply(self, header: Header, payload: Any = None) -> None:
        self._back.put(header, payload)


__all__ = ["Client", "ControlLine", "Host", "HostSocket", "Line", "Place", "SimLink", "SimSocket"]
