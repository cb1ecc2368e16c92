"""On one host a process that is stopped or busy is named and waited for, however long; only one that is gone ends the job."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

SOON = {"PSGC_DEAD_S": "2", "PSGC_SILENCE_S": "1"}
STOPPED_S = 6.0  # much longer than PSGC_DEAD_S


WHO = ((0, "shm"), (1, "shm"), (1, "tcp"), (3, "tcp"))  # the scheduler, the server, a worker; and the job's transport


def test_whoever_is_stopped_for_longer_than_dead_s_goes_on_and_the_job_ends_well(make_job: Callable[..., Any]) -> None:
    """A job for each, all of them stopped at the same time."""
    jobs = [make_job(nodes=2, env={**SOON, "PSGC_TRANSPORT": transport}) for _, transport in WHO]
    for job in jobs:
        job.whole("--steps", "60", "--check-sums", job="steps.py")  # done before the scheduler goes on, and then it is waited for
    for job in jobs:
        job.processes[2].read_until("step 5:")
    stopped = [job.processes[who].popen for job, (who, _) in zip(jobs, WHO, strict=True)]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    idle(STOPPED_S)
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    for job, process, (who, transport) in zip(jobs, stopped, WHO, strict=True):
        assert set(job.end().values()) == {0}, (who, transport, job.text())
        others = "\n".join(p.text for p in job.processes if p.popen is not process)
        silent = (
            r"the scheduler at .* has said nothing for \d s; its process is stopped or busy, and is waited for"
            if who == 0
            else rf"pid {process.pid} on .*\) has said nothing for \d s"
        )
        assert re.search(silent, others), (who, transport, others)


def idle(seconds: float) -> None:
    """Sleep; that a process does nothing for so long is what is tested."""
    signal.sigtimedwait([signal.SIGUSR2], seconds)
