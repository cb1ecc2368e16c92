"""Residuals that a bucket is owed: an earlier job's codec kept them, and this job's codec keeps none.

All of it is added to the first gradient that this rank sends, so that it is applied once. A step that was not finite, or that the trainer
did not apply, has not paid it. Numbers only. Each slice of the bucket is paid by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.floats import reference_narrow_bf16, reference_widen_bf16

F32 = NDArray[np.float32]


class Owed:
    """values: float32 [numel], in gradient units of the last step."""

    def __init__(self, values: F32) -> None:
        self.values = values
        self._paying: dict[int, int] = {}  # slices that the present or the last step pays: first element -> end

    def begin(self, previous_skipped: int, rescale: float) -> bool:
        """A step starts; False when nothing is owed any more."""
        if not previous_skipped:
            for lo, hi in self._paying.items():
                self.values[lo:hi] = 0
        self._paying.clear()
        self.values *= np.float32(rescale)
        return bool(self.values.any())

    def add_to(self, gradient: NDArray[Any], lo: int) -> None:
        """Add what the slice from element ``lo`` on is owed to its gradient (bfloat16 as uint16 bits)."""
        owed = self.values[lo : lo + gradient.size]
        with np.errstate(over="ignore"):
            if gradient.dtype == np.uint16:
                gradient[:] = reference_narrow_bf16(reference_widen_bf16(gradient) + owed)
            else:
                gradient[:] = gradient + owed
        self._paying[lo] = lo + gradient.size

    def pay(self, lo: int, hi: int) -> F32:
        """A copy of what the slice is owed; it counts as paid by this step."""
        self._paying[lo] = hi
        return self.values[lo:hi].copy()

    def unpaid(self, lo: int) -> None:
        """The step of the slice from element ``lo`` on has no result."""
        self._paying.pop(lo, None)

    def left(self, dropped: bool) -> F32:
        """The elements that are still owed. dropped: the trainer did not apply the last step."""
        left = self.values.copy()
        for lo, hi in () if dropped else self._paying.items():
            left[lo:hi] = 0
        return left
