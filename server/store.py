"""A server's memory that survives it: kept results and residuals in sealed memfds, double-buffered, the commit word written last.

One segment a layout. For each key: a record of 64 bytes, two result buffers, and two residual buffers where the pull codec keeps one.
A step writes the buffers that the record does not name, then the record; so at any instant the record names whole ones.

    record: u64 sequence before, u64 step, u32 flags, u32 contributors, i64 slot, u64 payload bytes, i64 residual slot, u64 sequence after
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import PayloadError
from psgc.server.step import Commit, Result
from psgc.transport.memfd import Segment, aligned

RECORD: Final = struct.Struct("<QQIIqQqQ")
RECORD_BYTES: Final = 64
assert RECORD.size <= RECORD_BYTES
Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What a key needs: bytes of one result payload, and elements of its residual (0: none)."""

    key: int
    result_bytes: int
    residual_numel: int


class KeyStore:
    """One key's buffers over shared memory."""

    def __init__(self, segment: Segment, segment_id: int, shape: KeyShape, start: int) -> None:
        self.shape = shape
        self.segment_id = segment_id
        self._record = segment.view(start, RECORD_BYTES)
        self.offsets = (start + RECORD_BYTES, start + RECORD_BYTES + aligned(shape.result_bytes))
        self._results = tuple(segment.view(offset, shape.result_bytes) for offset in self.offsets)
        first = self.offsets[1] + aligned(shape.result_bytes)
        size = 4 * shape.residual_numel
        self._residuals = tuple(segment.view(o, size).view(np.float32) for o in (first, first + aligned(size))) if size else ()
        self._sequence = 0
        self._lengths = [0, 0]  # payload bytes in each result buffer
        self.residual_slot = 0
        self._lent_step = -1

    @staticmethod
    def bytes_needed(shape: KeyShape) -> int:
        return RECORD_BYTES + 2 * aligned(shape.result_bytes) + 2 * aligned(4 * shape.residual_numel)

    def result(self, slot: int) -> Bytes:
        """Result buffer 0 or 1, as long as the payload bound."""
        view: Bytes = self._results[slot]
        return view

    def recorded_bytes(self, slot: int) -> int:
        """Length of the payload committed in result buffer ``slot``."""
        return self._lengths[slot]

    def residuals(self) -> tuple[F32, F32] | None:
        """The committed residual and the buffer that the step under way writes its new one to; None without feedback."""
        if not self._residuals:
            return None
        return self._residuals[self.residual_slot], self._residuals[1 - self.residual_slot]

    def restore(self, first: int, payload: Any) -> None:
        """Set elements of the residual, from ``first`` on, before the first step. Raises PayloadError for what is not finite."""
        values = np.frombuffer(payload, np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("a residual to be restored holds NaN or infinity")
        self._residuals[self.residual_slot][first : first + values.size] = values

    def lent(self, step: int) -> tuple[F32, bool]:
        """Scratch for the residual after ``step`` with a result added back: the buffer that the next step writes. And whether the
        scratch holds that already."""
        ready, self._lent_step = self._lent_step == step, step
        return self._residuals[1 - self.residual_slot], ready

    def commit(self, commit: Commit) -> None:
        """Make the outcome of a step the key's state."""
        if commit.residual:
            self.residual_slot = 1 - self.residual_slot
        result = commit.result
        if result.slot >= 0:
            self._lengths[result.slot] = result.payload_bytes
        self._sequence += 1
        body = RECORD.pack(
            self._sequence, result.step, int(result.flags), result.contributors, result.slot, result.payload_bytes, self.residual_slot, self._sequence
        )  # fmt: skip
        self._record[:8] = np.frombuffer(body[:8], np.uint8)  # sequences differ while the record is being written
        self._record[8 : RECORD.size - 8] = np.frombuffer(body[8:-8], np.uint8)
        self._record[RECORD.size - 8 : RECORD.size] = np.frombuffer(body[-8:], np.uint8)

    def recorded(self) -> tuple[Result, int] | None:
        """What the record says: the last result and the residual's buffer; None if it was torn or nothing was committed."""
        return read_record(self._record)


def read_record(record: Bytes) -> tuple[Result, int] | None:
    """Decode a commit record; None if nothing was committed yet or the writer died while writing it."""
    before, step, flags, contributors, slot, payload_bytes, residual_slot, after = RECORD.unpack(record[: RECORD.size].tobytes())
    if before != after or before == 0:
        return None
    return Result(step, flags, contributors, slot, payload_bytes), residual_slot


class Store:
    """All keys of this server."""

    def __init__(self) -> None:
        self.keys: dict[int, KeyStore] = {}
        self.segments: dict[int, Segment] = {}

    def add_layout(self, layout_id: int, shapes: list[KeyShape]) -> Segment | None:
        """Make the segment for a layout's keys on this server; None if it has none here."""
        if layout_id in self.segments or not shapes:
            return None
        segment = Segment.create(f"psgc-store-{layout_id}", sum(map(KeyStore.bytes_needed, shapes)))
        self.segments[layout_id] = segment
        start = 0
        for shape in shapes:
            self.keys[shape.key] = KeyStore(segment, layout_id, shape, start)
            start += KeyStore.bytes_needed(shape)
        return segment

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()


__all__ = ["KeyShape", "KeyStore", "Store", "read_record"]
