"""When a running job plans, what it then tries, and what it keeps. Pure, and the same on every rank.

Every rank has one Steering and feeds it the same numbers, the job's step time in one window of steps after the other; so all ranks switch at the same
step. The course of it:

    measuring   the first window, by what the job began with; then a plan is made, whose candidates are tried
    trying      one candidate after the other, a window each, and those near the quickest once more, because a machine's speed changes from minute to
                minute; the quickest is kept, of those about as quick the one that loses least
    watching    until windows in a row depart from the step time that was kept; then a plan is made again

So what is kept was measured to be quicker, not only predicted. A plan that changes nothing makes the next one wait longer, so that noise does not make
the job switch to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

TIE: Final = 0.03  # step times this near to the quickest are as good: medians of a few steps vary by that
CLOSE: Final = 0.2  # candidates this near to the quickest are measured twice
DRIFT: Final = 0.25  # of the step time that was kept: beyond, the job or a link has changed
PATIENCE: Final = 2  # windows in a row
MOST_PATIENCE: Final = 64
MOST_SWITCHES: Final = 32  # each keeps the slots of the layout before it; then the job stays as it is

Verdict = Literal["go on", "plan", "switch"]


class Steering:
    """kept: the candidate that the job has now, 0 for what it had when the last plan was made. reference_ms: its step time."""

    def __init__(self) -> None:
        self.kept = 0
        self.measured_ms: list[float] = []  # by candidate, of those tried so far; of two windows the shorter step: other work only adds
        self._again: list[int] | None = None  # candidates to be measured once more; None: it is not known yet which
        self.reference_ms = 0.0
        self.patience = PATIENCE
        self.switches = 0
        self._losses: Sequence[int] = (0,)
        self._phase: Literal["measuring", "planning", "trying", "watching"] = "measuring"
        self._departed = 0  # windows in a row

    def window(self, step_ms: float) -> Verdict:
        """The job's step time in one more window. "plan": ``planned`` is to be called; "switch": to candidate ``kept``."""
        if self._phase == "measuring":
            return self._plan(step_ms)
        if self._phase == "trying":
            if self.kept == len(self.measured_ms):
                self.measured_ms.append(step_ms)
            else:
                self.measured_ms[self.kept] = min(step_ms, self.measured_ms[self.kept])
            return self._next()
        departs = abs(step_ms - self.reference_ms) > DRIFT * self.reference_ms
        self._departed = self._departed + 1 if departs else 0
        if self._departed < self.patience or self.switches >= MOST_SWITCHES:
            return "go on"
        return self._plan(step_ms)

    def planned(self, losses: Sequence[int]) -> Verdict:
        """The plan's candidates, and what the job has now before them, each with how much it loses: a number that is larger for more."""
        self._losses, self.kept = losses, 0
        self._phase = "trying"
        return self._next()

    @property
    def over(self) -> bool:
        """Whether the last plan's candidates have all been tried."""
        return self._phase == "watching"

    def _plan(self, step_ms: float) -> Verdict:
        self._phase, self.measured_ms, self._departed, self._again = "planning", [step_ms], 0, None
        return "plan"

    def _next(self) -> Verdict:
        before, tried = self.kept, len(self.measured_ms)
        if tried < len(self._losses):
            self.kept = tried
        elif again := self._close():
            self.kept = again.pop()
        else:
            self._phase = "watching"
            self.kept = self._best()
            self.reference_ms = self.measured_ms[self.kept]
            self.patience = PATIENCE if self.kept else min(2 * self.patience, MOST_PATIENCE)
        if self.kept == before:
            return "go on"
        self.switches += 1
        return "switch"

    def _close(self) -> list[int]:
        """The candidates that are still to be measured once more, the last of them next: first the one that the job has now."""
        if self._again is None:
            limit = (1 + CLOSE) * min(self.measured_ms)
            near = [number for number, step_ms in enumerate(self.measured_ms) if step_ms <= limit]
            self._again = near if len(near) > 1 else []
        return self._again

    def _best(self) -> int:
        quickest = min(self.measured_ms)
        near = [number for number, step_ms in enumerate(self.measured_ms) if step_ms <= (1 + TIE) * quickest]
        return min(near, key=lambda number: (self._losses[number], number))
