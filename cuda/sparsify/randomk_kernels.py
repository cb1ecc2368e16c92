"""Kernels of `randomk`: the places that every rank draws alike, and the values at them.

A payload is int32: the two keys, then the values. ``size`` and ``wide`` are numel // count and numel % count.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import INFINITY_BITS, MAX_F32, flag_nonfinite, load_f32, magnitude_bits, read_rescale, store_f32
from psgc.cuda.common.many_kernels import address, part_of
from psgc.cuda.common.randoms import random_word, read_draws
from psgc.cuda.sparsify.loads import p_at, p_of_tile


@triton.jit
def places_of(stratum, count, size, wide, numel, before, between):
    """The element drawn from each stratum (int64); those before ``wide`` have one more than ``size``."""
    numel, count = numel.to(tl.int64), count.to(tl.int64)
    high = random_word(count.to(tl.uint32), before, between).to(tl.int64)
    low = random_word((count + 1).to(tl.uint32), before, between).to(tl.int64)
    turn = (high * numel + ((low * numel) >> 32)) >> 32
    elements = tl.where(stratum < wide, size + 1, size).to(tl.int64)
    drawn = (random_word(stratum.to(tl.uint32), before, between).to(tl.int64) * elements) >> 32
    place = stratum * size + tl.minimum(stratum, wide.to(tl.int64)) + drawn + turn
    return tl.where(place >= numel, place - numel, place)


@triton.jit(do_not_specialize=["numel", "divisor", "payload_bytes"])
def scan_kernel(values, residual, divisor, factor, rescale, kept, status, numel, payload_bytes, DIVIDES: tl.constexpr, TILE: tl.constexpr):
    """Flag NaN and infinity, and write the payload's length. kept: None, or becomes p."""
    start = tl.program_id(0).to(tl.int64) * TILE
    p = p_of_tile(values, residual, start, numel, divisor, factor, rescale, DIVIDES, TILE)
    if kept is not None:
        at = start + tl.arange(0, TILE)
        tl.store(kept + at, p, mask=at < numel)
    tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(magnitude_bits(p), 0) >= INFINITY_BITS)
    tl.store(status + 1, payload_bytes.to(tl.int64), mask=start == 0)


@triton.jit
def write_values(
    values, residual, divisor, factor, rescale, kept, payload, start, before, between, numel, count, size, wide, scale,
    DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the keys, and the values of the strata from ``start`` on. kept: None, or holds p, which loses them."""
    stratum = start + tl.arange(0, TILE)
    live = stratum < count
    place = places_of(stratum, count, size, wide, numel, before, between)
    p = p_at(values, residual, place, live, divisor, factor, rescale, DIVIDES)
    sent = tl.minimum(tl.maximum(p * scale, -MAX_F32), MAX_F32)
    tl.store(payload + 2 + stratum, sent.to(tl.int32, bitcast=True), mask=live)
    tl.store(payload, before.to(tl.int32, bitcast=True), mask=start == 0)
    tl.store(payload + 1, between.to(tl.int32, bitcast=True), mask=start == 0)
    if kept is not None:
        tl.store(kept + place, p - sent, mask=live)


@triton.jit(do_not_specialize=["numel", "count", "size", "wide", "divisor", "first", "before", "between"])
def gather_kernel(
    values, residual, divisor, factor, rescale, kept, payload, words, first, before, between, numel, count, size, wide, scale,
    DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a payload; `kept` as in `write_values`."""
    _first, before, between = read_draws(words, first, before, between)
    start = tl.program_id(0).to(tl.int64) * TILE
    write_values(
        values, residual, divisor, factor, rescale, kept, payload, start, before, between, numel, count, size, wide, scale, DIVIDES, TILE
    )  # fmt: skip


@triton.jit
def _write_tile(source, residual, rescale, out, status, numel, start, row, before, between, SCALES: tl.constexpr, TILE: tl.constexpr):
    """Look at a tile of elements, and write as many strata as a tile has elements."""
    p = p_of_tile(source, residual, start, numel, 1, None, rescale, False, TILE)
    flag_nonfinite(status, tl.max(magnitude_bits(p), 0) >= INFINITY_BITS)
    count = (tl.load(row + 6) - 8) // 4
    scale = 1.0
    if SCALES:
        scale = (numel.to(tl.float64) / count.to(tl.float64)).to(tl.float32)
    if start < count:
        payload = out.to(tl.pointer_type(tl.int32), bitcast=True)
        write_values(
            source, residual, 1, None, rescale, None, payload, start, before, between, numel, count, numel // count, numel % count, scale, False, TILE
        )  # fmt: skip


@triton.jit
def write_many_kernel(
    table, owners, words, at, rescale, DTYPE: tl.constexpr, FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Encode many parts of elements of DTYPE: see `many`."""
    part, row, numel, start, out, status = part_of(table, owners, TILE)
    factor = read_rescale(at, rescale)
    source = address(row, 0, DTYPE, ALIGNED)
    _first, before, between = read_draws(words + part * 3, 0, 0, 0)
    if FEEDBACK:
        _write_tile(source, address(row, 1, tl.float32, ALIGNED), factor, out, status, numel, start, row, before, between, SCALES, TILE)
    else:
        _write_tile(source, None, factor, out, status, numel, start, row, before, between, SCALES, TILE)


@triton.jit(do_not_specialize=["numel", "count", "size", "wide"])
def apply_kernel(payload, out, numel, count, size, wide, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change the elements at the payload's places. MODE: as in `scatter_kernels`, but that a zero keeps its sign."""
    before = tl.load(payload).to(tl.uint32, bitcast=True)
    between = tl.load(payload + 1).to(tl.uint32, bitcast=True)
    stratum = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = stratum < count
    place = places_of(stratum, count, size, wide, numel, before, between)
    value = tl.load(payload + 2 + stratum, mask=live, other=0).to(tl.float32, bitcast=True)
    if MODE == 1:
        value = load_f32(out, place, live, False) + value
    if MODE == 2:
        value = load_f32(out, place, live, False) - value
    store_f32(out, place, value, live, False)
