"""A link that is a socket: the handshake's bytes, polling and closing. What messages look like on it is the transport's."""

from __future__ import annotations

import contextlib
import socket

from psgc.transport.link import Link
from psgc.transport.security.handshake import Proof


class SocketLink(Link):
    """See the module's text. sock: connected, or about to be."""

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        super().__init__(proof, peer)
        sock.setblocking(False)
        self.socket = sock

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
