"""Kernels of `blocktopk`: the blocks' squares, and their elements in payloads.

A block's elements lie in the payload one after the other, from byte ``state[END]`` on; only the part's last block may be shorter, and it is then the
last one sent.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import store_f32
from psgc.cuda.sparsify.gap_kernels import END
from psgc.cuda.sparsify.loads import p_at, store_bytes, stored_f32
from psgc.cuda.sparsify.scatter_kernels import combined

INFINITY_BITS = tl.constexpr(0x7FF0000000000000)  # of float64
MAGNITUDE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
TOGETHER = tl.constexpr(16)  # rows of lanes that are loaded before the first is needed


@triton.jit
def halved_rows(x, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """The sum of each row of ``SIZE`` elements, a power of two, whose halves are added until one is left."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, SIZE >> (step + 1))), 1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def squares_of(
    values, residual, divisor, factor, rescale, kept, unit, numel, block, run, runs, DIVIDES: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """The sum of squares of each unit, float64: a run of up to ``run`` elements, of which a block has ``runs``. kept: None, or becomes p."""
    first = unit // runs * block + unit % runs * run
    end = tl.minimum(tl.minimum(first + run, (unit // runs + 1) * block), numel.to(tl.int64))
    start = tl.min(first, 0)
    size = tl.maximum(end - first, 0).to(tl.int32)
    offset = (first - start).to(tl.int32)[:, None] + tl.arange(0, 8)[None, :]
    old = residual if residual is None else residual + start
    left = kept if kept is None else kept + start
    lanes = tl.zeros((UNITS, 8), tl.float64)
    step: tl.constexpr = 8 if DIVIDES else 8 * TOGETHER  # a division takes registers
    whole = tl.min(size, 0) // step * step
    for row in range(0, whole, step):
        for next_row in tl.static_range(0, step, 8):
            at = offset + (row + next_row)
            p = p_at(values + start, old, at, None, divisor, factor, rescale, DIVIDES, True)
            if left is not None:
                tl.store(left + at, p)
            x = p.to(tl.float64)
            lanes += x * x
    for row in range(whole, tl.max(size, 0), 8):
        at = offset + row
        live = (row + tl.arange(0, 8))[None, :] < size[:, None]
        p = p_at(values + start, old, at, live, divisor, factor, rescale, DIVIDES)
        if left is not None:
            tl.store(left + at, p, mask=live)
        x = p.to(tl.float64)
        lanes += x * x
    return halved_rows(lanes, UNITS, 8, 3)


@triton.jit(do_not_specialize=["numel", "block", "run", "runs", "units", "divisor"])
def squares_kernel(
    values,
    residual,
    divisor,
    factor,
    rescale,
    kept,
    squares,
    keys,
    status,
    numel,
    block,
    run,
    runs,
    units,
    DIVIDES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """squares (float64) <- those of the units; see `squares_of`. keys: None, or, where blocks have one run, theirs; NaN and infinity are then flagged."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    found = squares_of(values, residual, divisor, factor, rescale, kept, unit, numel, block, run, runs, DIVIDES, UNITS)
    if keys is None:
        tl.store(squares + unit, found, mask=unit < units)
    else:
        store_keys(keys, status, unit, found.to(tl.int64, bitcast=True) & MAGNITUDE, units)


@triton.jit
def store_keys(keys, status, number, key, blocks):
    tl.store(keys + number, key, mask=number < blocks)
    tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(key, 0) >= INFINITY_BITS)


@triton.jit
def keys_of(squares, number, runs, blocks, RUNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """Each block's sum of squares, of up to ``RUNS`` runs, as an integer (int64) of the same order; 0 beyond the last block."""
    run = tl.arange(0, RUNS)
    live = (number < blocks)[:, None] & (run < runs)[None, :]
    rows = tl.load(squares + number[:, None] * runs + run[None, :], mask=live, other=0.0)
    return halved_rows(rows, ROWS, RUNS, STEPS).to(tl.int64, bitcast=True) & MAGNITUDE


@triton.jit(do_not_specialize=["runs", "blocks"])
def keys_kernel(squares, keys, status, runs, blocks, RUNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """keys (int64) <- those of the blocks; flag NaN and infinity."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = keys_of(squares, number, runs, blocks, RUNS, ROWS, STEPS)
    store_keys(keys, status, number, key, blocks)


@triton.jit(do_not_specialize=["numel", "block", "tiles", "count", "blocks", "divisor"])
def write_blocks_kernel(
    values, residual, divisor, factor, rescale, indices, payload, state, status, kept, numel, block, tiles, count, blocks,
    DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the chosen blocks' elements, and the payload's length. kept: None, or holds p, which loses them."""
    program = tl.program_id(0).to(tl.int64)
    chosen, first = program // tiles, program % tiles * TILE
    offset = first + tl.arange(0, TILE)
    at = tl.load(indices + chosen).to(tl.int64) * block + offset
    live = (offset < block) & (at < numel)
    p = p_at(values, residual, at, live, divisor, factor, rescale, DIVIDES)
    end = tl.load(state + END)
    store_bytes(payload + end, chosen * block + offset, live, p)
    if kept is not None:
        tl.store(kept + at, p - (p + 0.0), mask=live)
    if program == 0:
        last = tl.load(indices + count - 1)
        missing = tl.where(last == blocks - 1, blocks.to(tl.int64) * block - numel, 0)
        tl.store(status + 1, end + 4 * (count.to(tl.int64) * block - missing))


@triton.jit(do_not_specialize=["numel", "block", "tiles"])
def apply_blocks_kernel(payload, places, bases, state, out, numel, block, tiles, MODE: tl.constexpr, TILE: tl.constexpr):
    """Change the elements of the payload's blocks."""
    program = tl.program_id(0).to(tl.int64)
    chosen, first = program // tiles, program % tiles * TILE
    offset = first + tl.arange(0, TILE)
    at = (tl.load(places + chosen).to(tl.int64) + tl.load(bases + chosen // 128)) * block + offset
    live = (offset < block) & (at < numel)
    value = stored_f32(payload + tl.load(state + END), chosen * block + offset, live)
    store_f32(out, at, combined(out, at, value, live, MODE), live, False)
