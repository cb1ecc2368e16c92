"""Residuals that a bucket inherits: an earlier job's codec kept them, and this job's codec keeps none.

All of it is added to the first gradient that this rank sends, so that it is applied once. A step that was not finite, or that the trainer
did not apply, leaves them to the next. Numbers only. Each slice of the bucket is added by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.floats import reference_narrow_bf16, reference_widen_bf16

F32 = NDArray[np.float32]


class Inherited:
    """values: float32 [numel], in gradient units of the last step."""

    def __init__(self, values: F32) -> None:
        self.values = values
        self._adding: dict[int, int] = {}  # slices that the present or the last step adds: first element -> end

    def begin(self, previous_skipped: int, rescale: float) -> bool:
        """A step starts; False when nothing is left."""
        if not previous_skipped:
            for lo, hi in self._adding.items():
                self.values[lo:hi] = 0
        self._adding.clear()
        self.values *= np.float32(rescale)
        return bool(self.values.any())

    def add_to(self, gradient: NDArray[Any], lo: int) -> None:
        """Add the slice from element ``lo`` on to its gradient (bfloat16 as uint16 bits)."""
        values = self.values[lo : lo + gradient.size]
        with np.errstate(over="ignore"):
            if gradient.dtype == np.uint16:
                gradient[:] = reference_narrow_bf16(reference_widen_bf16(gradient) + values)
            else:
                gradient[:] = gradient + values
        self._adding[lo] = lo + gradient.size

    def take(self, lo: int, hi: int) -> F32:
        """A copy of the slice, which counts as added by this step."""
        self._adding[lo] = hi
        return self.values[lo:hi].copy()

    def keep(self, lo: int) -> None:
        """The step of the slice from element ``lo`` on has no result."""
        self._adding.pop(lo, None)

    def left(self, dropped: bool) -> F32:
        """The elements that are still to be added. dropped: the trainer did not apply the last step."""
        left = self.values.copy()
        for lo, hi in () if dropped else self._adding.items():
            left[lo:hi] = 0
        return left
