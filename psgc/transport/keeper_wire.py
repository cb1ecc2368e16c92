"""How a server hands its memory to the launcher, which keeps it should the server die: one packet and one descriptor a segment."""

from __future__ import annotations

import json
import os
import socket

MAX_PACKET_BYTES = 4096


def send_segment(sock: socket.socket, name: str, fd: int, nbytes: int) -> None:
    """Have the launcher keep the segment ``name``; it replaces an older one of that name."""
    socket.send_fds(sock, [json.dumps({"name": name, "bytes": nbytes}).encode()], [fd])


def recv_segment(sock: socket.socket) -> tuple[str, int, int] | None:
    """The next (name, fd, bytes) on the launcher's end; None at the end of the stream. Raises BlockingIOError if there is none yet."""
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 4)
    if not data:
        return None
    try:
        body = json.loads(data)
        return str(body["name"]), fds[0], int(body["bytes"])
    except (ValueError, KeyError, IndexError):
        for fd in fds:
            os.close(fd)
        raise
