"""The worker's connections to its servers: shared memory where server and worker share a host, else TCP. One interface for both.

Knows how messages travel and counts their bytes; must not know what they mean.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from typing import Any, Literal

import zmq

from psgc.errors import PsgcError
from psgc.transport.dealer import Dealer
from psgc.transport.memfd import LocalLink, Segment
from psgc.transport.watch import Pollable
from psgc.wire.frames import HEADER_BYTES, Header
from psgc.wire.messages import ServerAddress
from psgc.worker.bucket import Slot

logger = logging.getLogger(__name__)
RECONNECT_S = 0.5


class ServerLink(ABC):
    """One server's connection. ``wire_bytes`` counts headers and payloads both ways, whatever the transport."""

    def __init__(self) -> None:
        self.wire_bytes = 0

    @abstractmethod
    def pollables(self) -> Sequence[Pollable]:
        """What to sleep on."""

    @abstractmethod
    def send(self, header: Header, body: bytes = b"", slot: Slot | None = None) -> None:
        """Send a header with a small body, or with the payload that lies in ``slot``."""

    @abstractmethod
    def receive(self, ready: Set[Any]) -> Iterator[tuple[Header, Any]]:
        """What has come, if one of ``ready`` is this link's."""

    @abstractmethod
    def events(self, ready: Set[Any]) -> Sequence[Literal["up", "down"]]:
        """What has happened to the connection since the last call, in order. Called at every turn of the loop."""

    @abstractmethod
    def add_segment(self, segment_id: int, segment: Segment) -> None:
        """Payloads may lie in this segment from now on."""

    @abstractmethod
    def close(self, linger_ms: int) -> None: ...


class TcpServerLink(ServerLink):
    def __init__(self, context: zmq.Context[Any], address: str, identity: bytes, dead_s: float) -> None:
        super().__init__()
        self._dealer = Dealer(context, address, identity, dead_s)

    def pollables(self) -> Sequence[Pollable]:
        return self._dealer.pollables()

    def send(self, header: Header, body: bytes = b"", slot: Slot | None = None) -> None:
        self.wire_bytes += HEADER_BYTES + header.payload_bytes
        self._dealer.send(header, body if slot is None else slot.bytes[: header.payload_bytes])

    def receive(self, ready: Set[Any]) -> Iterator[tuple[Header, Any]]:
        for header, payload in self._dealer.receive() if self._dealer.socket in ready else ():
            self.wire_bytes += HEADER_BYTES + header.payload_bytes
            yield header, payload

    def events(self, ready: Set[Any]) -> Sequence[Literal["up", "down"]]:
        return list(self._dealer.events()) if self._dealer.monitor in ready else ()

    def add_segment(self, segment_id: int, segment: Segment) -> None:
        """Payloads are copied to the socket from wherever they lie."""

    def close(self, linger_ms: int) -> None:
        self._dealer.close(linger_ms)


class LocalServerLink(ServerLink):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._link: LocalLink | None = LocalLink.connect(address)
        self._segments: dict[int, Segment] = {}
        self._events: list[Literal["up", "down"]] = ["up"]
        self._retry_at = 0.0

    def pollables(self) -> Sequence[Pollable]:
        return () if self._link is None else (self._link.pollable(),)

    def send(self, header: Header, body: bytes = b"", slot: Slot | None = None) -> None:
        self.wire_bytes += HEADER_BYTES + header.payload_bytes
        if self._link is None:
            return
        if slot is None:
            self._link.send(header, body)
        else:
            self._link.send_located(header, slot.segment, slot.offset)

    def receive(self, ready: Set[Any]) -> Iterator[tuple[Header, Any]]:
        if self._link is not None and self._link.fileno() in ready:
            self._link.flush()
            for header, payload in self._link.receive():
                self.wire_bytes += HEADER_BYTES + header.payload_bytes
                yield header, payload

    def events(self, ready: Set[Any]) -> Sequence[Literal["up", "down"]]:
        if self._link is not None and self._link.closed:
            self._link.close()
            self._link = None
            self._events.append("down")
            self._retry_at = time.monotonic() + RECONNECT_S
        elif self._link is None and time.monotonic() >= self._retry_at:
            self._reconnect()
        events, self._events = self._events, []
        return events

    def _reconnect(self) -> None:
        try:
            self._link = LocalLink.connect(self._address)
        except OSError:
            self._retry_at = time.monotonic() + RECONNECT_S
            return
        for segment_id, segment in self._segments.items():
            self._link.announce(segment_id, segment)
        self._events.append("up")

    def add_segment(self, segment_id: int, segment: Segment) -> None:
        self._segments[segment_id] = segment
        if self._link is not None:
            self._link.announce(segment_id, segment)

    def close(self, linger_ms: int) -> None:
        if self._link is not None:
            self._link.close()


def connect_server(
    context: zmq.Context[Any], server: ServerAddress, *, host: str, transport: str, identity: bytes, dead_s: float
) -> ServerLink:
    """The best link to ``server``: shared memory if it is on this host and answers there, else TCP. ``transport`` may insist on one.

    Raises PsgcError if shared memory was insisted on and cannot be had.
    """
    if transport != "tcp" and server.host == host and server.local_address:
        try:
            link = LocalServerLink(server.local_address)
        except OSError as error:
            logger.info("server on this host does not answer locally server=%d error=%s", server.index, error)
        else:
            logger.info("server link server=%d transport=shm", server.index)
            return link
    if transport == "shm":
        raise PsgcError(f"PSGC_TRANSPORT=shm, but server {server.index} at {server.address} is not reachable by shared memory; use auto")
    logger.info("server link server=%d transport=tcp address=%s", server.index, server.address)
    return TcpServerLink(context, server.address, identity, dead_s)
