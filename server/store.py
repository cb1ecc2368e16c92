"""A server's memory, which survives its process: results and residuals in sealed memfds, double-buffered, with commit records that are
written last.

All keys lie in one arena. Each has a block there: a label of 64 bytes, two records of 64 bytes, two result buffers, and two residual buffers
if the pull codec keeps a residual. A segment is a sequence of blocks that ends at the first one without a label, so the memory describes
itself, and a process that takes the place of another finds all keys in the segments alone. A step writes the buffers that the newest whole record does not
name, then the older record; so a whole record names complete buffers at any time, wherever the process ended. A key that was removed keeps its label; its
record says so.

    label:  u64 key, u64 bytes of a result buffer, u64 elements of a residual, u64 LABELLED (written last)
    record: u64 sequence before, u64 step, u32 flags, u32 contributors, i32 result's buffer, i32 newest buffer with a payload, u64 payload bytes of buffer 0,
            u64 of buffer 1, f32 rescale, u16 residual's buffer, u16 add back, u64 sequence after (written last)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair
from psgc.errors import PayloadError, PsgcError
from psgc.layout.update_rule import UpdateRule
from psgc.server.step import NO_SLOT, Commit, Kept, Result
from psgc.server.weights.versions import Versions
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place, Segment, aligned

LABEL: Final = struct.Struct("<QQQQ")
LABELLED: Final = 0x79656B2063677370  # "psgc key"
LABEL_BYTES: Final = 64
RECORD: Final = struct.Struct("<QQIIiiQQfHHQ")
RECORD_BYTES: Final = 64
RECORDS_BYTES: Final = 2 * RECORD_BYTES
NO_SEQUENCE: Final = bytes(8)
REMOVED: Final = (1 << 64) - 1  # the sequence of the record of a key that was removed
assert LABEL.size <= LABEL_BYTES
assert RECORD.size == RECORD_BYTES
NOTHING: Final = Kept(None)
Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What a key needs: bytes of one result payload, and elements of its residual (0: none)."""

    key: int
    result_bytes: int
    residual_numel: int


@dataclass(frozen=True, slots=True)
class Record:
    """A whole commit record. lengths: payload bytes of each result buffer; residual_slot: the buffer of the residual."""

    sequence: int = 0
    kept: Kept = NOTHING
    lengths: tuple[int, int] = (0, 0)
    residual_slot: int = 0


class KeyStore:
    """One key's buffers over shared memory. A block that has a label is taken up as its former process left it."""

    def __init__(self, shape: KeyShape, block: Place) -> None:
        self.shape = shape
        self._block = block
        records = LABEL_BYTES
        first = records + RECORDS_BYTES
        second = first + aligned(shape.result_bytes)
        residual = second + aligned(shape.result_bytes)
        self._records = block.bytes[records:first].data
        self._results = tuple(block.part(start, shape.result_bytes) for start in (first, second))
        size = 4 * shape.residual_numel
        starts = (residual, residual + aligned(size)) if size else ()
        self._residuals = tuple(block.bytes[start : start + size].view(np.float32) for start in starts)
        if LABEL.unpack(block.bytes[: LABEL.size].tobytes()) != (shape.key, shape.result_bytes, shape.residual_numel, LABELLED):
            block.bytes[: LABEL.size] = np.frombuffer(LABEL.pack(shape.key, shape.result_bytes, shape.residual_numel, 0), np.uint8)
            block.bytes[LABEL.size - 8 : LABEL.size] = np.frombuffer(LABELLED.to_bytes(8, "little"), np.uint8)
        record = read_record(block.bytes[records:first]) or Record()
        self._sequence, self.residual_slot = record.sequence, record.residual_slot  # the latter: the buffer of the committed residual
        self._lengths = list(record.lengths)  # payload bytes in each result buffer
        self._newest = record.kept.newest
        self._pending = record.kept.result, record.kept.add_back, record.kept.rescale
        self._lent_step = -1

    @staticmethod
    def bytes_needed(shape: KeyShape) -> int:
        return LABEL_BYTES + RECORDS_BYTES + 2 * aligned(shape.result_bytes) + 2 * aligned(4 * shape.residual_numel)

    def populate(self) -> None:
        """Make its pages, from any thread and without the GIL. Raises OSError where there is no memory."""
        self._block.populate()

    def release(self) -> None:
        """Nobody needs the key any more: its record says so, and its buffers' memory is given back."""
        if not self.removed:
            self._sequence, records = REMOVED, np.frombuffer(self._records, np.uint8)
            records[-8:] = records[RECORD_BYTES - 8 : RECORD_BYTES] = 0
            RECORD.pack_into(self._records, 0, REMOVED, 0, 0, 0, NO_SLOT, NO_SLOT, 0, 0, 1.0, 0, 0, REMOVED)
        first = LABEL_BYTES + RECORDS_BYTES
        self._block.part(first, self._block.bytes.nbytes - first).release()

    @property
    def removed(self) -> bool:
        """Whether this process or a former one has released it."""
        return self._sequence == REMOVED

    @property
    def kept(self) -> Kept:
        """As of the last commit, whichever process made it."""
        result, add_back, rescale = self._pending
        return Kept(result, self._newest, add_back, rescale)

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

    def restore(self, first: int, payload: Any, rescale: float = 1.0) -> None:
        """Set elements of the residual, from ``first`` on, and what multiplies it first, before the first step. Raises PayloadError for NaN and infinity."""
        values = np.frombuffer(payload, np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("a residual to be restored holds NaN or infinity")
        self._residuals[self.residual_slot][first : first + values.size] = values
        self.commit(Commit(self.shape.key, Result(0, 0, 0), False, False, rescale))
        self._pending = None, False, rescale

    def lent(self, step: int) -> tuple[F32, bool]:
        """Scratch memory for the residual after ``step`` with a result added back (it is the buffer that the next step writes), and whether it
        already holds that residual."""
        ready, self._lent_step = self._lent_step == step, step
        return self._residuals[1 - self.residual_slot], ready

    def commit(self, commit: Commit) -> None:
        """Make the outcome of a step the key's state. The older record is written; until its last word is, the other one counts."""
        _, result, residual, add_back, rescale = commit
        step, flags, contributors, slot, payload_bytes = result
        if slot >= 0:
            self._newest = slot
            self._lengths[slot] = payload_bytes
        if residual:
            self.residual_slot = 1 - self.residual_slot
        self._sequence = sequence = self._sequence + 1
        self._pending = result, add_back, rescale
        at = RECORD_BYTES * (sequence & 1)
        records = self._records
        records[at + RECORD_BYTES - 8 : at + RECORD_BYTES] = NO_SEQUENCE
        first, second = self._lengths
        RECORD.pack_into(
            records, at, sequence, step, flags, contributors, slot, self._newest, first, second, rescale, self.residual_slot, add_back, sequence
        )  # fmt: skip


def read_record(records: Bytes) -> Record | None:
    """The newest whole record of the two; None if nothing was committed yet."""
    found = None
    for at in (0, RECORD_BYTES):
        fields = RECORD.unpack(records[at : at + RECORD_BYTES].tobytes())
        before, step, flags, contributors, slot, newest, first, second, rescale, residual_slot, add_back, after = fields
        if before != after or not before or (found is not None and before < found.sequence):
            continue
        result = Result(step, flags, contributors, slot, 0 if slot == NO_SLOT else (first, second)[slot]) if step else None
        found = Record(before, Kept(result, newest, bool(add_back), rescale), (first, second), residual_slot)
    return found


def find_blocks(segment: Bytes) -> Iterator[tuple[KeyShape, slice]]:
    """The shape of every key in a segment's memory, and where its block lies, whichever process has written it."""
    start = 0
    while start + LABEL_BYTES <= len(segment):
        key, result_bytes, residual_numel, labelled = LABEL.unpack(segment[start : start + LABEL.size].tobytes())
        shape = KeyShape(key, result_bytes, residual_numel)
        end = start + KeyStore.bytes_needed(shape)
        if labelled != LABELLED or end > len(segment):
            return
        yield shape, slice(start, end)
        start = end


class Store:
    """All keys of this server. former: the segments that a former process has left, in their order; its keys are taken up from them."""

    def __init__(self, former: Iterable[Segment] = ()) -> None:
        self.keys: dict[int, KeyStore] = {}
        self._left: dict[int, tuple[KeyShape, Place]] = {}  # by key, what a former process has left and nobody has taken up yet
        self.weights: dict[int, Versions] = {}
        self._arena = Arena("psgc-store")
        self._weights_arena = Arena("psgc-weights")
        for segment in former:
            used = 0
            for shape, where in find_blocks(segment.bytes):
                used = where.stop
                self._left[shape.key] = shape, Place(segment, where.start, segment.bytes[where])
            self._arena.adopt(segment, used)

    def add_keys(self, shapes: list[KeyShape]) -> list[tuple[int, Segment]]:
        """Make room for these keys, or take them up. Returns the segments that this created, with their numbers. Keys that exist already stay as they are.
        Raises PsgcError for a key that a former process has left in another shape."""
        segments = self._arena.segments
        before = len(segments)
        for shape in shapes:
            if shape.key in self.keys:
                continue
            left, block = self._left.pop(shape.key, (shape, None))
            if left != shape:
                raise PsgcError(f"what a former process of this server has left is of {left}, not of {shape}")
            self.keys[shape.key] = KeyStore(shape, self._arena.cut(KeyStore.bytes_needed(shape)) if block is None else block)
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


__all__ = ["KeyShape", "KeyStore", "Record", "Store", "find_blocks", "read_record"]
