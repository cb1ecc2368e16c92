"""A bucket at work: its codec, its residual, the slots its payloads are encoded into, and the jobs that encode and decode parts.

Numbers only: no protocol, no sockets. ``begin`` is called by the network thread, ``encode`` and ``decode`` by pool threads; parts of one
bucket may be worked on at once, the steps of one bucket never overlap.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import BLOCK, Codec, Encoded, Stream, parse_pair
from psgc.layout import Bucket, Layout, Part
from psgc.transport.memfd import Segment, aligned
from psgc.wire.frames import Flag
from psgc.worker.session import BucketBuffer

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a part's payload is encoded: its place in its layout's segment. It stays until the step is decoded."""

    segment: int
    offset: int
    bytes: Bytes


def make_slots(layout: Layout) -> tuple[Segment, dict[int, Slot]]:
    """One segment for all payloads that this worker pushes for ``layout``, and each key's slot in it."""
    offset, places = 0, {}
    for bucket, part in layout.parts():
        bound = parse_pair(bucket.codec, bucket.dtype).push.payload_bound(part.numel)
        places[part.key] = (offset, bound)
        offset += aligned(bound)
    segment = Segment.create(f"psgc-push-{layout.id}", offset)
    return segment, {key: Slot(layout.id, start, segment.view(start, bound)) for key, (start, bound) in places.items()}


@dataclass(slots=True)
class _PartWork:
    part: Part
    slot: Slot
    payload_bytes: int = 0
    rescale: float = 1.0  # of the residual's unit, since the residual was last committed
    committed: bool = False  # the last step's payload is part of an aggregate and of the residual
    add_back: bool = False  # the slot's payload goes back to the residual: the trainer skipped that step


class BucketWork:
    """See the module's text. residual: float32 [numel] in gradient units, or None where the push codec keeps none."""

    def __init__(self, layout: Layout, bucket: Bucket, slots: dict[int, Slot], rank: int, seed: int) -> None:
        self.layout, self.bucket = layout, bucket
        self.pair = parse_pair(bucket.codec, bucket.dtype)
        self._rank, self._seed = rank, seed
        broadcast = layout.kind == "broadcast"
        self.residual = np.zeros(bucket.numel, np.float32) if self.pair.push.feedback and not broadcast else None
        self._parts = {part.key: _PartWork(part, slots[part.key]) for part in bucket.parts}
        self._lock = threading.Lock()
        self._buffer: BucketBuffer | None = None
        self._array: NDArray[Any] | None = None
        self._left = 0
        self.step = 0

    @property
    def name(self) -> str:
        return f"{self.layout.name}/{self.bucket.index}"

    def slot(self, key: int) -> Slot:
        return self._parts[key].slot

    def begin(self, buffer: BucketBuffer, previous_skipped: bool, rescale: float) -> None:
        """A step starts; the last one has been stored."""
        self._buffer, self._array, self._left = buffer, None, len(self._parts)
        self.step += 1
        # Where the servers keep a residual they add the skipped step's result back; else each worker adds its own payload.
        own_add_back = previous_skipped and self.residual is not None and not self.pair.pull.feedback
        for work in self._parts.values():
            work.add_back = work.add_back or (own_add_back and work.committed)
            work.committed = False
            work.rescale *= rescale

    def encode(self, key: int) -> Encoded:
        """Encode one part into its slot."""
        work = self._parts[key]
        array = self._loaded()
        lo, hi = work.part.offset, work.part.offset + work.part.numel
        residual = None if self.residual is None else self.residual[lo:hi]
        if work.add_back and residual is not None:
            self._add_back(work, residual)
        stream = Stream(self._seed, self.step, self._rank, self.bucket.index, lo)
        encoded = self.pair.push.encode(array[lo:hi], residual, work.rescale, stream, work.slot.bytes)
        work.payload_bytes = encoded.payload_bytes
        return encoded

    def decode(self, key: int, flags: int, payload: Bytes | None, own: bool) -> bool:
        """Take one part's result: decode it into the array and commit its residual. True when it was the bucket's last and
        everything has been stored. Raises PayloadError for a payload that its codec did not write."""
        work = self._parts[key]
        if not flags & Flag.SKIPPED:
            array = self._loaded()
            target = array[work.part.offset : work.part.offset + work.part.numel]
            if flags & Flag.NONFINITE:
                target.fill(np.nan)
            else:
                self._decode_part(work, np.empty(0, np.uint8) if payload is None else payload, target, own)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            assert self._buffer is not None
            self._buffer.store(bool(flags & Flag.SKIPPED))
            self._buffer = self._array = None
        return last

    def first_nonfinite(self, key: int) -> str | None:
        """The tensor of the part's first NaN or infinity, or None."""
        array = self._loaded()
        part = self._parts[key].part
        values = array[part.offset : part.offset + part.numel]
        if self.bucket.dtype == "bfloat16" and values.dtype == np.uint16:
            bad = (values & 0x7F80) == 0x7F80
        elif values.dtype.kind == "f":
            bad = ~np.isfinite(values)
        else:
            return None
        return self._tensor_at(part.offset + int(bad.argmax())) if bad.any() else None

    def _tensor_at(self, element: int) -> str:
        for index in self.bucket.tensors:
            element -= self.layout.tensors[index].numel
            if element < 0:
                return self.layout.tensors[index].name
        raise AssertionError("an element past the bucket's end")

    def _loaded(self) -> NDArray[Any]:
        with self._lock:
            if self._array is None:
                assert self._buffer is not None
                self._array = self._buffer.load()
                assert self._array.size == self.bucket.numel, (self._array.size, self.bucket)
            return self._array

    def _add_back(self, work: _PartWork, residual: NDArray[np.float32]) -> None:
        payload = work.slot.bytes[: work.payload_bytes]
        for lo, hi in slices(self.pair.push, work.part.numel):
            self.pair.push.fold([payload], work.part.numel, lo, hi, residual[lo:hi], False)
        work.add_back = False

    def _decode_part(self, work: _PartWork, payload: Bytes, target: NDArray[Any], own: bool) -> None:
        push, pull = self.pair.push, self.pair.pull
        numel = work.part.numel
        pull.validate(payload, numel)
        commit = own and self.residual is not None
        together = commit and push.chunk == pull.chunk
        if commit and not together:
            for lo, hi in slices(push, numel):
                self._commit(work, target, lo, hi)
        for lo, hi in slices(pull, numel):
            if together:
                self._commit(work, target, lo, hi)  # reads the gradient that the next line overwrites, while it is in cache
            pull.decode(payload, numel, lo, hi, target[lo:hi])
        if own:
            work.committed = True
        if commit:
            work.rescale = 1.0

    def _commit(self, work: _PartWork, grad: NDArray[Any], lo: int, hi: int) -> None:
        assert self.residual is not None
        residual = self.residual[work.part.offset + lo : work.part.offset + hi]
        payload = work.slot.bytes[: work.payload_bytes]
        self.pair.push.commit(payload, work.part.numel, lo, hi, grad[lo:hi], residual, work.rescale)


def slices(codec: Codec, numel: int) -> list[tuple[int, int]]:
    """The ranges that ``codec`` wants a part worked on in."""
    if not codec.chunk or numel <= codec.chunk:
        return [(0, numel)]
    assert codec.chunk % BLOCK == 0
    return [(lo, min(lo + codec.chunk, numel)) for lo in range(0, numel, codec.chunk)]
