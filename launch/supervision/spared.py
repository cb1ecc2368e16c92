"""Processes whose death is no fault, because the job goes on without them: workers under PSGC_ON_WORKER_LOSS=shrink, servers' standbys, and what runs a host's
part of a job that outlives the host. Pure; knows processes by their number.

Invariant: a process that comes back and is told that the job has failed has come too late for it, or others are told so, too: it is never the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from psgc.diagnostics.report import Report
from psgc.launch.supervision.blame import Account


@dataclass(slots=True)
class Spared:
    """may_be: of processes that may be, what says whether they are, once they have died. returning: in the place of dead ones, until they have taken a step, or
    have the state of a training that has none left. too_late: returning ones that the job has ended without, or that are not let
    in, and what they were told. last: who has died last, as a verdict on all."""

    may_be: dict[int, Callable[[], bool]] = field(default_factory=dict)
    returning: set[int] = field(default_factory=set)
    too_late: dict[int, str] = field(default_factory=dict)
    last: tuple[str, int] | None = None

    def comes_back(self, number: int) -> None:
        """Another process has been started in the place of one."""
        if number in self.may_be:
            self.returning.add(number)

    def heeds(self, report: Report) -> bool:
        """Whether this is a returning process's word that the job has ended without it."""
        if report.child not in self.returning or report.event != "job failed":
            return False
        self.too_late.setdefault(report.child, report.text)
        return True

    def spares(self, number: int, account: Account) -> bool:
        """Whether the job goes on without a process that has died: one that was in it, or was coming back."""
        if number not in self.may_be or account.informed or not (number in self.returning or account.in_job):
            return False
        return self.may_be[number]()

    def excuses(self, number: int, account: Account, failed: bool) -> bool:
        """Whether a process that has died is no cause. failed: whether the job has failed, after which nobody is spared; but who was told that it came too late
        for the job has died of that."""
        return number in self.too_late if failed else self.spares(number, account)

    def lose(self, number: int, end: str, status: int) -> str:
        """It is not followed by another. Returns what to say."""
        late = number in self.too_late
        self.returning.discard(number)
        self.last = self.last if late and self.last else (self.too_late.get(number) or end, status if status > 0 else 128 - status)
        return "" if late else f"{end}; the others go on without it"
