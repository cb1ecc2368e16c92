"""The transport over TCP, by plain sockets: a sequence of ``[header][payload]``. Lengths are checked before anything is allocated.

Payloads are sent from where they lie and received where they stay. Bytes that the kernel has not taken wait in the link's queue, so that
the kernel holds few of them. The kernel detects dead peers, so one message may take minutes as long as bytes move.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.processes.addresses import SCHEME, is_loopback, join, listening_socket, lookup, split, unmapped
from psgc.transport.host import local_address_for
from psgc.transport.link import IN_PLACE_BYTES, MAX_BYTES, MAX_MESSAGES, Dial, Listener, Transport, Trouble
from psgc.transport.lookup import Lookup
from psgc.transport.memory.segment import Place
from psgc.transport.pacing import PacedLink, cut
from psgc.transport.security.encryption import TAG_BYTES, Cipher
from psgc.transport.security.handshake import Proof
from psgc.transport.socket_link import MESSAGE_BYTES, SocketLink
from psgc.transport.tcp_remedies import remedy
from psgc.wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

Bytes = NDArray[np.uint8]
STAGE_BYTES: Final = 16 << 10  # buffer in which many headers and small payloads are received at once
UNSENT_BYTES: Final = 128 << 10  # what the kernel may hold beyond the bytes in flight, until a connection is known to be fast
MOST_UNSENT_BYTES: Final = 1 << 20
# The same for a fast connection, in seconds: a busy machine wakes the thread no sooner, and the path must not be idle until then.
UNSENT_S: Final = 0.01
RATED_BYTES: Final = 1 << 20  # a connection's rate is determined after so many bytes
WAKE_BYTES: Final = 512 << 10  # of a large payload must have come before a poll returns
SEND_AT_ONCE: Final = 32  # messages in one system call
SEALED_BYTES: Final = 256 << 10  # how far ahead of the kernel messages are encrypted
KEEPALIVE_S: Final = 5
MOST_PROBES: Final = 127  # that the kernel takes; beyond these the time without an answer decides alone
# Of Linux's struct tcp_info, in microseconds: busy_time, while bytes were not acknowledged; rwnd_limited, while that was for want of room at the receiver.
_BUSY: Final = struct.Struct("@QQ")
_BUSY_AT: Final = 168
_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


def set_options(sock: socket.socket, dead_s: float) -> None:
    """Switch Nagle's algorithm off, keep little unsent in the kernel, and end a connection whose path carries nothing for ``dead_s``."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(MOST_PROBES, max(1, math.ceil(dead_s / KEEPALIVE_S) - 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(dead_s * 1000), 2**31 - 1))


@dataclass(slots=True)
class _Outgoing:
    """A queued message. body: its payload; once sealed, encrypted and followed by its tag. counted: whether ``unsent`` counts it. kept: bytes of
    memory that the message itself takes."""

    head: bytes
    body: memoryview | None
    counted: bool
    kept: int
    sealed: bool = False


class TcpLink(SocketLink):
    """One end of a connection."""

    queues = True

    def __init__(self, sock: socket.socket, proof: Proof, peer: str, dead_s: float) -> None:
        super().__init__(sock, proof, peer)
        set_options(sock, dead_s)
        self._queue: deque[_Outgoing] = deque()
        self._cipher: Cipher | None = None
        self._sent = 0  # bytes of the queue's first message that the kernel has taken
        self._unsent_bytes = UNSENT_BYTES  # TCP_NOTSENT_LOWAT
        self._taken_since, self._taken = 0.0, 0  # since when messages have waited here, and how many of their bytes the kernel has taken
        self._held_since = self._held_s = 0.0  # since when the simulated link has held up what waits here; and for how long, before that
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._lo = self._hi = 0  # the range of the buffer that has not been read yet
        self._header: Header | None = None  # header of the payload that is being received
        self._array, self._payload = _NOTHING, _NOTHING.data
        self._filled = 0
        self._head = b""  # the same header's bytes, which the tag covers
        self._wake = 1  # SO_RCVLOWAT

    @classmethod
    def connect(cls, family: int, address: Any, proof: Proof, dead_s: float, source: str = "") -> TcpLink:
        """Begin to connect; ``prove`` finds out whether that succeeded. source: this end's address; "" for the one that the route has. Raises OSError if
        it fails at once."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            link = cls(sock, proof, join(unmapped(str(address[0])), address[1]), dead_s)
            if source:
                with contextlib.suppress(OSError):  # an address that is translated on its way (NAT) is none of this machine's
                    sock.bind((source, 0))
            sock.connect(address)
        except BlockingIOError:
            return link
        except OSError:
            sock.close()
            raise
        return link

    def prove(self) -> bool:
        proved = super().prove()
        if proved and self.proof.encrypted and self._cipher is None:
            self._cipher = Cipher(*self.proof.keys)
        return proved

    @property
    def queued(self) -> bool:
        return bool(self._queue)

    @property
    def receiving(self) -> bool:
        return self._header is not None

    def leaving_s(self, now: float) -> float:
        try:
            told = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BUSY_AT + _BUSY.size)
        except OSError:
            return 0.0
        busy_us, full_us = _BUSY.unpack_from(told, _BUSY_AT) if len(told) >= _BUSY_AT + _BUSY.size else (0, 0)
        held_s = self._held_s + (max(0.0, now - self._held_since) if self._held_since else 0.0)
        return max(held_s, float(busy_us - full_us) / 1e6)

    @property
    def source(self) -> str:
        return self.peer.rpartition(":")[0]

    def slow_down(self, pace: PacedLink) -> None:
        self.pace = pace
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, pace.queue_bytes)

    def send(self, header: Header, body: Any = None, place: Place | None = None) -> None:
        payload: Any = body if place is None else place.bytes[: header.payload_bytes]
        view = memoryview(payload) if payload is not None and len(payload) else None
        self.unsent += view is not None
        kept = 0 if place is not None else MESSAGE_BYTES + (0 if view is None else view.nbytes)
        self._queue.append(_Outgoing(pack_header(header), view, view is not None, kept))
        self._keep(kept)

    def flush(self) -> None:
        while self._queue and not self.closed:
            pieces, total = self._pieces()
            if self.pace is not None:
                allowed = self.pace.out.allowance()
                self.held_out = allowed == 0
                if self.held_out:
                    self._held_since = self._held_since or time.monotonic()
                    return
                pieces, total = cut(pieces, allowed), min(total, allowed)
            try:
                sent = self.socket.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error.strerror or str(error))
                return
            self._forget(sent)
            if self.pace is not None:
                self.pace.out.spend(sent, more=self.queued)
                if self._held_since and not self._queue:
                    self._held_s += time.monotonic() - self._held_since
                    self._held_since = 0.0
            self._rate(sent)
            if sent < total:
                return

    def _rate(self, sent: int) -> None:
        """The kernel has taken ``sent`` bytes of the queue. Their rate determines how many bytes it may hold unsent."""
        now = time.monotonic()
        if not self._queue or not self._taken_since:
            self._taken_since, self._taken = now if self._queue else 0.0, 0
            return
        self._taken += sent
        if self._taken >= RATED_BYTES:
            wanted = UNSENT_S * self._taken / max(now - self._taken_since, 1e-6)
            unsent = UNSENT_BYTES
            while unsent < min(wanted, MOST_UNSENT_BYTES):
                unsent *= 2
            if unsent != self._unsent_bytes:
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
                self._unsent_bytes = unsent
            self._taken_since, self._taken = now, 0

    def _pieces(self) -> tuple[list[Any], int]:
        """The pieces to send next, and their total size."""
        pieces: list[Any] = []
        skip, total = self._sent, -self._sent
        for _, message in zip(range(SEND_AT_ONCE), self._queue, strict=False):
            if self._cipher is not None and not message.sealed:
                if total >= SEALED_BYTES:
                    break  # sealed messages take memory of their own
                message.body, message.sealed = self._cipher.seal(message.head, message.body), True
            head, payload = message.head, message.body
            if skip < HEADER_BYTES:
                pieces.append(head[skip:] if skip else head)
                skip = HEADER_BYTES
            total += HEADER_BYTES
            if payload is not None:
                pieces.append(payload[skip - HEADER_BYTES :] if skip > HEADER_BYTES else payload)
                total += len(payload)
            skip = 0
        return pieces, total

    def _forget(self, sent: int) -> None:
        """The kernel has taken ``sent`` more bytes: remove them from the queue."""
        self._sent += sent
        while self._queue:
            payload = self._queue[0].body
            size = HEADER_BYTES + (0 if payload is None else len(payload))
            if self._sent < size:
                return
            self._sent -= size
            message = self._queue.popleft()
            self.unsent -= message.counted
            self._keep(-message.kept)

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        self.more = False
        drained = False
        while not self.closed:
            message = self._next()
            if message is not None:
                yield message
                messages, nbytes = messages - 1, nbytes - message[0].payload_bytes
                if messages <= 0 or nbytes <= 0:
                    self.more = True
                    break
            elif drained:
                break
            else:
                drained = self._fill()
        if not self.closed:
            self._wake_for(len(self._payload) - self._filled)

    def _next(self) -> tuple[Header, Any] | None:
        """The next complete message that has been received, or None."""
        header = self._header
        if header is None:
            if self._hi - self._lo < HEADER_BYTES:
                return None
            header = unpack_header(self._stage[self._lo : self._lo + HEADER_BYTES])
            if self._cipher is not None:
                self._head = bytes(self._stage[self._lo : self._lo + HEADER_BYTES])
            self._lo += HEADER_BYTES
            if header.payload_bytes == 0 and self._cipher is None:
                return header, None
            if header.payload_bytes > MAX_PAYLOAD_BYTES:
                raise RemoteProtocolError(f"payload of {header.payload_bytes} bytes, at most {MAX_PAYLOAD_BYTES}", ErrorCode.MALFORMED)
            self._header, self._filled = header, 0
            self._array = self._room(header)
            self._payload = self._array.data
        count = min(self._hi - self._lo, len(self._payload) - self._filled)
        if count:
            self._payload[self._filled : self._filled + count] = self._stage[self._lo : self._lo + count]
            self._lo, self._filled = self._lo + count, self._filled + count
        if self._filled < len(self._payload):
            return None
        if self._cipher is not None:
            self._cipher.open(self._head, self._payload)
        array, self._array, self._payload = self._array, _NOTHING, _NOTHING.data
        self._header, self._filled = None, 0
        return header, array[: header.payload_bytes] if header.payload_bytes else None

    def _room(self, header: Header) -> Bytes:
        """Memory to receive the payload into, and the tag that follows it."""
        if self._cipher is not None:
            return self.buffers.take(header.payload_bytes + TAG_BYTES)
        wanted = self.posted(self, header) if header.payload_bytes >= IN_PLACE_BYTES else None
        return self.buffers.take(header.payload_bytes) if wanted is None else wanted

    def _fill(self) -> bool:
        """Receive more, directly into the payload that is under way. True if no more bytes have come."""
        stage, lacks = self._stage, len(self._payload) - self._filled
        if self._lo:
            stage[: self._hi - self._lo] = stage[self._lo : self._hi]
            self._lo, self._hi = 0, self._hi - self._lo
        rooms: list[memoryview] = [self._payload[self._filled :], stage] if lacks else [stage[self._hi :]]
        room = lacks + STAGE_BYTES - self._hi
        if self.pace is not None:
            allowed = self.pace.into.allowance()
            self.held_in = allowed == 0
            if self.held_in:
                return True
            rooms, room = cut(rooms, allowed), min(room, allowed)
        try:
            count = self.socket.recvmsg_into(rooms)[0]
        except BlockingIOError:
            return True
        except OSError as error:
            self.fail(error.strerror or str(error))
            return True
        if count == 0:
            self.fail("closed by the peer")
            return True
        if self.pace is not None:
            self.pace.into.spend(count, more=count == room)
        self._filled += min(count, lacks)
        self._hi += max(0, count - lacks)
        return count < room

    def _wake_for(self, lacks: int) -> None:
        """Make polls return once much of a large payload has come, not for every packet."""
        wake = min(lacks, WAKE_BYTES if self.pace is None else self.pace.into.quantum) if lacks > STAGE_BYTES else 1
        if wake != self._wake:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
            self._wake = wake

    def close(self) -> None:
        self._queue.clear()
        self.unsent = 0
        super().close()

    def see_off(self, patience_s: float) -> None:
        """Before closing: send the rest, shut down the sending direction, and wait for the peer to close. Otherwise, if bytes of the peer were
        unread here, the close would reset the connection, and the peer would lose what it has not read yet."""
        if self.closed or not self.proof.done:
            return
        until = time.monotonic() + patience_s
        try:
            while self._queue and (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                self._forget(self.socket.sendmsg(self._pieces()[0]))
            self.socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv_into(self._stage):
                    return
        except OSError:
            return


class TcpListener(Listener):
    """Where workers connect. host: the address to listen on, "" for all of this machine's. reached_at: the host that is told to workers, by default
    the same; advertised: a host:port that is told to them instead. listening: a socket that listens there already. Raises PsgcError if the port is taken."""

    def __init__(
        self, host: str, port: int, dead_s: float, reached_at: str = "", advertised: str = "", listening: socket.socket | None = None
    ) -> None:
        self.transport = TRANSPORT
        self._dead_s = dead_s
        self.socket = listening_socket(port, host) if listening is None else listening
        self.socket.setblocking(False)
        self.port = int(self.socket.getsockname()[1])
        self._advertised = advertised or join(reached_at or host, self.port)

    @property
    def address(self) -> str:
        return SCHEME + self._advertised

    @property
    def listening(self) -> socket.socket:
        return self.socket

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self, proof: Proof) -> TcpLink:
        sock, address = self.socket.accept()
        return TcpLink(sock, proof, join(unmapped(str(address[0])), address[1]), self._dead_s)

    def close(self) -> None:
        self.socket.close()


class _Dialer:
    """Connects to ``tcp://host:port``. If the name has several addresses, they are tried one after the other; from the second attempt on, the
    name is also looked up again. source: a name or an address of this machine that connections are made from, of the families that it has; "" for
    the one that the route has."""

    def __init__(self, address: str, dead_s: float, source: str = "") -> None:
        self._address, self._dead_s, self._source, self._attempts = address, dead_s, source, 0
        self._lookup: Lookup | None = None

    def __call__(self, proof: Proof) -> TcpLink:
        if self._lookup is None:
            try:
                self._lookup = Lookup(*split(self._address))
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error)) from None
        found = self._lookup.addresses(again=self._attempts > 0)
        family, where = found[self._attempts % len(found)]
        self._attempts += 1
        return TcpLink.connect(family, where, proof, self._dead_s, self._own(family))

    def _own(self, family: int) -> str:
        """The address of that family to connect from. Raises OSError where this machine has no address of the source's name."""
        found = [str(where[0]) for its, where in lookup(self._source, 0) if its == family] if self._source else []
        return found[0] if found else ""


class Tcp(Transport):
    """Between any two hosts."""

    name = "tcp"
    label = "tcp"
    copies = True
    encrypts = True

    def listen(self, config: Config) -> TcpListener:
        """See Transport."""
        return self._listener(config, None)

    def listen_with(self, config: Config, listening: socket.socket) -> TcpListener:
        """See Transport."""
        return self._listener(config, listening)

    @staticmethod
    def _listener(config: Config, listening: socket.socket | None) -> TcpListener:
        """Listen on the address from which the scheduler is reached, unless another one is configured: a job on one machine listens on loopback
        only."""
        reached_at = "" if config.advertise else config.node_host or local_address_for(config.root_host)
        if not config.node_host and is_loopback(reached_at) and not is_loopback(config.root_host):
            reached_at = config.root_host  # this is the scheduler's machine, whose name leads to itself here, and to its address elsewhere
        host = config.node_host or config.root_host
        alone = is_loopback(config.root_host) and is_loopback(host) and not config.advertise
        own = config.node_host or local_address_for(host)  # loopback has many addresses
        return TcpListener(own if alone else "", config.port, config.dead_s, reached_at, config.advertise, listening)

    def dialer(self, address: str, config: Config) -> Dial:
        return _Dialer(address, config.dead_s, config.node_host)

    def remedy(self, address: str, same_host: bool, trouble: Trouble) -> str:
        return remedy(address, same_host, trouble)


TRANSPORT: Final = Tcp()
