"""The transport between peers on one host: payloads stay in shared memory; a Unix socket carries headers and passes the memory's descriptors.

A segment is passed to the peer before the first message whose payload lies in it. Abstract socket names leave no file behind and live in
the network namespace, so two processes that can connect and map a passed descriptor share a host. Knows headers, not their meaning.
"""

from __future__ import annotations

import errno
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
from psgc.errors import RemoteProtocolError
from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Dial, Listener, Transport, Trouble
from psgc.transport.memory.segment import Place, Segment
from psgc.transport.security.handshake import Proof, Refused
from psgc.transport.socket_link import MESSAGE_BYTES, SocketLink
from psgc.wire.frames import HEADER_BYTES, Flag, Header, Kind, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

logger = logging.getLogger(__name__)

SCHEME: Final = "shm://"
LOCATOR: Final = struct.Struct("<QQ")  # segment id, offset; follows the header of a LOCATED message
MAX_SEGMENTS: Final = 256  # of one peer; an arena's segments double in size, so it never needs so many
MAX_PACKET_BYTES: Final = 128 << 10  # headers and small control bodies; below the kernel's default socket buffer


class LocalLink(SocketLink):
    """One end of a connection: packets ``[header][locator or body]``. Packets that the socket has no room for are queued."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        super().__init__(sock, proof, peer)
        self._passed: dict[Segment, int] = {}  # segments of this process that were passed to the peer, and their ids
        self._segments: dict[int, Segment] = {}  # the peer's segments, by the ids that it gave them
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._buffer = bytearray(MAX_PACKET_BYTES)

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
        segment = self._passed.get(place.segment)
        if segment is None:
            segment = self._pass(place.segment)
        self._put(pack_header(header._replace(flags=header.flags | Flag.LOCATED)) + LOCATOR.pack(segment, place.offset), None)

    def _pass(self, segment: Segment) -> int:
        """Pass a segment to the peer. Returns its id, which locators may then name."""
        number = self._passed[segment] = len(self._passed)
        self._put(pack_header(Header(Kind.SEGMENT, key=number, payload_bytes=segment.nbytes)), segment.fd)
        return number

    def flush(self) -> None:
        while self._queue and not self.closed:
            data, fd = self._queue[0]
            try:
                if fd is None:
                    self.socket.send(data)
                else:
                    socket.send_fds(self.socket, [data], [fd])
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error.strerror or str(error))
                return
            self._queue.popleft()
            self._keep(-MESSAGE_BYTES - len(data))

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        self.more = False
        while not self.closed:
            if messages <= 0:  # only messages count: payloads lie in memory and take no time here
                self.more = True
                return
            try:
                count, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], socket.CMSG_SPACE(4))
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(error.strerror or str(error))
                return
            if count == 0:
                self.fail("closed by the peer")
                return
            message = self._parse(memoryview(self._buffer)[:count], ancillary)
            messages -= 1
            if message is not None:
                yield message

    def _parse(self, data: memoryview, ancillary: list[tuple[int, int, bytes]]) -> tuple[Header, Any] | None:
        rights = [raw for level, kind, raw in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        fds = [fd for raw in rights for (fd,) in struct.iter_unpack("i", raw[: len(raw) // 4 * 4])]  # padding has room for a second one
        try:
            header = unpack_header(data[:HEADER_BYTES])
            if header.kind == Kind.SEGMENT:
                if len(fds) != 1 or (len(self._segments) >= MAX_SEGMENTS and header.key not in self._segments):
                    raise RemoteProtocolError(
                        f"SEGMENT with {len(fds)} descriptors, {len(self._segments)} are here; expected one, and at most {MAX_SEGMENTS}",
                        ErrorCode.MALFORMED,
                    )
                self._segments[header.key] = Segment.attach(fds.pop(), header.payload_bytes)
                return None
        finally:
            for fd in fds:
                os.close(fd)
        if header.flags & Flag.LOCATED:
            if len(data) != HEADER_BYTES + LOCATOR.size:
                raise RemoteProtocolError(f"locator of {len(data) - HEADER_BYTES} bytes, expected {LOCATOR.size}", ErrorCode.MALFORMED)
            segment_id, offset = LOCATOR.unpack(data[HEADER_BYTES:])
            segment = self._segments.get(segment_id)
            if segment is None:
                raise RemoteProtocolError(f"payload in segment {segment_id:#x}, which was never passed", ErrorCode.MALFORMED)
            return header._replace(flags=header.flags & ~Flag.LOCATED), segment.view(offset, header.payload_bytes)
        body = bytes(data[HEADER_BYTES:])
        if len(body) != header.payload_bytes:
            raise RemoteProtocolError(f"body of {len(body)} bytes, header says {header.payload_bytes}", ErrorCode.MALFORMED)
        return header, body or None

    def _put(self, data: bytes, fd: int | None) -> None:
        if len(data) > MAX_PACKET_BYTES:
            raise ValueError(f"packet of {len(data)} bytes; large bodies go over TCP")
        self._queue.append((data, fd))
        self._keep(MESSAGE_BYTES + len(data))
        self.flush()

    def close(self) -> None:
        super().close()
        self._queue.clear()
        self._passed.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class LocalListener(Listener):
    """Where peers on this host connect. name: of an abstract socket."""

    def __init__(self, name: str) -> None:
        self.transport = TRANSPORT
        self.name = name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.socket.bind("\0" + name)
        self.socket.listen(1024)

    @property
    def address(self) -> str:
        return SCHEME + self.name

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
