"""How long this rank's steps take, in windows of as many as ``steering`` looks at, and what backward computes in them.

A step is what an optimizer applies, however many backwards it took. It lasts from the moment at which the last gradients before it had arrived to the moment
for the next one; what is decided between two steps is in none of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from psgc.plan.inputs.observed import Iteration
from psgc.plan.live.steering import SETTLING, WINDOW
from psgc.torch.auto.measuring import Measuring
from psgc.torch.gradients.profiler import Recorder

WARM_UP: Final = 3  # steps at the beginning, which declare, compile and fill caches


class StepTimes:
    """steps: that have ended so far. noting: when gradients become ready is recorded. sample: any of the parameters."""

    def __init__(self, measuring: Measuring, sample: torch.Tensor) -> None:
        self._now_ns = measuring.now_ns
        self._recorder = self._recorded = Recorder(measuring.clock(sample))  # of this window, and of the last whole one
        self.noting = True
        self.steps, self._skip = 0, WARM_UP  # _skip: steps to come that are in no window
        # the last arrival, and that of the last step, later by what was done between steps since
        self._arrived_ns = self._began_ns = 0
        self._fresh = False  # gradients have arrived since the last step
        self._periods: list[int] = []  # nanoseconds

    def ready(self, name: str) -> None:
        if self.noting:
            self._recorder.ready(name)

    def leaving(self) -> None:
        if self.noting:
            self._recorder.leaving()

    def delivered(self) -> None:
        """A step's gradients are there, or some of them: it may take several backwards."""
        self._arrived_ns, self._fresh = self._now_ns(), True
        if self.noting:
            self._recorder.delivered()

    def step_over(self) -> bool:
        """A step is over, if gradients have arrived since the last one: count it. Returns whether one is."""
        if not self._fresh:
            return False
        self._fresh = False
        self._recorder.merge()
        self.steps += 1
        if self._skip:
            self._skip -= 1
        else:
            self._periods.append(self._arrived_ns - self._began_ns)
        self._began_ns = self._arrived_ns
        return True

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What is done inside is no part of a step."""
        began = self._now_ns()
        yield
        self._began_ns += self._now_ns() - began

    @property
    def warms_up(self) -> bool:
        return self.steps <= WARM_UP

    @property
    def window(self) -> int:
        """How many steps of this window are over."""
        return len(self._periods)

    def end_window(self) -> float:
        """Milliseconds of a step in this window, which is over: ``iterations`` are its own."""
        step_ms = statistics.median(self._periods) * 1e-6
        self._recorded = self._recorder
        self._periods.clear()
        return step_ms

    def record_anew(self, noting: bool) -> None:
        """What comes is of a window that has not begun yet."""
        self.noting, self._recorder = noting, Recorder(self._recorder.clock)

    def settle(self) -> None:
        """Gradients travel by another choice from now on: begin a window once that has settled."""
        self._skip = SETTLING
        self._periods.clear()

    def iterations(self) -> list[Iteration]:
        """Of the last whole window."""
        return self._recorded.iterations(0)


STEPS_OF_FIRST_WINDOW: Final = WARM_UP + WINDOW + 1  # and the step with which ranks tell each other
