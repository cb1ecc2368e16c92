"""Rates from members' reports: between two reports, or since the members joined. Pure."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psgc.observe.slow import Slow, slow_members
from psgc.observe.table import Value, figures_of, increase
from psgc.wire.reports import Event, Observed, Report, ReportOf, report_of

CLEAR_SHARE: Final = 0.02  # of the time: ranks whose waiting differs by less are about equally fast
# A member that has missed so many heartbeats is awaited; under a short heartbeat, only after this many seconds, which a busy machine may take.
SILENT_HEARTBEATS: Final = 2.5
LEAST_SILENCE_S: Final = 1.5
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """A member and its figures, by the names of ``psgc/observe/table.py``; None: not known yet."""

    role: str
    index: int
    hostname: str
    pid: int
    left: bool
    silent_s: float
    figures: Mapping[str, Value]

    @property
    def member(self) -> str:
        """How it is called everywhere."""
        return f"{'rank' if self.role == 'worker' else self.role} {self.index if self.index >= 0 else '?'}"

    def number(self, figure: str) -> float | None:
        """A figure that is one number."""
        value = self.figures.get(figure)
        return value if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class View:
    """The job at one moment. slow: members that hold up its steps, and where. awaited: the members that it waits for now: those that are silent, or else those
    that are slow, or else the rank that waits clearly less than another. slowest_rank: the slowest of these that is one."""

    complete: bool
    rows: tuple[Row, ...]
    awaited: tuple[str, ...]
    slowest_rank: int | None
    events: tuple[Event, ...] = ()
    slow: tuple[Slow, ...] = ()

    @property
    def workers(self) -> list[Row]:
        return [row for row in self.rows if row.role == "worker"]

    @property
    def steps(self) -> int | None:
        """That the job has taken: a rank's process that follows another has counted fewer."""
        known = [steps for row in self.workers if (steps := row.number("steps")) is not None]
        return int(max(known)) if known else None

    def median(self, figure: str) -> float | None:
        """The median of a figure over the workers; None if it is not known."""
        known = [value for row in self.workers if (value := row.number(figure)) is not None]
        return statistics.median(known) if known else None

    @property
    def warnings(self) -> int:
        return sum(event.level >= logging.WARNING for event in self.events)


class Follower:
    """Follows a job from one answer to the next. Rates are those between a member's last two reports, or since it joined if there is only one report."""

    def __init__(self) -> None:
        self._last: dict[Key, Report] = {}
        self._before: dict[Key, Report] = {}

    def see(self, observed: Observed) -> View:
        """Raises RemoteProtocolError."""
        for key, report in reports_of(observed).items():
            last = self._last.get(key)
            if last is not None and last != report:
                self._before[key] = last
            self._last[key] = report
        return view(observed, self._before)


def reports_of(observed: Observed) -> dict[Key, Report]:
    """Each member's report, where one has come. Raises RemoteProtocolError."""
    found = {(member.role, member.index): report_of(member) for member in observed.members if member.index >= 0}
    return {key: report for key, report in found.items() if report is not None}


def view(observed: Observed, before: Mapping[Key, Report] | None = None) -> View:
    """The job's view. before: earlier reports, from which rates are counted; without them, rates are since each member joined. Raises
    RemoteProtocolError."""
    now = reports_of(observed)
    rows = tuple(
        _row(member, now.get((member.role, member.index)), (before or {}).get((member.role, member.index))) for member in observed.members
    )
    ordered = tuple(sorted(rows, key=lambda row: (row.role != "worker", row.index)))
    silence_s = longest_silence_s(observed.heartbeat_ms / 1e3)
    silent = tuple(row.member for row in ordered if observed.complete and not row.left and row.silent_s > silence_s)
    heard = {(row.role, row.index) for row in ordered if not row.left and row.silent_s <= silence_s}
    slow = slow_members(
        *({key[1]: report for key, report in now.items() if key in heard and key[0] == role} for role in ("worker", "server"))
    )
    named = tuple(one.member for one in slow)
    slowest = next((row.index for member in named for row in ordered if row.member == member and row.role == "worker"), None)
    if slowest is None and not slow:
        slowest = _slowest(ordered)
    awaited = silent or named or (() if slowest is None else (f"rank {slowest}",))
    return View(observed.complete, ordered, awaited, slowest, observed.events, slow)


def longest_silence_s(heartbeat_s: float) -> float:
    """A member that has been silent for longer is awaited, and what it has told is of the past."""
    return max(SILENT_HEARTBEATS * heartbeat_s, LEAST_SILENCE_S)


def _row(member: ReportOf, now: Report | None, before: Report | None) -> Row:
    figures = {} if now is None else figures_of(member.role, now, increase(now, before))
    return Row(member.role, member.index, member.hostname, member.pid, member.left, member.silent_ms / 1e3, figures)


def _slowest(rows: tuple[Row, ...]) -> int | None:
    waits = {row.index: waited for row in rows if row.role == "worker" and (waited := row.number("waits")) is not None}
    if len(waits) < 2 or max(waits.values()) - min(waits.values()) < CLEAR_SHARE:
        return None
    return min(waits, key=waits.__getitem__)
