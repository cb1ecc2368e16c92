"""Finds out, without waiting, whether somebody listens at an address, because ZeroMQ does not tell why it cannot connect."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from typing import Final

from psgc.processes.addresses import lookup

AGAIN_S: Final = 1.0  # from one attempt's end to the next
PATIENCE_S: Final = 3.0  # longer than a connection over the slowest link takes; if a firewall drops packets, nothing ever comes back


class Knock:
    """Call ``answer`` now and then. Attempts send nothing and are closed as soon as they are accepted."""

    def __init__(self, host: str, port: int) -> None:
        self._addresses = []
        with contextlib.suppress(OSError):
            self._addresses = lookup(host, port)
        self._last: int | None = None if self._addresses else errno.EADDRNOTAVAIL
        self._socket: socket.socket | None = None
        self._began = self._ended = float("-inf")

    def answer(self, now: float) -> int | None:
        """How the last attempt ended: 0, somebody listens; else an error number (ECONNREFUSED: the machine is there, and nobody listens;
        ETIMEDOUT: nothing came back; EADDRNOTAVAIL: the name cannot be looked up). None: none has ended yet."""
        if self._socket is None and self._addresses and now - self._ended >= AGAIN_S:
            self._begin(now)
        elif self._socket is not None:
            self._look(now)
        return self._last

    def _begin(self, now: float) -> None:
        family, address = self._addresses[0]
        self._began = now
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            result = self._socket.connect_ex(address)
        except OSError as error:
            result = error.errno or errno.EIO
        if result != errno.EINPROGRESS:
            self._end(result, now)

    def _look(self, now: float) -> None:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if poll.poll(0):
            self._end(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now)
        elif now - self._began > PATIENCE_S:
            self._end(errno.ETIMEDOUT, now)

    def _end(self, result: int, now: float) -> None:
        self._last, self._ended = result, now
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
