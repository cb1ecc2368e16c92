"""How the sparse kernels read p = values / divisor + rescale * residual, and float32 elements at any alignment."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import corrected, load_f32, mean, read_rescale


@triton.jit
def p_at(values, residual, at, live, divisor, factor, rescale, DIVIDES: tl.constexpr, WHOLE: tl.constexpr = False):
    """p at these places (int64), float32. residual: None for none. factor: None, or points to the rescale. 0 where not ``live``; WHOLE: all are."""
    x = mean(load_f32(values, at, live, WHOLE), divisor, DIVIDES)
    return corrected(x, residual, read_rescale(factor, rescale), at, live, WHOLE)


@triton.jit
def p_of_tile(values, residual, start, numel, divisor, factor, rescale, DIVIDES: tl.constexpr, TILE: tl.constexpr):
    """p of the elements from ``start`` (int64) on. A full tile is loaded without a mask, 16 bytes at once."""
    at = start + tl.arange(0, TILE)
    if start + TILE <= numel:
        p = p_at(values, residual, at, None, divisor, factor, rescale, DIVIDES, True)
    else:
        p = p_at(values, residual, at, at < numel, divisor, factor, rescale, DIVIDES, False)
    return p


@triton.jit
def stored_f32(data, at, live):
    """float32 elements of bytes at any alignment: element ``at`` begins 4 * at bytes behind ``data``."""
    place = data + 4 * at
    bits = tl.load(place, mask=live, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(place + byte, mask=live, other=0).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_bytes(data, at, live, value):
    """The inverse of ``stored_f32``."""
    place, bits = data + 4 * at, value.to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(place + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=live)
