"""Running figures of a worker's steps, which it reports to the scheduler: a few additions a step."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

RECENT_STEPS: Final = 64


class Figures:
    """steps: the steps that optimizers have applied. exchange_s: time from each step's first submission to its last mean; waited_s: the part of it in which
    the training thread waited. Both leave out each optimizer's first step, which declares tensors and may compile kernels."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.steps = 0
        self.exchange_s = self.waited_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._submitted = 0.0  # when the first bucket of the step under way left; 0.0: none has
        self._waiting = 0.0  # since when the training thread waits for the step under way; 0.0: it does not
        self.plan_version = 0  # layouts that optimizers have had
        self.travels = ""  # the last of these, in words

    def submitted(self, now: float) -> None:
        """Note that a bucket is submitted."""
        if not self._submitted:
            self._submitted = now

    def means_came(self, waited_s: float, now: float, counts: bool) -> None:
        """Note that all means have come. waited_s: how long the training thread has waited for them; counts: this is not the optimizer's first step."""
        if self._submitted and counts:
            self.exchange_s += now - self._submitted
            self.waited_s += min(waited_s, now - self._submitted)
        self._submitted = self._waiting = 0.0

    def waits(self, now: float, counts: bool) -> None:
        """Note that the training thread begins to wait for means. counts: as of ``means_came``."""
        self._waiting = now if counts else 0.0

    def laid_out(self, travels: str) -> None:
        """Note that gradients have got a layout. travels: how they travel by it, in words."""
        self.plan_version += 1
        self.travels = travels

    def so_far(self, now: float) -> tuple[float, float]:
        """exchange_s and waited_s with the wait that is under way: a rank that waits for long is seen to."""
        submitted, waiting = self._submitted, self._waiting
        if not submitted or not waiting:
            return self.exchange_s, self.waited_s
        return self.exchange_s + max(0.0, now - submitted), self.waited_s + max(0.0, now - max(submitted, waiting))

    def step_over(self, duration_s: float | None) -> None:
        """Note that the trainer has applied a step. duration_s: the time since it applied the step before."""
        self.steps += 1
        if duration_s is not None:
            self._recent.append(duration_s)

    @property
    def step_s(self) -> float:
        """The median of the last steps."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else 0.0
