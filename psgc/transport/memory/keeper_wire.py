"""How a server leaves what must outlive it with the launcher, and how the next process of that server gets it: one packet with one descriptor each.

A process first reads what the one before has left (``recv_left``; nothing, for the first one). Then it sends segments and listening sockets as it makes them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MAX_PACKET_BYTES: Final = 4096
LISTENER: Final = "listener-"  # begins the name of a listening socket, which has 0 bytes
FORGET: Final = b'{"forget": true}'


class Left(NamedTuple):
    """What the processes before have left. incarnation: of the process that reads this, from 1. lineage: a number that all of them have in common.
    kept: by name, a descriptor and its bytes."""

    incarnation: int
    lineage: int
    kept: Mapping[str, tuple[int, int]]


def send_segment(sock: socket.socket, name: str, fd: int, nbytes: int) -> None:
    """Have the launcher keep the segment ``name``; it replaces an older one of that name."""
    socket.send_fds(sock, [json.dumps({"name": name, "bytes": nbytes}).encode()], [fd])


def send_forget(sock: socket.socket) -> None:
    """The job has ended in order: nobody needs what the launcher keeps, and no process follows this one."""
    sock.send(FORGET)


def recv_segment(sock: socket.socket) -> tuple[str, int, int] | None:
    """The next (name, fd, bytes) on the launcher's end; None at the end of the stream, ("", -1, 0) where all is to be forgotten.

    Raises BlockingIOError if there is none yet, ValueError for a packet that is not psgc's: it is dropped, and the next one can be read.
    """
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 4)
    if not data:
        return None
    if data == FORGET and not fds:
        return "", -1, 0
    for fd in fds:
        os.set_inheritable(fd, False)  # recv_fds does not pass MSG_CMSG_CLOEXEC on
    try:
        (fd,), body = fds, json.loads(data)
        name, nbytes = str(body["name"]), int(body["bytes"])
        if os.fstat(fd).st_size != nbytes or not name:
            raise ValueError(f"segment {name!r} of {os.fstat(fd).st_size} bytes, the server says {nbytes}")
    except (ValueError, KeyError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"packet of {len(data)} bytes with {len(fds)} descriptors: {error}; expected one segment") from None
    return name, fd, nbytes


def send_left(sock: socket.socket, left: Left) -> None:
    """Give the next process what the ones before have left. Its descriptors stay open here."""
    sock.send(json.dumps({"incarnation": left.incarnation, "lineage": left.lineage, "kept": len(left.kept)}).encode())
    for name, (fd, nbytes) in left.kept.items():
        send_segment(sock, name, fd, nbytes)


def recv_left(sock: socket.socket) -> Left:
    """Wait for what ``send_left`` sends. Raises ValueError for anything else, as the launcher's end."""
    body: Any = json.loads(sock.recv(MAX_PACKET_BYTES) or b"null")
    if not isinstance(body, dict):
        raise ValueError("the launcher has ended")
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(int(body["kept"])):
        received = recv_segment(sock)
        if received is None:
            raise ValueError("the launcher has ended")
        kept[received[0]] = received[1:]
    return Left(int(body["incarnation"]), int(body["lineage"]), kept)
