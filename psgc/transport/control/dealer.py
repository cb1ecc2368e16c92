"""A member's control connection to the scheduler, by ZeroMQ over TCP. It is made again when it breaks, and reports both events.

Owns one DEALER socket at a time and its monitor. A message is a frame with the header and frames with the payload's bytes; no frame to the
scheduler is longer than ``FRAME_BYTES``. Messages that were in flight when a connection broke may be lost. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from psgc.errors import RemoteProtocolError
from psgc.processes.addresses import needs_ipv6, split
from psgc.transport.control.greeting import why_refused
from psgc.transport.control.knock import Knock
from psgc.transport.security.curve import HUNG_UP, prove_membership
from psgc.transport.security.job_keys import JobKeys
from psgc.transport.watch import Pollable, has_message
from psgc.wire.frames import Header, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

# Below this size, ZeroMQ's own copy is faster than its zero-copy bookkeeping.
COPY_BELOW_BYTES: Final = 64 << 10
CERTAIN: Final = 5  # failed handshakes in a row: a single one may fail because the peer has just ended
AGAIN: Final = 2  # more of them behind a first look at who listens: those before may have failed before it came
PAUSE_S: Final = 0.1  # before a new socket replaces one that ZeroMQ has given up; doubled each time
LONGEST_PAUSE_S: Final = 1.0
SILENT_S: Final = 5.0  # limit on a connection's handshake, which takes a few round trips
CONNECT_TIMEOUT_MS: Final = 5000  # then a new attempt begins: the kernel's own pause between two attempts grows to a minute
# Frames to the scheduler are no longer: it refuses longer ones, so that ZeroMQ allocates no more for a stranger whose handshake it reads.
FRAME_BYTES: Final = 60 << 10
MAX_MESSAGE_BYTES: Final = 512 << 20  # a part is far smaller; a peer that announces more is refused by ZeroMQ itself


def set_common_options(socket: zmq.Socket[Any], dead_s: float) -> None:
    """Never drop messages silently, bound their size, and detect dead TCP peers."""
    socket.setsockopt(zmq.SNDHWM, 0)  # flow control is ours (credits); at its high-water mark ZeroMQ would drop or block
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, min(int(dead_s * 1000), 2**31 - 1))


def message_of(frames: list[Any], any_version: bool = False) -> tuple[Header, Any]:
    """Header and payload of a received message; the payload is a uint8 array that keeps its frame alive. Raises RemoteProtocolError."""
    if not frames:
        raise RemoteProtocolError("message without a header", ErrorCode.MALFORMED)
    header = unpack_header(frames[0].buffer, any_version)
    pieces = [frame.buffer for frame in frames[1:]]
    count = sum(map(len, pieces))
    if count != header.payload_bytes:
        raise RemoteProtocolError(f"payload of {count} bytes, header says {header.payload_bytes}", ErrorCode.MALFORMED)
    if not count:
        return header, None
    return header, np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), np.uint8)


class Dealer:
    """See the module's text. ``identity`` is this member's name at the peer's ROUTER, the same after a reconnect. keys: the job's, if it has
    a token; under several it tries one after the other. refused: how many handshakes in a row have failed: the peer holds another token, or is no scheduler.

    ``tick`` replaces ``socket`` and ``monitor`` after ZeroMQ has given the connection up."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, identity: bytes, dead_s: float, keys: JobKeys | None = None) -> None:
        self._context, self._endpoint, self._identity, self._dead_s, self._keys = context, endpoint, identity, dead_s, keys
        self.refused = 0
        self._tried = 0  # sockets that were turned away, each of which had the next of the keys
        self._suspected = ""  # what ``turned_away`` has found, and is to find again
        self._up = self._failed = self._silent = False  # this socket's handshake: done; failed; not answered for SILENT_S
        self._accepted = float("inf")  # when the peer's machine accepted the connection whose handshake is under way
        self._pauses, self._retry_at = 0, float("-inf")
        self.socket, self.monitor = self._connect()
        self._knock = Knock(*split(endpoint))

    def _connect(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        socket = self._context.socket(zmq.DEALER)
        set_common_options(socket, self._dead_s)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.IPV6, needs_ipv6(split(self._endpoint)[0]))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys is not None:
            prove_membership(socket, self._keys.keys[self._tried % len(self._keys.keys)])
        monitor = socket.get_monitor_socket(int(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) | HUNG_UP)
        socket.connect(self._endpoint)
        return socket, monitor

    def tick(self, now: float) -> None:
        """Call it now and then; it reads the tokens again if they have changed, and replaces a socket whose handshake has failed, after a pause. ZeroMQ may
        never connect again after an answer that is no handshake or does not fit (another program's, or a scheduler's that has a token where this member has
        none), and it takes another program for a peer of its first version."""
        if self._keys is not None and self._keys.read_again():
            self._tried = 0  # a connection that is up stays, and the next one is made under these
        if self._up or has_message(self.monitor):
            return
        if now - self._accepted > SILENT_S:
            self._silent = self._failed = True
        elif not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:  # without a high-water mark this means that there is no connection
            self._fail()
        if not self._failed or now < self._retry_at:
            return
        self._retry_at = now + min(PAUSE_S * 2**self._pauses, LONGEST_PAUSE_S)
        self._pauses = min(self._pauses + 1, 16)
        self._failed, self._accepted = False, float("inf")
        old = self.socket, self.monitor
        self.socket, self.monitor = (
            self._connect()
        )  # before the old ones are closed: else they could have their addresses, and ``Watch`` see no change
        _close(*old, linger_ms=0)

    def _fail(self) -> None:
        """This socket's handshake has failed. It counts once, even if ZeroMQ repeats it."""
        self.refused += not self._failed
        self._tried += not self._failed
        self._failed = True

    def nobody_listens(self, now: float) -> bool:
        """While the connection cannot be made: whether the peer's machine answers that nobody listens there. Call it repeatedly."""
        return self._knock.answer(now) == errno.ECONNREFUSED

    def pollables(self) -> tuple[Pollable, Pollable]:
        """The sockets that become readable when a message has come, and when the connection has an event."""
        return (self.socket, zmq.POLLIN), (self.monitor, zmq.POLLIN)

    def send(self, header: Header, payload: Any = None) -> None:
        """Queue one message, copying ``payload`` (bytes or a uint8 array). It is lost if ZeroMQ has given
        the connection up (see ``tick``), as it may be with any connection that breaks: "up" says when to send again."""
        head = pack_header(header)
        with contextlib.suppress(zmq.Again):
            if payload is None or len(payload) == 0:
                self.socket.send(head, zmq.NOBLOCK)
                return
            self.socket.send(head, zmq.SNDMORE | zmq.NOBLOCK)
            body = memoryview(payload)
            last = (len(body) - 1) // FRAME_BYTES * FRAME_BYTES
            for first in range(0, last, FRAME_BYTES):
                self.socket.send(body[first : first + FRAME_BYTES], zmq.SNDMORE | zmq.NOBLOCK)
            self.socket.send(body[last:], zmq.NOBLOCK)

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """All messages that have come. Raises RemoteProtocolError for frames that are no message."""
        while has_message(self.socket):
            yield message_of(self.socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def events(self) -> Iterator[Literal["up", "down"]]:
        """The connection's events, in order."""
        while has_message(self.monitor):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._accepted = time.monotonic()
                continue
            self._accepted = float("inf")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up, self._failed, self._silent, self.refused, self._pauses = True, False, False, 0, 0
                self._suspected = ""
                yield "up"
                continue
            if not self._up:
                self._fail()
            self._up = False
            yield "down"

    def turned_away(self, silent: bool = True) -> str:
        """A sentence that says who refuses this member, and why; empty if that is not certain. It takes up to a second, but only after repeated
        failures of the handshake. silent: also ask one that leaves handshakes unanswered, where that second passes each time."""
        hung_up, silent = self.refused >= CERTAIN * (1 if self._keys is None else len(self._keys.keys)), silent and self._silent
        if not hung_up and not silent:
            return ""
        why, certain = why_refused(self._endpoint, self._keys is not None, hung_up)
        before, self._suspected = self._suspected, "" if certain else why
        self.refused, self._silent = CERTAIN - AGAIN if self._suspected else 0, False
        return why if certain or why == before else ""

    def close(self, linger_ms: int = 0) -> None:
        self._knock.close()
        _close(self.socket, self.monitor, linger_ms)


def _close(socket: zmq.Socket[Any], monitor: zmq.Socket[Any], linger_ms: int) -> None:
    with contextlib.suppress(zmq.ZMQError):
        socket.disable_monitor()
    monitor.close(0)
    socket.close(linger_ms)
