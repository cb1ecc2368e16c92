"""Kernels over floats that travel element by element: rounding, sums, means. One pass, a tile of consecutive elements a program.

Tiles within the part are read and written without a mask: Triton loads 16 bytes at once only where it knows that a mask does not cut them.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.decoded_kernels import ADDS
from psgc.cuda.common.elements import load_bits, load_f32, mean, report_bytes, store_f32
from psgc.cuda.common.many_kernels import address, part_of, reading_of


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
def _copy_tile(source, target, rest, TILE: tl.constexpr, WHOLE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    mask = offsets < rest
    bits = load_bits(source, offsets, mask, WHOLE)
    if WHOLE:
        tl.store(target + offsets, bits)
    else:
        tl.store(target + offsets, bits, mask=mask)


@triton.jit
def _sum_tile(sources, target, rest, COUNT: tl.constexpr, COPIES: tl.constexpr, TILE: tl.constexpr):
    """target <- the sum of the sources, of a tile wherever in its part it is. COPIES: the one source's bits as they are, those of a NaN, too."""
    if COPIES:
        if rest >= TILE:
            _copy_tile(sources[0], target, rest, TILE, True)
        else:
            _copy_tile(sources[0], target, rest, TILE, False)
    elif rest >= TILE:
        _mean_tile(sources, target, rest, 1.0, COUNT, False, TILE, True)
    else:
        _mean_tile(sources, target, rest, 1.0, COUNT, False, TILE, False)


@triton.jit
def cast_many_kernel(
    table, owners, DTYPE: tl.constexpr, ITEMS: tl.constexpr, COPIES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Round many parts of elements of DTYPE to ITEMS: see `many`."""
    _part, row, numel, start, out, _status = part_of(table, owners, TILE)
    target = out.to(tl.pointer_type(ITEMS), bitcast=True) + start
    _sum_tile((address(row, 0, DTYPE, ALIGNED) + start,), target, numel - start, 1, COPIES, TILE)


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
    _fold_either(_moved(sources, start, COUNT), acc + start, numel - start, COUNT, TILE)


@triton.jit
def _fold_either(sources, acc, rest, COUNT: tl.constexpr, TILE: tl.constexpr):
    if rest >= TILE:
        _fold_tile(sources, acc, rest, COUNT, TILE, True)
    else:
        _fold_tile(sources, acc, rest, COUNT, TILE, False)


@triton.jit
def read_many_kernel(
    table, owners, TARGET: tl.constexpr, GRAD: tl.constexpr, USE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, ITEMS: tl.constexpr,
    COPIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """DECODES: the sum of COUNT payloads of ITEMS becomes the target. ADDS: it is added to it. For many parts: see `many`."""
    row, numel, start, payloads = reading_of(table, owners, TILE, COUNT)
    target, sources = address(row, 0, TARGET, ALIGNED) + start, ()
    for k in tl.static_range(COUNT):
        sources = sources + (payloads[k].to(tl.pointer_type(ITEMS), bitcast=True) + start,)
    if USE == ADDS:
        _fold_either(sources, target, numel - start, COUNT, TILE)
    else:
        _sum_tile(sources, target, numel - start, COUNT, COPIES, TILE)
