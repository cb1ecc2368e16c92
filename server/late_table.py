"""The table of a key's late contributions beside each of its two commit records: bytes, and back. It is written before its record's last word is.

table: u32 whether there is an earlier result, u32 its flags, u32 its contributors, i32 its buffer; then for each contribution that the last step was closed
       without: i32 rank (-1: none), u32 state, u64 payload bytes. Its payload lies in the slot of the same number.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psgc.server.late import KeptLate, Owed
from psgc.server.records import NO_SLOT, Result

Bytes = NDArray[np.uint8]
EARLIER: Final = struct.Struct("<IIIi")
ENTRY: Final = struct.Struct("<iIQ")
NOBODY: Final = -1
CAME, SKIPPED, NONFINITE = 1, 2, 4  # bits of an entry's state


def table_bytes(late: int) -> int:
    """Of a table of so many contributions."""
    return EARLIER.size + late * ENTRY.size


def write_table(table: Bytes, kept: KeptLate) -> None:
    earlier = kept.earlier
    written = EARLIER.pack(0, 0, 0, NO_SLOT) if earlier is None else EARLIER.pack(1, earlier.flags, earlier.contributors, earlier.slot)
    for owed in kept.owed:
        state = CAME * owed.came | SKIPPED * owed.skipped | NONFINITE * owed.nonfinite
        written += ENTRY.pack(owed.rank, state, owed.payload_bytes)
    end = ENTRY.pack(NOBODY, 0, 0) if len(written) + ENTRY.size <= len(table) else b""
    table[: len(written) + len(end)] = np.frombuffer(written + end, np.uint8)


def read_table(table: Bytes, result: Result, lengths: tuple[int, int]) -> KeptLate:
    """result: of the record beside it; lengths: of the payloads in the two result buffers."""
    there, flags, contributors, slot = EARLIER.unpack_from(table.data)
    earlier = Result(result.step - 1, flags, contributors, slot, 0 if slot == NO_SLOT else lengths[slot]) if there else None
    owed = []
    for at in range(EARLIER.size, len(table) - ENTRY.size + 1, ENTRY.size):
        rank, state, nbytes = ENTRY.unpack_from(table.data, at)
        if rank == NOBODY:
            break
        owed.append(Owed(rank, bool(state & CAME), bool(state & SKIPPED), bool(state & NONFINITE), nbytes))
    return KeptLate(tuple(owed), earlier)
