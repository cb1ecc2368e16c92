"""How a server passes its memory to the launcher, which keeps it if the server dies: one packet with one descriptor for each segment."""

from __future__ import annotations

import json
import os
import socket

MAX_PACKET_BYTES = 4096


def send_segment(sock: socket.socket, name: str, fd: int, nbytes: int) -> None:
    """Have the launcher keep the segment ``name``; it replaces an older one of that name."""
    socket.send_fds(sock, [json.dumps({"name": name, "bytes": nbytes}).encode()], [fd])


def recv_segment(sock: socket.socket) -> tuple[str, int, int] | None:
    """The next (name, fd, bytes) on the launcher's end; None at the end of the stream.

    Raises BlockingIOError if there is none yet, ValueError for a packet that is not psgc's: it is dropped, and the next one can be read.
    """
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 4)
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)  # recv_fds does not pass MSG_CMSG_CLOEXEC on
    try:
        (fd,), body = fds, json.loads(data)
        name, nbytes = str(body["name"]), int(body["bytes"])
        if os.fstat(fd).st_size != nbytes:
            raise ValueError(f"segment {name!r} of {os.fstat(fd).st_size} bytes, the server says {nbytes}")
    except (ValueError, KeyError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"packet of {len(data)} bytes with {len(fds)} descriptors: {error}; expected one segment") from None
    return name, fd, nbytes
