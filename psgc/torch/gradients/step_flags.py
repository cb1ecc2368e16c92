"""The flags that every submission of one step carries. They must be the same on all ranks; otherwise the servers end the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_RESCALE: Final = 1e30  # the header carries a float32


@dataclass(frozen=True, slots=True)
class StepFlags:
    """The flags of one step's submissions, the same on all ranks. rates: learning rate of each parameter group; empty if residuals
    do not follow it. forgets: what codecs have kept is forgotten before this step (``skips``)."""

    previous_skipped: int
    loss_scale: float
    rates: tuple[float, ...]
    forgets: bool = False

    def rescale(self, last: StepFlags | None, group: int) -> float:
        """The residual's unit in step ``last`` over its unit in this step. A residual is in units of the scaled gradient and, on request
        for SGD without momentum, of the learning rate times that."""
        if self.forgets:
            return 0.0
        if last is None:
            return 1.0
        factor = self.loss_scale / last.loss_scale
        if group < min(len(last.rates), len(self.rates)):
            before, now = last.rates[group], self.rates[group]
            if before and now:
                factor *= before / now
        return max(-MAX_RESCALE, min(factor, MAX_RESCALE))
