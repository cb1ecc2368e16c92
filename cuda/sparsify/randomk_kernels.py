"""Kernels of `randomk`: the places that every rank draws alike, and the values at them.

A payload is int32: the two keys, then the values. ``size`` and ``wide`` are numel // count and numel % count.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.decoded_kernels import ADDS, COMMITS
from psgc.cuda.common.elements import INFINITY_BITS, MAX_F32, corrected, flag_nonfinite, load_f32, magnitude_bits, read_rescale, store_f32
from psgc.cuda.common.many_kernels import address, grad_of, part_of, reading_of
from psgc.cuda.common.randoms import random_word, read_draws
from psgc.cuda.sparsify.loads import p_at, p_of_tile


@triton.jit
def places_of(stratum, count, size, wide, numel, before, between):
    """The element drawn from each stratum (int64); those before ``wide`` have one more than ``size``."""
    place = unturned(stratum, size, wide, before, between) + turn_of(count, numel, before, between)
    return tl.where(place >= numel, place - numel, place)


@triton.jit
def turn_of(count, numel, before, between):
    """By how many elements all strata are turned."""
    numel, count = numel.to(tl.int64), count.to(tl.int64)
    high = random_word(count.to(tl.uint32), before, between).to(tl.int64)
    low = random_word((count + 1).to(tl.uint32), before, between).to(tl.int64)
    return (high * numel + ((low * numel) >> 32)) >> 32


@triton.jit
def unturned(stratum, size, wide, before, between):
    """The element drawn from each stratum (int64), before they are turned."""
    elements = tl.where(stratum < wide, size + 1, size).to(tl.int64)
    drawn = (random_word(stratum.to(tl.uint32), before, between).to(tl.int64) * elements) >> 32
    return stratum * size + tl.minimum(stratum, wide.to(tl.int64)) + drawn


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
    sent = p * scale
    sent = tl.where(sent > MAX_F32, MAX_F32, sent)  # not tl.minimum, of which a GPU makes the limit where an element is NaN
    sent = tl.where(sent < -MAX_F32, -MAX_F32, sent)
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


@triton.jit
def _value_at(payload, at, live, numel, count):
    """(which elements the payload has a value for, their values); see `places_of`, of which this is the inverse."""
    before = tl.load(payload).to(tl.uint32, bitcast=True)
    between = tl.load(payload + 1).to(tl.uint32, bitcast=True)
    size, wide = numel // count, numel % count
    place = at - turn_of(count, numel, before, between)
    place = tl.where(place < 0, place + numel, place)
    border = wide * (size + 1)
    stratum = tl.where(place < border, place // (size + 1), wide + (place - border) // size)
    hit = live & (place == unturned(stratum, size, wide, before, between))
    return hit, tl.load(payload + 2 + stratum, mask=hit, other=0).to(tl.float32, bitcast=True)


@triton.jit
def read_many_kernel(
    table, owners, at, rescale,
    TARGET: tl.constexpr, GRAD: tl.constexpr, USE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Use the payloads of many parts, element by element: see `many`. A sum's first payload keeps the sign of a zero."""
    row, numel, start, payloads = reading_of(table, owners, TILE, COUNT)
    target = address(row, 0, TARGET, ALIGNED)
    grad = grad_of(row, target, GRAD, ALIGNED, USE)
    count = (tl.load(row + 4) - 8) // 4
    place = start + tl.arange(0, TILE)
    live = place < numel
    hit, value = _value_at(payloads[0].to(tl.pointer_type(tl.int32), bitcast=True), place, live, numel, count)
    total = tl.where(hit, value, 0.0)
    for k in tl.static_range(1, COUNT):
        also, value = _value_at(payloads[k].to(tl.pointer_type(tl.int32), bitcast=True), place, live, numel, count)
        total = tl.where(also, total + value, total)
    if USE == ADDS:
        total = load_f32(target, place, live, False) + total
    if USE == COMMITS:
        p = corrected(load_f32(grad, place, live, False), target, read_rescale(at, rescale), place, live, False)
        total = tl.where(hit, p - total, p)
    store_f32(target, place, total, live, False)
