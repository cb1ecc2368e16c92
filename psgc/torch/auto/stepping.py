"""An observer that acts between the steps of an exchange: what ``auto`` and ``psgc verify`` have in common.

Every rank acts after the same step, as soon as its optimizer has stepped.
"""

from __future__ import annotations

from typing import Any

import torch

from psgc.torch.auto.step_times import StepTimes
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.observer import Observer


class Stepping(Observer):
    """times: of the exchange's steps."""

    def __init__(self, exchange: GradientExchange[Any], times: StepTimes) -> None:
        self._exchange, self._times = exchange, times
        self._told = False  # an optimizer has told of a step

    def ready(self, name: str, gradient: torch.Tensor) -> None:
        self._times.ready(name)

    def leaving(self) -> None:
        self._times.leaving()

    def delivered(self) -> None:
        self._times.delivered()

    def begins(self) -> None:
        """Where no optimizer tells of its steps, as may be under DDP, one ends with the first gradients of the next."""
        if not self._told:
            self._step()

    def stepped(self) -> None:
        self._told = True
        self._step()

    def _step(self) -> None:
        """A step is over, if gradients have arrived since the last one."""
        if self._exchange.buckets and self._times.step_over():
            self._warm()
            with self._times.between_steps():
                self._decide()

    def _warm(self) -> None:
        """What is to be done first while steps are not measured yet."""

    def _decide(self) -> None:
        """Act on what all ranks know by now. Every rank calls it after the same step."""
        raise NotImplementedError
