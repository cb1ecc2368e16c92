"""Payloads of single elements and their places: the payload of `topk`.

| offset        | type                 | meaning                                                       |
|---------------|----------------------|---------------------------------------------------------------|
| 0             | u32                  | count of elements sent                                        |
| 4             | f32 [count]          | the values, by ascending index                                |
| 4 + 4 * count | packed indices       | see `gaps`: widths, then gaps bit-packed in groups of 128     |

or, where that would not be shorter, all elements; no count can be the marker, as a part has fewer than 2**31 elements:

| offset        | type                 | meaning                                                       |
|---------------|----------------------|---------------------------------------------------------------|
| 0             | u32                  | 0xffffffff                                                    |
| 4             | f32 [numel]          | the values                                                    |

Owns these bytes; the codec chooses which elements are sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import borrowed, view_f32, view_u8, view_u32
from psgc.codecs.common.feedback import CHUNK, NO_RESIDUAL, mean_corrected_chunk
from psgc.codecs.common.payloads import MAX_PAYLOADS, eight
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_F32, SCALAR_F32, helper, kernel
from psgc.codecs.sparsify.gaps import (
    GAPS,
    pack,
    packed_bound,
    packed_bytes,
    reference_packed,
    reference_unpacked,
    unpack_group,
    well_formed,
)
from psgc.codecs.sparsify.largest import Chosen, Indices
from psgc.codecs.sparsify.sparse import SLICE, SparseCodec, correct, reference_scattered
from psgc.errors import PayloadError

ALL: Final = 0xFFFFFFFF  # the count that says that every element follows
_INFINITY_BITS: Final = 0x7F800000
_AT, _LOADED, _PLACE, _PREVIOUS = range(4)  # of a cursor: element, elements whose place is known, byte of the next gaps, last place


def reference_encode(p: F32, indices: Indices) -> bytes:
    """Payload of the elements of p at some places."""
    sparse = np.uint32(indices.size).tobytes() + p[indices].tobytes() + reference_packed(indices)
    dense = np.uint32(ALL).tobytes() + p.tobytes()
    return sparse if len(sparse) < len(dense) else dense


def reference_decode(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    count = int(np.frombuffer(payload, np.uint32, 1)[0])
    if count == ALL:
        return reference_scattered(np.arange(numel), np.frombuffer(payload, np.float32, numel, 4), numel)
    return reference_scattered(reference_unpacked(payload[4 + 4 * count :], count), np.frombuffer(payload, np.float32, count, 4), numel)


@helper
def _begin(payload: Any, cursor: Any) -> None:
    cursor[_AT], cursor[_LOADED], cursor[_PLACE], cursor[_PREVIOUS] = 0, 0, -(-np.int64(view_u32(payload, 0, 1)[0]) // GAPS), -1


@helper
def _add(payload: Any, start: Any, out: Any, subtracts: Any, cursor: Any, places: Any) -> None:
    """Add the payload's elements to ``out``, which begins at ``start``, or take them from it. Slices are asked for in turn: cursor (int64
    [4]) and places (int64 [GAPS]) keep where the last one ended, so that the indices are never held all at once."""
    count = np.int64(view_u32(payload, 0, 1)[0])
    if count == ALL:
        everything = view_f32(payload, 4 + 4 * start, out.size)
        for i in range(out.size):
            value = everything[i] + np.float32(0)
            out[i] = out[i] - value if subtracts else out[i] + value
        return
    values, packed = view_f32(payload, 4, count), view_u8(payload, 4 + 4 * count, payload.size - 4 - 4 * count)
    at, loaded, end = cursor[_AT], cursor[_LOADED], start + out.size
    while at < count:
        if at == loaded:
            group = places[: min(GAPS, count - loaded)]
            cursor[_PLACE] = unpack_group(packed, cursor[_PLACE], np.int64(packed[loaded // GAPS]), cursor[_PREVIOUS], group)
            cursor[_PREVIOUS] = group[group.size - 1]
            loaded += group.size
        place = places[at % GAPS]
        if place >= end:
            break
        value = values[at] + np.float32(0)
        out[place - start] = out[place - start] - value if subtracts else out[place - start] + value
        at += 1
    cursor[_AT], cursor[_LOADED] = at, loaded


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, OUT_F32, BOOL))
def _fold(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, acc: Any, fresh: Any) -> None:
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    scratch, cursors, places = np.empty(SLICE, np.float32), np.empty((count, 4), np.int64), np.empty((count, GAPS), np.int64)
    for k in range(count):
        _begin(payloads[k], cursors[k])
    for start in range(0, acc.size, SLICE):
        chunk = acc[start : start + SLICE]
        total = chunk if fresh else scratch[: chunk.size]
        total[:] = np.float32(0)
        for k in range(count):
            _add(payloads[k], start, total, False, cursors[k], places[k])
        if not fresh:
            for i in range(chunk.size):
                chunk[i] += total[i]


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32))
def _mean(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, divisor: Any, residual: Any, rescale: Any, p: Any
) -> None:  # fmt: skip
    """p <- the payloads' sum / divisor + rescale * residual; the sum is never held all at once."""
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    scratch, cursors, places = np.empty(CHUNK, np.float32), np.empty((count, 4), np.int64), np.empty((count, GAPS), np.int64)
    for k in range(count):
        _begin(payloads[k], cursors[k])
    for start in range(0, p.size, CHUNK):
        chunk = p[start : start + CHUNK]
        total = scratch[: chunk.size]
        total[:] = np.float32(0)
        for k in range(count):
            _add(payloads[k], start, total, False, cursors[k], places[k])
        mean_corrected_chunk(total, divisor, residual[start : start + CHUNK], rescale, chunk)


@kernel(types.void(IN_BYTES, IN_F32, OUT_F32, SCALAR_F32))
def _commit(payload: Any, grad: Any, residual: Any, rescale: Any) -> None:
    cursor, places = np.empty(4, np.int64), np.empty(GAPS, np.int64)
    _begin(payload, cursor)
    for start in range(0, grad.size, SLICE):
        g, r = grad[start : start + SLICE], residual[start : start + SLICE]
        for i in range(g.size):
            r[i] = g[i] + rescale * r[i]
        _add(payload, start, r, True, cursor, places)


@kernel(types.void(IN_BYTES, OUT_F32))
def _take(payload: Any, p: Any) -> None:
    cursor = np.empty(4, np.int64)
    _begin(payload, cursor)
    _add(payload, 0, p, True, cursor, np.empty(GAPS, np.int64))


class ElementsCodec(SparseCodec):
    """A codec that sends single elements. Subclasses select them."""

    @abstractmethod
    def counts(self, numel: int) -> tuple[int, int]:
        """How many elements of a part are sent: at least, at most. Raises CodecError for a part that cannot be sent."""

    @abstractmethod
    def choose(self, values: F32, residual: F32, rescale: float) -> Chosen:
        """The elements of ``values + rescale * residual`` to send; an empty residual is none."""

    @abstractmethod
    def reference_indices(self, p: F32) -> Indices:
        """Their places, ascending, in plain NumPy."""

    def payload_bound(self, numel: int) -> int:
        _, most = self.counts(numel)
        return min(4 + 4 * most + packed_bound(most, numel), 4 + 4 * numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        count = int(payload[:4].view(np.uint32)[0]) if payload.size >= 4 else -1
        least, most = self.counts(numel)
        if count == ALL:
            valid = payload.size == 4 + 4 * numel <= self.payload_bound(numel)
        else:
            valid = least <= count <= most and payload.size >= 4 + 4 * count and well_formed(payload[4 + 4 * count :], count, numel)
        if not valid:
            wanted = f"{most}" if least == most else f"{least} to {most}"
            raise PayloadError(
                f"{self.name} payload of {numel} elements: its {payload.size} bytes are not {wanted} values and their indices"
            )  # fmt: skip

    def write(self, values: F32, residual: F32, rescale: float, out: Bytes) -> Encoded:
        chosen, numel = self.choose(values, residual, rescale), values.size
        finite = chosen.top < _INFINITY_BITS
        if 2 * chosen.indices.size > numel and packed_bytes(chosen.indices) + 4 * chosen.indices.size >= 4 * numel:
            out[:4].view(np.uint32)[0] = ALL
            p = np.empty(numel, np.float32)
            correct(values, 1, residual, rescale, p)
            out[4 : 4 + 4 * numel] = p.view(np.uint8)
            return Encoded(4 + 4 * numel, not finite)
        count = chosen.indices.size
        out[:4].view(np.uint32)[0] = count
        out[4 : 4 + 4 * count] = chosen.values.view(np.uint8)
        return Encoded(4 + 4 * count + pack(chosen.indices, out[4 + 4 * count :]), not finite)

    def take(self, payload: Bytes, p: F32) -> None:
        _take(payload, p)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _fold(*eight(payloads), len(payloads), acc, fresh)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(payload, grad, residual, rescale)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded | None:  # fmt: skip
        if not isinstance(push, ElementsCodec):
            return None
        p = np.empty(numel, np.float32) if residual_out is None else residual_out
        _mean(*eight(payloads), len(payloads), divisor, NO_RESIDUAL if residual is None else residual, rescale, p)
        return self.write_and_take(p, residual_out is not None, out)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return reference_encode(p, self.reference_indices(p))

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_decode(payload, numel)
