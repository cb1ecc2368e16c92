"""How often processes that follow one another in one place may end without one that completes a step. Pure: ``now`` is passed in."""

from __future__ import annotations

from typing import Final

MOST: Final = 3  # within WITHIN_S
WITHIN_S: Final = 60.0
MOST_AT_ALL: Final = 9  # of those that take long to end


class Ends:
    """When they ended, since one of them completed a step."""

    def __init__(self) -> None:
        self._when: list[float] = []

    def another(self, now: float) -> str:
        """One has ended. "" if another may follow it; else how often that has been so: "4 times in 10 s"."""
        self._when.append(now)
        recent = sum(now - when < WITHIN_S for when in self._when)
        return "" if recent <= MOST and len(self._when) <= MOST_AT_ALL else f"{len(self._when)} times in {now - self._when[0]:.0f} s"

    def stepped(self) -> None:
        self._when.clear()
