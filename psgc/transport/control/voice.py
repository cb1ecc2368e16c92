"""Decides which of a job's processes on this machine logs what all of them know, if their output goes to the same place.

An *outlet* is where a process's lines can be read: its stderr, or under a launcher the launcher's. Of the processes with one outlet, the
first that logs a line on a topic listens under a name in Linux's abstract socket namespace, and keeps that name until the process ends. The
user's other processes then log nothing on that topic. On systems without such sockets every process logs.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import struct
from typing import Final

from psgc.config import Config

STDERR: Final = 2
BACKLOG: Final = 4096  # processes of one outlet: each of the silent ones keeps a connection
# Topics.
AWAITED: Final = "awaited"  # known to the scheduler and the servers: which members and ranks are awaited
ADMISSION: Final = "admission"  # that the scheduler does not answer
LIFELINE: Final = "lifeline"  # that the scheduler is silent
PARTS: Final = "parts"  # known to a worker: the state of its own parts


def own_outlet() -> str:
    """Where this process's stderr goes: device and inode; empty if it is closed."""
    try:
        found = os.fstat(STDERR)
    except OSError:
        return ""
    return f"{found.st_dev:x}:{found.st_ino:x}"


class Voice:
    """This process's right to log on a topic. group: identifies the processes of which only one may log (a job).
    outlet: PSGC_OUTLET; without it this process's own. key: the job's, which is slow to derive from its token. Every user of the host sees the
    names that are taken, and must find neither the token nor the names of other topics from them."""

    def __init__(self, group: str, outlet: str = "", key: bytes = b"") -> None:
        self._outlet = outlet or own_outlet()
        self._group, self._key = f"{os.getuid()} {self._outlet} {group}", key
        self._held: dict[str, socket.socket] = {}  # sockets that hold names, by topic
        self._others: dict[str, socket.socket] = {}  # connections to processes that hold other names: they break when those end

    @classmethod
    def of(cls, config: Config) -> Voice:
        """The voice of a member of the job that ``config`` describes."""
        from psgc.transport.security.curve import control_keys  # loads ZeroMQ, which a process that only compiles does not need

        keys = control_keys(config.job, config.token)
        return cls(f"{config.job} {config.root_endpoint}", config.outlet, b"" if keys is None else keys.member_secret)

    def _name_of(self, topic: str) -> str:
        return hmac.digest(self._key, f"voice {self._group} {topic}".encode(), "sha256").hex()[:32]

    def speaks(self, topic: str) -> bool:
        """Whether this process is the one that logs on ``topic`` here. Asking takes the right if no process of this user has it."""
        if topic in self._held or not self._outlet:
            return True
        if topic in self._others:
            if not _broken(self._others[topic]):
                return False
            self._others.pop(topic).close()
        name = f"\0psgc-voice/{self._name_of(topic)}"
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            own.bind(name)
            own.listen(BACKLOG)
        except OSError as error:
            own.close()
            holder = _own_holder(name) if error.errno == errno.EADDRINUSE else None
            if holder is not None:
                self._others[topic] = holder
            return holder is None
        self._held[topic] = own
        return True

    def close(self) -> None:
        for sockets in (self._held, self._others):
            while sockets:
                sockets.popitem()[1].close()

    def __del__(self) -> None:
        self.close()


def _own_holder(name: str) -> socket.socket | None:
    """A connection to the process that holds the name, if it is this user's; another user's has no right to silence this one."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    holder.setblocking(False)
    try:
        holder.connect(name)
        _, uid, _ = struct.unpack("iII", holder.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:  # it does not listen as psgc does, or has just ended
        uid = -1
    if uid == os.getuid():
        return holder
    holder.close()
    return None


def _broken(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))
