"""How a broken collective ends: with the job's own error, which says who died and why, or with its own if the job has none."""

from __future__ import annotations

import time
from typing import Final, NoReturn

from psgc.errors import GroupError
from psgc.worker.session import Session

REPORT_HEARTBEATS: Final = 4  # how long the job's own report of a failure is waited for: it says more than a closed connection does
ANSWER_HEARTBEATS: Final = 60  # the same, once the scheduler was told: it always answers, but a busy machine's may take its time


def fail(session: Session, what: str, reason: str) -> NoReturn:
    """Raise what ended the job; if nothing has within a few heartbeats, end it with ``what`` and why it failed. Raises PsgcError."""
    _await_failure(session, REPORT_HEARTBEATS)
    text = f"rank {session.rank}: {what} failed: {reason}"
    session.tell_broken(text)
    _await_failure(session, ANSWER_HEARTBEATS)
    session.fail(text)
    raise GroupError(text)


def _await_failure(session: Session, heartbeats: int) -> None:
    """Raise what ended the job, if something does within so many heartbeats."""
    until = time.monotonic() + heartbeats * session.config.heartbeat_s
    while time.monotonic() < until and not session.failed:
        session.check()  # one that was left hears of no failure
        time.sleep(0.02)
    session.check()
