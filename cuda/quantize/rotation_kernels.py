"""The randomised Hadamard rotation of groups of 1024 in registers: ``psgc.codecs.quantize.rotation``, operation by operation."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

STAGES = tl.constexpr(10)
SCALE = tl.constexpr(2.0**-5)


@triton.jit
def signs_of(index):
    """The signs of the elements at these places of the part, +1 or -1."""
    h = (index & 4095).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return tl.where(((h ^ (h >> 16)) & 1) != 0, -1.0, 1.0)


@triton.jit
def hadamard(x):
    """H times each 1024 elements of x: sums and differences of pairs at distances 1, 2, ..., 512."""
    size: tl.constexpr = x.shape[0]
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, (size // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (size,))
    return x


@triton.jit
def rotated(x, index):
    """Whole groups, rotated."""
    return hadamard(x * (signs_of(index) * SCALE))


@triton.jit
def rotated_back(x, index):
    """Whole groups, rotated back."""
    return hadamard(x * SCALE) * signs_of(index)
