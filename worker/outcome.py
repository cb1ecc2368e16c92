"""Whether a process's membership of a job goes on: the error that has ended the job, and what is called at the end.

Invariant: the first error stands, and is known, with whether the launcher says it, before anybody is released; what ``at_end`` is given is called once,
whichever end comes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import cast

from psgc.config import Config
from psgc.diagnostics.report import Event, Launcher
from psgc.errors import JobFailed, PsgcError, UsageError
from psgc.layout import Layout
from psgc.processes.checkpoints import SAVES
from psgc.worker.rest import Rest
from psgc.worker.session import Session, Ticket
from psgc.worker.tickets import StepTicket, TicketBoard


class Outcome:
    """Of one session. Used by any thread. board: the session's tickets; launcher: who started this process, and is told."""

    def __init__(self, config: Config) -> None:
        self.board = TicketBoard()
        self.launcher = Launcher(config.launcher)
        SAVES.report_to(self.launcher.tell_saving, config.save_timeout_s)
        self.error: PsgcError | None = None
        self.closed = False  # the session has been left
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    @property
    def failed(self) -> bool:
        return self.error is not None

    def check(self) -> None:
        """Raise the error that ended the job, if one has, and UsageError once the session has been left."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise UsageError(
                "psgc has been shut down in this process: what was made in that job does not go on in another; make the optimizer, or wrap the model, again "
                "after init()"
            )

    def fail(self, error: PsgcError, tells: bool = True, event: Event = "job failed") -> bool:
        """The job has failed. Returns False if it had before. The caller then releases whoever waits, and calls ``run_calls``. tells: the launcher, which then
        says why. event: what it is told."""
        with self._lock:
            if self.error is not None:
                return False
            if tells and isinstance(error, JobFailed):
                error.told = self.launcher.tell(event, str(error))
            self.error = error
        return True

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called by the next ``run_calls``; at once if the job has failed."""
        with self._lock:
            self._calls.append(call)
        if self.failed:
            self.run_calls()

    def run_calls(self) -> None:
        """Before this process leaves the job, or when the job has failed."""
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class SessionWithOutcome(Session):
    """A session that goes on until its outcome says otherwise."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.outcome = Outcome(config)
        self.rest = Rest()

    def issue(self, layout: Layout, bucket: int) -> StepTicket:
        """The ticket of a bucket's step, which is submitted now."""
        self.check()
        if self.figures is not None:
            self.figures.submitted(time.monotonic())
        if self.trace is not None:
            self.trace.submitted(layout, bucket)
        return self.outcome.board.issue()

    def wait(self, tickets: Iterable[Ticket]) -> None:
        with self.rest.resting():
            self.outcome.board.wait(cast("Iterable[StepTicket]", tickets))
        self.check()

    def wait_for_all(self) -> None:
        self.wait(self.outcome.board.outstanding())

    def check(self) -> None:
        self.outcome.check()

    @property
    def failed(self) -> bool:
        return self.outcome.failed

    def at_end(self, call: Callable[[], None]) -> None:
        self.outcome.at_end(call)
