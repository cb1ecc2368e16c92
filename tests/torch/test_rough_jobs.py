"""Trainings that are uneven, under plans over groups of ranks, with servers behind them and without: right, or a clear end of every rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.layout.collective import ENCODED, ENCODED_BY_NODE, SUM, SUM_BY_NODE
from tests.conftest import ASKS_SCHEDULER
from tests.torch.job_rough import Net
from tests.torch.test_planned import written
from tests.torch.test_switch import plan_of

Make = Callable[..., Any]
JOB = str(Path(__file__).parent / "job_rough.py")
NUMEL = {name: parameter.numel() for name, parameter in Net().named_parameters()}
SHARDS = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
ROOTS = ("intra.reduce", "inter.push", "inter.pull", "intra.broadcast")
SHARDS_ENCODED = ("intra.reduce_scatter", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.all_gather")
ROOTS_ENCODED = ("intra.reduce", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.broadcast")
STEM, LEFT, RIGHT = "stem.weight stem.bias", "left.bias left.weight", "right.weight right.bias"
OVER_SERVERS = (
    [(RIGHT, "none", SHARDS), (LEFT, "none", ROOTS), (STEM, "none", ("flat.push", "flat.pull"))],
    [(RIGHT, "onebit/none", SHARDS_ENCODED), (LEFT, "topk:k=0.1", ROOTS_ENCODED), (STEM, "none/onebit", SHARDS_ENCODED)],
)
AMONG_WORKERS = (
    [(RIGHT, "none", SUM), (LEFT, "none", SUM_BY_NODE), (STEM, "none", ("flat.all_reduce",))],
    [(RIGHT, "onebit", ENCODED_BY_NODE), (LEFT, "topk:k=0.1", ENCODED), (STEM, "onebit/none", ENCODED)],
)


def run(make_job: Make, folder: Path, servers: int, ending: str, plans: Any, transport: str = "auto") -> list[Any]:
    """The workers of a job on nodes of two ranks and one that has ended."""
    paths = [str(written(folder / f"{number}.json", plan_of(NUMEL, *buckets))) for number, buckets in enumerate(plans)]
    job = make_job(servers=servers, env={"PSGC_TRANSPORT": transport})
    job.scheduler()
    for index in range(servers):
        job.server(index)
    more = ASKS_SCHEDULER if ending == "killed" else {"ROUGH_LEFT": str(folder / "left")}
    workers = [
        job.worker(node, ending, *paths, job=JOB, BYTEPS_LOCAL_RANK=str(local), BYTEPS_LOCAL_SIZE=str(2 - node), **more)
        for node, local in ((0, 0), (0, 1), (1, 0))
    ]
    job.end()
    return workers


def is_right(workers: list[Any]) -> None:
    for worker in workers:
        said = set(worker.text.splitlines())
        assert {"right", "the same again"} <= said, worker.text


def ends_with(worker: Any, *wanted: str) -> None:
    """One line that says all this, and no traceback."""
    assert worker.popen.returncode == 1, worker.text
    assert all(text in worker.last_line for text in wanted), worker.text
    assert "Traceback" not in worker.text, worker.text


def test_servers_behind_nodes_train_right_and_a_rank_with_fewer_batches_is_named(make_job: Make, tmp_path: Path) -> None:
    workers = run(make_job, tmp_path, 2, "fewer", OVER_SERVERS)
    is_right(workers)
    for worker in (workers[0], workers[2]):
        ends_with(worker, "rank(s) 1 left the job, but ", ": every rank must run the same number of steps")


def test_collectives_train_right_and_a_rank_that_is_killed_ends_all_others_with_a_line(make_job: Make, tmp_path: Path) -> None:
    workers = run(make_job, tmp_path, 0, "killed", AMONG_WORKERS)
    is_right(workers)
    assert workers[1].popen.returncode == -signal.SIGKILL
    for worker in (workers[0], workers[2]):
        ends_with(worker, "worker 1 (node 0, local rank 1,", "died: its process is gone")


@pytest.mark.parametrize(("servers", "plans", "transport"), [(1, OVER_SERVERS, "shm"), (1, OVER_SERVERS, "tcp"), (0, AMONG_WORKERS, "tcp")])
def test_a_rank_that_is_killed_in_the_middle_of_a_step_ends_all_others_with_a_line(
    make_job: Make, tmp_path: Path, servers: int, plans: Any, transport: str
) -> None:
    """With servers, before they have its node's sum; without, in the middle of a collective."""
    workers = run(make_job, tmp_path, servers, "killed", plans[:1], transport)
    assert workers[1].popen.returncode == -signal.SIGKILL
    for worker in (workers[0], workers[2]):
        ends_with(worker, "worker 1 (node 0, local rank 1,", "died: its process is gone")
