"""What has happened in the last hour of a job: what the scheduler has logged, and what members' reports tell of. For observers. Pure.

Invariant: at most ``MOST`` events are kept, none older than ``KEPT_S``.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from psgc.wire.reports import Event, Report

KEPT_S: Final = 3600.0
MOST: Final = 200
MOST_TEXT: Final = 1000


class Events:
    """See the module's text."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, int, str]] = deque(maxlen=MOST)

    def note(self, now: float, level: int, text: str) -> None:
        """level: as in the logging module."""
        self._kept.append((now, level, text[:MOST_TEXT]))

    def compare(self, now: float, label: str, before: Report | None, after: Report) -> None:
        """Note what a member's report says that its last one did not. label: how the member is called."""
        if after.travels and (before is None or before.plan_version != after.plan_version):
            self.note(now, logging.INFO, f"layout {after.plan_version} of {label}: {after.travels}")
        # The first report to this process tells of connections that may have broken long before, as another process has said.
        if before is not None and (again := after.reconnects - before.reconnects) > 0:
            self.note(
                now,
                logging.WARNING,
                f"{label} has lost a connection to a server and made it again" + (f", {again} times" if again > 1 else ""),
            )

    def told(self, now: float) -> tuple[Event, ...]:
        """The oldest first."""
        while self._kept and now - self._kept[0][0] > KEPT_S:
            self._kept.popleft()
        return tuple(Event(max(0, int(now - at)), level, text) for at, level, text in self._kept)
