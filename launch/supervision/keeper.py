"""Keeps a server's shared memory alive in the launcher, so that it outlives the server: descriptors come over a socket."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

from psgc.transport.memory.keeper_wire import recv_segment

logger = logging.getLogger(__name__)


class Keeper:
    """One server's segments. ``child_fd`` is inherited by the server as PSGC_KEEPER_FD."""

    def __init__(self) -> None:
        self.socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.segments: dict[str, tuple[int, int]] = {}  # name -> (descriptor, bytes)

    @property
    def child_fd(self) -> int:
        return self._child.fileno()

    def started(self) -> None:
        """The server has inherited its end."""
        self._child.close()

    def receive(self) -> bool:
        """Take what the server has sent; False at the end of the stream (the segments stay)."""
        while True:
            try:
                received = recv_segment(self.socket)
            except BlockingIOError:
                return True
            except OSError:
                return False
            except ValueError as error:
                logger.warning("segment not kept reason=%s", error)
                continue
            if received is None:
                return False
            name, fd, nbytes = received
            old = self.segments.get(name)
            self.segments[name] = (fd, nbytes)
            if old is not None:
                os.close(old[0])

    def close(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments.clear()
        for end in (self.socket, self._child):
            with contextlib.suppress(OSError):
                end.close()
