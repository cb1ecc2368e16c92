"""On one host a process that is stopped or busy is named and waited for, however long; only one that is gone ends the job."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Process

SOON = {"PSGC_DEAD_S": "2", "PSGC_SILENCE_S": "1", "PSGC_STEP_TIMEOUT_S": "10000"}
LONGER = r"has said nothing for ([3-9]|\d\d+) s"  # than PSGC_DEAD_S
WHO = ((1, "shm"), (1, "tcp"), (3, "tcp"), (0, "shm"))  # the server, a worker, the scheduler; and the job's transport


def test_whoever_is_stopped_for_longer_than_dead_s_goes_on_and_the_job_ends_well(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """A job for each, stopped in the middle until another process says for how long that one has said nothing; all are stopped at the same time."""
    go = tmp_path / "go"
    jobs = [make_job(nodes=2, env={**SOON, "PSGC_TRANSPORT": transport}) for _, transport in WHO]
    for job, (who, _) in zip(jobs, WHO, strict=True):
        job.whole("--steps", "40", "--hold-at", "6", "--go", str(go), "--check-sums", job="steps.py")
        job.processes[2].read_until("step 5:")
        job.processes[who].popen.send_signal(signal.SIGSTOP)
    go.touch()
    for job, (who, _) in zip(jobs, WHO, strict=True):
        scheduler, worker, stopped = job.processes[0], job.processes[2], job.processes[who].popen
        if who == 0:
            say(worker, "^step 40:")  # steps go on without the scheduler; then it is waited for
            say(worker, rf"the scheduler at .* {LONGER}; its process is stopped or busy, and is waited for")
        else:
            say(scheduler, rf"pid {stopped.pid} on .*\) {LONGER}")
        stopped.send_signal(signal.SIGCONT)
    for job, (who, transport) in zip(jobs, WHO, strict=True):
        assert set(job.end().values()) == {0}, (who, transport, job.text())


def say(process: Process, words: str) -> None:
    """Wait until it has said so."""
    if not re.search(words, process.text, re.MULTILINE):
        process.read_until(words)
