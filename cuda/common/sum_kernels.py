"""Sums over a whole part, as `psgc.codecs.common.sums` defines them: trees over leaves of 4096 elements."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halved(x, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """The sum of ``SIZE`` elements, a power of two: elements i and i + SIZE / 2, then i and i + SIZE / 4, ... are added until one is left."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, (2, SIZE >> (step + 1))), 0)
    return tl.sum(x, 0)


@triton.jit(do_not_specialize=["count"])
def sums_kernel(x, sums, count, LEAF: tl.constexpr, STEPS: tl.constexpr):
    """sums <- those of each ``LEAF`` elements of x."""
    leaf = tl.program_id(0).to(tl.int64)
    at = leaf * LEAF + tl.arange(0, LEAF)
    tl.store(sums + leaf, halved(tl.load(x + at, mask=at < count, other=0.0), LEAF, STEPS))
