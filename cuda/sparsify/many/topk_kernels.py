"""`topk` of many small parts, a program for each: exact, or by a sampled threshold."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import INFINITY_BITS, magnitude_bits, read_rescale
from psgc.cuda.common.many_kernels import address, whole_part
from psgc.cuda.sparsify.gap_kernels import ALL
from psgc.cuda.sparsify.loads import p_of_tile
from psgc.cuda.sparsify.many.choosing_kernels import PART, SAMPLE, chosen_of, key_of_rank, pack_indices, packed_end

NUMBERS = tl.constexpr(5)  # of a part: elements wanted, of its sample, the logarithm of that, the rank there, most candidates of use
KEY_BITS = tl.constexpr(31)
BYTES = tl.constexpr(128)


@triton.jit
def _counted(values, residual, rescale, numel, floor, TILE: tl.constexpr):
    """How many elements reach the floor."""
    count = tl.zeros((TILE,), tl.int32)
    for first in range(0, numel, TILE):
        p = p_of_tile(values, residual, first, numel, 1, None, rescale, False, TILE)
        count += ((first + tl.arange(0, TILE) < numel) & (magnitude_bits(p) >= floor)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _write_part(
    values, residual, rescale, out, status, indices, numel, wanted, size, log_size, rank, room, SAMPLED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write one part's payload, and its length."""
    if SAMPLED:
        floor, _equal = key_of_rank(values, residual, rescale, size, numel, log_size, rank, SAMPLE, KEY_BITS, TILE)
        floor = tl.maximum(floor, 1)
        whole = _counted(values, residual, rescale, numel, floor.to(tl.int32), TILE) > room
        limit, least, rest = floor - 1, floor, tl.zeros((), tl.int64)
        if whole:
            key, equal = key_of_rank(values, residual, rescale, numel, numel, log_size, wanted, PART, KEY_BITS, TILE)
            limit, least, rest = key, key, equal
    else:
        limit, rest = key_of_rank(values, residual, rescale, numel, numel, log_size, wanted, PART, KEY_BITS, TILE)
        least = limit
    sent = out.to(tl.pointer_type(tl.float32), bitcast=True) + 1
    count = tl.zeros((), tl.int32)
    for first in range(0, numel, TILE):
        at = first + tl.arange(0, TILE)
        p = p_of_tile(values, residual, first, numel, 1, None, rescale, False, TILE)
        key = magnitude_bits(p)
        tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(key, 0) >= INFINITY_BITS)
        chosen, others = chosen_of(key.to(tl.int64), at < numel, limit, least, rest)
        selected = chosen.to(tl.int32)
        to = count + tl.cumsum(selected, 0) - 1
        tl.store(indices + to, at.to(tl.int32), mask=chosen)
        tl.store(sent + to, p, mask=chosen)
        count += tl.sum(selected, 0)
        rest -= others.to(tl.int64)
    tl.debug_barrier()
    end = packed_end(indices, count)
    dense = (2 * count > numel) & (end + 4 * count >= 4 * numel)
    stored = tl.where(dense, ALL, count.to(tl.int64))
    tl.store(status + 1, tl.where(dense, 4 + 4 * numel.to(tl.int64), 4 + 4 * count + end))
    byte = tl.arange(0, 4)
    tl.store(out + byte, (stored >> (8 * byte).to(tl.int64)).to(tl.uint8))
    if dense:
        for first in range(0, numel, TILE):
            at = first + tl.arange(0, TILE)
            p = p_of_tile(values, residual, first, numel, 1, None, rescale, False, TILE)
            tl.store(sent + at, p, mask=at < numel)
    else:
        pack_indices(indices, count, out + 4 + 4 * count, BYTES)


@triton.jit
def topk_many_kernel(
    table, numbers, at, rescale, DTYPE: tl.constexpr, FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr, SAMPLED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Encode many parts of elements of DTYPE: see `many`. The indices that are chosen lie in a part's scratch until they are packed."""
    row, numel, out, status, scratch = whole_part(table)
    numel = numel.to(tl.int32)
    factor = read_rescale(at, rescale)
    mine = numbers + tl.program_id(0) * NUMBERS
    wanted, size = tl.load(mine), tl.load(mine + 1).to(tl.int32)
    log_size, rank, room = tl.load(mine + 2), tl.load(mine + 3), tl.load(mine + 4)
    indices = scratch.to(tl.pointer_type(tl.int32), bitcast=True)
    source = address(row, 0, DTYPE, ALIGNED)
    if FEEDBACK:
        residual = address(row, 1, tl.float32, ALIGNED)
        _write_part(source, residual, factor, out, status, indices, numel, wanted, size, log_size, rank, room, SAMPLED, TILE)
    else:
        _write_part(source, None, factor, out, status, indices, numel, wanted, size, log_size, rank, room, SAMPLED, TILE)
