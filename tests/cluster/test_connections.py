"""A broken connection is made again, and lost messages are sent again: no step is lost, and none is added twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.ports import free_port
from tests.proxy import Proxy


class CuttingProxy(Proxy):
    """Cuts each connection after a random number of bytes, both ways together, in mid-payload more often than not."""

    def __init__(self, target: int, seed: int, bytes_between_cuts: int) -> None:
        self._random, self._budget = random.Random(seed), bytes_between_cuts
        self._left: dict[int, int] = {}  # by connection
        self.cuts = 0
        self.cutting = True
        super().__init__(target)

    def passed(self, number: int, from_client: bool, data: bytes) -> tuple[bytes, bool]:
        self._left.setdefault(number, self._random.randrange(self._budget // 2, self._budget))
        self._left[number] -= len(data)
        if self.cutting and self._left[number] < 0:
            self.cuts += 1
            return data[: len(data) // 2], False
        return data, True


def test_steps_survive_connections_cut_in_mid_payload(make_job: Callable[..., Any]) -> None:
    port = free_port()
    proxy = CuttingProxy(port, seed=1, bytes_between_cuts=6_000_000)
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp"})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{proxy.port}")
    arguments = ("--steps", "24", "--numel", "200000", "--pause-s", "0", "--check-sums")
    workers = [job.worker(node, *arguments, job="steps.py") for node in range(2)]
    statuses = job.end()
    proxy.close()
    assert set(statuses.values()) == {0}, job.text()
    assert proxy.cuts > 3, "the proxy cut nothing, so the test shows nothing"
    assert any("'resent': 0" not in worker.text for worker in workers), job.text()
