"""What a server's process leaves to the next one, with its launcher: the segments of its store and the sockets that it listens with.

So a server that ends in the middle of a job goes on in another process, at the same address, from what it had committed; what was under way workers send
again on their new connections. A process without a launcher that keeps its memory, or under PSGC_ON_SERVER_LOSS=stop, leaves nothing: its death ends the job.
"""

from __future__ import annotations

import logging
import os
import socket

from psgc.config import Config
from psgc.errors import PsgcError
from psgc.transport.link import Listener
from psgc.transport.memory.keeper_wire import LISTENER, recv_left, send_forget, send_segment
from psgc.transport.memory.segment import Segment
from psgc.transport.selection import listen

logger = logging.getLogger(__name__)
STORE = "store-"  # begins the names of the store's segments, with their numbers


class Succession:
    """See the module's text. left: what the processes before have left; None: nobody keeps anything. The descriptors are taken once, by the first job."""

    def __init__(self, config: Config) -> None:
        """Waits for the launcher to say what there is. Raises PsgcError if it ends instead."""
        keeps = config.keeper_fd >= 0 and config.on_server_loss == "restart"
        self._socket = socket.socket(fileno=os.dup(config.keeper_fd)) if keeps else None
        try:
            self._left = None if self._socket is None else recv_left(self._socket)
        except (ValueError, KeyError, OSError) as error:
            raise PsgcError(f"server: what the launcher keeps of it cannot be read (PSGC_KEEPER_FD): {error}") from None
        self._kept = {} if self._left is None else dict(self._left.kept)

    @property
    def place(self) -> tuple[int, int]:
        """This process's incarnation and lineage, as in Register; zeros if none can follow it."""
        return (0, 0) if self._left is None else (self._left.incarnation, self._left.lineage)

    @property
    def follows(self) -> bool:
        """Whether this process goes on with what another has left."""
        return any(name.startswith(LISTENER) for name in self._kept)

    @property
    def has_store(self) -> bool:
        """Whether that is not only where it listens, but also what it has kept of a job's layouts."""
        return any(name.startswith(STORE) for name in self._kept)

    def listen(self, config: Config) -> list[Listener]:
        """The server's listeners, which the launcher keeps from now on. Raises as ``selection.listen``."""
        sockets = {
            name.removeprefix(LISTENER): socket.socket(fileno=fd) for name, (fd, _) in self._kept.items() if name.startswith(LISTENER)
        }
        listeners = listen(config, sockets)
        if any(listener.listening is None for listener in listeners):
            self._left = None  # a transport whose listeners cannot be handed over
        for listener in listeners if self._left is not None and not sockets else ():
            assert listener.listening is not None
            self._keep(LISTENER + listener.transport.name, listener.listening.fileno(), 0)
        return listeners

    def segments(self) -> list[Segment]:
        """The store's segments, in their order."""
        found = {int(name.removeprefix(STORE)): place for name, place in self._kept.items() if name.startswith(STORE)}
        return [Segment(*found[number]) for number in sorted(found)]

    def keep(self, number: int, segment: Segment) -> None:
        """The store has a new segment."""
        self._keep(f"{STORE}{number}", segment.fd, segment.nbytes)

    def forget(self) -> None:
        """The job has ended in order: no process follows this one in it."""
        self._kept = {}
        if self._socket is not None:
            try:
                send_forget(self._socket)
            except OSError:
                logger.debug("the launcher keeps nothing any more")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _keep(self, name: str, fd: int, nbytes: int) -> None:
        if self._socket is not None and self._left is not None:
            send_segment(self._socket, name, fd, nbytes)
