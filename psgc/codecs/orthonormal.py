"""Orthonormal columns of a tall float32 matrix, in an order of operations that every CPU and GPU can follow to the same bits.

Owns that order. Column by column, from the first on: the column is multiplied by the power of two that brings its largest magnitude to
[0.5, 1), so that nothing overflows or vanishes. Then classical Gram-Schmidt, twice ("twice is enough"): the coefficients of column k are
its dot products with all columns before it, rounded to float32, and

    p_ik <- float32(((p_ik - c_0 p_i0) - c_1 p_i1) - ...)      in float64, each difference rounded

Then the column is multiplied by 1 / its norm, in float64, and rounded to float32. A column that depends on those before it, up to 1e-5 of
its length, becomes zero; one that has a NaN or infinity stays no number. Every sum over rows (dot products and squares) is taken in float64 as a tree:

    rows in blocks of 4096; in a block 64 lanes, lane j adding rows j, j + 64, ... in turn, then lanes j and j + 32, j and j + 16, ...
    until one is left; then the sums of blocks 2 i and 2 i + 1 are added, the last one kept where their number is odd, until one is left

Every product in a sum or difference is of two float32, so it is exact in float64: a fused multiply-add changes nothing. Between columns all
is data-parallel over rows. Source: Giraud, Langou, Rozloznik and van den Eshof 2005 (classical Gram-Schmidt, twice).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import BLOCK, F32
from psgc.codecs.kernel import helper, kernel

LANES: Final = 64
PASSES: Final = 2
LEAST_SQUARE: Final = 1e-10  # of the column's square before: float32's rounding of a dependent column leaves less
F32_MATRIX: Final = types.Array(types.float32, 2, "C")

F64 = NDArray[np.float64]


def define_tree(values: F64) -> np.float64:
    """The sum of [rows] float64 in the documented order."""
    blocks: list[np.float64] = []
    for start in range(0, values.size, BLOCK):
        lanes = np.zeros(LANES)
        for first in range(start, min(start + BLOCK, values.size), LANES):
            row = values[first : min(first + LANES, values.size)]
            lanes[: row.size] += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        blocks.append(lanes[0])
    while len(blocks) > 1:
        pairs = [left + right for left, right in zip(blocks[::2], blocks[1::2], strict=False)]
        blocks = pairs + blocks[2 * len(pairs) :]
    return blocks[0] if blocks else np.float64(0)


def define_orthonormal(p: F32) -> F32:
    """What ``orthonormalise`` makes of p [rows, rank]."""
    done = p.copy()
    for k in range(p.shape[1]):
        column = done[:, k].astype(np.float64)
        top = np.abs(column).max(initial=0)
        if 0 < top < np.inf:
            column = np.ldexp(column, -np.frexp(top)[1]).astype(np.float32).astype(np.float64)
        before = define_tree(column * column)
        for _ in range(PASSES):
            coefficients = [np.float32(define_tree(done[:, j] * column)) for j in range(k)]
            for j, coefficient in enumerate(coefficients):
                column = column - np.float64(coefficient) * done[:, j]
            column = column.astype(np.float32).astype(np.float64)
        square = define_tree(column * column)
        done[:, k] = column * (1 / np.sqrt(square) if square > LEAST_SQUARE * before else 0.0)
    return done


@helper
def _dots(p: Any, first: Any, k: Any, lanes: Any, blocks: Any, sums: Any) -> None:
    """sums[first:k + 1] <- the dot products of columns first to k with column k. lanes: [LANES, rank], blocks: [ceil(rows / BLOCK), rank]."""
    rows = p.shape[0]
    count = -(-rows // BLOCK)
    for number in range(count):
        start = number * BLOCK
        end = min(start + BLOCK, rows)
        lanes[:, first : k + 1] = 0.0
        for i in range(start, end):
            lane, value = lanes[(i - start) % LANES], np.float64(p[i, k])
            for j in range(first, k + 1):
                lane[j] += np.float64(p[i, j]) * value
        width = LANES // 2
        while width > 0:
            for i in range(width):
                for j in range(first, k + 1):
                    lanes[i, j] += lanes[width + i, j]
            width //= 2
        for j in range(first, k + 1):
            blocks[number, j] = lanes[0, j]
    while count > 1:
        for number in range(count // 2):
            for j in range(first, k + 1):
                blocks[number, j] = blocks[2 * number, j] + blocks[2 * number + 1, j]
        if count % 2:
            for j in range(first, k + 1):
                blocks[count // 2, j] = blocks[count - 1, j]
        count = (count + 1) // 2
    for j in range(first, k + 1):
        sums[j] = blocks[0, j]


@kernel(types.void(F32_MATRIX))
def orthonormalise(p: Any) -> None:
    """The columns of p [rows, rank] become orthonormal, in place; one that depends on those before it becomes zero."""
    rows, rank = p.shape
    if rows == 0:
        return
    lanes, blocks, sums = np.empty((LANES, rank)), np.empty((-(-rows // BLOCK), rank)), np.empty(rank)
    for k in range(rank):
        top = np.float64(0)
        for i in range(rows):
            top = max(top, abs(np.float64(p[i, k])))
        if 0 < top < np.inf:
            factor = math.ldexp(1.0, -math.frexp(top)[1])
            for i in range(rows):
                p[i, k] = np.float32(np.float64(p[i, k]) * factor)
        _dots(p, k, k, lanes, blocks, sums)
        before = sums[k]
        for _ in range(PASSES if k > 0 else 0):
            _dots(p, 0, k, lanes, blocks, sums)
            for j in range(k):
                sums[j] = np.float64(np.float32(sums[j]))
            for i in range(rows):
                value = np.float64(p[i, k])
                for j in range(k):
                    value -= sums[j] * np.float64(p[i, j])
                p[i, k] = np.float32(value)
        _dots(p, k, k, lanes, blocks, sums)
        factor = 1.0 / np.sqrt(sums[k]) if sums[k] > LEAST_SQUARE * before else 0.0
        for i in range(rows):
            p[i, k] = np.float32(np.float64(p[i, k]) * factor)
