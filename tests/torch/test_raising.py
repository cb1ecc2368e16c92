"""A backward that raises on one rank, whose script goes on: right where all ranks drop the step, else the end of every rank with a line that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ASKS_SCHEDULER

Make = Callable[..., Any]
JOB = str(Path(__file__).parent / "job_raising.py")
ENV = {
    "PSGC_FUSE_BYTES": "1000",
    "PSGC_MIN_COMPRESS_BYTES": "0",
}  # the last layer's gradients have left when the first layer's backward raises


@pytest.mark.parametrize("servers", [1, 0])
@pytest.mark.parametrize(("how", "codec"), [("alone", "none"), ("alone", "int8"), ("steps", "none")])
def test_a_rank_that_goes_on_without_a_step_that_others_applied_ends_the_job_with_its_reason(
    make_job: Make, servers: int, how: str, codec: str
) -> None:
    job = make_job(servers=servers, env=ENV | {"PSGC_CODEC": codec})
    job.scheduler()
    for index in range(servers):
        job.server(index)
    workers = [job.worker(node, how, job=JOB, **ASKS_SCHEDULER) for node in range(2)]
    job.end()
    for worker in workers:
        assert worker.popen.returncode == 1, job.text()
        assert "rank 1: backward raised in " in worker.last_line and "call put_back() in place of step()" in worker.last_line, job.text()
        assert "Traceback" not in worker.text, job.text()
    assert workers[1].text.count("goes on") == 1


@pytest.mark.parametrize("servers", [1, 0])
def test_where_every_rank_drops_the_step_the_training_goes_on(make_job: Make, servers: int) -> None:
    job = make_job(servers=servers, env=ENV | {"PSGC_CODEC": "int8"})
    workers = job.whole("together", job=JOB)
    assert set(job.end().values()) == {0}, job.text()
    assert all("the same weights" in worker.text for worker in workers)
    assert workers[1].text.count("goes on") == 4
