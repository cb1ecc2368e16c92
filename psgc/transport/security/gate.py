"""A server's new connections, until they have proved that they belong to the job. Their number, their time, and the bytes read are limited.

Owns the listeners and the accepted connections that are not proved yet. A peer that fails is cut off without an answer. The log gets one line
for each kind of refusal, and later, less and less often, how many more there were.
"""

from __future__ import annotations

import logging
import random
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from psgc.transport.link import Link, Listener, Transport
from psgc.transport.security.handshake import PATIENCE_S, Refused, ServerProof
from psgc.transport.security.refusals import Refusals

logger = logging.getLogger(__name__)
MOST: Final = 256  # strangers' connections that have not proved their identity, beside one of each worker; beyond, one of the source that has most is closed
AT_ONCE: Final = 64  # connections accepted at once, before the handshakes of others go on
TURN_S: Final = 0.02  # time for handshakes in one turn of the server's loop


class Gate:
    """See the module's text. proof: makes the server's side of a handshake, for a transport. workers: of the job, which may all come at the same moment."""

    def __init__(
        self, listeners: Sequence[Listener], proof: Callable[[Transport], ServerProof], clock: Callable[[], float] = time.monotonic,
        workers: int = 0,
    ) -> None:  # fmt: skip
        self._most = MOST + workers
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._proof, self._clock = proof, clock
        self._waiting: dict[int, tuple[Link, float]] = {}  # oldest first
        self._refusals = Refusals(logger, "payload connections")
        self._epoll = select.epoll()
        self._open = False
        self._reopen()

    def __len__(self) -> int:
        return len(self._waiting)

    def fileno(self) -> int:
        """A descriptor that polls readable when ``serve`` has something to do."""
        return self._epoll.fileno()

    def serve(self) -> list[Link]:
        """Accept connections and continue handshakes. Returns the connections that are proved now; the caller then owns them."""
        proved: list[Link] = []
        until = time.monotonic() + TURN_S
        # One event at a time: epoll then gives every connection a turn, also those that had none before the time was over.
        while ready := self._epoll.poll(0, 1):
            fd = ready[0][0]
            listener = self._listeners.get(fd)
            if listener is not None:
                proved += self._accept(listener)
            elif fd in self._waiting:
                proved += self._prove(self._waiting[fd][0])
            if time.monotonic() >= until:
                break  # the rest will be ready in the next turn, too
        return proved

    def tick(self) -> None:
        """Cut off peers that take too long. Call it about once a second."""
        now = self._clock()
        for fd, (_, since) in list(self._waiting.items()):
            if now - since < PATIENCE_S:
                break
            self._refuse(fd, "late", f"it has not proved within {PATIENCE_S:.0f} s that it is of this job")
        self._refusals.tick(now)
        self._reopen()

    def close(self) -> None:
        for fd in list(self._waiting):
            self._leave(fd).close()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()

    def _accept(self, listener: Listener) -> list[Link]:
        proved: list[Link] = []
        for _ in range(AT_ONCE):
            try:
                link = listener.accept(self._proof(listener.transport))
            except Refused as error:
                self._note(error.kind, f"payload connection refused: {error}")
                continue
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:  # out of descriptors: polling would say so again and again
                self._note("no room", f"payload connections cannot be accepted for now: {error.strerror}; see `ulimit -n`")
                self._shut()
                break
            if len(self._waiting) >= self._most:
                self._refuse(
                    self._one_of_the_crowd(), "crowd", f"{self._most} others waited, and most of them came from where it came from"
                )
            self._waiting[link.fileno()] = link, self._clock()
            self._epoll.register(link.fileno(), select.EPOLLIN)
            proved += self._prove(link)
        return proved

    def _one_of_the_crowd(self) -> int:
        """A random connection of the source that has the most, so that a flood only keeps its own source out. It is random because a worker at the
        same source would certainly be closed if it was always the oldest."""
        sources = Counter(link.source for link, _ in self._waiting.values())
        crowded = max(sources, key=sources.__getitem__)
        return random.choice([fd for fd, (link, _) in self._waiting.items() if link.source == crowded])

    def _prove(self, link: Link) -> list[Link]:
        """Continue one handshake. Returns the connection once it is proved, else None."""
        try:
            if link.prove():
                return [self._leave(link.fileno())]
        except Refused as error:
            self._refuse(link.fileno(), error.kind, str(error))
            return []
        if link.closed:  # the peer closed it: a worker that only checked whether somebody listens, or that ended
            self._leave(link.fileno())
            logger.info("payload connection from %s: %s", link.peer, link.why)
            link.close()
        return []

    def _refuse(self, fd: int, kind: str, why: str) -> None:
        link = self._leave(fd)
        link.close()
        if kind == "gone":  # a worker that ended; if that was a fault, it is reported elsewhere
            logger.debug("payload connection from %s ended before it was proved: %s", link.peer, why)
        else:
            self._note(kind, f"payload connection from {link.peer} refused: {why}")

    def _note(self, kind: str, text: str) -> None:
        self._refusals.note(kind, text, self._clock())

    def _leave(self, fd: int) -> Link:
        """Forget the connection before it is closed: a copy of its descriptor in another process would keep the epoll awake."""
        self._epoll.unregister(fd)
        return self._waiting.pop(fd)[0]

    def _shut(self) -> None:
        if self._open:
            self._open = False
            for fd in self._listeners:
                self._epoll.unregister(fd)

    def _reopen(self) -> None:
        if not self._open:
            self._open = True
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)
