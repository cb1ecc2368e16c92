"""Which of this process's descriptors are of what a test has made: others come and go meanwhile, of other threads."""

from __future__ import annotations

import contextlib
import os
import socket
import stat


def descriptors_of(fd: int) -> int:
    """How many there are of what is behind ``fd``."""
    behind, found = os.fstat(fd), 0
    for other in _all():
        with contextlib.suppress(OSError):
            found += os.path.samestat(behind, os.fstat(other))
    return found


def listening_sockets() -> set[str]:
    """The sockets that listen, by their names in /proc."""
    found = set()
    for fd in _all():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as each:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
