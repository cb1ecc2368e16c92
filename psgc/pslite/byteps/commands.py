"""BytePS's commands, keys and parts: the arithmetic of byteps 0.2.5, pure.

A command (``head`` of a message) joins a type of request and a dtype by Cantor's pairing. A tensor's number, in the order of declaration, and a part's number
are a key; the key's hash chooses the server, and the server's range of keys begins it on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from psgc.errors import RemoteProtocolError, UsageError
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.machines import Machines
from psgc.pslite.nodes import key_ranges

PUSH_PULL, ROW_SPARSE, REGISTER = range(3)  # types of request
DTYPES: Final = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")  # by BytePS's numbers
ITEM_BYTES: Final = {"float32": 4, "float64": 8, "float16": 2, "uint8": 1, "int32": 4, "int8": 1, "int64": 8}
PART_BYTES: Final = 4_096_000  # BYTEPS_PARTITION_BYTES's default
PAGE_BYTES: Final = 4096
MAX_TENSORS = MAX_PARTS = 1 << 16


def command(request: int, dtype: str) -> int:
    number = DTYPES.index(dtype)
    return (request + number) * (request + number + 1) // 2 + number


def parse_command(head: int) -> tuple[int, str]:
    """The request type and dtype of a command. Raises RemoteProtocolError for a command that BytePS does not have."""
    if 0 <= head < 1 << 10:
        diagonal = (math.isqrt(8 * head + 1) - 1) // 2
        dtype = head - diagonal * (diagonal + 1) // 2
        request = diagonal - dtype
        if request in (PUSH_PULL, REGISTER) and dtype < len(DTYPES):
            return request, DTYPES[dtype]
    raise RemoteProtocolError(f"command {head}; expected a push, a pull or a compressor's registration of {', '.join(DTYPES)}")


def aligned_bytes(size: int, dtype: str) -> int:
    """Bytes of the buffers that BytePS makes for a part; a k that is a fraction refers to these."""
    unit = 8 * ITEM_BYTES[dtype] ** 2
    return -(-size // unit) * unit


def part_bound(part_bytes: int, local_size: int = 1) -> int:
    """Bytes of each part except the last."""
    unit = local_size * PAGE_BYTES
    return -(-part_bytes // unit) * unit


@dataclass(frozen=True, slots=True)
class PartPlace:
    """One part of a tensor. key: without the server's range; wire_key: with it. start, stop: its bytes."""

    key: int
    server: int
    wire_key: int
    start: int
    stop: int


def parts_of(tensor: int, size: int, bound: int, placement: HashPlacement, machines: Machines) -> list[PartPlace]:
    """The parts of the tensor with this number, of ``size`` bytes. Raises UsageError for more tensors or parts than BytePS has keys for."""
    count = -(-size // bound)
    if not 0 <= tensor < MAX_TENSORS or count > MAX_PARTS:
        raise UsageError(
            f"tensor {tensor} of {size} bytes in parts of {bound}: BytePS has keys for {MAX_TENSORS} tensors of {MAX_PARTS} parts; raise BYTEPS_PARTITION_BYTES"
        )
    ranges = key_ranges(len(machines.servers))
    places = []
    for part in range(count):
        server, key = placement.server(tensor, part, machines), tensor << 16 | part
        places.append(PartPlace(key, server, ranges[server].start + key, part * bound, min((part + 1) * bound, size)))
    return places
