"""A connection that is made again and again, and breaks each time before anything comes through: no single break lasts long enough to be noticed.

Pure: ``now`` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.processes.absence import younger

MANY: Final = 3  # breaks without progress that may end a job


@dataclass(slots=True)
class Breaks:
    """Since something last came through. count: of breaks; first: when the first of these was."""

    count: int = 0
    first: float = 0.0

    def broke(self, now: float) -> None:
        """The connection has broken, which was up."""
        self.first = self.first if self.count else now
        self.count += 1

    def came_through(self, when: float) -> None:
        """What was awaited came through at this time."""
        if when > self.first:
            self.count = 0

    def was_away(self, away: float, now: float) -> None:
        """This process did not run for so long."""
        self.first = younger(self.first, away, now)

    def last(self, now: float, limit_s: float) -> bool:
        """Whether that has gone on for longer than the limit."""
        return self.count >= MANY and now - self.first > limit_s

    def text(self, now: float) -> str:
        """Of what has happened, behind the connection's name."""
        return f"broke {self.count} time{'s' * (self.count > 1)} in {now - self.first:.0f} s and nothing came through"
