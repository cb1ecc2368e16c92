"""When to repeat the message that something is awaited: soon at first, then at growing intervals, so that a long wait does not fill a log.

Pure: ``now`` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.processes.absence import younger

LONGEST_S: Final = 60.0  # a wait of hours is still named this often


@dataclass(slots=True)
class Reminder:
    """The reminders of one wait, which began at ``since``."""

    since: float
    times: int = 0  # how often it has been named

    def was_away(self, away: float, now: float) -> None:
        """This process did not run for so long."""
        self.since = younger(self.since, away, now)

    def due(self, now: float, first_s: float) -> bool:
        """Whether to repeat the message now. Each interval is twice the last one, up to a minute. first_s: from ``since`` to the first message."""
        if now - self.since < min(first_s * 2**self.times, max(first_s, LONGEST_S)):
            return False
        self.since, self.times = now, min(self.times + 1, 16)
        return True
