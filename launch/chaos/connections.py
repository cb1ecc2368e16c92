"""Cuts and slows the connections of another process of this user, without its help: through duplicates of its sockets.

Linux gives a duplicate of a descriptor to whoever may trace the process (``pidfd_getfd``): an ancestor of the same user, where no policy forbids it.
Only connections that were accepted by a job's servers and its scheduler, and the other ends of these, are touched: those of torch.distributed, and between a
process and its launcher, are nobody's here.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any, Final

from psgc.launch.chaos.members import Member

_GETFD: Final = 438  # the same number on every architecture
_PACING: Final = 47  # SO_MAX_PACING_RATE
_RATE: Final = struct.Struct("@L")
_UNPACED: Final = 2 ** (8 * _RATE.size) - 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def connections_of(member: Member, services: Iterable[Member]) -> list[socket.socket]:
    """Duplicates of the member's connections to servers and scheduler, or of those that it has accepted as one; the caller closes them. services: the job's
    servers and scheduler. Raises PermissionError where duplicates are not given."""
    if member.role == "worker":
        peers = {place for service in services for place in _listening(service.process.pid)}
        return _sockets(member.process.pid, lambda each: _ports(each.getpeername()) in peers)
    own = _listening(member.process.pid)
    return _sockets(member.process.pid, lambda each: _ports(each.getsockname()) in own and not _listens(each))


def cut(connections: Iterable[socket.socket]) -> int:
    """Break them, for both ends. Returns how many that were."""
    count = 0
    for connection in connections:
        with connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            count += 1
    return count


def slow(connections: Iterable[socket.socket], rate: int | None) -> int:
    """Have the kernel send at most so many bytes a second on each TCP connection; None: as it did before. Returns how many that were."""
    count = 0
    for connection in connections:
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                connection.setsockopt(socket.SOL_SOCKET, _PACING, _RATE.pack(_UNPACED if rate is None else rate))
            except OSError:
                continue
            count += 1
    return count


def _sockets(pid: int, wanted: Any) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return found
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    continue
            except OSError:
                continue
            own = _duplicate(handle, int(entry))
            if own is None:
                continue
            try:
                fits = wanted(own)
            except OSError:
                fits = False
            if fits:
                found.append(own)
            else:
                own.close()
    except FileNotFoundError:  # it has ended
        pass
    finally:
        os.close(handle)
    return found


def _duplicate(handle: int, fd: int) -> socket.socket | None:
    """Raises PermissionError."""
    own = _LIBC.syscall(_GETFD, handle, fd, 0)
    if own >= 0:
        return socket.socket(fileno=own)
    if ctypes.get_errno() == 1:
        raise PermissionError("the kernel gives no duplicates of other processes' sockets here (pidfd_getfd; see kernel.yama.ptrace_scope)")
    return None


def _listening(pid: int) -> set[Any]:
    """Where the process listens: ports, and names of Unix sockets."""
    places = set()
    for each in _sockets(pid, _listens):
        with each:
            places.add(_ports(each.getsockname()))
    return places


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports(address: Any) -> Any:
    """What two ends of a connection say alike: addresses differ where a socket listens on all of a machine's."""
    return address[1] if isinstance(address, tuple) else address or None


def refused(pid: int) -> str:
    """Why the kernel gives no duplicates of this process's descriptors; empty if it does."""
    handle = os.pidfd_open(pid)
    try:
        own = _LIBC.syscall(_GETFD, handle, 0, 0)
        if own >= 0:
            os.close(own)
            return ""
        return f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(handle)
