"""Kernels of `powersgd`: Gram-Schmidt and the products of factors, in the orders of operations of the CPU, so that all ranks have the same bits."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import INFINITY_BITS, magnitude_bits
from psgc.cuda.common.sum_kernels import halved


@triton.jit
def products(a, b, rank, rows, first, TILE: tl.constexpr):
    """Products (float64) of two columns' elements from row ``first`` on; 0 after the last one."""
    row = tl.arange(0, TILE) + first
    left = tl.load(a + row * rank, mask=row < rows, other=0.0).to(tl.float64)
    return left * tl.load(b + row * rank, mask=row < rows, other=0.0).to(tl.float64)


@triton.jit
def leaf_sum(a, b, rank, rows, first, TILE: tl.constexpr, STEPS: tl.constexpr):
    """The sum of the products of sixteen tiles, a leaf, as a tree whose first four levels add whole tiles."""
    total = minus_zeros(TILE)
    for odd in range(2):
        total += fourth(a, b, rank, rows, first + odd * TILE, TILE) + fourth(a, b, rank, rows, first + (odd + 2) * TILE, TILE)
    return halved(total, TILE, STEPS)


@triton.jit
def minus_zeros(TILE: tl.constexpr):
    """-0.0, to which any number is added without a change; a constant -0.0 would become 0.0."""
    return tl.full((TILE,), -1.0, tl.float64) * 0.0


@triton.jit
def fourth(a, b, rank, rows, first, TILE: tl.constexpr):
    """Products of every fourth tile, added."""
    even = products(a, b, rank, rows, first, TILE) + products(a, b, rank, rows, first + 8 * TILE, TILE)
    return even + (products(a, b, rank, rows, first + 4 * TILE, TILE) + products(a, b, rank, rows, first + 12 * TILE, TILE))


@triton.jit
def dot(a, b, rank, rows, leaves, LEAF: tl.constexpr, STEPS: tl.constexpr):
    """The dot product of two columns (float64), as a tree over leaves of ``LEAF`` rows. leaves: scratch, one float64 for each."""
    TILE: tl.constexpr = LEAF // 16
    count = tl.cdiv(rows, LEAF)
    total = tl.zeros((), tl.float64)
    for leaf in range(count):
        total = leaf_sum(a, b, rank, rows, leaf * LEAF, TILE, STEPS)
        tl.store(leaves + leaf, total)
    if count > 1:
        tl.debug_barrier()
        lanes = minus_zeros(TILE)
        for odd in range(2):
            lanes += fourth_of(leaves, count, odd, TILE) + fourth_of(leaves, count, odd + 2, TILE)
        total = halved(lanes, TILE, STEPS)
        tl.debug_barrier()
    return total


@triton.jit
def fourth_of(leaves, count, tile, TILE: tl.constexpr):
    """The leaves' sums of every fourth tile of them, added; 0 after the last leaf."""
    number = tl.arange(0, TILE) + tile * TILE
    low = leaf_tile(leaves, number, count) + leaf_tile(leaves, number + 8 * TILE, count)
    return low + (leaf_tile(leaves, number + 4 * TILE, count) + leaf_tile(leaves, number + 12 * TILE, count))


@triton.jit
def leaf_tile(leaves, number, count):
    return tl.load(leaves + number, mask=number < count, other=0.0)


@triton.jit(do_not_specialize=["rank", "stride"])
def orthonormal_kernel(p, table, leaves, coefficients, rank, stride, LEAF: tl.constexpr, STEPS: tl.constexpr, PASSES: tl.constexpr):
    """The columns of one matrix [rows, rank] become orthonormal, in place, as `psgc.codecs.common.orthonormal` says. table: first element and rows of each.
    leaves, coefficients (float64): scratch, ``stride`` and ``rank`` for each matrix."""
    number = tl.program_id(0).to(tl.int64)
    columns, rows = p + tl.load(table + 2 * number), tl.load(table + 2 * number + 1)
    leaves, coefficients = leaves + number * stride, coefficients + number * rank
    TILE: tl.constexpr = LEAF // 16
    count = tl.cdiv(rows, TILE)
    for k in range(rank):
        column = columns + k
        top = tl.zeros((), tl.int32)
        for tile in range(count):
            row = tl.arange(0, TILE) + tile * TILE
            top = tl.maximum(top, tl.max(magnitude_bits(tl.load(column + row * rank, mask=row < rows, other=0.0)), 0))
        # the power of two that brings the largest magnitude to [0.5, 1): float64 has no denormal here
        exponent = (top.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
        scales = (top > 0) & (top < INFINITY_BITS)
        factor = tl.where(scales, (1023 - exponent) << 52, 1023 << 52).to(tl.float64, bitcast=True)
        for tile in range(count):
            row = tl.arange(0, TILE) + tile * TILE
            x = tl.load(column + row * rank, mask=row < rows, other=0.0).to(tl.float64)
            tl.store(column + row * rank, (x * factor).to(tl.float32), mask=row < rows)
        tl.debug_barrier()
        before = dot(column, column, rank, rows, leaves, LEAF, STEPS)
        for _ in range(PASSES):
            for j in range(k):
                tl.store(coefficients + j, dot(columns + j, column, rank, rows, leaves, LEAF, STEPS).to(tl.float32).to(tl.float64))
            tl.debug_barrier()
            for tile in range(count):
                row = tl.arange(0, TILE) + tile * TILE
                x = tl.load(column + row * rank, mask=row < rows, other=0.0).to(tl.float64)
                for j in range(k):
                    x = x - tl.load(coefficients + j) * tl.load(columns + j + row * rank, mask=row < rows, other=0.0).to(tl.float64)
                tl.store(column + row * rank, x.to(tl.float32), mask=row < rows)
            tl.debug_barrier()
        square = dot(column, column, rank, rows, leaves, LEAF, STEPS)
        factor = tl.where(square > 1e-10 * before, 1.0 / tl.sqrt(square), 0.0)
        for tile in range(count):
            row = tl.arange(0, TILE) + tile * TILE
            x = tl.load(column + row * rank, mask=row < rows, other=0.0).to(tl.float64)
            tl.store(column + row * rank, (x * factor).to(tl.float32), mask=row < rows)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "columns", "rank"])
def product_kernel(p, q, out, rows, columns, rank, MODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out (float32) becomes, grows by (1) or loses (2) p q^T, each element summed over the rank in order."""
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0).to(tl.int64) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) % across * COLUMNS + tl.arange(0, COLUMNS)
    left = tl.load(p + row * rank, mask=row < rows, other=0.0)
    right = tl.load(q + column * rank, mask=column < columns, other=0.0)
    total = left[:, None] * right[None, :]
    for k in range(1, rank):
        left = tl.load(p + row * rank + k, mask=row < rows, other=0.0)
        right = tl.load(q + column * rank + k, mask=column < columns, other=0.0)
        total += left[:, None] * right[None, :]
    at = row[:, None] * columns + column[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    if MODE == 1:
        total = tl.load(out + at, mask=live, other=0.0) + total
    if MODE == 2:
        total = tl.load(out + at, mask=live, other=0.0) - total
    tl.store(out + at, total, mask=live)
