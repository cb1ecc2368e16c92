"""PSGC_ENCRYPT=1: sums are right, and somebody who reads the traffic sees no payload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ports import free_port
from tests.proxy import Proxy


class ReadingProxy(Proxy):
    """Keeps what passes."""

    def __init__(self, target: int) -> None:
        self.seen = bytearray()
        super().__init__(target)

    def passed(self, number: int, from_client: bool, data: bytes) -> tuple[bytes, bool]:
        self.seen += data
        return data, True


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("encrypt", [False, True])
def test_payloads_on_the_wire_are_readable_without_encryption_and_not_with_it(
    make_job: Callable[..., Any], encrypt: bool, asynchronous: bool
) -> None:
    if encrypt:
        pytest.importorskip("cryptography", reason="the extra `encrypt` is not installed")
    port = free_port()
    proxy = ReadingProxy(port)
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp", "PSGC_ENCRYPT": str(int(encrypt)), "PSGC_ASYNC": str(int(asynchronous))})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{proxy.port}")
    for node in range(2):
        if asynchronous:  # weights, and what moves them
            job.worker(node, "sums", "models", job="asynchronous.py")
        else:
            job.worker(node, "--steps", "4", "--numel", "5000", "--pause-s", "0", "--check-sums", job="steps.py")
    statuses = job.end()
    proxy.close()
    assert set(statuses.values()) == {0}, job.text()
    telling = np.full(16, 3.0, np.float32).tobytes()  # of a gradient in step 3, of a change in each
    assert len(proxy.seen) > 4 * 5000 * 4
    assert (telling in proxy.seen) == (not encrypt)
