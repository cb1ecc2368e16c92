"""Payloads of single elements and their places: what `topk` and `graddrop` have in common.

| offset        | type                 | meaning                                                       |
|---------------|----------------------|---------------------------------------------------------------|
| 0             | u32                  | count of elements sent                                        |
| 4             | f32 [count]          | the values, by ascending index                                |
| 4 + 4 * count | packed indices       | see `gaps`: widths, then gaps bit-packed in blocks of 128     |

or, where that would not be shorter, all elements; no count can be the marker, as a part has fewer than 2**31 elements:

| offset        | type                 | meaning                                                       |
|---------------|----------------------|---------------------------------------------------------------|
| 0             | u32                  | 0xffffffff                                                    |
| 4             | f32 [numel]          | the values                                                    |

Owns these bytes; which elements are sent is the codec's.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from psgc.codecs.codec import F32, Array, Bytes, Encoded, Stream
from psgc.codecs.gaps import define_packed, define_unpacked, pack, packed_bound, packed_bytes, unpack, well_formed
from psgc.codecs.largest import Chosen, Indices
from psgc.codecs.sparse import Sent, SparseCodec, correct, decoded_values, define_scattered
from psgc.errors import PayloadError

ALL: Final = 0xFFFFFFFF  # the count that says that every element follows
_INFINITY_BITS: Final = 0x7F800000


def define_encode(p: F32, indices: Indices) -> bytes:
    """Payload of the elements of p at some places."""
    sparse = np.uint32(indices.size).tobytes() + p[indices].tobytes() + define_packed(indices)
    dense = np.uint32(ALL).tobytes() + p.tobytes()
    return sparse if len(sparse) < len(dense) else dense


def define_decode(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    count = int(np.frombuffer(payload, np.uint32, 1)[0])
    if count == ALL:
        return define_scattered(np.arange(numel), np.frombuffer(payload, np.float32, numel, 4), numel)
    return define_scattered(define_unpacked(payload[4 + 4 * count :], count), np.frombuffer(payload, np.float32, count, 4), numel)


class ElementsCodec(SparseCodec):
    """A codec that sends single elements. Subclasses say which."""

    @abstractmethod
    def counts(self, numel: int) -> tuple[int, int]:
        """How many elements of a part are sent: at least, at most. Raises CodecError for a part that cannot be sent."""

    @abstractmethod
    def choose(self, values: F32, residual: F32, rescale: float) -> Chosen:
        """The elements of ``values + rescale * residual`` to send; an empty residual is none."""

    @abstractmethod
    def define_indices(self, p: F32) -> Indices:
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

    def read(self, payload: Bytes, numel: int) -> Sent:
        count = int(payload[:4].view(np.uint32)[0])
        if count == ALL:
            return Sent(np.arange(numel, dtype=np.uint32), decoded_values(payload[4:]))
        places = np.empty(count, np.uint32)
        unpack(payload[4 + 4 * count :], places)
        return Sent(places, decoded_values(payload[4 : 4 + 4 * count]))

    def define_payload(self, p: Array, stream: Stream) -> bytes:
        return define_encode(p, self.define_indices(p))

    def define_elements(self, payload: bytes, numel: int) -> Array:
        return define_decode(payload, numel)
