"""Payload connections over TCP by plain sockets: ``[header][payload]`` after ``[header][payload]``, lengths checked before anything is kept.

Payloads leave from where they lie and are received where they stay. What the kernel has not taken waits in the link's queue, so that
the kernel holds little; whether the peer lives is the kernel's to find out, so that one message may take minutes while bytes move.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.addresses import join, listening_socket, unmapped
from psgc.errors import RemoteProtocolError
from psgc.transport.handshake import Proof
from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Link
from psgc.transport.pacing import cut
from psgc.wire.frames import HEADER_BYTES, Header, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

Bytes = NDArray[np.uint8]
MAX_PAYLOAD_BYTES: Final = 512 << 20  # a part is far smaller
STAGE_BYTES: Final = 16 << 10  # headers and small payloads are received many at once
UNSENT_BYTES: Final = 512 << 10  # that the kernel keeps beyond what is on its way
WAKE_BYTES: Final = 512 << 10  # of a large payload are to be there before a poll returns
SEND_AT_ONCE: Final = 32  # messages in one system call
KEEPALIVE_S: Final = 5
_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


def set_options(sock: socket.socket, dead_s: float) -> None:
    """No delay; little unsent in the kernel; a path that carries nothing for ``dead_s`` ends the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil(dead_s / KEEPALIVE_S) - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_s * 1000))


class TcpLink(Link):
    """One end of a connection."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str, dead_s: float) -> None:
        super().__init__(sock, proof, peer)
        set_options(sock, dead_s)
        self._queue: deque[tuple[bytes, memoryview | None]] = deque()
        self._sent = 0  # bytes of the first of them that the kernel has taken
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._lo = self._hi = 0  # what is in it and not looked at yet
        self._header: Header | None = None  # of the payload that is being received
        self._array, self._payload = _NOTHING, _NOTHING.data
        self._filled = 0
        self._wake = 1  # SO_RCVLOWAT

    @classmethod
    def connect(cls, family: int, address: Any, proof: Proof, dead_s: float) -> TcpLink:
        """Begin to connect; ``prove`` finds out whether it has. Raises OSError if that fails at once."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            link = cls(sock, proof, join(unmapped(str(address[0])), address[1]), dead_s)
            sock.connect(address)
        except BlockingIOError:
            return link
        except OSError:
            sock.close()
            raise
        return link

    @property
    def queued(self) -> bool:
        return bool(self._queue)

    def send(self, header: Header, payload: Any = None) -> None:
        """Queue one message; ``flush`` sends it. ``payload`` (bytes or a uint8 array) must stay as it is until the peer has answered."""
        view = None
        if payload is not None and len(payload):
            view = memoryview(payload)
            self.unsent += 1
        self._queue.append((pack_header(header), view))

    def flush(self) -> None:
        while self._queue and not self.closed:
            pieces, total = self._pieces()
            if self.pace is not None:
                allowed = self.pace.out.allowance()
                self.held_out = allowed == 0
                if self.held_out:
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
            if sent < total:
                return

    def _pieces(self) -> tuple[list[Any], int]:
        """What to send next, and how much that is."""
        pieces: list[Any] = []
        skip, total = self._sent, -self._sent
        for _, (head, payload) in zip(range(SEND_AT_ONCE), self._queue, strict=False):
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
        """The kernel has taken so many more bytes."""
        self._sent += sent
        while self._queue:
            payload = self._queue[0][1]
            size = HEADER_BYTES + (0 if payload is None else len(payload))
            if self._sent < size:
                return
            self._sent -= size
            self._queue.popleft()
            if payload is not None:
                self.unsent -= 1

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
        """The next whole message of what has been received."""
        header = self._header
        if header is None:
            if self._hi - self._lo < HEADER_BYTES:
                return None
            header = unpack_header(self._stage[self._lo : self._lo + HEADER_BYTES])
            self._lo += HEADER_BYTES
            if header.payload_bytes == 0:
                return header, None
            if header.payload_bytes > MAX_PAYLOAD_BYTES:
                raise RemoteProtocolError(f"payload of {header.payload_bytes} bytes, at most {MAX_PAYLOAD_BYTES}", ErrorCode.MALFORMED)
            self._header, self._filled = header, 0
            self._array = np.empty(header.payload_bytes, np.uint8)
            self._payload = self._array.data
        count = min(self._hi - self._lo, len(self._payload) - self._filled)
        if count:
            self._payload[self._filled : self._filled + count] = self._stage[self._lo : self._lo + count]
            self._lo, self._filled = self._lo + count, self._filled + count
        if self._filled < len(self._payload):
            return None
        array, self._array, self._payload = self._array, _NOTHING, _NOTHING.data
        self._header, self._filled = None, 0
        return header, array

    def _fill(self) -> bool:
        """Receive more, straight into the payload that is under way. True if there is nothing more to be had now."""
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
        """Have polls return when much of a large payload is there, and not for every packet."""
        wake = min(lacks, WAKE_BYTES if self.pace is None else self.pace.into.quantum) if lacks > STAGE_BYTES else 1
        if wake != self._wake:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
            self._wake = wake

    def close(self) -> None:
        self._queue.clear()
        self.unsent = 0
        super().close()

    def see_off(self, patience_s: float) -> None:
        """Before it is closed: send the rest, say that there is no more, and wait for the peer to close. Without that, what the peer has not
        read yet would be lost where something of its own is unread here."""
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


class TcpListener:
    """Where workers connect. host: "" for all addresses of this machine. Raises PsgcError if the port is taken."""

    transport = "tcp"

    def __init__(self, host: str, port: int, dead_s: float) -> None:
        self._dead_s = dead_s
        self.socket = listening_socket(port, host)
        self.socket.setblocking(False)
        self.port = int(self.socket.getsockname()[1])

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self, proof: Proof) -> TcpLink:
        """A new connection. Raises BlockingIOError if there is none, OSError if it cannot be had."""
        sock, address = self.socket.accept()
        return TcpLink(sock, proof, join(unmapped(str(address[0])), address[1]), self._dead_s)

    def close(self) -> None:
        self.socket.close()
