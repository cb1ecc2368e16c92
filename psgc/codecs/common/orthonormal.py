"""Orthonormal columns of a tall float32 matrix, in an order of operations that every CPU and GPU can follow to the same bits.

Owns that order. Column by column, from the first on: the column is multiplied by the power of two that brings its largest magnitude to
[0.5, 1), so that nothing overflows or vanishes. Then classical Gram-Schmidt, twice ("twice is enough"): the coefficients of column k are
its dot products with all columns before it, rounded to float32, and

    p_ik <- float32(((p_ik - c_0 p_i0) - c_1 p_i1) - ...)      in float64, each difference rounded

Then the column is multiplied by 1 / its norm, in float64, and rounded to float32. A column that depends on those before it, up to 1e-5 of
its length, becomes zero; one that has a NaN or infinity stays no number. Every sum over rows (dot products and squares) is a block tree in
float64, as `sums` says.

Every product in a sum or difference is of two float32, so it is exact in float64: a fused multiply-add changes nothing. Between columns all
is data-parallel over rows. Source: Giraud, Langou, Rozloznik and van den Eshof 2005 (classical Gram-Schmidt, twice).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32
from psgc.codecs.common.sums import LEAF, halve, reference_tree_sum
from psgc.codecs.jit.kernel import helper, kernel

PASSES: Final = 2
LEAST_SQUARE: Final = 1e-10  # of the column's square before: float32's rounding of a dependent column leaves less
F32_MATRIX: Final = types.Array(types.float32, 2, "C")


def reference_orthonormal(p: F32) -> F32:
    """The reference of ``orthonormalise``: the orthonormal columns of p [rows, rank]."""
    done = p.copy()
    for k in range(p.shape[1]):
        column = done[:, k].astype(np.float64)
        top = np.abs(column).max(initial=0)
        if 0 < top < np.inf:
            column = np.ldexp(column, -np.frexp(top)[1]).astype(np.float32).astype(np.float64)
        before = reference_tree_sum(column * column)[0]
        for _ in range(PASSES):
            coefficients = [np.float32(reference_tree_sum(done[:, j] * column)[0]) for j in range(k)]
            for j, coefficient in enumerate(coefficients):
                column = column - np.float64(coefficient) * done[:, j]
            column = column.astype(np.float32).astype(np.float64)
        square = reference_tree_sum(column * column)[0]
        done[:, k] = column * (1 / np.sqrt(square) if square > LEAST_SQUARE * before else 0.0)
    return done


@helper
def _leaf_sum(sums: Any, count: Any) -> Any:
    """The sum of a block of ``count`` elements, which are overwritten."""
    width = 1
    while width < count:
        width *= 2
    if width < LEAF:
        for i in range(count):
            sums[i] += 0.0  # -0 becomes 0, as it does where the block's zeros are added
    sums[count:width] = 0.0
    halve(sums, width)
    return sums[0]


@helper
def _dot(a: Any, b: Any, sums: Any, leaves: Any) -> Any:
    """The dot product of two columns. sums: scratch, [LEAF]; leaves: scratch, an element for each block."""
    count = -(-a.size // LEAF)
    for leaf in range(count):
        left, right = a[leaf * LEAF : (leaf + 1) * LEAF], b[leaf * LEAF : (leaf + 1) * LEAF]
        for i in range(left.size):
            sums[i] = np.float64(left[i]) * np.float64(right[i])
        leaves[leaf] = _leaf_sum(sums, left.size)
    while count > 1:
        above = -(-count // LEAF)
        for leaf in range(above):
            size = min(LEAF, count - leaf * LEAF)
            for i in range(size):
                sums[i] = leaves[leaf * LEAF + i]
            leaves[leaf] = _leaf_sum(sums, size)
        count = above
    return leaves[0]


@helper
def _scale_down(column: Any) -> None:
    """column *= the power of two that brings its largest magnitude to [0.5, 1)."""
    top = np.float32(0)
    for i in range(column.size):
        top = max(top, abs(column[i]))
    if 0 < top < np.inf:
        factor = math.ldexp(1.0, -math.frexp(np.float64(top))[1])
        for i in range(column.size):
            column[i] = np.float32(np.float64(column[i]) * factor)


@helper
def _project_out(columns: Any, k: Any, coefficients: Any, scratch: Any) -> None:
    """Column k -= the columns before it, each times its coefficient."""
    rows = columns.shape[1]
    for first in range(0, rows, LEAF):
        column = columns[k, first : first + LEAF]
        for i in range(column.size):
            scratch[i] = np.float64(column[i])
        for j in range(k):
            other, coefficient = columns[j, first : first + LEAF], coefficients[j]
            for i in range(other.size):
                scratch[i] -= coefficient * np.float64(other[i])
        for i in range(column.size):
            column[i] = np.float32(scratch[i])


@kernel(types.void(F32_MATRIX))
def orthonormalise(p: Any) -> None:
    """The columns of p [rows, rank] become orthonormal, in place; one that depends on those before it becomes zero."""
    rows, rank = p.shape
    if rows == 0:
        return
    columns = np.ascontiguousarray(p.T)
    sums, leaves, coefficients = np.empty(LEAF), np.empty(-(-rows // LEAF)), np.empty(rank)
    for k in range(rank):
        column = columns[k]
        _scale_down(column)
        before = _dot(column, column, sums, leaves)
        for _ in range(PASSES if k > 0 else 0):
            for j in range(k):
                coefficients[j] = np.float64(np.float32(_dot(columns[j], column, sums, leaves)))
            _project_out(columns, k, coefficients, sums)
        square = _dot(column, column, sums, leaves)
        factor = 1.0 / np.sqrt(square) if square > LEAST_SQUARE * before else 0.0
        for i in range(rows):
            column[i] = np.float32(np.float64(column[i]) * factor)
    for i in range(rows):
        for k in range(rank):
            p[i, k] = columns[k, i]
