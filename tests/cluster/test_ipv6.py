"""A job whose addresses are IPv6: everything is bound, advertised and reached there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.ports import free_port

Make = Callable[..., Any]
pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("root", ["::1", "[::1]"])
def test_a_job_runs_over_ipv6(make_job: Make, root: str) -> None:
    job = make_job(nodes=2, env={"DMLC_PS_ROOT_URI": root, "PSGC_TRANSPORT": "tcp"})
    job.whole("--steps", "10", "--check-sums", job="steps.py")
    assert set(job.end().values()) == {0}, job.text()


def test_a_server_on_ipv6_serves_members_that_come_by_ipv4(make_job: Make) -> None:
    port = free_port()
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp"})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"[::1]:{port}")
    job.worker(0, "--steps", "5", "--check-sums", job="steps.py")
    job.worker(1, "--steps", "5", "--check-sums", job="steps.py", DMLC_PS_ROOT_URI="localhost")
    assert set(job.end().values()) == {0}, job.text()


def test_a_scheduler_that_is_missing_is_named_with_brackets(make_job: Make) -> None:
    job = make_job(nodes=1, env={"DMLC_PS_ROOT_URI": "::1", "PSGC_REGISTER_TIMEOUT_S": "4"})
    worker = job.worker(0, job="steps.py")
    assert job.end() == {"worker 0": 1}
    assert f"(PSGC_REGISTER_TIMEOUT_S) of waiting for the scheduler at tcp://[::1]:{job.port}" in worker.last_line, worker.text
