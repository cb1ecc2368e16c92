"""``init`` after ``shutdown``: a process joins one job after another and leaves nothing behind; `psgc run` keeps the scheduler and the servers for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

AGAIN = str(Path(__file__).parent.parent / "jobs" / "again.py")
TOLD = re.compile(r"^rank (\d) after (\d+) jobs: (fds=\d+ threads=\d+ python=\d+ segments=\d+) rss=(\d+)$", re.MULTILINE)
MOST_GROWN_MB = 20  # the allocator's; a job of these that were kept would be 70 KB of residuals, 1 MB of payloads and a thread pool


def opened(out: str, first: int, last: int) -> list[tuple[str, str]]:
    """Of each rank, what it had open after its first and after its last job; their memory has not grown in between."""
    told = {(rank, int(jobs)): (what, int(resident)) for rank, jobs, what, resident in TOLD.findall(out)}
    ranks = sorted({rank for rank, _ in told})
    for rank in ranks:
        assert told[rank, last][1] - told[rank, first][1] <= MOST_GROWN_MB, out
    return [(told[rank, first][0], told[rank, last][0]) for rank in ranks]


@pytest.mark.parametrize("jobs", [4, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("servers", [2, 0])
def test_workers_join_job_after_job_and_leave_nothing_open(launched: Any, servers: int, jobs: int) -> None:
    first = min(jobs // 2, 10)
    command = (sys.executable, AGAIN, "--jobs", str(jobs), "--told-at", str(first), str(jobs))
    popen = launched.psgc("run", "--no-prefix", "--servers", str(servers), "--", *command, PSGC_SILENCE_S="60")
    status, out, err = launched.end(popen)
    assert status == 0, err
    assert sorted(line for line in out.splitlines() if line.endswith(f": {jobs} jobs")) == [
        f"rank {rank}: {jobs} jobs" for rank in range(2)
    ]
    both = opened(out, first, jobs)
    assert len(both) == 2 and all(then == now for then, now in both), out
    assert "the workers have ended; ending" not in err and "scheduler" not in err, "its services wait, and end without a word"


def test_so_does_a_worker_that_is_alone(launched: Any) -> None:
    status, out, err = launched.end(launched.preloaded(AGAIN, "--jobs", "50", "--told-at", "5", "50"))
    assert status == 0, err
    ((then, now),) = opened(out, 5, 50)
    assert then == now


def test_what_a_server_kept_that_was_killed_in_a_jobs_last_moment_is_not_taken_for_the_next_jobs(launched: Any) -> None:
    """The job says that all sums are its own. The server's next process comes when that job is over: it has to start (nothing is loaded ahead for it here)."""
    command = (sys.executable, AGAIN, "--jobs", "2", "--kill")
    popen = launched.python("-m", "psgc.launch", "run", "--no-prefix", "--", *command, PSGC_SILENCE_S="60", PSGC_STEP_TIMEOUT_S="60")
    status, out, err = launched.end(popen)
    assert (status, sorted(out.splitlines())) == (0, ["rank 0: 2 jobs", "rank 1: 2 jobs"]), err
    said = re.findall(r"^psgc run: .*$", err, re.MULTILINE)
    assert said and said[0].startswith("psgc run: server 0 was killed by SIGKILL"), err


def test_a_worker_that_joins_fewer_jobs_than_the_others_is_named(launched: Any) -> None:
    command = (sys.executable, AGAIN, "--jobs", "2", "--fewer-on-rank", "1")
    status, _, err = launched.end(launched.psgc("run", "--", *command, PSGC_SILENCE_S="60"))
    said = r"psgc run: rank 1 ended with status 0 and joined 1 job\(s\), not the next, which the other ranks wait for: .*, as often as the others"
    assert status == 1 and re.fullmatch(said, err.splitlines()[-1]), err
