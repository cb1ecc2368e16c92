"""Running figures of a worker's steps, which it reports to the scheduler: a few additions a step."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

RECENT_STEPS: Final = 64


class Figures:
    """steps: that optimizers have applied. exchange_s: from steps' first submissions to their last means; waited_s: of that, while the training
    thread waited. The first step of each optimizer, which declares and may compile, counts in neither."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.steps = 0
        self.exchange_s = self.waited_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._submitted = 0.0  # when the first bucket of the step under way left; 0.0: none has

    def submitted(self, now: float) -> None:
        """A bucket leaves."""
        if not self._submitted:
            self._submitted = now

    def means_came(self, waited_s: float, now: float, counts: bool) -> None:
        """The means are there, for which the training thread has waited so long. counts: it is not the first step."""
        if self._submitted and counts:
            self.exchange_s += now - self._submitted
            self.waited_s += min(waited_s, now - self._submitted)
        self._submitted = 0.0

    def step_over(self, duration_s: float | None) -> None:
        """The trainer has applied a step, so long after the one before it."""
        self.steps += 1
        if duration_s is not None:
            self._recent.append(duration_s)

    @property
    def step_s(self) -> float:
        """The median of the last steps."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else 0.0
