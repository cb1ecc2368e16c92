"""Peers on one host: payloads stay in shared memory, only headers travel, over a Unix socket that also passes the memory.

Owns segments (sealed memfds) and the SEQPACKET link between two processes. Abstract socket names leave no file behind and live in
the network namespace, so two processes that can connect and map a passed descriptor share a host. Knows headers, not their meaning.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from psgc.errors import RemoteProtocolError
from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Link
from psgc.transport.memory.segment import Segment
from psgc.transport.security.handshake import Proof, Refused
from psgc.wire.frames import HEADER_BYTES, Flag, Header, Kind, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

logger = logging.getLogger(__name__)

LOCATOR: Final = struct.Struct("<QQ")  # segment id, offset; follows the header of a LOCATED message
MAX_SEGMENTS: Final = 256  # of one peer; an arena doubles from one to the next and never gets there
MAX_PACKET_BYTES: Final = 128 << 10  # headers and small control bodies; below the kernel's default socket buffer


class LocalLink(Link):
    """One end of a connection: packets ``[header][locator or body]``; what does not fit now is queued."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        super().__init__(sock, proof, peer)
        self._segments: dict[int, Segment] = {}
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._buffer = bytearray(MAX_PACKET_BYTES)

    @classmethod
    def connect(cls, address: str, proof: Proof) -> LocalLink:
        """Connect to an abstract socket. Raises OSError if nobody listens there (another host or namespace)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect("\0" + address)
        except OSError:
            sock.close()
            raise
        return cls(sock, proof, address)

    @property
    def queued(self) -> bool:
        return bool(self._queue)

    def announce(self, segment_id: int, segment: Segment) -> None:
        """Pass a segment to the peer; it may then be named in locators."""
        header = Header(Kind.SEGMENT, key=segment_id, payload_bytes=segment.nbytes)
        self._put(pack_header(header), segment.fd)

    def send_located(self, header: Header, segment_id: int, offset: int) -> None:
        """A message whose payload lies in an announced segment."""
        self._put(pack_header(header._replace(flags=header.flags | Flag.LOCATED)) + LOCATOR.pack(segment_id, offset), None)

    def send(self, header: Header, body: bytes = b"") -> None:
        """A message with a small body, or none."""
        self._put(pack_header(header) + body, None)

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

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        self.more = False
        while not self.closed:
            if messages <= 0:  # payloads lie in memory: they take no time here
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
        self.flush()

    def close(self) -> None:
        super().close()
        self._queue.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class LocalListener:
    """Where peers on this host connect."""

    transport = "unix"

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.socket.bind("\0" + address)
        self.socket.listen(1024)

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self, proof: Proof) -> LocalLink:
        """A new connection. Raises BlockingIOError if there is none, OSError if it cannot be had, Refused if it is of another user:
        abstract sockets know no permissions."""
        sock, _ = self.socket.accept()
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            sock.close()
            raise Refused("user", f"pid {pid} is of user {uid}, this server of user {os.getuid()}")
        return LocalLink(sock, proof, f"pid {pid}")

    def close(self) -> None:
        self.socket.close()
