"""Other programs that listen where a member of a job looks for the scheduler."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def program(opening: bytes, answer: bytes | None = None) -> Iterator[int]:
    """Another program's port. opening: what it says first. answer: what it says to whatever it hears, and then it closes;
    None: it only listens."""

    def talk(peer: socket.socket) -> None:
        with suppress(OSError), peer:
            peer.sendall(opening)
            while peer.recv(4096):
                if answer is not None:
                    peer.sendall(answer)
                    return

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
