"""Asynchronous training and tensors that servers hold, over real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

ASYNC = {"BYTEPS_ENABLE_ASYNC": "1"}
JOB = "asynchronous.py"


@pytest.mark.timeout(300)
def test_asynchronous_training_reaches_the_synchronous_loss_within_5_percent(make_job: Callable[..., Any]) -> None:
    def loss(codec: str, **job: Any) -> float:
        said = make_job(**job).said("digits", "60", codec, job=JOB)
        return float(re.findall(r"loss=(\S+)", said[0])[0])

    synchronous = loss("none")
    assert loss("topk:k=0.1", servers=2, env={**ASYNC, "PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_STALENESS": "4"}) <= 1.05 * synchronous


@pytest.mark.timeout(300)
def test_integer_changes_add_up_bit_for_bit_and_rounds_are_outer_steps(make_job: Callable[..., Any]) -> None:
    for text in make_job(servers=2, env={"PSGC_TRANSPORT": "tcp"}).said("sums", job=JOB):
        assert "summed" in text


@pytest.mark.timeout(300)
def test_models_train_with_buffers_frozen_and_bfloat16_parameters_late_groups_and_dropped_steps(make_job: Callable[..., Any]) -> None:
    for text in make_job(env={**ASYNC, "PSGC_MIN_COMPRESS_BYTES": "0"}).said("models", "onebit", job=JOB):
        assert "trained" in text


@pytest.mark.timeout(300)
def test_no_worker_is_further_ahead_than_the_bound_and_one_that_ends_early_holds_nobody_up(make_job: Callable[..., Any]) -> None:
    said = make_job(env={**ASYNC, "PSGC_STALENESS": "2"}).said("bound", job=JOB)
    assert "weight=23.0" in said[0], "all 20 + 3 steps are in it"


@pytest.mark.timeout(300)
def test_a_killed_worker_ends_the_others_with_one_line(make_job: Callable[..., Any]) -> None:
    job = make_job(env={**ASYNC, "PSGC_STALENESS": "2"})
    workers = job.whole("endless", job=JOB)
    stdout = workers[1].popen.stdout
    while "stepped" not in stdout.readline():
        pass
    workers[1].kill()
    ended = job.end()
    assert ended["worker 0"] == 1 and "worker 1" in workers[0].last_line, job.text()


@pytest.mark.timeout(300)
def test_without_rank_0_there_are_no_initial_values_and_the_job_ends_with_that_line(make_job: Callable[..., Any]) -> None:
    job = make_job(env=ASYNC)
    workers = job.whole("headless", job=JOB)
    assert job.end()["worker 1"] == 1, job.text()
    assert "rank(s) 0" in workers[1].last_line or "rank 0" in workers[1].last_line, job.text()
