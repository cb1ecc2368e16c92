"""Asynchronous training and tensors that servers hold, over real processes: one worker over shared memory, the other over TCP."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOBS

ASYNC = {"BYTEPS_ENABLE_ASYNC": "1", "PSGC_STALENESS": "2", "PSGC_MIN_COMPRESS_BYTES": "0"}
JOB = "asynchronous.py"


@pytest.fixture(scope="module")
def job(make_shared_job: Callable[..., Any]) -> Any:
    """One job that does everything; in the end its worker 1 is killed."""
    job = make_shared_job(servers=2, env=ASYNC)
    job.scheduler()
    for index in range(2):
        job.server(index)
    todo = ("digits", "sums", "models", "bound", "endless")
    workers = [job.worker(0, *todo, job=JOB), job.worker(1, *todo, job=JOB, PSGC_TRANSPORT="tcp")]
    while line := workers[1].popen.stdout.readline():
        workers[1].text += line
        if "stepped" in line:
            workers[1].kill()
            break
    job.ended = job.end()
    return job


def of_workers(job: Any) -> list[str]:
    return [process.text for process in job.processes if process.name.startswith("worker")]


@pytest.mark.timeout(300)
def test_asynchronous_training_reaches_the_synchronous_loss_within_5_percent(job: Any) -> None:
    for text in of_workers(job):
        ((synchronous, asynchronous),) = re.findall(r"synchronous=(\S+) asynchronous=(\S+)", text) or pytest.fail(job.text())
        assert float(asynchronous) <= 1.05 * float(synchronous)


@pytest.mark.timeout(300)
def test_integer_changes_add_up_bit_for_bit_and_rounds_are_outer_steps(job: Any) -> None:
    assert all("summed" in text for text in of_workers(job)), job.text()


@pytest.mark.timeout(300)
def test_models_train_with_buffers_frozen_and_bfloat16_parameters_late_groups_and_dropped_steps(job: Any) -> None:
    assert all("trained" in text for text in of_workers(job)), job.text()


@pytest.mark.timeout(300)
def test_no_worker_is_further_ahead_than_the_bound(job: Any) -> None:
    assert all("bounded" in text for text in of_workers(job)), job.text()


@pytest.mark.timeout(300)
def test_a_killed_worker_ends_the_others_with_one_line(job: Any) -> None:
    first = next(process for process in job.processes if process.name == "worker 0")
    assert job.ended["worker 0"] == 1 and "worker 1" in first.last_line, job.text()


@pytest.mark.timeout(300)
def test_a_killed_server_ends_every_worker_with_one_line(make_job: Callable[..., Any]) -> None:
    job = make_job(servers=2, env=ASYNC)
    job.scheduler()
    servers = [job.server(index) for index in range(2)]
    workers = [job.worker(0, "endless", job=JOB), job.worker(1, "endless", job=JOB, PSGC_TRANSPORT="tcp")]
    for worker in workers:
        while "stepped" not in worker.text and (line := worker.popen.stdout.readline()):
            worker.text += line
    servers[1].kill()
    ended = job.end()
    for worker in workers:
        assert ended[worker.name] == 1 and re.search(r"server 1 .*died: its process is gone", worker.last_line), job.text()
        assert "Traceback" not in worker.text, job.text()


@pytest.mark.timeout(300)
def test_what_codecs_have_not_sent_yet_goes_on_from_a_checkpoint(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """With as many ranks as before, and with more."""
    env = {key: value for key, value in ASYNC.items() if key != "PSGC_STALENESS"}
    assert all("saved" in text for text in make_job(env=env).said(f"save={tmp_path}", job=JOB))
    for ranks in (2, 3):
        assert all("resumed" in text for text in make_job(nodes=ranks, env=env).said(f"resume={tmp_path}", job=JOB))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_ends_early_holds_nobody_up(make_job: Callable[..., Any]) -> None:
    said = make_job(env=ASYNC).said("leaving", job=JOB)
    assert "weight=24.0" in said[0], "all 20 + 4 steps are in it"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_rank_0_there_are_no_initial_values_and_the_job_ends_with_that_line(make_job: Callable[..., Any]) -> None:
    job = make_job(env=ASYNC)
    workers = job.whole("headless", job=JOB)
    assert job.end()["worker 1"] == 1, job.text()
    gone = ("rank(s) 0", "rank 0", "all other ranks have left the job")  # whichever rank 1 waits for when that is seen
    assert any(words in workers[1].last_line for words in gone), job.text()


def test_held_tensors_do_alone_what_they_do_in_a_job(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=1, servers=1)
    (in_job,) = job.said(job="held.py")
    lone = make_job(
        nodes=1, env=dict.fromkeys(("DMLC_NUM_WORKER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "BYTEPS_FORCE_DISTRIBUTED"), "")
    )
    process = lone.start("alone", [sys.executable, str(JOBS / "held.py")])
    assert process.end() == 0, process.text
    found, wanted = (
        json.loads(next(line for line in text.splitlines() if line.startswith("found")).removeprefix("found"))
        for text in (process.text, in_job)
    )
    assert found == wanted
    rounds = "nesterov:lr=1,momentum=0.5"
    assert found[rounds][0] == {"w": [2.5, 5.0, -3.0], "s": 3.0}
    assert found[rounds][1]["s"] == 3.5, "zeros are pushed for what is left out, and the momentum moves it"
    assert found["after"] == {"w": [1.0] * 3, "i": [0, 0]}, "nothing of what was refused was pushed"
    told = found["told"]
    for what, words in {
        "name": "UsageError: HeldTensors: no tensor is named 'x'; there are w, i",
        "shape": "UsageError: HeldTensors: the change of 'w': expected a tensor of shape [3], float32 or what becomes that; got one of shape [1]",
        "scalar": "got one of shape []",
        "fraction": "the change of 'i': expected a tensor of shape [2], int64 or what becomes that; got float32; convert it",
        "complex": "got complex64",
        "sparse": "got one that is sparse_coo; convert it with to_dense()",
        "list": "the change of 'w': expected a tensor of shape [3], float32 or what becomes that; got a list",
        "powersgd": "CodecError: codec powersgd: changes are pushed by a codec of one round",
        "onebit/int8": "CodecError: codec onebit/int8: changes are pushed by a codec of one round",
        "onebitt": "CodecError: ",
    }.items():
        assert words in told[what], told[what]
