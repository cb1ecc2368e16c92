"""Kernels of `shared`: the largest magnitudes, codes in the shared scales, and the sums of codes. A program has ROWS blocks of 256 elements."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import (
    INFINITY_BITS,
    corrected,
    flag_nonfinite,
    load_bits,
    load_f32,
    magnitude_bits,
    mean,
    report_bytes,
    store_f32,
)
from psgc.cuda.common.randoms import read_draws
from psgc.cuda.quantize.code_kernels import integer_code

BLOCK = tl.constexpr(256)
TOP = tl.constexpr(127.0)


@triton.jit
def _tile(numel, ROWS: tl.constexpr):
    """(first element, first block, offsets [ROWS, 256] of elements, their mask, blocks [ROWS], their mask) of this program."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return start, start // BLOCK, offsets, offsets < numel - start, rows, rows * BLOCK < numel - start


@triton.jit
def _p_of(grad, residual, rescale, offsets, mask):
    return corrected(load_f32(grad, offsets, mask, False), residual, rescale, offsets, mask, False)


@triton.jit
def _scales(tops, least):
    """max|p| / 127 of each block; 0 where that would not be a normal float."""
    top = tl.full(tops.shape, TOP, tl.float32)
    return tl.where(tops >= least, tl.div_rn(tops, top), 0.0)


@triton.jit(do_not_specialize=["numel", "payload_bytes"])
def maxima_kernel(grad, residual, rescale, out, status, numel, payload_bytes, ROWS: tl.constexpr):
    """out (float32) <- max|p| of each block, 0 where it is not finite; flag NaN and infinity."""
    start, first, offsets, mask, rows, here = _tile(numel, ROWS)
    old = residual if residual is None else residual + start
    top = tl.max(magnitude_bits(_p_of(grad + start, old, rescale, offsets, mask)), axis=1)
    tl.store(out + first + rows, tl.where(top < INFINITY_BITS, top, 0).to(tl.float32, bitcast=True), mask=here)
    flag_nonfinite(status, tl.max(top, axis=0) >= INFINITY_BITS)
    report_bytes(status, payload_bytes, tl.program_id(0))


@triton.jit(do_not_specialize=["numel", "first", "before", "between"])
def codes_kernel(
    grad, residual, rescale, maxima, words, first, before, between, out, status, numel, least, RANDOM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """out (int8) <- codes."""
    start, block, offsets, mask, rows, here = _tile(numel, ROWS)
    place, key, other = read_draws(words, first, before, between)
    old = residual if residual is None else residual + start
    p = _p_of(grad + start, old, rescale, offsets, mask)
    tops = tl.load(maxima + block + rows, mask=here, other=0.0)
    live = tops >= least
    factor = tl.div_rn(tl.full((ROWS,), TOP, tl.float32), tl.where(live, tops, 1.0))
    index = place + start.to(tl.uint32) + offsets.to(tl.uint32)
    code = integer_code(p, factor[:, None], TOP, 1.0, index, key, other, RANDOM)
    tl.store(out + start + offsets, tl.where(live[:, None], code & 255, 0).to(tl.uint8), mask=mask)
    report_bytes(status, numel, tl.program_id(0))


@triton.jit(do_not_specialize=["numel"])
def apply_kernel(sums, maxima, sent, target, residual, rescale, divisor, numel, least, DIVIDES: tl.constexpr, ROWS: tl.constexpr):
    """residual (None: not) <- target + rescale * residual - sent * scale; then target <- sums * scale / divisor."""
    start, block, offsets, mask, rows, here = _tile(numel, ROWS)
    scale = _scales(tl.load(maxima + block + rows, mask=here, other=0.0), least)[:, None]
    if residual is not None:
        p = _p_of(target + start, residual + start, rescale, offsets, mask)
        codes = load_bits(sent + start, offsets, mask, False).to(tl.float32)
        tl.store(residual + start + offsets, p - codes * scale, mask=mask)
        tl.debug_barrier()  # what is stored next does not come from what was loaded of the target, maybe by another thread
    elements = load_bits(sums + start, offsets, mask, False).to(tl.float32) * scale
    store_f32(target + start, offsets, mean(elements, divisor, DIVIDES), mask, False)


@triton.jit(do_not_specialize=["numel"])
def add_kernel(sent, maxima, residual, numel, least, ROWS: tl.constexpr):
    """residual <- residual + sent * scale."""
    start, block, offsets, mask, rows, here = _tile(numel, ROWS)
    scale = _scales(tl.load(maxima + block + rows, mask=here, other=0.0), least)[:, None]
    codes = load_bits(sent + start, offsets, mask, False).to(tl.float32)
    old = load_f32(residual + start, offsets, mask, False)
    tl.store(residual + start + offsets, old + codes * scale, mask=mask)
