"""A member's control connection to the scheduler, by ZeroMQ over TCP: re-made when it breaks, and saying so when it does.

Owns one DEALER socket and its monitor. Messages are ``[header][payload]``; what was in flight when a connection broke may be lost.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from psgc.addresses import needs_ipv6, split
from psgc.errors import RemoteProtocolError
from psgc.transport.control.knock import Knock
from psgc.transport.security.curve import HUNG_UP, ControlKeys, prove_membership
from psgc.transport.watch import Pollable, has_message
from psgc.wire.frames import Header, pack_header, unpack_header
from psgc.wire.messages import ErrorCode

# ZeroMQ's own copy beats its zero-copy bookkeeping below this size.
COPY_BELOW_BYTES: Final = 64 << 10
TURNED_AWAY: Final = "does not take this member's token: set the same PSGC_TOKEN and PSGC_JOB everywhere"
CERTAIN: Final = 5  # handshakes that failed: one may fail because the peer has just ended
CONNECT_TIMEOUT_MS: Final = 5000  # then a new attempt: the kernel's own pause between two grows to a minute, after a link is back
MAX_MESSAGE_BYTES: Final = 512 << 20  # a part is far smaller; a peer that announces more is refused by ZeroMQ itself


def set_common_options(socket: zmq.Socket[Any], dead_s: float) -> None:
    """No silent drops, no unbounded message, dead TCP peers noticed."""
    socket.setsockopt(zmq.SNDHWM, 0)  # flow control is ours (credits); at its high-water mark ZeroMQ would drop or block
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(dead_s * 1000))


def message_of(frames: list[Any]) -> tuple[Header, Any]:
    """Header and payload (uint8 array over the frame, kept alive by it) of a received message. Raises RemoteProtocolError."""
    if len(frames) not in (1, 2):
        raise RemoteProtocolError(f"message of {len(frames)} frames, expected header and payload", ErrorCode.MALFORMED)
    header = unpack_header(frames[0].buffer)
    payload = np.frombuffer(frames[1].buffer, np.uint8) if len(frames) == 2 and len(frames[1].buffer) else None
    if (0 if payload is None else len(payload)) != header.payload_bytes:
        raise RemoteProtocolError(
            f"payload of {0 if payload is None else len(payload)} bytes, header says {header.payload_bytes}", ErrorCode.MALFORMED
        )
    return header, payload


class Dealer:
    """See the module's text. ``identity`` is this member's name at the peer's ROUTER, the same after a reconnect. keys: of the job, if it has
    a token. refused: how often in a row a handshake has failed: the peer holds another token, or is no scheduler."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, identity: bytes, dead_s: float, keys: ControlKeys | None = None) -> None:
        self.refused = 0
        self.socket = context.socket(zmq.DEALER)
        set_common_options(self.socket, dead_s)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.IPV6, needs_ipv6(split(endpoint)[0]))
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            prove_membership(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) | HUNG_UP)
        self.socket.connect(endpoint)
        self._knock = Knock(*split(endpoint))

    def nobody_listens(self, now: float) -> bool:
        """While the connection cannot be made: whether the peer's machine answers that nobody listens there. To be asked repeatedly."""
        return self._knock.answer(now) == errno.ECONNREFUSED

    def pollables(self) -> tuple[Pollable, Pollable]:
        """What becomes readable when there is something to receive, and when something has happened to the connection."""
        return (self.socket, zmq.POLLIN), (self.monitor, zmq.POLLIN)

    def send(self, header: Header, payload: Any = None) -> None:
        """Queue one message; ``payload`` (bytes or a uint8 array) must stay as it is until the peer has answered."""
        head = pack_header(header)
        if payload is None or len(payload) == 0:
            self.socket.send(head)
            return
        self.socket.send(head, zmq.SNDMORE)
        self.socket.send(payload, copy=len(payload) < COPY_BELOW_BYTES)

    def receive(self) -> Iterator[tuple[Header, Any]]:
        """All messages that have come. Raises RemoteProtocolError for what is no message."""
        while has_message(self.socket):
            yield message_of(self.socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def events(self) -> Iterator[Literal["up", "down"]]:
        """What has happened to the connection, in order."""
        while has_message(self.monitor):
            message = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            up = message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = 0 if up else self.refused + bool(message["event"] & HUNG_UP)
            yield "up" if up else "down"

    @property
    def turned_away(self) -> bool:
        """Whether it is certain by now that the peer will not let this member speak."""
        return self.refused >= CERTAIN

    def close(self, linger_ms: int = 0) -> None:
        self._knock.close()
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
