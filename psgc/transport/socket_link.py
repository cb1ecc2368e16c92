"""A link over a socket: the handshake's bytes, polling and closing. Each transport defines the format of its messages."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from psgc.transport.link import Link
from psgc.transport.security.handshake import Proof

# Limit on the memory of a link's queue: bodies and Python's objects, but not payloads, which lie in memory that is kept anyway. A server that
# answers 100,000 keys at once to a worker that reads slowly needs a quarter of it.
MOST_KEPT_BYTES: Final = 128 << 20
MESSAGE_BYTES: Final = 256


class SocketLink(Link):
    """See the module's text. sock: connected, or about to be."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        super().__init__(proof, peer)
        sock.setblocking(False)
        self.socket = sock
        self._kept = 0

    def _keep(self, nbytes: int) -> None:
        """Count a queued message's own memory; a negative number: the message has left the queue."""
        self._kept += nbytes
        if self._kept > MOST_KEPT_BYTES:
            self.fail(f"it does not read what it is sent: {MOST_KEPT_BYTES >> 20} MiB of answers wait for it")

    def fileno(self) -> int:
        return self.socket.fileno()

    def _say(self, data: bytes) -> int:
        return self.socket.send(data)

    def _hear(self, nbytes: int) -> bytes:
        return self.socket.recv(nbytes)

    @property
    def reached(self) -> bool:
        try:
            self.socket.getpeername()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.fail("closed")
        with contextlib.suppress(OSError):
            self.socket.close()
