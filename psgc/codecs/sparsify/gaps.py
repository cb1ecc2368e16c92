"""Sorted indices as bit-packed gaps: how sparse payloads say where their values belong.

| offset          | type                       | meaning                                                                     |
|-----------------|----------------------------|-----------------------------------------------------------------------------|
| 0               | u8 [ceil(count / 128)]     | width of each group of 128 gaps, 0..32 bits                                 |
| groups          | bytes                      | each group's gaps at its width, least significant bit first, then zero bits |
|                 |                            | up to the next byte                                                         |

Owns these bytes; knows nothing of the values. A gap is index - previous index - 1, the first one counted from -1; a group's width is
that of its largest gap. Source: Lemire and Boytsov 2015, "Decoding billions of integers per second through vectorization".
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import Bytes
from psgc.codecs.common.bits import leading_zeros, view_u32, view_u64
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, OUT_BYTES, helper, kernel

IN_U32: Final = types.Array(types.uint32, 1, "C", readonly=True)
OUT_U32: Final = types.Array(types.uint32, 1, "C")
GAPS: Final = 128  # a group; 128 gaps at any width end at a byte
MAX_WIDTH: Final = 32

Indices = NDArray[np.int64]


def reference_packed(indices: Indices) -> bytes:
    """The layout above for sorted, distinct indices."""
    gaps = np.diff(indices, prepend=-1) - 1
    groups = [gaps[start : start + GAPS] for start in range(0, gaps.size, GAPS)]
    widths = [int(group.max()).bit_length() for group in groups]
    packed = [
        np.packbits((group[:, None] >> np.arange(width)) & 1 > 0, bitorder="little").tobytes()
        for group, width in zip(groups, widths, strict=True)
    ]
    return bytes(widths) + b"".join(packed)


def reference_unpacked(packed: bytes, count: int) -> Indices:
    """The indices that were packed."""
    groups, gaps = -(-count // GAPS), [np.empty(0, np.int64)]
    place = groups
    for group, width in enumerate(packed[:groups]):
        size = min(GAPS, count - group * GAPS)
        end = place + -(-size * width // 8)
        bits = np.unpackbits(np.frombuffer(packed[place:end], np.uint8), count=size * width, bitorder="little")
        gaps.append(bits.reshape(size, width).astype(np.int64) @ (1 << np.arange(width, dtype=np.int64)))
        place = end
    return np.asarray(np.cumsum(np.concatenate(gaps) + 1) - 1, np.int64)


def packed_bound(count: int, numel: int) -> int:
    """Most bytes that ``count`` indices below ``numel`` take.

    The gaps add up to at most numel - count; a group costs 16 bytes for every bit of its width, and widths, being logarithms, add up
    to most when the groups' largest gaps are alike.
    """
    groups = -(-count // GAPS)
    widths = groups * (math.log2((numel - count) / groups + 1) + 1)
    return groups + min(16 * groups * (numel - count).bit_length(), math.ceil(16 * widths) + 1)


def packed_bytes(indices: NDArray[Any]) -> int:
    """Bytes that sorted, distinct indices take."""
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    tops = np.maximum.reduceat(gaps, np.arange(0, gaps.size, GAPS))
    return _bytes_of(np.frexp(tops.astype(np.float64))[1], gaps.size)  # exponents are bit lengths


def packed_length(packed: Bytes, count: int) -> int:
    """Where the bytes of ``count`` indices end, by their widths; beyond ``packed`` if it is cut off."""
    widths = packed[: -(-count // GAPS)]
    return _bytes_of(widths.astype(np.int64), count) if widths.size * GAPS >= count else packed.size + 1


def _bytes_of(widths: NDArray[Any], count: int) -> int:
    sizes = np.minimum(GAPS, count - GAPS * np.arange(widths.size))
    return int(widths.size + (-(-sizes * widths // 8)).sum())


@helper
def _pack_group(indices: Any, previous: Any, width: Any, out: Any, place: Any) -> Any:
    held, bits = np.uint64(0), np.int64(0)
    for i in range(indices.size):
        held |= np.uint64(np.int64(indices[i]) - previous - 1) << np.uint64(bits)
        previous = np.int64(indices[i])
        bits += width
        if bits >= 32:
            view_u32(out, place, 1)[0] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(32)
            bits -= 32
            place += 4
    while bits > 0:
        out[place] = np.uint8(held & np.uint64(0xFF))
        held >>= np.uint64(8)
        bits -= 8
        place += 1
    return place


@helper
def unpack_group(packed: Any, place: Any, width: Any, previous: Any, indices: Any) -> Any:
    """indices <- one group's, from bytes that begin at ``place``; returns where the next group begins."""
    end = place + (indices.size * width + 7) // 8
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    if end + 8 <= packed.size:  # whole words can be read
        for i in range(indices.size):
            bit = i * width
            word = view_u64(packed, place + (bit >> 3), 1)[0]
            previous += np.int64((word >> np.uint64(bit & 7)) & mask) + 1
            indices[i] = previous
        return end
    held, bits = np.uint64(0), np.int64(0)
    for i in range(indices.size):
        while bits < width:
            held |= np.uint64(packed[place]) << np.uint64(bits)
            place += 1
            bits += 8
        previous += np.int64(held & mask) + 1
        indices[i] = previous
        held >>= np.uint64(width)
        bits -= width
    return end


@kernel(I64(IN_U32, OUT_BYTES))
def pack(indices: Any, out: Any) -> Any:
    """Write sorted uint32 indices to ``out``; returns the bytes written."""
    groups = -(-indices.size // GAPS)
    place, previous = groups, np.int64(-1)
    for group in range(groups):
        chosen = indices[group * GAPS : (group + 1) * GAPS]
        union, before = np.uint32(0), previous
        for i in range(chosen.size):
            union |= np.uint32(np.int64(chosen[i]) - before - 1)
            before = np.int64(chosen[i])
        width = np.int64(32) - np.int64(leading_zeros(union))
        out[group] = np.uint8(width)
        place = _pack_group(chosen, previous, width, out, place)
        previous = before
    return place


@kernel(types.void(IN_BYTES, OUT_U32))
def unpack(packed: Any, indices: Any) -> None:
    """indices <- as many as it has room for."""
    place, previous = -(-indices.size // GAPS), np.int64(-1)
    for group in range(-(-indices.size // GAPS)):
        chosen = indices[group * GAPS : (group + 1) * GAPS]
        place = unpack_group(packed, place, np.int64(packed[group]), previous, chosen)
        previous = np.int64(chosen[chosen.size - 1])


@kernel(BOOL(IN_BYTES, I64, I64))
def well_formed(packed: Any, count: Any, numel: Any) -> Any:
    """Whether ``packed`` is exactly the bytes of ``count`` indices below numel; reads within it only."""
    groups, scratch = -(-count // GAPS), np.empty(GAPS, np.int64)
    if packed.size < groups:
        return False
    place, previous = groups, np.int64(-1)
    for group in range(groups):
        width, size = np.int64(packed[group]), min(GAPS, count - group * GAPS)
        if width > MAX_WIDTH or place + -(-size * width // 8) > packed.size:
            return False
        place = unpack_group(packed, place, width, previous, scratch[:size])
        previous = scratch[size - 1]
        if previous >= numel:
            return False
    return place == packed.size
