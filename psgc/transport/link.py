"""One payload connection between a worker and a server, whatever it travels over: proved first, then messages, never blocking.

A connection object is one connection, ever: a broken one is thrown away, and the peer that it was is gone with it. Owns the handshake's
bytes on the socket; knows headers, not their meaning.
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from psgc.transport.pacing import PacedLink
from psgc.transport.security.handshake import Proof
from psgc.wire.frames import Header

MAX_MESSAGES: Final = 64  # of one connection in one turn, before the others have theirs
MAX_BYTES: Final = 8 << 20  # and of their payloads; a turn is then some milliseconds


class Link(ABC):
    """See the module's text. proof: this end's side of the handshake. peer: who is at the other end, for logs.

    closed: nothing comes or goes any more, and ``why``; ``number``: the error number of that, or 0 where the peer was reached.
    more: ``receive`` stopped early, and polling would not tell that there is more.
    unsent: payloads that were queued and that the kernel has not taken whole yet.
    """

    def __init__(self, sock: socket.socket, proof: Proof, peer: str) -> None:
        sock.setblocking(False)
        self.socket, self.proof, self.peer = sock, proof, peer
        self.closed, self.why, self.number = False, "", 0
        self.more = False
        self.unsent = 0
        self.owner: Any = None  # whoever keeps it, for who finds it ready
        self.pace: PacedLink | None = None  # its simulated host's, if it is paced
        self.held_out = self.held_in = False  # it had more to send, or perhaps to receive, than the simulated link lets pass now
        self._greeting = proof.begin()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    @abstractmethod
    def queued(self) -> bool:
        """Whether something waits for room to be sent."""

    @abstractmethod
    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it."""

    @abstractmethod
    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        """Messages that have come: header, and payload (array), body or None. At most so many, and payloads of about so many bytes.

        Raises RemoteProtocolError for what is no message; the connection is then of no use any more.
        """

    def prove(self) -> bool:
        """Go on with the handshake. True once both ends have proved themselves: only then is anything else sent or received.

        Raises Refused if the peer proves nothing.
        """
        while not self.closed:
            try:
                if self._greeting:
                    self._greeting = self._greeting[self.socket.send(self._greeting) :]
                    continue
                if self.proof.done:
                    return True
                data = self.socket.recv(self.proof.wants)
            except BlockingIOError:
                return False
            except OSError as error:
                self.fail(error.strerror or str(error), error.errno or 0)
                return False
            if not data:
                self.fail("closed by the peer before it had proved itself")
                return False
            self._greeting = self.proof.receive(data)
        return False

    @property
    def reached(self) -> bool:
        """Whether the peer's kernel has accepted the connection."""
        try:
            self.socket.getpeername()
        except OSError:
            return False
        return True

    def fail(self, why: str, number: int = 0) -> None:
        """The connection is of no use any more; whoever owns it closes it."""
        if not self.closed:
            self.closed, self.why, self.number = True, why, number

    def see_off(self, patience_s: float) -> None:
        """Before it is closed in order: have the peer hear what is queued, for at most so long."""
        if not self.closed and self.proof.done:
            self.flush()

    def close(self) -> None:
        """What is queued is dropped with the memory that it lies in."""
        self.fail("closed")
        with contextlib.suppress(OSError):
            self.socket.close()
