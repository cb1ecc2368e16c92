"""Connections to servers, each made by the transport that suits it, and made again when it breaks: a worker's, and a server's to its standby.

Knows how connections are made, proved and made again, and counts their bytes. Knows neither the kinds of transport nor the meaning of messages.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from psgc.config import Config
from psgc.errors import PsgcError, RemoteProtocolError
from psgc.transport.host import host_id
from psgc.transport.link import Dial, Link, Transport, Trouble
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Place
from psgc.transport.security.handshake import NONCE_BYTES, PATIENCE_S, Refused, WorkerProof
from psgc.transport.selection import reaching
from psgc.wire.frames import HEADER_BYTES, Header
from psgc.wire.messages import ServerAddress

logger = logging.getLogger(__name__)
RECONNECT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Route:
    """How a server is reached. address: the server's, of the transport. proof: makes the worker's side of a handshake."""

    server: int
    transport: Transport
    address: str
    same_host: bool
    dial: Dial
    proof: Callable[[], WorkerProof]

    def remedy(self, trouble: Trouble) -> str:
        """What is wrong, and how to mend it."""
        return self.transport.remedy(self.address, self.same_host, trouble)


class ServerLink:
    """One server's connection, made again when it breaks. ``wire_bytes`` counts headers and payloads in both directions, on any transport.

    links: where the connections of this thread are polled.
    """

    def __init__(self, route: Route, links: LinkSet) -> None:
        self.server, self.route = route.server, route
        self.wire_bytes = 0
        self._last = Trouble(None, "it has not answered yet")
        self._links = links
        self._link: Link | None = None
        self._up = False
        self._retry_at = 0.0
        self._began = 0.0  # when the attempt under way was begun
        self._events: list[Literal["up", "down"]] = []

    @property
    def queues(self) -> bool:
        """Whether payloads wait in the connection for a slow peer: see ``unsent``."""
        return self._link is not None and self._link.queues

    @property
    def unsent(self) -> int:
        """How many payloads wait in the connection: given to ``send``, but not yet taken completely by the kernel. It changes in ``send`` and
        when the network thread flushes its LinkSet. The queue of a connection that is lost is lost, too."""
        return 0 if self._link is None else self._link.unsent

    def leaving_s(self, now: float) -> float:
        """See ``Link.leaving_s``: of the present connection. Any thread may ask."""
        link = self._link
        return 0.0 if link is None or link.closed else link.leaving_s(now)

    def send(self, header: Header, body: bytes = b"", place: Place | None = None) -> None:
        """Send a header with a small body, or with the payload that lies at ``place``. Dropped unless the connection is up."""
        if self._up and self._link is not None:
            self.wire_bytes += HEADER_BYTES + header.payload_bytes
            self._link.send(header, body, place)
            self._links.touch(self._link)

    @property
    def receiving(self) -> bool:
        """Whether the beginning of a message has come, but not all of it."""
        return self._link is not None and self._link.receiving

    @property
    def remedy(self) -> str:
        """Why the connection is not up, and how to mend it: the state of the present attempt, or how the last one ended."""
        return self.route.remedy(self.trouble)

    @property
    def trouble(self) -> Trouble:
        """Why the connection is not up."""
        silent = self._link is not None and not self._link.closed and self._link.reached
        return Trouble(0, "it accepts connections and says nothing") if silent else self._last

    @property
    def up(self) -> bool:
        """Whether both ends have proved themselves, and nothing has broken since."""
        return self._up

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """Messages of the connection, which is ready. Their number is bounded; the rest is received in the next turn. Bytes that are no message
        close the connection, which is then made again."""
        link = self._link
        if link is None or link.closed:
            return
        if not self._up:
            self._go_on(link)  # no messages yet: the server sends none before HELLO
        else:
            try:
                for header, payload in link.receive():
                    self.wire_bytes += HEADER_BYTES + header.payload_bytes
                    yield header, payload
            except RemoteProtocolError as error:  # altered on the path, or not psgc's protocol
                logger.warning("connection to server %d closed: %s", self.server, error)
                link.fail(str(error))
            self._links.received(link)

    def events(self) -> list[Literal["up", "down"]]:
        """The connection's events since the last call, in order. Call it after ``receive``, when the connection has closed, and now and then
        while the connection is not up: it is then made again."""
        if self._link is not None and self._link.closed:
            self._lose(self._link.why, self._link.number)
        if not self._up and (now := time.monotonic()) >= self._retry_at:
            self._try(now)
        events, self._events = self._events, []
        return events

    def close(self, linger_s: float) -> None:
        """linger_s: how long the last messages may take to leave."""
        link, self._link, self._up = self._link, None, False
        if link is not None:
            self._links.discard(link)
            link.see_off(linger_s)
            link.close()

    def _try(self, now: float) -> None:
        """No connection is up: begin an attempt, or give up one that takes too long."""
        if self._link is not None:
            if now - self._began < PATIENCE_S:
                return
            self._lose(f"no answer for {PATIENCE_S:.0f} s", 0 if self._link.reached else errno.ETIMEDOUT)
        self._began = now
        try:
            self._link = self.route.dial(self.route.proof())
        except socket.gaierror as error:
            self._lose(f"its name cannot be looked up ({error.strerror})", errno.EADDRNOTAVAIL)
        except OSError as error:
            self._lose(error.strerror or str(error), error.errno or 0)
        else:
            self._link.owner = self
            self._links.add(self._link)
            self._go_on(self._link)

    def _go_on(self, link: Link) -> None:
        """Take the next step of the handshake."""
        try:
            proved = link.prove()
        except Refused as error:
            self._lose(str(error), 0)
            return
        if proved:
            self._up = True
            self._links.touch(link)
            self._events.append("up")
        elif link.closed:
            self._lose(link.why, link.number)

    def _lose(self, why: str, number: int) -> None:
        self._last = Trouble(number, why)
        now = time.monotonic()
        self._retry_at = now + RECONNECT_S
        if self._up:
            self._up = False
            self._events.append("down")
        if self._link is not None:
            self._links.discard(self._link)
            self._link.close()
            self._link = None


def connect_server(server: ServerAddress, links: LinkSet, config: Config, *, rank: int, epoch: int, key: bytes) -> ServerLink:
    """A link to ``server`` by the best transport that ``config`` allows. key: this rank's data key.

    Raises PsgcError if no transport reaches it, ConfigError if the transport that was asked for does not encrypt although it has to.
    """
    same_host = server.host == host_id()
    transport = reaching(server.by_transport, config, same_host)
    if transport is None:
        raise PsgcError(
            f"PSGC_TRANSPORT={config.transport}, but server {server.index} at {server.address} cannot be reached by it; use auto"
        )
    logger.info("server link server=%d transport=%s", server.index, transport.name)
    encrypt = config.encrypt and not transport.local

    def proof() -> WorkerProof:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return WorkerProof(transport.label, server.index, epoch, rank, key, host_id(), nonce, encrypt=encrypt)

    address = server.by_transport[transport.name]
    return ServerLink(Route(server.index, transport, address, same_host, transport.dialer(address, config), proof), links)
