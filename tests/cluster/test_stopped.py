"""On one host a process that is stopped or busy is named and waited for, however long; only one that is gone ends the job."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

SOON = {"PSGC_DEAD_S": "2", "PSGC_SILENCE_S": "1"}
STOPPED_S = 6.0  # much longer than PSGC_DEAD_S


@pytest.mark.parametrize(("who", "transport"), [(0, "shm"), (1, "shm"), (1, "tcp"), (3, "tcp")])
def test_whoever_is_stopped_for_longer_than_dead_s_goes_on_and_the_job_ends_well(
    make_job: Callable[..., Any], who: int, transport: str
) -> None:
    job = make_job(nodes=2, env={**SOON, "PSGC_TRANSPORT": transport})
    workers = job.whole("--steps", "60", "--check-sums", job="steps.py")  # done before the scheduler goes on, and then it is waited for
    line = ""
    while "step 5:" not in line:
        line = workers[0].popen.stdout.readline()
        assert line, "it ended before its fifth step"
    process = job.processes[who].popen
    process.send_signal(signal.SIGSTOP)
    idle(STOPPED_S)
    process.send_signal(signal.SIGCONT)
    assert set(job.end().values()) == {0}, job.text()
    others = "\n".join(p.text for p in job.processes if p.popen is not process)
    if who == 0:
        assert re.search(r"the scheduler at .* has said nothing for \d s; its process is stopped or busy, and is waited for", others), (
            others
        )
    else:
        assert re.search(rf"pid {process.pid} on .*\) has said nothing for \d s", others), others


def idle(seconds: float) -> None:
    """Sleep; that a process does nothing for so long is what is tested."""
    signal.sigtimedwait([signal.SIGUSR2], seconds)
