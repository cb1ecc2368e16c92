"""Kernels over floats that travel element by element: rounding, sums, means. One pass, a tile of consecutive elements a program.

Tiles within the part are read and written without a mask: Triton loads 16 bytes at once only where it knows that a mask does not cut them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import load_f32, mean, report_bytes, store_f32
from psgc.cuda.common.many_kernels import address, part_of


@triton.jit
def _sum_at(sources, offsets, mask, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """The left-to-right sum of the sources' elements, float32."""
    total = load_f32(sources[0], offsets, mask, WHOLE)
    for k in tl.static_range(1, COUNT):
        total += load_f32(sources[k], offsets, mask, WHOLE)
    return total


@triton.jit
def _moved(sources, start, COUNT: tl.constexpr):
    moved = ()
    for k in tl.static_range(COUNT):
        moved = moved + (sources[k] + start,)
    return moved


@triton.jit
def _mean_tile(sources, target, rest, divisor, COUNT: tl.constexpr, DIVIDES: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    mask = offsets < rest
    store_f32(target, offsets, mean(_sum_at(sources, offsets, mask, COUNT, WHOLE), divisor, DIVIDES), mask, WHOLE)


@triton.jit(do_not_specialize=["numel", "payload_bytes", "divisor"])
def mean_kernel(sources, target, status, numel, payload_bytes, divisor, COUNT: tl.constexpr, DIVIDES: tl.constexpr, TILE: tl.constexpr):
    """target <- the sum of COUNT sources over the divisor, rounded to its dtype. status: None, or gets the payload's length."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * TILE
    rest = numel - start
    moved = _moved(sources, start, COUNT)
    if rest >= TILE:
        _mean_tile(moved, target + start, rest, divisor, COUNT, DIVIDES, TILE, True)
    else:
        _mean_tile(moved, target + start, rest, divisor, COUNT, DIVIDES, TILE, False)
    if status is not None:
        report_bytes(status, payload_bytes, program)


@triton.jit
def cast_many_kernel(table, owners, DTYPE: tl.constexpr, ITEMS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Round many parts of elements of DTYPE to ITEMS: see `many`."""
    _part, row, numel, start, out, _status = part_of(table, owners, TILE)
    source = (address(row, 0, DTYPE, ALIGNED) + start,)
    target = out.to(tl.pointer_type(ITEMS), bitcast=True) + start
    if start + TILE <= numel:
        _mean_tile(source, target, numel - start, 1.0, 1, False, TILE, True)
    else:
        _mean_tile(source, target, numel - start, 1.0, 1, False, TILE, False)


@triton.jit
def _fold_tile(sources, acc, rest, COUNT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    mask = offsets < rest
    total = load_f32(acc, offsets, mask, WHOLE) + _sum_at(sources, offsets, mask, COUNT, WHOLE)
    store_f32(acc, offsets, total, mask, WHOLE)


@triton.jit(do_not_specialize=["numel"])
def add_kernel(sources, acc, numel, COUNT: tl.constexpr, TILE: tl.constexpr):
    """acc <- acc + the sum of COUNT sources."""
    start = tl.program_id(0).to(tl.int64) * TILE
    rest = numel - start
    moved = _moved(sources, start, COUNT)
    if rest >= TILE:
        _fold_tile(moved, acc + start, rest, COUNT, TILE, True)
    else:
        _fold_tile(moved, acc + start, rest, COUNT, TILE, False)
