"""`blocktopk` of many small parts, a program for each."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import read_rescale
from psgc.cuda.common.many_kernels import address, whole_part
from psgc.cuda.sparsify.block_kernels import INFINITY_BITS, keys_of, squares_of
from psgc.cuda.sparsify.loads import p_at, store_bytes
from psgc.cuda.sparsify.many.choosing_kernels import KEYS, chosen_of, key_of_rank, pack_indices, packed_end

NUMBERS = tl.constexpr(2)  # of a part: blocks that are sent, blocks that there are
KEY_BITS = tl.constexpr(63)
BYTES = tl.constexpr(128)


@triton.jit
def _write_part(
    values, residual, rescale, out, status, scratch, numel, count, blocks, block, run, runs,
    RUNS: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one part's payload, and its length. scratch: the blocks' keys, the squares of their runs, then the numbers of those that are sent."""
    keys = scratch.to(tl.pointer_type(tl.int64), bitcast=True)
    squares = scratch.to(tl.pointer_type(tl.float64), bitcast=True) + blocks
    indices = (scratch + 8 * blocks + 8 * blocks * runs).to(tl.pointer_type(tl.int32), bitcast=True)
    for first in range(0, blocks * runs, UNITS):
        unit = first + tl.arange(0, UNITS)
        found = squares_of(values, residual, 1, None, rescale, None, unit, numel, block, run, runs, False, UNITS)
        tl.store(squares + unit, found, mask=unit < blocks * runs)
    tl.debug_barrier()
    for first in range(0, blocks, ROWS):
        number = first + tl.arange(0, ROWS)
        key = keys_of(squares, number, runs, blocks, RUNS, ROWS, STEPS)
        tl.store(keys + number, key, mask=number < blocks)
        tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(key, 0) >= INFINITY_BITS)
    tl.debug_barrier()
    limit, rest = key_of_rank(keys, None, rescale, blocks, blocks, blocks, count, KEYS, KEY_BITS, TILE)
    target = tl.zeros((), tl.int32)
    for first in range(0, blocks, TILE):
        at = first + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < blocks, other=0)
        chosen, others = chosen_of(key, at < blocks, limit, limit, rest)
        selected = chosen.to(tl.int32)
        tl.store(indices + target + tl.cumsum(selected, 0) - 1, at, mask=chosen)
        target += tl.sum(selected, 0)
        rest -= others.to(tl.int64)
    tl.debug_barrier()
    pack_indices(indices, count, out, BYTES)
    end = packed_end(indices, count)
    for first in range(0, count * block, TILE):
        to = first + tl.arange(0, TILE)
        at = tl.load(indices + to // block, mask=to < count * block, other=0) * block + to % block
        live = (to < count * block) & (at < numel)
        p = p_at(values, residual, at, live, 1, None, rescale, False)
        store_bytes(out + end, to, live, p)
    missing = tl.where(tl.load(indices + count - 1) == blocks - 1, blocks * block - numel, 0)
    tl.store(status + 1, end + 4 * (count * block - missing))


@triton.jit(do_not_specialize=["block", "run", "runs"])
def blocktopk_many_kernel(
    table, numbers, at, rescale, block, run, runs, DTYPE: tl.constexpr, FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr, RUNS: tl.constexpr,
    STEPS: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode many parts of elements of DTYPE: see `many`."""
    row, numel, out, status, scratch = whole_part(table)
    numel = numel.to(tl.int32)
    factor = read_rescale(at, rescale)
    mine = numbers + tl.program_id(0) * NUMBERS
    count, blocks = tl.load(mine).to(tl.int32), tl.load(mine + 1).to(tl.int32)
    source = address(row, 0, DTYPE, ALIGNED)
    if FEEDBACK:
        residual = address(row, 1, tl.float32, ALIGNED)
        _write_part(
            source, residual, factor, out, status, scratch, numel, count, blocks, block, run, runs, RUNS, STEPS, UNITS, ROWS, TILE
        )  # fmt: skip
    else:
        _write_part(source, None, factor, out, status, scratch, numel, count, blocks, block, run, runs, RUNS, STEPS, UNITS, ROWS, TILE)
