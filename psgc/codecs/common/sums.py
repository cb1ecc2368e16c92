"""Sums over a whole part, as trees: the same bits whatever the threads, lanes or device.

Owns the order. In each leaf of 4096 elements, the last filled up with zeros, elements i and i + 2048 are added, then i and i + 1024, ...
until one is left. The leaves' sums are summed likewise, 4096 at a time, until one number is left.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32
from psgc.codecs.common.feedback import corrected_chunk
from psgc.codecs.jit.kernel import IN_F32, SCALAR_F32, helper, kernel

LEAF: Final = 4096  # elements
_OUT_F64: Final = types.Array(types.float64, 1, "C")


def reference_tree_sum(x: NDArray[Any]) -> NDArray[Any]:
    """The sum of a float32 or float64 vector, in its own precision, as an array of one element; 0 of nothing."""
    sums = reference_leaf_sums(x)
    while sums.size > 1:
        sums = reference_leaf_sums(sums)
    return sums


def reference_leaf_sums(x: NDArray[Any]) -> NDArray[Any]:
    """The sum of each leaf."""
    rows = np.zeros((max(1, -(-x.size // LEAF)), LEAF), x.dtype)
    rows.ravel()[: x.size] = x
    return halved(rows)


def halved(rows: NDArray[Any]) -> NDArray[Any]:
    """The sum of each row: its halves are added until one element is left."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


@helper
def halve(sums: Any, width: Any) -> None:
    """sums[0] <- the sum of the first ``width`` elements, a power of two, likewise."""
    half = width >> 1
    while half:
        for i in range(half):
            sums[i] += sums[half + i]
        half >>= 1


@functools.cache
def magnitudes_kernel() -> Any:
    """(values, residual, rescale, out): each leaf's sum of |values + rescale * residual|; compiled or loaded now."""

    @kernel(types.void(IN_F32, IN_F32, SCALAR_F32, _OUT_F64))
    def leaf_magnitudes(values: Any, residual: Any, rescale: Any, out: Any) -> None:
        p, sums = np.empty(LEAF, np.float32), np.empty(LEAF, np.float64)
        for leaf in range(out.size):
            v, r = values[leaf * LEAF : (leaf + 1) * LEAF], residual[leaf * LEAF : (leaf + 1) * LEAF]
            corrected_chunk(v, r, rescale, p[: v.size])
            for i in range(v.size):
                sums[i] = np.float64(abs(p[i]))
            sums[v.size :] = 0.0
            halve(sums, LEAF)
            out[leaf] = sums[0]

    return leaf_magnitudes


@functools.cache
def squares_kernel() -> Any:
    """(values, out): each leaf's sum of squares; compiled or loaded now."""

    @kernel(types.void(IN_F32, _OUT_F64))
    def leaf_squares(values: Any, out: Any) -> None:
        sums = np.empty(LEAF, np.float64)
        for leaf in range(out.size):
            v = values[leaf * LEAF : (leaf + 1) * LEAF]
            for i in range(v.size):
                x = np.float64(v[i])
                sums[i] = x * x
            sums[v.size :] = 0.0
            halve(sums, LEAF)
            out[leaf] = sums[0]

    return leaf_squares


def sum_magnitudes(values: F32, residual: F32, rescale: float) -> float:
    """The sum of |values + rescale * residual| in float64; an empty residual is none."""
    sums = np.empty(-(-values.size // LEAF))
    magnitudes_kernel()(values, residual, rescale, sums)
    return float(reference_tree_sum(sums)[0])


def sum_squares(values: F32) -> float:
    """The sum of squares in float64."""
    sums = np.empty(-(-values.size // LEAF))
    squares_kernel()(values, sums)
    return float(reference_tree_sum(sums)[0])
