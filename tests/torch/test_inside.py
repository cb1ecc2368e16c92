"""Nodes with roots (BYTEPS_REDUCE_ROOTS) and with switches (BYTEPS_PCIE_SWITCH_SIZE) in real jobs: exact sums, and who pushes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = str(Path(__file__).parent / "job_inside.py")


@pytest.mark.timeout(300)
def test_of_a_node_its_roots_alone_push_and_behind_switches_sums_are_exact_too(make_job: Callable[..., Any]) -> None:
    inside = ({"BYTEPS_REDUCE_ROOTS": "1"}, {"BYTEPS_PCIE_SWITCH_SIZE": "2"})
    job = make_job(nodes=2, servers=1)
    job.scheduler()
    job.server(0)
    workers = [
        job.worker(node, job=JOB, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(size), **inside[node])
        for node, size in enumerate((2, 4))
        for local in range(size)
    ]
    assert set(job.end().values()) == {0}, job.text()
    said = "\n".join(worker.text for worker in workers)
    pushed = {int(rank): int(keys) for rank, keys in re.findall(r"rank (\d): \d+ buckets are exact, (\d+) keys pushed", said)}
    assert len(pushed) == 6, said
    assert pushed[0] == 0, "rank 0 is no root"
    assert all(pushed[rank] for rank in range(1, 6)), pushed


def test_workers_of_a_node_that_say_different_things_of_it_end_the_job_with_one_line(make_job: Callable[..., Any]) -> None:
    for first, second, line in (
        ({"BYTEPS_REDUCE_ROOTS": "1"}, {}, "has BYTEPS_REDUCE_ROOTS 1 and BYTEPS_PCIE_SWITCH_SIZE unset"),
        (
            {"BYTEPS_REDUCE_ROOTS": "2"},
            {"BYTEPS_REDUCE_ROOTS": "2"},
            "its roots are 2, expected local ranks from 0 to 1, each once and in order",
        ),
    ):
        job = make_job(nodes=1)
        job.scheduler()
        job.server(0)
        workers = [
            job.worker(0, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE="2", **inside) for local, inside in enumerate((first, second))
        ]
        assert 0 not in {job.end()[worker.name] for worker in workers}
        assert any(line in worker.text for worker in workers), job.text()
