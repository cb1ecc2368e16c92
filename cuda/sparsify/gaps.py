"""Ascending indices as bit-packed gaps, on the GPU: the bytes of `psgc.codecs.sparsify.gaps`, written and read by groups of 128.

Owns these bytes. How many indices there are is known on the device alone, so grids are as large as the most there can be, and programs beyond
the last group end at once. ``state`` is that of `selection`: CHOSEN is the number of indices, DENSE says that a payload holds every element
instead, END is where the packed indices end. Packed indices begin at byte ``head + each * count`` of the payload.
"""

from __future__ import annotations

from typing import Final

import torch

from psgc.cuda.common.launching import launch
from psgc.cuda.common.scratch import Plan
from psgc.cuda.sparsify.gap_kernels import bases_kernel, offsets_kernel, pack_kernel, unpack_kernel, widths_kernel
from psgc.cuda.sparsify.selection import STATES, Arrays

GAPS: Final = 128
ROWS: Final = 8  # groups whose widths a program finds
# What ``offsets_kernel`` does besides.
SCAN: Final = 0  # nothing
OPEN: Final = 1  # before it: reads the count that the payload begins with
CLOSE: Final = 2  # after it: writes the count, or the mark that every element follows, and the payload's length
CHUNK: Final = 1024  # groups that a scan looks at at once


def packing_plan(most: int) -> Plan:
    """What ``packed`` needs for up to ``most`` indices, besides ``state``."""
    groups = -(-most // GAPS)
    return {"indices": (torch.int32, most), "widths": (torch.uint8, groups), "offsets": (torch.int64, groups)}


def pack(arrays: Arrays, payload: torch.Tensor, status: torch.Tensor, head: int, each: int, numel: int, mode: int) -> None:
    """Write ``state[CHOSEN]`` of the indices to the payload. mode: SCAN or CLOSE. numel: elements of the part, for CLOSE."""
    indices, widths, offsets, state = (arrays[name] for name in ("indices", "widths", "offsets", "state"))
    groups = offsets.numel()
    launch(widths_kernel, -(-groups // ROWS), indices, widths, state, ROWS=ROWS)
    launch(offsets_kernel, 1, payload, widths, offsets, state, status, head, each, numel, MODE=mode, CHUNK=CHUNK)
    launch(pack_kernel, groups, indices, widths, offsets, payload, state, head, each, BYTES=GAPS, num_warps=1)


def unpacking_plan(most: int) -> Plan:
    """What ``unpack`` needs for up to ``most`` indices. ``places[i] + totals[i // GAPS]`` is then index i."""
    groups = -(-most // GAPS)
    return {
        "state": (torch.int64, STATES), "offsets": (torch.int64, groups), "places": (torch.int32, most), "totals": (torch.int64, groups),
    }  # fmt: skip


def unpack(arrays: Arrays, payload: torch.Tensor, head: int, each: int, mode: int) -> None:
    """Read the payload's indices. mode: OPEN, or SCAN where ``state`` says how many there are."""
    places, totals, offsets, state = (arrays[name] for name in ("places", "totals", "offsets", "state"))
    groups = offsets.numel()
    launch(offsets_kernel, 1, payload, None, offsets, state, None, head, each, 0, MODE=mode, CHUNK=CHUNK)
    launch(unpack_kernel, groups, payload, offsets, state, places, totals, head, each, num_warps=1)
    launch(bases_kernel, 1, totals, state, CHUNK=CHUNK)
