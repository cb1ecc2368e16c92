"""A TCP proxy on loopback, for tests that read along or get in the way."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading


class Proxy:
    """Forwards connections to port ``target`` of this machine. A subclass says what becomes of each piece of data."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def passed(self, number: int, from_client: bool, data: bytes) -> tuple[bytes, bool]:
        """What to forward of ``data``, which has come on connection ``number`` (0, 1, ...), and whether the connection goes on."""
        return data, True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(number, source, sink, source is client), daemon=True).start()

    def _forward(self, number: int, source: socket.socket, sink: socket.socket, from_client: bool) -> None:
        goes_on = True
        with contextlib.suppress(OSError):
            while goes_on and (data := source.recv(1 << 16)):
                data, goes_on = self.passed(number, from_client, data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
