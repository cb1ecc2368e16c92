"""A server's memory, which survives its process: results and residuals in sealed memfds, double-buffered, with a commit record that is
written last.

All keys lie in one arena. Each has a block there: a label of 64 bytes, a record of 64 bytes, two result buffers, and two residual buffers
if the pull codec keeps a residual. A segment is a sequence of blocks that ends at the first one without a label, so the memory describes
itself. A step writes the buffers that the record does not name, then the record; so the record names complete buffers at any time. A key that was
removed keeps its label; its record is zeros.

    label:  u64 key, u64 bytes of a result buffer, u64 elements of a residual, u64 LABELLED (written last)
    record: u64 sequence before, u64 step, u32 flags, u32 contributors, i64 slot, u64 payload bytes, i64 residual slot, u64 sequence after
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair
from psgc.errors import PayloadError
from psgc.layout.update_rule import UpdateRule
from psgc.server.step import Commit, Result
from psgc.server.weights.versions import Versions
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place, Segment, aligned

LABEL: Final = struct.Struct("<QQQQ")
LABELLED: Final = 0x79656B2063677370  # "psgc key"
LABEL_BYTES: Final = 64
RECORD: Final = struct.Struct("<QQIIqQqQ")
RECORD_BYTES: Final = 64
assert LABEL.size <= LABEL_BYTES
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

    def __init__(self, shape: KeyShape, block: Place) -> None:
        self.shape = shape
        self._block = block
        record = LABEL_BYTES
        first = record + RECORD_BYTES
        second = first + aligned(shape.result_bytes)
        residual = second + aligned(shape.result_bytes)
        self._record = block.bytes[record : record + RECORD_BYTES]
        self._results = tuple(block.part(start, shape.result_bytes) for start in (first, second))
        size = 4 * shape.residual_numel
        starts = (residual, residual + aligned(size)) if size else ()
        self._residuals = tuple(block.bytes[start : start + size].view(np.float32) for start in starts)
        block.bytes[: LABEL.size] = np.frombuffer(LABEL.pack(shape.key, shape.result_bytes, shape.residual_numel, 0), np.uint8)
        block.bytes[LABEL.size - 8 : LABEL.size] = np.frombuffer(LABELLED.to_bytes(8, "little"), np.uint8)
        self._sequence = 0
        self._lengths = [0, 0]  # payload bytes in each result buffer
        self.residual_slot = 0
        self._lent_step = -1

    @staticmethod
    def bytes_needed(shape: KeyShape) -> int:
        return LABEL_BYTES + RECORD_BYTES + 2 * aligned(shape.result_bytes) + 2 * aligned(4 * shape.residual_numel)

    def populate(self) -> None:
        """Make its pages, from any thread and without the GIL. Raises OSError where there is no memory."""
        self._block.populate()

    def release(self) -> None:
        """Nobody needs the key any more: its record says that nothing was committed, and its buffers' memory is given back."""
        self._record[:] = 0
        self._block.part(LABEL_BYTES + RECORD_BYTES, self._block.bytes.nbytes - LABEL_BYTES - RECORD_BYTES).release()

    def place(self, slot: int) -> Place:
        """Where result buffer 0 or 1 lies, as long as the payload bound."""
        return self._results[slot]

    def result(self, slot: int) -> Bytes:
        """Result buffer 0 or 1, as long as the payload bound."""
        return self._results[slot].bytes

    def recorded_bytes(self, slot: int) -> int:
        """Length of the payload committed in result buffer ``slot``."""
        return self._lengths[slot]

    def residuals(self) -> tuple[F32, F32] | None:
        """The committed residual, and the buffer for the new one that the present step writes; None without feedback."""
        if not self._residuals:
            return None
        return self._residuals[self.residual_slot], self._residuals[1 - self.residual_slot]

    def restore(self, first: int, payload: Any) -> None:
        """Set elements of the residual, from ``first`` on, before the first step. Raises PayloadError for NaN and infinity."""
        values = np.frombuffer(payload, np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("a residual to be restored holds NaN or infinity")
        self._residuals[self.residual_slot][first : first + values.size] = values

    def lent(self, step: int) -> tuple[F32, bool]:
        """Scratch memory for the residual after ``step`` with a result added back (it is the buffer that the next step writes), and whether it
        already holds that residual."""
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
        record = self._record.data
        record[:8] = body[:8]  # sequences differ while the record is being written
        record[8 : RECORD.size - 8] = body[8:-8]
        record[RECORD.size - 8 : RECORD.size] = body[-8:]

    def recorded(self) -> tuple[Result, int] | None:
        """The record's contents: the last result and the residual's buffer. None if it is torn, or if nothing was committed."""
        return read_record(self._record)


def read_record(record: Bytes) -> tuple[Result, int] | None:
    """Decode a commit record; None if nothing was committed yet or the writer died while writing it."""
    before, step, flags, contributors, slot, payload_bytes, residual_slot, after = RECORD.unpack(record[: RECORD.size].tobytes())
    if before != after or before == 0:
        return None
    return Result(step, flags, contributors, slot, payload_bytes), residual_slot


def find_blocks(segment: Bytes) -> Iterator[tuple[KeyShape, Bytes]]:
    """The shape and the block of every key in a segment's memory, whichever process has written it."""
    start = 0
    while start + LABEL_BYTES <= len(segment):
        key, result_bytes, residual_numel, labelled = LABEL.unpack(segment[start : start + LABEL.size].tobytes())
        shape = KeyShape(key, result_bytes, residual_numel)
        end = start + KeyStore.bytes_needed(shape)
        if labelled != LABELLED or end > len(segment):
            return
        yield shape, segment[start:end]
        start = end


class Store:
    """All keys of this server."""

    def __init__(self) -> None:
        self.keys: dict[int, KeyStore] = {}
        self.weights: dict[int, Versions] = {}
        self._arena = Arena("psgc-store")
        self._weights_arena = Arena("psgc-weights")

    def add_keys(self, shapes: list[KeyShape]) -> list[tuple[int, Segment]]:
        """Make room for these keys. Returns the segments that this created, with their numbers. Keys that exist already stay as they are."""
        segments = self._arena.segments
        before = len(segments)
        for shape in shapes:
            if shape.key not in self.keys:
                self.keys[shape.key] = KeyStore(shape, self._arena.cut(KeyStore.bytes_needed(shape)))
        return [(number, segments[number]) for number in range(before, len(segments))]

    def remove_keys(self, keys: Iterable[int]) -> None:
        """Give back the memory of keys that nobody needs any more."""
        for key in keys:
            self.keys.pop(key).release()

    def add_weights(self, key: int, rule: UpdateRule, pair: CodecPair, numel: int) -> None:
        """Hold weights. Memory for them is made as it is needed. A key that exists already stays as it is."""
        if key not in self.weights:
            self.weights[key] = Versions(rule, pair, numel, self._weights_arena)

    def place(self, key: int, slot: int) -> Place:
        """Where a result, or a version of weights, lies."""
        return self.weights[key].place(slot) if key in self.weights else self.keys[key].place(slot)

    def close(self) -> None:
        self._arena.close()
        self._weights_arena.close()


__all__ = ["KeyShape", "KeyStore", "Store", "find_blocks", "read_record"]
