"""Kernels of `gaps`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.sparsify.select_kernels import CHOSEN, DENSE

ALL: tl.constexpr = tl.constexpr(0xFFFFFFFF)
END: tl.constexpr = tl.constexpr(6)
_INTEGERS = ["head", "each", "numel", "count"]


@triton.jit
def stored_u32(data):
    """The number that these bytes begin with, as int64."""
    byte = tl.arange(0, 4)
    return tl.sum(tl.load(data + byte).to(tl.int64) << (8 * byte).to(tl.int64), 0)


@triton.jit
def widths_of(indices, group, count):
    """The width of each group's gaps, int32; 0 beyond the last one."""
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = at < count
    before = tl.load(indices + at - 1, mask=live & (at > 0), other=-1)
    gap = tl.where(live, tl.load(indices + at, mask=live, other=0) - before - 1, 0)
    top = tl.max(gap, 1)
    return tl.sum(((top[:, None] >> tl.arange(0, 32)[None, :]) > 0).to(tl.int32), 1)


@triton.jit(do_not_specialize=_INTEGERS)
def widths_kernel(indices, widths, state, ROWS: tl.constexpr):
    """widths <- that of each group's gaps."""
    count = tl.load(state + CHOSEN)
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(widths + group, widths_of(indices, group, count).to(tl.uint8), mask=group * 128 < count)


@triton.jit(do_not_specialize=_INTEGERS)
def offsets_kernel(payload, widths, offsets, state, status, head, each, numel, MODE: tl.constexpr, CHUNK: tl.constexpr):
    """offsets <- where each group's gaps begin in the packed indices, by their widths. widths: None if they are in the payload."""
    if MODE == 1:
        stored = stored_u32(payload)
        tl.store(state + DENSE, (stored == ALL).to(tl.int64))
        tl.store(state + CHOSEN, tl.where(stored == ALL, 0, stored))
        count = tl.where(stored == ALL, 0, stored)
    else:
        count = tl.load(state + CHOSEN)
    groups = tl.cdiv(count, 128)
    source = payload + head + each * count if widths is None else widths
    place = groups
    for first in range(0, groups, CHUNK):
        group = tl.arange(0, CHUNK).to(tl.int64) + first
        size = tl.maximum(tl.minimum(count - group * 128, 128), 0)
        nbytes = (size * tl.load(source + group, mask=group < groups, other=0).to(tl.int64) + 7) // 8
        tl.store(offsets + group, place + tl.cumsum(nbytes, 0) - nbytes, mask=group < groups)
        place += tl.sum(nbytes, 0)
    tl.store(state + END, place)
    if MODE == 2:
        dense = (2 * count > numel) & (place + 4 * count >= 4 * numel.to(tl.int64))
        tl.store(state + DENSE, dense.to(tl.int64))
        tl.store(status + 1, tl.where(dense, 4 + 4 * numel.to(tl.int64), 4 + 4 * count + place))
        byte = tl.arange(0, 4)
        tl.store(payload + byte, (tl.where(dense, ALL, count) >> (8 * byte).to(tl.int64)).to(tl.uint8))


@triton.jit
def packed_bytes(indices, group, byte, width, size, steps):
    """Bytes of groups of ``size`` gaps of ``width`` bits, 1 or more, each of which holds bits of ``steps`` gaps at most."""
    number = byte * 8 // width
    gathered = tl.zeros(number.shape, tl.int64)
    for _ in range(steps):
        at = group * 128 + number
        live = (number < size) & (number * width < 8 * byte + 8)
        before = tl.load(indices + at - 1, mask=live & (at > 0), other=-1)
        gap = tl.where(live, tl.load(indices + at, mask=live, other=0) - before - 1, 0).to(tl.int64)
        shift = (number * width - 8 * byte).to(tl.int64)
        gathered |= tl.where(shift >= 0, gap << tl.maximum(shift, 0), gap >> tl.maximum(-shift, 0))
        number += 1
    return (gathered & 255).to(tl.uint8)


@triton.jit(do_not_specialize=_INTEGERS)
def pack_kernel(indices, widths, offsets, payload, state, head, each, BYTES: tl.constexpr):
    """Write one group's width and gaps."""
    count = tl.load(state + CHOSEN)
    group = tl.program_id(0).to(tl.int64)
    if (group * 128 < count) & (tl.load(state + DENSE) == 0):
        packed = payload + head + each * count
        width = tl.load(widths + group).to(tl.int32)
        tl.store(packed + group, width.to(tl.uint8))
        size = tl.minimum(count - group * 128, 128).to(tl.int32)
        nbytes = (size * width + 7) // 8
        target = packed + tl.load(offsets + group)
        for first in range(0, nbytes, BYTES):
            byte = first + tl.arange(0, BYTES)
            tl.store(target + byte, packed_bytes(indices, group, byte, width, size, (width + 6) // width + 1), mask=byte < nbytes)


@triton.jit(do_not_specialize=_INTEGERS)
def unpack_kernel(payload, offsets, state, places, totals, head, each):
    """places <- the group's indices, counted from its first possible one; totals <- how many places it spans."""
    count = tl.load(state + CHOSEN)
    group = tl.program_id(0).to(tl.int64)
    if group * 128 < count:
        packed = payload + head + each * count
        width = tl.load(packed + group).to(tl.int64)
        number = tl.arange(0, 128).to(tl.int64)
        at = group * 128 + number
        live = at < count
        first = number * width
        last = (first + width - 1) >> 3  # byte of its last bit
        source = packed + tl.load(offsets + group) + (first >> 3)
        bits = tl.zeros((128,), tl.int64)
        for byte in tl.static_range(5):
            read = live & ((first >> 3) + byte <= last)
            bits |= tl.load(source + byte, mask=read, other=0).to(tl.int64) << (8 * byte)
        gap = (bits >> (first & 7)) & ((tl.full((), 1, tl.int64) << width) - 1)
        steps = tl.where(live, gap + 1, 0)
        tl.store(places + at, (tl.cumsum(steps, 0) - 1).to(tl.int32), mask=live)
        tl.store(totals + group, tl.sum(steps, 0))


@triton.jit
def bases_kernel(totals, state, CHUNK: tl.constexpr):
    """totals <- the first index that each group can hold."""
    groups = tl.cdiv(tl.load(state + CHOSEN), 128)
    base = tl.zeros((), tl.int64)
    for first in range(0, groups, CHUNK):
        group = tl.arange(0, CHUNK).to(tl.int64) + first
        total = tl.load(totals + group, mask=group < groups, other=0)
        tl.store(totals + group, base + tl.cumsum(total, 0) - total, mask=group < groups)
        base += tl.sum(total, 0)
