"""Finds the first cause of a job's failure, the message about it, and the exit status. Pure.

One fault makes many processes fail. A process that was informed of the fault reports that before it ends; a process that fails without such a report
is itself the cause. So the cause is the earliest event of the first of these kinds that occurred: a process that failed by itself; a fault that the
scheduler detected; a fault that a scheduler on another machine reported to a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from psgc.diagnostics.report import Report


class Weight(IntEnum):
    REPORTED = 1  # by a member, from a scheduler that is not here
    FOUND = 2  # by the scheduler
    OWN = 3  # a process failed by itself


@dataclass(slots=True)
class Account:
    """The state of one process. name: the prefix of its lines. status: as Popen's returncode; None while it runs, or if the launcher ended it."""

    name: str
    service: bool
    scheduler: bool = False
    status: int | None = None
    ended: bool = False
    begun: int = 0  # how often it has called init; of a service: in how many jobs it has served
    joined: int = 0  # how often everyone was there
    left: int = 0  # how many jobs it has left in order; of a service: has seen to their end
    informed: bool = False  # that the job has failed
    left_out: bool = False  # it has died, and the job goes on without it
    cut_off: str = ""  # why it has left a job that may go on
    coming_back: bool = False  # another process has been started in its place, and has not joined yet

    @property
    def in_job(self) -> bool:
        """Whether a worker is in a job that is complete, or on its way back into it."""
        return self.coming_back or self.left < self.joined

    def comes_back(self) -> None:
        """Another process has been started in its place, which joins the same job once more."""
        self.begun = self.joined = self.left
        self.coming_back, self.cut_off = True, ""


@dataclass(frozen=True, slots=True)
class Cause:
    weight: Weight
    child: int
    text: str


@dataclass(slots=True)
class Blame:
    """See the module's text. Processes are known by their number, in order of their start."""

    accounts: list[Account] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def hear(self, report: Report) -> None:
        """Take a process's report into account."""
        if not 0 <= report.child < len(self.accounts):
            return
        account = self.accounts[report.child]
        if report.event == "joining":
            account.begun += 1
        elif report.event == "joined":
            account.joined += 1
            account.coming_back = False
            account.begun = max(account.begun, account.joined)
        elif report.event == "left":
            account.left += 1
        elif report.event == "job failed":
            account.informed = True
            self._add(Weight.FOUND if account.scheduler else Weight.REPORTED, report.child, report.text)
        elif report.event == "cut off":
            account.cut_off = report.text
        elif not (account.informed or account.cut_off):  # else it died of what it was told
            who = f"rank {report.rank}" if report.rank >= 0 else account.name
            self._add(Weight.OWN, report.child, f"{who} ended with {report.text}")
        self._find_absent()

    def learn(self, child: int, weight: Weight, text: str, status: int) -> None:
        """What a launcher elsewhere has found out about its part of the job, which is this child. status: what it will end with."""
        self.accounts[child].status = status
        self._add(weight, child, text)

    def end(self, child: int, status: int | None = None, description: str = "") -> None:
        """A process has ended. status: None if we ended it. description: who it was and how it ended."""
        account = self.accounts[child]
        account.ended = True
        if status is None:
            return
        account.status = status
        explained = account.informed or any(cause.child == child for cause in self.causes)
        if status and not explained:
            self._add(Weight.OWN, child, description)
        self._find_absent()

    def leave_out(self, child: int) -> None:
        """A process has died that the job goes on without: it is no fault."""
        self.accounts[child].ended = self.accounts[child].left_out = True

    def is_absent(self, child: int) -> bool:
        """Whether a worker that has ended may be awaited by a job that it will not join: it never called init, or failed between two jobs."""
        account = self.accounts[child]
        return not account.begun or bool(account.status and account.left >= account.begun)

    @property
    def failed(self) -> bool:
        """Whether the job has failed. False if processes were only told of a fault elsewhere: they end by themselves, and may save something first."""
        return any(cause.weight > Weight.REPORTED for cause in self.causes)

    @property
    def formed(self) -> bool:
        """Whether the job has ever been complete."""
        return any(account.joined for account in self.accounts)

    @property
    def unneeded(self) -> bool:
        """Whether the services that run wait for nothing without workers: they have seen every job of theirs to its end, or none was ever complete."""
        running = [account for account in self.accounts if account.service and not account.ended]
        return self.never_formed or bool(running and all(0 < account.left >= account.begun for account in running))

    @property
    def never_formed(self) -> bool:
        """Whether the services run but the job was never complete, so that without workers they wait for nothing."""
        return not self.formed and any(account.begun for account in self.accounts if account.service)

    @property
    def unused(self) -> bool:
        """Whether all workers ended without contacting the scheduler: the command does not use psgc."""
        workers = [account for account in self.accounts if not account.service]
        return self.never_formed and all(account.ended and not account.begun for account in workers)

    @property
    def cause(self) -> Cause | None:
        """The first cause, as far as it is known."""
        return max(self.causes, key=lambda each: each.weight, default=None)  # of equals, max takes the first

    def verdict(self) -> tuple[str, int] | None:
        """The message and the exit status: the status of the process that was the cause, 128 + its signal, or 1 if it has none. None if nothing failed."""
        cause = self.cause
        if cause is None:
            return None
        status = self.accounts[cause.child].status or 1
        return cause.text, status if status > 0 else 128 - status

    def _find_absent(self) -> None:
        """Find a worker that ended with status 0 and never called init, or less often than others, who wait for it."""
        workers = [account for account in self.accounts if not account.service]
        jobs = max((account.begun for account in workers if account.begun > account.joined and not account.ended), default=0)
        if self.causes or not jobs:
            return
        for child, account in enumerate(self.accounts):
            if not account.service and account.ended and not account.left_out and account.begun < jobs:
                joined = "never joined the job" if not account.begun else f"joined {account.begun} job(s), not the next"
                often = "" if not account.begun else ", as often as the others"
                self._add(
                    Weight.OWN,
                    child,
                    f"{account.name} ended with status 0 and {joined}, which the other ranks wait for: every rank must call psgc.torch.init(){often}",
                )
                return

    def _add(self, weight: Weight, child: int, text: str) -> None:
        self.causes.append(Cause(weight, child, text))
