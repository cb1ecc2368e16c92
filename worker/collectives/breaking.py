"""How a broken collective ends: with the job's own error, which says who died and why, or with its own if the job has none."""

from __future__ import annotations

import time
from typing import Final, NoReturn

from psgc.errors import GroupError
from psgc.worker.session import Session

REPORT_HEARTBEATS: Final = 4  # how long the job's own report of a failure is waited for: it says more than a closed connection does


def fail(session: Session, what: str, reason: str) -> NoReturn:
    """Raise what ended the job; if nothing has within a few heartbeats, end it with ``what`` and why it failed. Raises PsgcError."""
    _await_failure(session)
    text = f"rank {session.rank}: {what} failed: {reason}"
    session.tell_broken(text)
    _await_failure(session)
    session.fail(text)
    raise GroupError(text)


def _await_failure(session: Session) -> None:
    """Raise what ended the job, if something does within a few heartbeats."""
    until = time.monotonic() + REPORT_HEARTBEATS * session.config.heartbeat_s
    while time.monotonic() < until and not session.failed:
        time.sleep(0.02)
    session.check()
