"""Which of the things that went wrong in a job was the first cause, what is said of it, and the exit status it gives. Pure.

One fault makes many processes fail. A process that has heard of the fault says so before it ends; one that fails without having heard of any
was itself the fault. So what counts, in this order, each time the earliest: a process that failed by itself; what the scheduler found
wrong; what a process heard from a scheduler elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from psgc.report import Report


class Weight(IntEnum):
    HEARD = 1  # by a member, from a scheduler that is not here
    FOUND = 2  # by the scheduler
    OWN = 3  # a process failed by itself


@dataclass(slots=True)
class Account:
    """What is known of one process. name: as its lines begin. status: as Popen's returncode; None while it runs, or if we ended it."""

    name: str
    service: bool
    scheduler: bool = False
    status: int | None = None
    ended: bool = False
    joining: bool = False  # it has called init
    joined: bool = False  # everyone was there
    left: bool = False  # in order
    heard: bool = False  # that the job has failed


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
            account.joining = True
        elif report.event == "joined":
            account.joining = account.joined = True
        elif report.event == "left":
            account.left = True
        elif report.event == "job failed":
            account.heard = True
            self._add(Weight.FOUND if account.scheduler else Weight.HEARD, report.child, report.text)
        elif not account.heard:  # else it died of what it heard
            who = f"rank {report.rank}" if report.rank >= 0 else account.name
            self._add(Weight.OWN, report.child, f"{who} ended with {report.text}")
        self._look_for_the_absent()

    def end(self, child: int, status: int | None = None, description: str = "") -> None:
        """A process has ended. status: None if we ended it. description: who it was and how it ended."""
        account = self.accounts[child]
        account.status, account.ended = status, True
        if status is None:
            return
        told = account.heard or any(cause.child == child for cause in self.causes)
        if status and not told:
            self._add(Weight.OWN, child, description)
        self._look_for_the_absent()

    @property
    def failed(self) -> bool:
        """Whether the job is lost. One that has heard so from elsewhere ends by itself, and may do something before."""
        return any(cause.weight > Weight.HEARD for cause in self.causes)

    @property
    def formed(self) -> bool:
        """Whether the job has ever been complete."""
        return any(account.joined for account in self.accounts)

    @property
    def never_formed(self) -> bool:
        """The services are up, and the job has not been complete: without workers they wait for nothing."""
        return not self.formed and any(account.joining for account in self.accounts if account.service)

    @property
    def unused(self) -> bool:
        """Whether all workers ended without contacting the scheduler: the command does not use psgc."""
        workers = [account for account in self.accounts if not account.service]
        return self.never_formed and all(account.ended and not account.joining for account in workers)

    def verdict(self) -> tuple[str, int] | None:
        """What is said, and the status: that of the process which was the cause, 128 + its signal, 1 where it has none; None: all well."""
        if not self.causes:
            return None
        cause = max(self.causes, key=lambda each: each.weight)  # of equals, max takes the first
        status = self.accounts[cause.child].status or 1
        return cause.text, status if status > 0 else 128 - status

    def _look_for_the_absent(self) -> None:
        """Find a worker that ended with status 0 and never called init, while others wait for it."""
        workers = [account for account in self.accounts if not account.service]
        if self.formed or self.causes or not any(account.joining and not account.ended for account in workers):
            return
        for child, account in enumerate(self.accounts):
            if not account.service and account.ended and not account.joining:
                self._add(
                    Weight.OWN, child, f"{account.name} ended with status 0 and never joined the job, which the other ranks wait for: every "
                    f"rank must call psgc.torch.init()",
                )  # fmt: skip
                return

    def _add(self, weight: Weight, child: int, text: str) -> None:
        self.causes.append(Cause(weight, child, text))
