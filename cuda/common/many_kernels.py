"""How a program of a launch over many parts finds its part: see `many`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import report_bytes

FIELDS = tl.constexpr(7)


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
    part = tl.load(owners + program)
    row = table + part * FIELDS
    tile = program - tl.load(row + 5)
    status = address(row, 3, tl.int64, False)
    report_bytes(status, tl.load(row + 6), tile)
    return part, row, tl.load(row + 4), tile * TILE, address(row, 2, tl.uint8, True), status
