"""Payloads of `topk` and `blocktopk` of many small parts used in one launch, a program for each part.

A program writes down a payload's indices, then changes the elements at their places, one payload after the other.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.decoded_kernels import ADDS, COMMITS
from psgc.cuda.common.elements import corrected, load_f32, read_rescale, store_f32
from psgc.cuda.common.many_kernels import READ_FIELDS, address, grad_of
from psgc.cuda.sparsify.gap_kernels import ALL, stored_u32
from psgc.cuda.sparsify.loads import stored_f32
from psgc.cuda.sparsify.scatter_kernels import combined

GROUPS = tl.constexpr(8)  # groups of gaps that a program unpacks at once


@triton.jit
def unpack_indices(packed, count, indices):
    """indices <- those that are packed; returns the bytes that they take there. See `gap_kernels.unpack_kernel`."""
    groups = tl.cdiv(count, 128)
    place = groups
    base = tl.zeros((), tl.int32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        width = tl.load(packed + group, mask=group < groups, other=0).to(tl.int32)
        size = tl.maximum(tl.minimum(count - group * 128, 128), 0)
        nbytes = (size * width + 7) // 8
        start = place + tl.cumsum(nbytes, 0) - nbytes
        number, wide = tl.arange(0, 128)[None, :], width[:, None]
        live = number < size[:, None]
        bit = number * wide
        last = (bit + wide - 1) >> 3  # byte of its last bit
        source = packed + start[:, None] + (bit >> 3)
        bits = tl.zeros((GROUPS, 128), tl.int64)
        for byte in tl.static_range(5):
            bits |= tl.load(source + byte, mask=live & ((bit >> 3) + byte <= last), other=0).to(tl.int64) << (8 * byte)
        gap = ((bits >> (bit & 7).to(tl.int64)) & ((tl.full((), 1, tl.int64) << wide.to(tl.int64)) - 1)).to(tl.int32)
        steps = tl.where(live, gap + 1, 0)
        total = tl.sum(steps, 1)
        begin = base + tl.cumsum(total, 0) - total
        tl.store(indices + group[:, None] * 128 + number, begin[:, None] + tl.cumsum(steps, 1) - 1, mask=live)
        place += tl.sum(nbytes, 0)
        base += tl.sum(total, 0)
    return place


@triton.jit
def _begin(target, grad, sums, rescale, numel, USE: tl.constexpr, TWICE: tl.constexpr, TILE: tl.constexpr):
    """What the elements are before payloads change them. TWICE: ``sums`` are added to the target afterwards."""
    for first in range(0, numel, TILE):
        at = first + tl.arange(0, TILE)
        live = at < numel
        if USE == COMMITS:
            store_f32(target, at, corrected(load_f32(grad, at, live, False), target, rescale, at, live, False), live, False)
        elif USE == ADDS and not TWICE:
            store_f32(target, at, load_f32(target, at, live, False) + 0.0, live, False)  # the sum's zeros are added, too
        else:
            store_f32(sums, at, tl.zeros((TILE,), tl.float32), live, False)


@triton.jit
def _use_elements(payload, indices, out, numel, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change the elements that a payload of `topk` has."""
    stored = stored_u32(payload)
    values = payload.to(tl.pointer_type(tl.float32), bitcast=True) + 1
    count = tl.where(stored == ALL, 0, stored).to(tl.int32)
    unpack_indices(payload + 4 + 4 * count, count, indices)
    tl.debug_barrier()
    for first in range(0, count, TILE):
        number = first + tl.arange(0, TILE)
        live = number < count
        at = tl.load(indices + number, mask=live, other=0)
        store_f32(out, at, combined(out, at, tl.load(values + number, mask=live, other=0.0), live, MODE), live, False)
    for first in range(0, tl.where(stored == ALL, numel, 0), TILE):
        at = first + tl.arange(0, TILE)
        live = at < numel
        store_f32(out, at, combined(out, at, tl.load(values + at, mask=live, other=0.0), live, MODE), live, False)
    tl.debug_barrier()


@triton.jit
def _use_blocks(payload, indices, out, numel, count, block, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change the elements of the blocks that a payload of `blocktopk` has."""
    values = payload + unpack_indices(payload, count, indices)
    tl.debug_barrier()
    for first in range(0, count * block, TILE):
        number = first + tl.arange(0, TILE)
        sent = number < count * block
        at = tl.load(indices + number // block, mask=sent, other=0) * block + number % block
        live = sent & (at < numel)
        store_f32(out, at, combined(out, at, stored_f32(values, number, live), live, MODE), live, False)
    tl.debug_barrier()


@triton.jit
def _sums(target, room, most, TWICE: tl.constexpr):
    """Where payloads are added up: in the target, or behind the indices."""
    if TWICE:
        return room.to(tl.pointer_type(tl.float32), bitcast=True) + most
    else:
        return target


@triton.jit(do_not_specialize=["most", "block"])
def read_many_kernel(
    table, numbers, rooms, most, block, at, rescale,
    TARGET: tl.constexpr, GRAD: tl.constexpr, USE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr,
    TWICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Use the payloads of many parts: see `many`. rooms: int32, of each part ``most`` for indices and, if TWICE, as many for sums. numbers: of a part, the
    blocks that are sent, with BLOCKS."""
    part = tl.program_id(0).to(tl.int64)
    row = table + part * (READ_FIELDS + COUNT)
    numel = tl.load(row + 2).to(tl.int32)
    target = address(row, 0, TARGET, ALIGNED)
    room = rooms + part * most * (2 if TWICE else 1)
    sums = _sums(target, room, most, TWICE)
    _begin(target, grad_of(row, target, GRAD, ALIGNED, USE), sums, read_rescale(at, rescale), numel, USE, TWICE, TILE)
    tl.debug_barrier()
    for k in range(COUNT):
        payload = tl.multiple_of(tl.load(row + READ_FIELDS + k).to(tl.pointer_type(tl.uint8)), 16)
        if BLOCKS:
            _use_blocks(payload, room, sums, numel, tl.load(numbers + part).to(tl.int32), block, 2 if USE == COMMITS else 1, TILE)
        else:
            _use_elements(payload, room, sums, numel, 2 if USE == COMMITS else 1, TILE)
    if TWICE:
        for first in range(0, numel, TILE):
            place = first + tl.arange(0, TILE)
            live = place < numel
            total = load_f32(target, place, live, False) + tl.load(sums + place, mask=live, other=0.0)
            store_f32(target, place, total, live, False)
