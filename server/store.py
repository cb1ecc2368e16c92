"""A server's memory, which survives its process: results and residuals in sealed memfds, double-buffered, with commit records that are
written last.

All keys lie in one arena (``blocks.py``). Each has a block there: two records of 64 bytes, two result buffers, and two residual buffers
if the pull codec keeps a residual; where steps do not wait for every rank, a table beside each record of who is late (``late_table.py``), and slots for late
payloads. A step writes the buffers that the newest whole record does not
name, then the older record; so a whole record names complete buffers at any time, wherever the process ended. A key that was removed keeps its block; its
record says so. Weights have blocks of their own (``weights/versions.py``).

    record: u64 sequence before, u64 step, u32 flags, u32 contributors, i32 result's buffer, i32 newest buffer with a payload, u64 payload bytes of buffer 0,
            u64 of buffer 1, f32 rescale, u16 residual's buffer, u16 add back, u64 sequence after (written last)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair
from psgc.errors import PayloadError
from psgc.layout.update_rule import UpdateRule
from psgc.server.blocks import BlockId, Blocks, Of, Written
from psgc.server.late import NOTHING_LATE
from psgc.server.late_table import read_table, table_bytes, write_table
from psgc.server.step import NO_SLOT, Commit, KeepLate, Kept, Result
from psgc.server.weights.versions import Versions
from psgc.transport.memory.segment import Place, Segment, aligned

RECORD: Final = struct.Struct("<QQIIiiQQfHHQ")
RECORD_BYTES: Final = 64
RECORDS_BYTES: Final = 2 * RECORD_BYTES
NO_SEQUENCE: Final = bytes(8)
REMOVED: Final = (1 << 64) - 1  # the sequence of the record of a key that was removed
assert RECORD.size == RECORD_BYTES
NOTHING: Final = Kept(None)
Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What a key needs: bytes of one result payload, and elements of its residual (0: none); how many late contributions a step may have, and bytes of one."""

    key: int
    result_bytes: int
    residual_numel: int
    late: int = 0
    late_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A whole commit record. lengths: payload bytes of each result buffer; residual_slot: the buffer of the residual."""

    sequence: int = 0
    kept: Kept = NOTHING
    lengths: tuple[int, int] = (0, 0)
    residual_slot: int = 0


class KeyStore:
    """One key's buffers over shared memory, which is as a former process has left it or of zeros."""

    def __init__(self, shape: KeyShape, block: Place) -> None:
        self.shape = shape
        self._block = block
        first = RECORDS_BYTES
        second = first + aligned(shape.result_bytes)
        residual = second + aligned(shape.result_bytes)
        self._records = block.bytes[:first].data
        self._results = tuple(block.part(start, shape.result_bytes) for start in (first, second))
        size = 4 * shape.residual_numel
        starts = (residual, residual + aligned(size)) if size else ()
        self._residuals = tuple(block.bytes[start : start + size].view(np.float32) for start in starts)
        tables = residual + 2 * aligned(size)
        each = aligned(table_bytes(shape.late)) if shape.late else 0
        self._tables = tuple(block.bytes[start : start + each] for start in (tables, tables + each) if each)
        slots, room = tables + 2 * each, aligned(shape.late_bytes)
        self._late_slots = tuple(block.bytes[slots + i * room : slots + i * room + shape.late_bytes] for i in range(shape.late))
        record = read_record(block.bytes[:first]) or Record()
        self._sequence, self.residual_slot = record.sequence, record.residual_slot  # the latter: the buffer of the committed residual
        self._lengths = list(record.lengths)  # payload bytes in each result buffer
        self._newest = record.kept.newest
        self._pending = record.kept.result, record.kept.add_back, record.kept.rescale
        self._lent_step = -1
        self._late = NOTHING_LATE
        if shape.late and record.kept.result is not None:
            self._late = read_table(self._tables[record.sequence & 1], record.kept.result, record.lengths)

    @staticmethod
    def bytes_needed(shape: KeyShape) -> int:
        late = 2 * aligned(table_bytes(shape.late)) + shape.late * aligned(shape.late_bytes) if shape.late else 0
        return RECORDS_BYTES + 2 * aligned(shape.result_bytes) + 2 * aligned(4 * shape.residual_numel) + late

    def populate(self) -> None:
        """Make its pages, from any thread and without the GIL. Raises OSError where there is no memory."""
        self._block.populate()

    def release(self) -> None:
        """Nobody needs the key any more: its record says so, and its buffers' memory is given back."""
        if not self.removed:
            self._sequence, records = REMOVED, np.frombuffer(self._records, np.uint8)
            records[-8:] = records[RECORD_BYTES - 8 : RECORD_BYTES] = 0
            RECORD.pack_into(self._records, 0, REMOVED, 0, 0, 0, NO_SLOT, NO_SLOT, 0, 0, 1.0, 0, 0, REMOVED)
        self._block.part(RECORDS_BYTES, self._block.bytes.nbytes - RECORDS_BYTES).release()

    @property
    def removed(self) -> bool:
        """Whether this process or a former one has released it."""
        return self._sequence == REMOVED

    @property
    def kept(self) -> Kept:
        """As of the last commit, whichever process made it."""
        result, add_back, rescale = self._pending
        return Kept(result, self._newest, add_back, rescale, self._late)

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

    def written(self, commit: Commit | None = None) -> Iterator[Written]:
        """What the last commit has written, its record last. commit: None: all that the key's state consists of, whichever commit wrote it."""
        if not self._sequence or self.removed:
            yield from (self._record(0),) if self.removed else ()
            return
        slot = self._newest if commit is None else commit.result.slot
        if slot != NO_SLOT and self._lengths[slot]:
            yield self._piece(self._results[slot].bytes[: self._lengths[slot]])
        if self._residuals and (commit is None or commit.residual):
            yield self._piece(self._residuals[self.residual_slot].view(np.uint8))
        yield self._record(RECORD_BYTES * (self._sequence & 1))

    def restored(self, first: int, numel: int) -> Iterator[Written]:
        """The same, of the last ``restore``."""
        yield self._piece(self._residuals[self.residual_slot][first : first + numel].view(np.uint8))
        yield self._record(RECORD_BYTES * (self._sequence & 1))

    def _piece(self, piece: Bytes) -> Written:
        return Written(self._block, piece.ctypes.data - self._block.bytes.ctypes.data, piece)

    def _record(self, at: int) -> Written:
        return Written(self._block, at, self._block.bytes[at : at + RECORD_BYTES].copy(), record=True)

    def lent(self, step: int) -> tuple[F32, bool]:
        """Scratch memory for the residual after ``step`` with a result added back (it is the buffer that the next step writes), and whether it
        already holds that residual."""
        ready, self._lent_step = self._lent_step == step, step
        return self._residuals[1 - self.residual_slot], ready

    def keep_late(self, keep: KeepLate) -> None:
        """Keep a late contribution. Raises PayloadError for a payload that is too long."""
        if keep.payload is not None:
            slot, nbytes = self._late_slots[keep.slot], len(keep.payload)
            if nbytes > len(slot):
                raise PayloadError(f"a late contribution of {nbytes} bytes, expected at most {len(slot)}")
            slot[:nbytes] = np.frombuffer(keep.payload, np.uint8)
        self.commit(keep.commit)

    def late_payload(self, slot: int) -> Bytes:
        """Of the late contribution in this slot."""
        return self._late_slots[slot][: self._late.owed[slot].payload_bytes]

    def commit(self, commit: Commit) -> None:
        """Make the outcome of a step the key's state. The older record is written; until its last word is, the other one counts."""
        _, result, residual, add_back, rescale, late = commit
        step, flags, contributors, slot, payload_bytes = result
        if slot >= 0:
            self._newest = slot
            self._lengths[slot] = payload_bytes
        if residual:
            self.residual_slot = 1 - self.residual_slot
        self._sequence = sequence = self._sequence + 1
        self._pending, self._late = (result, add_back, rescale), late
        if self._tables:
            write_table(self._tables[sequence & 1], late)
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


class Store:
    """All keys of this server. former: the segments that a former process has left, in their order; its keys are taken up from them. keep: told of each new
    segment, with its number, before anything is in it."""

    def __init__(self, former: Iterable[Segment] = (), keep: Callable[[int, Segment], None] | None = None) -> None:
        self.keys: dict[int, KeyStore] = {}
        self.weights: dict[int, Versions] = {}
        self._removed: dict[int, tuple[Written, ...]] = {}  # records of keys that were removed
        self._blocks = Blocks("psgc-store", former, keep)

    @property
    def segments(self) -> dict[int, Segment]:
        """All memory, by number."""
        return self._blocks.segments

    def add_keys(self, shapes: Iterable[KeyShape]) -> None:
        """Make room for these keys, or take them up. Keys that exist already stay as they are. Raises PsgcError for a key that a former process has left in
        another shape."""
        for shape in shapes:
            if shape.key not in self.keys:
                of, sizes = BlockId(Of.KEY, shape.key), (shape.result_bytes, shape.residual_numel)
                self.keys[shape.key] = KeyStore(shape, self._blocks.block(of, sizes, KeyStore.bytes_needed(shape)))

    def remove_keys(self, keys: Iterable[int]) -> None:
        """Give back the memory of keys that nobody needs any more."""
        for key in keys:
            of_key = self.keys.pop(key)
            of_key.release()
            self._removed[key] = tuple(of_key.written())

    def add_weights(self, key: int, rule: UpdateRule, pair: CodecPair, numel: int, ranks: int) -> None:
        """Hold weights, or take them up. Memory for versions is made as it is needed. A key that exists already stays as it is. Raises as ``add_keys``."""
        if key not in self.weights:
            self.weights[key] = Versions(key, rule, pair, numel, ranks, self._blocks)

    @property
    def known(self) -> list[int]:
        """Keys of which a process in another place would have to know something."""
        return [*self._removed, *self.keys, *self.weights]

    def written(self, key: int) -> Iterable[Written]:
        """All that it would have to know of the key: what is kept, or that it was removed."""
        if key in self._removed:
            return self._removed[key]
        return self.keys[key].written() if key in self.keys else self.weights[key].written()

    def place(self, key: int, slot: int) -> Place:
        """Where a result, or a version of weights, lies."""
        return self.weights[key].place(slot) if key in self.weights else self.keys[key].place(slot)

    def close(self) -> None:
        self._blocks.close()


__all__ = ["KeyShape", "KeyStore", "Record", "Store", "read_record"]
