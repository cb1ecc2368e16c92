"""Keeps a server's shared memory and listening sockets in the launcher, so that they outlive the server: descriptors come over a socket. The next process of
the server gets them by the same way. Connections that workers make in between wait in the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket

from psgc.transport.memory.keeper_wire import LISTENER, Left, recv_segment, send_left

logger = logging.getLogger(__name__)


class Keeper:
    """One server's segments and listeners. ``child_fd`` is inherited by the server's process as PSGC_KEEPER_FD."""

    def __init__(self) -> None:
        self.segments: dict[str, tuple[int, int]] = {}  # name -> (descriptor, bytes)
        self._lineage = secrets.randbits(62) | 1
        self._incarnation = 0
        self._connect()

    def _connect(self) -> None:
        """For the next process, which finds what was left when it looks."""
        self.socket, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._incarnation += 1
        send_left(self.socket, Left(self._incarnation, self._lineage, self.segments))
        self.socket.setblocking(False)

    @property
    def followable(self) -> bool:
        """Whether another process can take up what the server's process has left."""
        return any(name.startswith(LISTENER) for name in self.segments)

    def renew(self) -> None:
        """The server's process has ended, and another is to follow. Raises OSError."""
        self._disconnect()
        self._connect()

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
            except ConnectionResetError:  # said once, before what is there: the process has ended and had not read all
                continue
            except OSError:
                return False
            except ValueError as error:
                logger.warning("segment not kept reason=%s", error)
                continue
            if received is None:
                return False
            name, fd, nbytes = received
            if not name:
                self._forget()
                continue
            old = self.segments.get(name)
            self.segments[name] = (fd, nbytes)
            if old is not None:
                os.close(old[0])

    def close(self) -> None:
        self._forget()
        self._disconnect()

    def _forget(self) -> None:
        for fd, _ in self.segments.values():
            os.close(fd)
        self.segments.clear()

    def _disconnect(self) -> None:
        for end in (self.socket, self._child):
            with contextlib.suppress(OSError):
                end.close()
