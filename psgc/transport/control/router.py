"""The scheduler's end of the control connections, by ZeroMQ. It never drops a message silently."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import zmq

from psgc.errors import PsgcError, RemoteProtocolError
from psgc.processes.addresses import SCHEME, needs_ipv6
from psgc.transport.control.dealer import COPY_BELOW_BYTES, FRAME_BYTES, MAX_MESSAGE_BYTES, message_of, set_common_options
from psgc.transport.security.curve import Doorkeeper, guard_scheduler
from psgc.transport.security.job_keys import JobKeys
from psgc.transport.security.refusals import Refusals
from psgc.transport.watch import has_message
from psgc.wire.frames import Header

logger = logging.getLogger(__name__)
MOST_A_FRAME_BYTES: Final = FRAME_BYTES + (1 << 10)  # encryption adds less than that
REBIND_TRIES: Final = 200
REBIND_PAUSE_S: Final = 0.01
HANDSHAKE_MS: Final = 10_000  # a peer that has not finished it by then is cut off, and its bytes are dropped


class Router:
    """One ROUTER socket. Bound to ``*``, it listens on IPv4 and IPv6; ``port`` is its port.
    listening_fd: a socket that somebody else has bound and set to listen.
    max_message_bytes: longer payloads are dropped. keys: the job's, if it has a token: then messages of peers without them are dropped. ZeroMQ
    cuts off a peer that announces a frame of more than ``MOST_A_FRAME_BYTES`` before it allocates anything, during the handshake, too.

    Raises PsgcError if the port is taken.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, dead_s: float, listening_fd: int = -1, max_message_bytes: int = MAX_MESSAGE_BYTES,
        keys: JobKeys | None = None,
    ) -> None:  # fmt: skip
        self._max_message_bytes = max_message_bytes
        self._dropped = Refusals(logger, "control messages")
        self._keys, self._listens_under = keys, None if keys is None else keys.keys[0]
        self._doorkeeper = None if keys is None else Doorkeeper(context, keys.keys)
        self.socket = context.socket(zmq.ROUTER)
        set_common_options(self.socket, dead_s)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_A_FRAME_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.IPV6, needs_ipv6(endpoint.removeprefix(SCHEME).rpartition(":")[0].strip("[]")))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a member that reconnects is the same member
        self._listening = os.dup(listening_fd) if listening_fd >= 0 else None  # ZeroMQ closes the other with its listener
        if listening_fd >= 0:
            self.socket.setsockopt(zmq.USE_FD, listening_fd)
        if keys is not None and self._doorkeeper is not None:
            guard_scheduler(self.socket, keys.keys[0])
            self._doorkeeper.watch(self.socket)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise PsgcError(
                f"cannot listen on {endpoint}: {error}; is another job using the port, or is the address another machine's?"
            ) from None
        self._bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._bound.rpartition(":")[2])

    def rekey(self) -> bool:
        """The tokens have changed: members are admitted by these. Where the oldest is another now, listen under that; this breaks all connections, which
        members make again. Returns whether it did. Raises PsgcError if the port has been taken in that moment."""
        assert self._keys is not None
        assert self._doorkeeper is not None
        self._doorkeeper.admit(self._keys.keys)
        if self._listens_under == (oldest := self._keys.keys[0]):
            return False
        self._listens_under = oldest
        self.socket.unbind(self._bound)
        guard_scheduler(self.socket, oldest)
        if self._listening is not None:
            self.socket.setsockopt(zmq.USE_FD, os.dup(self._listening))
        for _ in range(REBIND_TRIES):
            try:
                self.socket.bind(self._bound)
                return True
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise PsgcError(f"cannot listen on {self._bound} under another token: {error}") from None
                time.sleep(REBIND_PAUSE_S)  # ZeroMQ gives the port back in its own thread
        raise PsgcError(f"cannot listen on {self._bound} under another token: the address is in use")

    def send(self, identity: bytes, frames: list[Any]) -> bool:
        """Send to one peer; False if it is not connected now. Large frames are not copied and must not change."""
        try:
            self.socket.send(identity, zmq.SNDMORE)
            for frame in frames[:-1]:
                self.socket.send(frame, zmq.SNDMORE)
            self.socket.send(frames[-1], copy=len(frames[-1]) < COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self) -> Iterator[tuple[bytes, Header, Any]]:
        """All messages that have come: the sender's identity, header and payload (which owns its bytes). Frames that are no message are logged and
        dropped. A message may be of another version of the protocol: see ``Header.version``."""
        while has_message(self.socket):
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                header, payload = message_of(frames, any_version=True)
                if header.payload_bytes > self._max_message_bytes:
                    raise RemoteProtocolError(f"payload of {header.payload_bytes} bytes, at most {self._max_message_bytes}")
            except RemoteProtocolError as error:
                self._dropped.note("no message", f"message dropped peer={identity.bytes!r} reason={error}", time.monotonic())
                self._dropped.tick(time.monotonic())
                continue
            yield identity.bytes, header, payload

    def close(self, linger_ms: int = 0) -> None:
        if self._doorkeeper is not None:
            self.socket.disable_monitor()
            self._doorkeeper.close()
        self.socket.close(linger_ms)
        if self._listening is not None:
            os.close(self._listening)
            self._listening = None
