"""Kernels of `bisection`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import magnitude_bits
from psgc.cuda.common.sum_kernels import halved
from psgc.cuda.sparsify.loads import p_of_tile
from psgc.cuda.sparsify.select_kernels import FLOOR, FOUND, LEVEL, LIMIT, descend, reads_whole


@triton.jit(do_not_specialize=["numel", "divisor"])
def magnitudes_kernel(
    values, residual, divisor, factor, rescale, sums, top, numel, DIVIDES: tl.constexpr, LEAF: tl.constexpr, STEPS: tl.constexpr
):
    """sums <- each leaf's sum of |p|, in float64; top: the bits of the largest."""
    leaf = tl.program_id(0).to(tl.int64)
    key = magnitude_bits(p_of_tile(values, residual, leaf * LEAF, numel, divisor, factor, rescale, DIVIDES, LEAF))
    tl.store(sums + leaf, halved(key.to(tl.float32, bitcast=True).to(tl.float64), LEAF, STEPS))
    tl.atomic_max(top, tl.max(key, 0).to(tl.int64))


@triton.jit(do_not_specialize=["rank", "need", "room", "numel"])
def bisect_kernel(histograms, state, total, top, rank, need, room, numel, KEY_BITS: tl.constexpr, PROBES: tl.constexpr):
    """Set LIMIT and LEVEL. Where candidates below the floor are needed, FOUND says that the list is of no use."""
    next_largest, _ = descend(histograms, rank, 4, KEY_BITS)
    mean = (tl.load(total) / numel.to(tl.float64)).to(tl.float32)
    reach = tl.load(top).to(tl.int32).to(tl.float32, bitcast=True) - mean
    low, high = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float32)
    below, above = tl.full((), 0, tl.int64), tl.full((), 1 << 32, tl.int64)
    for _ in range(PROBES):
        ratio = (low + high) * 0.5
        threshold = (mean + ratio * reach).to(tl.uint32, bitcast=True).to(tl.int64)
        too_many = next_largest >= threshold
        low, high = tl.where(too_many, ratio, low), tl.where(too_many, high, ratio)
        below, above = tl.where(too_many, threshold, below), tl.where(too_many, above, threshold)
    tl.store(state + LIMIT, above - 1)
    tl.store(state + LEVEL, below)
    useless = reads_whole(state, need, room) | (below < tl.load(state + FLOOR))
    tl.store(state + FOUND, tl.full((), -1, tl.int64), mask=useless)
