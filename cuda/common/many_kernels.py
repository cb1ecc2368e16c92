"""How a program of a launch over many parts finds its part: see `many`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.decoded_kernels import COMMITS
from psgc.cuda.common.elements import report_bytes

FIELDS = tl.constexpr(8)
READ_FIELDS = tl.constexpr(5)


@triton.jit
def address(row, field: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer of the table."""
    pointer = tl.load(row + field).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def part_of(table, owners, TILE: tl.constexpr):
    """(this program's part, its row of the table, elements of the part, the tile's first element, out, status); reports the payload's length."""
    program = tl.program_id(0)
    part = tl.load(owners + program).to(tl.int32)
    row = table + part * FIELDS
    tile = program - tl.load(row + 5)
    status = address(row, 3, tl.int64, False)
    report_bytes(status, tl.load(row + 6), tile)
    return part, row, tl.load(row + 4), tile * TILE, address(row, 2, tl.uint8, True), status


@triton.jit
def whole_part(table):
    """Of a launch with one program a part: (the part's row of the table, elements of the part, out, status, scratch)."""
    row = table + tl.program_id(0).to(tl.int64) * FIELDS
    return row, tl.load(row + 4), address(row, 2, tl.uint8, True), address(row, 3, tl.int64, False), address(row, 7, tl.uint8, True)


@triton.jit
def reading_of(table, owners, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Of a launch that uses payloads: (this program's row of the table, elements of its part, the tile's first element, the payloads)."""
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * (READ_FIELDS + COUNT)
    payloads = ()
    for k in tl.static_range(COUNT):
        payloads = payloads + (address(row, READ_FIELDS + k, tl.uint8, True),)
    return row, tl.load(row + 2), (program - tl.load(row + 3)) * TILE, payloads


@triton.jit
def grad_of(row, target, GRAD: tl.constexpr, ALIGNED: tl.constexpr, USE: tl.constexpr):
    """The gradient that a payload was made of; but for commits, which alone read it, the target: Triton 3.6 compiles no helper that returns None."""
    if USE == COMMITS:
        return address(row, 1, GRAD, ALIGNED)
    else:
        return target
