"""What encoding leaves out, for each place of an option that encodes: residuals that change only when the step's result is there.

An option may encode up to four times: a gradient, or a sum of some ranks'. Every such place is a *slot*, and keeps the residual of the pieces that this rank
encodes there. Residuals are in units of the sum: what a rank adds to a later step counts once in its sum, whichever slot has kept it. So all
slots of all ranks together are what has not been applied yet. Numbers only.

Encoding writes the new residual beside the old one (``Feedback.new``). ``commit`` takes it up, once all ranks have agreed that the step has a result. A
step that the trainer does not apply is taken back: slot 0, through which all that goes into the sum passes, gets its own payload back, and
later slots their old residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.worker.device import DeviceBucket

F32 = NDArray[np.float32]


class Feedback:
    """The residual of one piece in one slot. value: float32 [numel], in units that ``rescale`` makes those of the next step; a ``Residual`` on the device
    that the slot encodes on, if it does."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.value: Any = np.zeros(numel, np.float32)
        self.new: Any = np.zeros(numel, np.float32)
        self.on: DeviceBucket | None = None
        self.rescale = 1.0
        self._old_rescale = 1.0  # of ``new``, while that holds the residual before the last step
        self._can_take_back = False

    def begin(self, rescale: float) -> None:
        """A step starts, in which gradients are ``rescale`` times as large as in the last one."""
        self.rescale *= rescale
        self._old_rescale *= rescale

    def encoded(self) -> None:
        """``new`` is being written: what it held before cannot be taken back any more."""
        self._can_take_back = False

    def commit(self) -> None:
        """The step has a result: the new residual counts."""
        self.value, self.new = self.new, self.value
        self._old_rescale, self.rescale = self.rescale, 1.0
        self._can_take_back = True

    def take_back(self) -> None:
        """The last committed step was not applied: go on from the residual before it. Does nothing if the last step had no result."""
        if self._can_take_back:
            self.value, self.new = self.new, self.value
            self.rescale = self._old_rescale
            self._can_take_back = False

    @property
    def committed(self) -> bool:
        """Whether the last step was committed and can be taken back."""
        return self._can_take_back

    def move(self, device: DeviceBucket | None) -> None:
        """Keep the residual on this device from now on, None: on the host. Between two steps."""
        if self.on is device:
            return
        held = self.copy(), _copy(self.new)
        self.value, self.new = (np.empty(self.numel, np.float32) if device is None else device.residual(self.numel) for _ in range(2))
        self.on = device
        for place, values in zip((self.value, self.new), held, strict=True):
            if device is None:
                place[:] = values
            else:
                place.keep(values)

    def copy(self) -> F32:
        """A copy of ``value``, on the host."""
        return _copy(self.value)

    def restore(self, values: F32, rescale: float) -> None:
        """Go on from what another job kept, before the first step."""
        if self.on is None:
            self.value[:] = values
        else:
            self.value.keep(values)
        self.rescale, self._can_take_back = rescale, False

    @property
    def before_last(self) -> tuple[F32, float]:
        """A copy of what ``take_back`` would leave, and its rescale. The last step was committed."""
        return _copy(self.new), self._old_rescale


def _copy(values: Any) -> F32:
    """On the host."""
    found: F32 = values.copy() if isinstance(values, np.ndarray) else values.load()
    return found
