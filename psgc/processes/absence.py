"""Detects that this process did not run for a while, because it was stopped or its machine slept. Other members were not silent meanwhile.

Pure: ``now`` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AWAY_S: Final = 2.0  # a tick that is late by more than this means absence; even a busy machine runs a process sooner


@dataclass(slots=True)
class Absence:
    """Detects absence in a loop that ticks every ``every_s`` seconds."""

    every_s: float
    _ticked: float | None = None

    def ended(self, now: float) -> float:
        """Call at each tick. Returns the seconds since the last tick if the process was away meanwhile, else 0. Waits for other members are to be
        shortened by this time (see ``younger``)."""
        away = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        return away if away > self.every_s + AWAY_S else 0.0


def younger(since: float, away: float, now: float) -> float:
    """The beginning of a wait that leaves out the absence."""
    return min(now, since + away)
