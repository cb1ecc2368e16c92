"""Rates from members' reports: between two reports, or since the members joined. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from psgc.wire.reports import Observed, Report, ReportOf, report_of

CLEAR_SHARE: Final = 0.02  # of the time: ranks whose waiting differs by less are about equally fast
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """A member's figures; None: not known yet. waits: share of the time in which a worker's training thread waited for means; ratio: uncompressed bytes
    divided by sent bytes; overlap: share of the exchange in which the training thread did not wait; load: share of the time in which a server's summing
    threads worked."""

    role: str
    index: int
    hostname: str
    pid: int
    left: bool
    silent_s: float
    steps: int | None = None
    step_ms: float | None = None
    bytes_per_s: float | None = None
    waits: float | None = None
    ratio: float | None = None
    overlap: float | None = None
    load: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The job at one moment. slowest_rank: the rank that waits clearly less than another, so that others wait for it; None if there is none."""

    complete: bool
    rows: tuple[Row, ...]
    slowest_rank: int | None

    @property
    def workers(self) -> list[Row]:
        return [row for row in self.rows if row.role == "worker"]

    @property
    def steps(self) -> int | None:
        return min((row.steps for row in self.workers if row.steps is not None), default=None)

    def median(self, figure: str) -> float | None:
        """The median of a figure over the workers; None if it is not known."""
        known = [value for row in self.workers if (value := getattr(row, figure)) is not None]
        return statistics.median(known) if known else None


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
    return View(observed.complete, ordered, _slowest(ordered))


def _row(member: ReportOf, now: Report | None, before: Report | None) -> Row:
    row = Row(member.role, member.index, member.hostname, member.pid, member.left, member.silent_ms / 1e3)
    if now is None:
        return row
    past = _since(now, before)
    seconds = past.up_ms / 1e3
    if not seconds:
        return row
    row = replace(row, bytes_per_s=past.wire_bytes / seconds)
    if member.role == "server":
        return replace(row, load=min(1.0, past.busy_ms / past.up_ms / now.threads) if now.threads else None)
    return replace(
        row, steps=now.steps, step_ms=now.step_us / 1e3 or None, waits=min(1.0, past.waited_ms / past.up_ms),
        ratio=past.uncompressed_bytes / past.gradient_bytes if past.gradient_bytes else None,
        overlap=max(0.0, 1 - past.waited_ms / past.exchange_ms) if past.exchange_ms else None,
    )  # fmt: skip


def _since(now: Report, before: Report | None) -> Report:
    """The increase of all counts, except step_us and threads. An earlier report with a longer time is from before a restart and is ignored."""
    if before is None or before.up_ms >= now.up_ms:
        return now
    return Report(**{each.name: max(0, getattr(now, each.name) - getattr(before, each.name)) for each in fields(Report)})


def _slowest(rows: tuple[Row, ...]) -> int | None:
    waits = {row.index: row.waits for row in rows if row.role == "worker" and row.waits is not None}
    if len(waits) < 2 or max(waits.values()) - min(waits.values()) < CLEAR_SHARE:
        return None
    return min(waits, key=waits.__getitem__)
