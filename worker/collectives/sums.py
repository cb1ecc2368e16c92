"""Sums of received slices, in member order: as psgc.program.sums defines them, by kernels that hold no GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.floats import FLOAT_KERNELS
from psgc.codecs.common.payloads import eight
from psgc.program.sums import sum_in_order

Array = NDArray[Any]


class Adder:
    """Keeps the memory that contributions are received into: as much as the largest sum so far has needed."""

    def __init__(self) -> None:
        self._places = np.empty(0, np.uint8)
        self._total = np.empty(0, np.float32)

    def places(self, like: Array, count: int) -> list[Array]:
        """So many arrays like ``like``; the next call gives out the same memory again."""
        if self._places.size < count * like.nbytes:
            self._places = np.empty(count * like.nbytes, np.uint8)
        return [self._places[index * like.nbytes : (index + 1) * like.nbytes].view(like.dtype) for index in range(count)]

    def add(self, contributions: list[Array], result: int, dtype: str, divisor: int = 1) -> None:
        """``contributions[result]`` becomes the sum of all, left to right, over the divisor."""
        own = contributions[result]
        if (len(contributions) == 1 and divisor == 1) or not own.size:
            return
        if dtype in ("bfloat16", "float16"):
            self._add_rounded(contributions, own, dtype, divisor)
            return
        if divisor != 1 and own.dtype.kind != "f":
            own[:] = sum_in_order(contributions, dtype, divisor)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            total = contributions[0]
            for contribution in contributions[1:-1]:
                np.add(total, contribution, out=total)
            if len(contributions) > 1:
                np.add(total, contributions[-1], out=own)
            if divisor != 1:
                np.true_divide(own, own.dtype.type(divisor), out=own)

    def _add_rounded(self, contributions: list[Array], own: Array, dtype: str, divisor: int) -> None:
        """In float32, rounded once."""
        if self._total.size < own.size:
            self._total = np.empty(own.size, np.float32)
        total, kernels = self._total[: own.size], FLOAT_KERNELS[dtype]
        for number, contribution in enumerate(contributions):
            kernels.fold(*eight([contribution.view(np.uint8)]), 1, 0, total, number == 0)
        kernels.finish(total, 0, divisor, own.view(np.uint8))
