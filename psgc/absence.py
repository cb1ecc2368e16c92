"""How long this process did not run: it was stopped, or its machine slept. It received nothing meanwhile, so nobody was silent.

Pure: ``now`` is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AWAY_S: Final = 2.0  # a tick that is so much later than it is due: a busy machine runs a process sooner than that


@dataclass(slots=True)
class Absence:
    """Seen by who ticks every ``every_s`` seconds."""

    every_s: float
    _ticked: float | None = None

    def ended(self, now: float) -> float:
        """At each tick: the seconds since the last one if this process was away meanwhile, else 0. What waits for others is to be taken for so
        much younger (see ``younger``)."""
        away = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        return away if away > self.every_s + AWAY_S else 0.0


def younger(since: float, away: float, now: float) -> float:
    """The beginning of a wait, without the absence that lay in it."""
    return min(now, since + away)
