"""PSGC_ENCRYPT=1: sums are right, and who reads along sees none of the payloads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


class ReadingProxy:
    """Forwards TCP connections and keeps what passes."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("encrypt", [False, True])
def test_payloads_on_the_wire_are_readable_without_encryption_and_not_with_it(make_job: Callable[..., Any], encrypt: bool) -> None:
    if encrypt:
        pytest.importorskip("cryptography", reason="the extra `encrypt` is not installed")
    port = free_port()
    proxy = ReadingProxy(port)
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp", "PSGC_ENCRYPT": str(int(encrypt))})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{proxy.port}")
    for node in range(2):
        job.worker(node, "--steps", "4", "--numel", "5000", "--pause-s", "0", "--check-sums", job="steps.py")
    statuses = job.end()
    proxy.close()
    assert set(statuses.values()) == {0}, job.text()
    telling = np.full(16, 3.0, np.float32).tobytes()  # of a gradient in step 3
    assert len(proxy.seen) > 4 * 5000 * 4
    assert (telling in proxy.seen) == (not encrypt)
