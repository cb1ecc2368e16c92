"""A lane's thread, which runs collectives on groups of its own, one after the other, and what the lane does next.

Owns the threads and the interface of their orders; knows neither layouts nor numbers. Invariant: the members of a group begin its collectives in one order, so
a lane's jobs come in an order that all ranks follow: a layout's (``psgc.program.order``), or the one that ranks vote on (``named.py``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from psgc.processes.reminder import Reminder
from psgc.program.groups import Groups


class Job(Protocol):
    """What a lane does in one go."""

    def run(self, groups: Groups) -> None:
        """Do it. In the lane's thread."""

    def what(self) -> str:
        """It, in words."""

    def late(self) -> str | None:
        """What to say of it once it has taken long; None: nothing."""


class Order(Protocol):
    """What a lane does next."""

    def put(self, job: Job) -> None:
        """The job has its turn."""

    def next(self) -> Job | None:
        """Sleep until there is a job, and return it; None: the lane ends."""

    def end(self) -> None:
        """The lane ends, after the jobs that it has been given."""


class FirstCome:
    """The order in which jobs are put."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.put, self.next = self._jobs.put, self._jobs.get

    def end(self) -> None:
        self._jobs.put(None)


class Lane(threading.Thread):
    """groups_of: makes its groups, when the first job wants them; broken: is told of what a job has raised, and the job in words."""

    def __init__(self, name: str, order: Order, groups_of: Callable[[], Groups], broken: Callable[[Exception, str], None]) -> None:
        super().__init__(name=f"psgc-{name}", daemon=True)
        self.order, self._groups_of, self._broken = order, groups_of, broken
        self._job: Job | None = None  # under way
        self._late: tuple[Job, Reminder] | None = None  # the job that is waited for, to the network thread's knowledge
        self.start()

    @cached_property
    def groups(self) -> Groups:
        """Raises what keeps this rank from having any."""
        return self._groups_of()

    def late(self, now: float, first_s: float) -> str | None:
        """What to say of a job that has taken long. first_s: until the first message."""
        job = self._job
        text = None if job is None else job.late()
        if job is None or text is None:
            self._late = None
            return None
        if self._late is None or self._late[0] is not job:
            self._late = job, Reminder(now)
        return text if self._late[1].due(now, first_s) else None

    def run(self) -> None:
        while (job := self.order.next()) is not None:
            self._job = job
            try:
                job.run(self.groups)
            except Exception as error:
                self._broken(error, job.what())
            self._job = None
        if "groups" in self.__dict__:
            self.groups.close()
