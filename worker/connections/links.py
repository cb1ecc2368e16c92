"""The worker's connections to its servers: shared memory where server and worker share a host, else TCP. One interface for both.

Knows how connections are made, proved and re-made, and counts bytes; must not know what messages mean.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from psgc.addresses import lookup, split
from psgc.errors import PsgcError
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Segment
from psgc.transport.security.handshake import NONCE_BYTES, PATIENCE_S, Refused, WorkerProof
from psgc.transport.shm import LocalLink
from psgc.transport.tcp import TcpLink
from psgc.wire.frames import HEADER_BYTES, Header
from psgc.wire.messages import ServerAddress
from psgc.worker.bucket import Slot
from psgc.worker.connections.reach import Trouble

logger = logging.getLogger(__name__)
RECONNECT_S: Final = 0.5


class ServerLink(ABC):
    """One server's connection, re-made when it breaks. ``wire_bytes`` counts headers and payloads both ways, whatever the transport.

    links: where the connections of this thread are polled. proof: makes the worker's side of a handshake, for a transport.
    trouble: why it is not up. queues: whether payloads wait in the link's queue for a slow peer: see ``unsent``.
    """

    queues = False

    def __init__(self, server: int, address: str, links: LinkSet, proof: Callable[[str], WorkerProof]) -> None:
        self.server, self.address = server, address
        self.wire_bytes = 0
        self._last = Trouble(None, "it has not answered yet")
        self._links, self._proof = links, proof
        self._link: Link | None = None
        self._up = False
        self._retry_at = 0.0
        self._began = 0.0  # when the attempt under way was begun
        self._events: list[Literal["up", "down"]] = []

    @abstractmethod
    def _dial(self) -> Link:
        """Begin a new connection. Raises OSError if that fails at once."""

    @abstractmethod
    def _send(self, header: Header, body: bytes, slot: Slot | None) -> None:
        """On the connection, which is up."""

    @property
    def unsent(self) -> int:
        """How many payloads wait in the link's queue: given to ``send``, and not yet taken whole by the kernel. It changes in ``send`` and
        when the network thread flushes its LinkSet; a connection that is lost takes its queue with it. Over shared memory always 0."""
        return 0 if self._link is None else self._link.unsent

    def send(self, header: Header, body: bytes = b"", slot: Slot | None = None) -> None:
        """Send a header with a small body, or with the payload that lies in ``slot``. Dropped unless the connection is up."""
        if self._up and self._link is not None:
            self.wire_bytes += HEADER_BYTES + header.payload_bytes
            self._send(header, body, slot)
            self._links.touch(self._link)

    @property
    def trouble(self) -> Trouble:
        """Why it is not up: how the attempt under way stands, or the last one ended."""
        if self._link is not None and not self._link.closed and self._link.reached:
            return Trouble(0, "it accepts connections and says nothing")
        return self._last

    @property
    def up(self) -> bool:
        """Whether both ends have proved themselves, and nothing has broken since."""
        return self._up

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """What has come on the connection, which is ready. Bounded: what is left is received at the next turn.

        Raises RemoteProtocolError for what is no message.
        """
        link = self._link
        if link is None or link.closed:
            return
        if not self._up:
            self._go_on(link)  # nothing has been said yet: the server speaks when it is greeted
        else:
            for header, payload in link.receive():
                self.wire_bytes += HEADER_BYTES + header.payload_bytes
                yield header, payload
            self._links.received(link)

    def events(self) -> list[Literal["up", "down"]]:
        """What has happened to the connection since the last call, in order. To be called after ``receive``, when the connection has
        closed, and now and then while it is not up: it is then made again."""
        if self._link is not None and self._link.closed:
            self._lose(self._link.why, self._link.number)
        if not self._up and (now := time.monotonic()) >= self._retry_at:
            self._try(now)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def add_segment(self, segment_id: int, segment: Segment) -> None:
        """Payloads may lie in this segment from now on."""

    def close(self, linger_s: float) -> None:
        """linger_s: so long the server may take to hear what was sent last."""
        link, self._link, self._up = self._link, None, False
        if link is not None:
            self._links.discard(link)
            link.see_off(linger_s)
            link.close()

    def _try(self, now: float) -> None:
        """No connection is up: begin one, or give up the one that takes too long."""
        if self._link is not None:
            if now - self._began < PATIENCE_S:
                return
            self._lose(f"no answer for {PATIENCE_S:.0f} s", 0 if self._link.reached else errno.ETIMEDOUT)
        self._began = now
        try:
            self._link = self._dial()
        except socket.gaierror as error:
            self._lose(f"its name cannot be looked up ({error.strerror})", errno.EADDRNOTAVAIL)
        except OSError as error:
            self._lose(error.strerror or str(error), error.errno or 0)
        else:
            self._link.owner = self
            self._links.add(self._link)
            self._go_on(self._link)

    def _go_on(self, link: Link) -> None:
        """With the handshake."""
        try:
            proved = link.prove()
        except Refused as error:
            self._lose(str(error), 0)
            return
        if proved:
            self._up = True
            self._came_up(link)
            self._links.touch(link)
            self._events.append("up")
        elif link.closed:
            self._lose(link.why, link.number)

    @abstractmethod
    def _came_up(self, link: Link) -> None:
        """Say what is to be said before anything else."""

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


class TcpServerLink(ServerLink):
    """address: ``tcp://host:port``. A name that stands for several addresses is tried at one after the other."""

    queues = True

    def __init__(self, server: int, address: str, links: LinkSet, proof: Callable[[str], WorkerProof], dead_s: float) -> None:
        super().__init__(server, address, links, proof)
        self._dead_s, self._attempts = dead_s, 0

    def _dial(self) -> Link:
        try:
            found = lookup(*split(self.address))
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        family, where = found[self._attempts % len(found)]
        self._attempts += 1
        return TcpLink.connect(family, where, self._proof("tcp"), self._dead_s)

    def _send(self, header: Header, body: bytes, slot: Slot | None) -> None:
        assert isinstance(self._link, TcpLink)
        self._link.send(header, body if slot is None else slot.bytes[: header.payload_bytes])

    def _came_up(self, link: Link) -> None:
        return  # nothing: payloads travel whole

    def add_segment(self, segment_id: int, segment: Segment) -> None:
        return  # they leave from wherever they lie


class LocalServerLink(ServerLink):
    def __init__(self, server: int, address: str, links: LinkSet, proof: Callable[[str], WorkerProof]) -> None:
        super().__init__(server, address, links, proof)
        self._segments: dict[int, Segment] = {}

    def _dial(self) -> Link:
        return LocalLink.connect(self.address, self._proof("unix"))

    def _send(self, header: Header, body: bytes, slot: Slot | None) -> None:
        assert isinstance(self._link, LocalLink)
        if slot is None:
            self._link.send(header, body)
        else:
            self._link.send_located(header, slot.segment, slot.offset)

    def _came_up(self, link: Link) -> None:
        assert isinstance(link, LocalLink)
        for segment_id, segment in self._segments.items():
            link.announce(segment_id, segment)

    def add_segment(self, segment_id: int, segment: Segment) -> None:
        self._segments[segment_id] = segment
        if self._up and isinstance(self._link, LocalLink):
            self._link.announce(segment_id, segment)
            self._links.touch(self._link)

    @staticmethod
    def answers(address: str) -> bool:
        """Whether a server listens there: on this host, and in this network namespace."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
            trial.setblocking(False)
            try:
                trial.connect("\0" + address)
            except BlockingIOError:  # it has many connections to take in
                return True
            except OSError as error:
                logger.info("server on this host does not answer locally address=%s error=%s", address, error)
                return False
        return True


def connect_server(
    server: ServerAddress, links: LinkSet, *, host: str, transport: str, rank: int, epoch: int, key: bytes, dead_s: float,
    encrypt: bool = False,
) -> ServerLink:  # fmt: skip
    """The best link to ``server``: shared memory if it is on this host and answers there, else TCP. ``transport`` may insist on one.
    key: this rank's data key. encrypt: what travels over TCP.

    Raises PsgcError if shared memory was insisted on and cannot be had.
    """

    def proof(over: str) -> WorkerProof:
        return WorkerProof(over, server.index, epoch, rank, key, host, secrets.token_bytes(NONCE_BYTES), encrypt=encrypt and over == "tcp")

    if transport != "tcp" and server.host == host and server.local_address and LocalServerLink.answers(server.local_address):
        logger.info("server link server=%d transport=shm", server.index)
        return LocalServerLink(server.index, server.local_address, links, proof)
    if transport == "shm":
        raise PsgcError(f"PSGC_TRANSPORT=shm, but server {server.index} at {server.address} is not reachable by shared memory; use auto")
    logger.info("server link server=%d transport=tcp address=%s", server.index, server.address)
    return TcpServerLink(server.index, server.address, links, proof, dead_s)
