"""A connection that breaks is re-made, and what was lost is sent again: no step is lost, none is added twice."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable
from typing import Any


class CuttingProxy:
    """Forwards TCP connections and cuts each one after a random number of bytes, in mid-payload more often than not."""

    def __init__(self, target: int, seed: int, bytes_between_cuts: int) -> None:
        self._target, self._random, self._budget = target, random.Random(seed), bytes_between_cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        self.cutting = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                left = [self._random.randrange(self._budget // 2, self._budget)]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink, left), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                left[0] -= len(data)
                if self.cutting and left[0] < 0:
                    self.cuts += 1
                    sink.sendall(data[: len(data) // 2])
                    break
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


def test_steps_survive_connections_cut_in_mid_payload(make_job: Callable[..., Any]) -> None:
    port = free_port()
    proxy = CuttingProxy(port, seed=1, bytes_between_cuts=3_000_000)
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp"})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{proxy.port}")
    arguments = ("--steps", "40", "--numel", "200000", "--pause-s", "0", "--check-sums")
    workers = [job.worker(node, *arguments, job="steps.py") for node in range(2)]
    statuses = job.end()
    proxy.close()
    assert set(statuses.values()) == {0}, job.text()
    assert proxy.cuts > 3, "the proxy cut nothing, so the test shows nothing"
    assert any("'resent': 0" not in worker.text for worker in workers), job.text()
