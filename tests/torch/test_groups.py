"""Groups over sockets, in jobs of real processes: every collective is NumPy's, and no failure leaves a process hanging."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ASKS_SCHEDULER

Make = Callable[..., Any]
PATH = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}


def workers(job: Any, *arguments: str, local_size: int = 1, **env: str) -> list[Any]:
    """All members of a job whose nodes have ``local_size`` ranks each; its workers, by rank, which have the settings ``env``."""
    job.scheduler()
    for index in range(job.servers):
        job.server(index)
    return [
        job.worker(node, *arguments, job="groups.py", BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(local_size), **env)
        for node in range(job.nodes)
        for local in range(local_size)
    ]


def test_every_collective_of_flat_local_and_inter_groups_beside_the_scripts_own(make_job: Make) -> None:
    job = make_job(nodes=2, env=PATH)
    ranks = workers(job, "beside", local_size=2)
    assert set(job.end().values()) == {0}, job.text()
    assert [worker.last_line for worker in ranks] == ["fine"] * 4, job.text()


def test_a_rank_that_is_killed_in_a_collective_ends_all_others_with_the_jobs_own_line(make_job: Make) -> None:
    job = make_job(nodes=2, env=PATH)
    ranks = workers(job, "die", local_size=2, **ASKS_SCHEDULER)
    job.end()
    assert ranks[3].popen.returncode == -signal.SIGKILL
    for worker in ranks[:3]:
        assert worker.popen.returncode == 1, job.text()
        assert re.search(r"worker 3 \(node 1, local rank 1, .*\) died: its process is gone", worker.last_line), job.text()
        assert "got what" not in worker.text
        assert "Traceback" not in worker.text, job.text()


def test_a_rank_that_never_comes_to_a_collective_ends_the_job_after_the_limit_of_a_step(make_job: Make) -> None:
    """Two jobs at once, which both wait for the limit."""
    kinds = {
        "be_absent": r"rank 0: all_reduce of 3 float32 in the group of ranks 0, 1 failed: rank 1 has not come to it within 3 s",
        "never_connect": r"rank 0 cannot connect to the group of ranks 0, 1: rank 1 has not connected within 6 s|"
        r"the value 'sockets [0-9a-f]+/0' has awaited its publication, for rank\(s\) 0, for .*PSGC_STEP_TIMEOUT_S",
    }
    limits = {"be_absent": {}, "never_connect": {"PSGC_STEP_TIMEOUT_S": "6"}}  # the former's group gets a limit once its members have met
    jobs = [make_job(nodes=2, env=PATH | limits[how]) for how in kinds]
    ranks = [workers(job, how) for job, how in zip(jobs, kinds, strict=True)]
    for job, of_job, said in zip(jobs, ranks, kinds.values(), strict=True):
        job.end()
        for worker in of_job:
            assert worker.popen.returncode == 1, job.text()
            assert re.search(said, worker.last_line), job.text()


def test_values_of_any_size_are_told_to_all_and_a_second_value_of_a_name_ends_the_job(make_job: Make) -> None:
    job = make_job(nodes=2, env=PATH)
    ranks = workers(job, "publish")
    job.end()
    for worker in ranks:
        assert worker.popen.returncode == 1
        assert "rank 1 published two different values under the name 'value 1'" in worker.last_line, job.text()
        assert "Traceback" not in worker.text, job.text()


def test_only_one_thread_at_a_time_issues_on_a_group(make_job: Make) -> None:
    job = make_job(nodes=2, env=PATH)
    ranks = workers(job, "break_rules")
    job.end()
    assert [worker.last_line for worker in ranks] == ["fine"] * 2, job.text()


def test_every_collective_under_encryption(make_job: Make) -> None:
    pytest.importorskip("cryptography", reason="psgc[encrypt] is not installed")
    job = make_job(nodes=2, env=PATH | {"PSGC_ENCRYPT": "1"})
    ranks = workers(job, "beside", local_size=2)
    assert set(job.end().values()) == {0}, job.text()
    assert [worker.last_line for worker in ranks] == ["fine"] * 4, job.text()
