"""The transport between peers on one host: payloads stay in shared memory; a Unix socket carries headers and passes the memory's descriptors.

A segment is passed to the peer before the first message whose payload lies in it, in a packet of its own; other messages share packets. Abstract socket
names leave no file behind and live in the network namespace, so two processes that can connect and map a passed descriptor share a host. Knows headers, not
their meaning.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from psgc.config import Config
from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Dial, Listener, Transport, Trouble
from psgc.transport.memory.segment import Place, Segment
from psgc.transport.security.handshake import Proof, Refused
from psgc.transport.socket_link import MESSAGE_BYTES, SocketLink
from psgc.wire.frames import HEADER_BYTES, Flag, Header, Kind, header_at, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

logger = logging.getLogger(__name__)

SCHEME: Final = "shm://"
LOCATOR: Final = struct.Struct("<QQ")  # segment id, offset; follows the header of a LOCATED message
MAX_SEGMENTS: Final = 256  # of one peer; an arena's segments double in size, so it never needs so many
MAX_PACKET_BYTES: Final = 128 << 10  # headers and small control bodies; below the kernel's default socket buffer
TOGETHER_BYTES: Final = 16 << 10  # of messages that leave in one packet
MAX_TOGETHER: Final = 256  # messages
_KIND_AT: Final = 5  # of a header's bytes


class LocalLink(SocketLink):
    """One end of a connection: packets of messages ``[header][locator or body]``. What is queued leaves in as few packets as it fits in."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        super().__init__(sock, proof, peer)
        self._passed: dict[Segment, int] = {}  # segments of this process that were passed to the peer, and their ids
        self._segments: dict[int, Segment] = {}  # the peer's segments, by the ids that it gave them
        self._queue: deque[tuple[bytes, int | None]] = deque()  # messages, with the descriptor that a SEGMENT passes
        self._packet = memoryview(bytearray(MAX_PACKET_BYTES))  # the one that is being read
        self._lo = self._hi = 0  # the range of it that has not been read yet

    @classmethod
    def connect(cls, name: str, proof: Proof) -> LocalLink:
        """Connect to an abstract socket. Raises OSError if nobody listens there (another host or namespace)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect("\0" + name)
        except OSError:
            sock.close()
            raise
        return cls(sock, proof, name)

    @property
    def queued(self) -> bool:
        return bool(self._queue)

    def send(self, header: Header, body: Any = None, place: Place | None = None) -> None:
        if place is None:
            self._put(pack_header(header) + (b"" if body is None else bytes(body)), None)
            return
        if place.segment is None:
            raise LocalProtocolError("a payload outside of shared memory cannot be told to a peer")
        segment = self._passed.get(place.segment)
        if segment is None:
            segment = self._pass(place.segment)
        located = Header(header.kind, header.flags | Flag.LOCATED, *header[2:])
        self._put(pack_header(located) + LOCATOR.pack(segment, place.offset), None)

    def _pass(self, segment: Segment) -> int:
        """Pass a segment to the peer. Returns its id, which locators may then name."""
        number = self._passed[segment] = len(self._passed)
        self._put(pack_header(Header(Kind.SEGMENT, key=number, payload_bytes=segment.nbytes)), segment.fd)
        return number

    def flush(self) -> None:
        while self._queue and not self.closed:
            messages, fd = self._next_packet()
            try:
                if fd is None:
                    self.socket.sendmsg(messages)
                else:
                    socket.send_fds(self.socket, messages, [fd])
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error.strerror or str(error))
                return
            for data in messages:
                self._queue.popleft()
                self._keep(-MESSAGE_BYTES - len(data))

    def _next_packet(self) -> tuple[list[bytes], int | None]:
        """The messages that leave next, together, and a descriptor that goes with them: a SEGMENT leaves alone."""
        first, fd = self._queue[0]
        messages, nbytes = [first], len(first)
        for data, other in itertools.islice(self._queue, 1, MAX_TOGETHER) if fd is None else ():
            nbytes += len(data)
            if other is not None or nbytes > TOGETHER_BYTES:
                break
            messages.append(data)
        return messages, fd

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        self.more = False
        while not self.closed:
            if messages <= 0:  # only messages count: payloads lie in memory and take no time here
                self.more = True
                return
            if self._lo < self._hi:
                messages -= 1
                yield self._next()
                continue
            try:
                count, ancillary, _, _ = self.socket.recvmsg_into([self._packet], socket.CMSG_SPACE(4))
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error.strerror or str(error))
                return
            if count == 0:
                self.fail("closed by the peer")
                return
            if ancillary or self._packet[_KIND_AT] == Kind.SEGMENT:
                self._attach(self._packet[:count], ancillary)
                messages -= 1
            else:
                self._lo, self._hi = 0, count

    def _attach(self, data: memoryview, ancillary: list[tuple[int, int, bytes]]) -> None:
        """The peer passes a segment."""
        rights = [raw for level, kind, raw in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        fds = [fd for raw in rights for (fd,) in struct.iter_unpack("i", raw[: len(raw) // 4 * 4])]  # padding has room for a second one
        try:
            header = unpack_header(data)
            full = len(self._segments) >= MAX_SEGMENTS and header.key not in self._segments
            if header.kind != Kind.SEGMENT or len(fds) != 1 or full:
                raise RemoteProtocolError(
                    f"{Kind(header.kind).name} with {len(fds)} descriptors, {len(self._segments)} segments are here; expected a SEGMENT with one, "
                    f"and at most {MAX_SEGMENTS}",
                    ErrorCode.MALFORMED,
                )
            self._segments[header.key] = Segment.attach(fds.pop(), header.payload_bytes)
        finally:
            for fd in fds:
                os.close(fd)

    def _next(self) -> tuple[Header, Any]:
        """The packet's next message."""
        start, self._lo = self._lo, self._lo + HEADER_BYTES
        if self._lo > self._hi:
            raise RemoteProtocolError(f"header of {self._hi - start} bytes, expected {HEADER_BYTES}", ErrorCode.MALFORMED)
        header = header_at(self._packet, start)
        if header.flags & Flag.LOCATED:
            if self._hi - self._lo < LOCATOR.size:
                raise RemoteProtocolError(f"locator of {self._hi - self._lo} bytes, expected {LOCATOR.size}", ErrorCode.MALFORMED)
            segment_id, offset = LOCATOR.unpack_from(self._packet, self._lo)
            self._lo += LOCATOR.size
            segment = self._segments.get(segment_id)
            if segment is None:
                raise RemoteProtocolError(f"payload in segment {segment_id:#x}, which was never passed", ErrorCode.MALFORMED)
            return Header(header.kind, header.flags & ~Flag.LOCATED, *header[2:]), segment.view(offset, header.payload_bytes)
        if header.kind == Kind.SEGMENT:
            raise RemoteProtocolError("SEGMENT amid other messages, expected it alone", ErrorCode.MALFORMED)
        if not header.payload_bytes:
            return header, None
        if header.payload_bytes > self._hi - self._lo:
            raise RemoteProtocolError(f"body of {self._hi - self._lo} bytes, header says {header.payload_bytes}", ErrorCode.MALFORMED)
        body = bytes(self._packet[self._lo : self._lo + header.payload_bytes])
        self._lo += header.payload_bytes
        return header, body

    def _put(self, data: bytes, fd: int | None) -> None:
        if len(data) > MAX_PACKET_BYTES:
            raise ValueError(f"packet of {len(data)} bytes; large bodies go over TCP")
        self._queue.append((data, fd))
        self._keep(MESSAGE_BYTES + len(data))

    def close(self) -> None:
        super().close()
        self._queue.clear()
        self._passed.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class LocalListener(Listener):
    """Where peers on this host connect. name: of an abstract socket; listening: one that listens already."""

    def __init__(self, name: str, listening: socket.socket | None = None) -> None:
        self.transport = TRANSPORT
        self.name = name
        if listening is None:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            listening.bind("\0" + name)
            listening.listen(1024)
        self.socket = listening
        self.socket.setblocking(False)

    @property
    def address(self) -> str:
        return SCHEME + self.name

    @property
    def listening(self) -> socket.socket:
        return self.socket

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self, proof: Proof) -> LocalLink:
        """See Listener. Raises Refused if the peer is of another user: abstract sockets have no permissions."""
        sock, _ = self.socket.accept()
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            sock.close()
            raise Refused("user", f"pid {pid} is of user {uid}, this server of user {os.getuid()}")
        return LocalLink(sock, proof, f"pid {pid}")

    def close(self) -> None:
        self.socket.close()


class SharedMemory(Transport):
    """Between processes of one host and one network namespace."""

    name = "shm"
    label = "unix"
    local = True

    def listen(self, config: Config) -> LocalListener:
        return LocalListener(f"psgc/{config.job:x}/{os.getpid()}/{secrets.token_hex(4)}")

    def listen_with(self, config: Config, listening: socket.socket) -> LocalListener:
        """See Transport."""
        return LocalListener(bytes(listening.getsockname()).decode().removeprefix("\0"), listening)

    def dialer(self, address: str, config: Config) -> Dial:
        return partial(LocalLink.connect, address.removeprefix(SCHEME))

    def reaches(self, address: str, same_host: bool) -> bool:
        return same_host and answers(address.removeprefix(SCHEME))

    def remedy(self, address: str, same_host: bool, trouble: Trouble) -> str:
        if trouble.number == errno.ECONNREFUSED:
            return "nobody listens there any more; has the server ended? Look at its log"
        if trouble.number == 0:
            return f"it accepts connections there and does not answer ({trouble.text}); is it stopped or busy?"
        return trouble.text


def answers(name: str) -> bool:
    """Whether a server listens at this abstract socket: on this host, and in this network namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
        trial.setblocking(False)
        try:
            trial.connect("\0" + name)
        except BlockingIOError:  # its queue of new connections is full
            return True
        except OSError as error:
            logger.info("server on this host does not answer locally address=%s error=%s", name, error)
            return False
    return True


TRANSPORT: Final = SharedMemory()
