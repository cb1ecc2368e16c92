"""A device's streams, staging rings and threads: what moves payloads between its memory and the host's, beside the trainer's kernels.

Three streams: one computes (encodes, decodes, packs), one copies down to the host, one copies up. Events order them among each other, and with the
trainer's stream. Copies go through pinned slots of fixed number and size. Host threads that wait: pool threads for a free slot, the completions' thread
for events. Owns no buckets.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import Scheme
from psgc.codecs.codec import F32, Codec
from psgc.device.codec import DeviceCodec
from psgc.device.state import DeviceState
from psgc.errors import DeviceError
from psgc.torch.device.completions import Completions
from psgc.torch.device.faults import device_faults
from psgc.torch.device.launches import Coming, Launches, aligned
from psgc.torch.device.results import Results
from psgc.torch.device.rings import SLOT_BYTES, SLOTS, Ring, Slot
from psgc.torch.device.runtime import Event, Runtime, Stream

Bytes = NDArray[np.uint8]
INCOMING: Final = 2  # payloads of results on the device at a time: one arrives while the other is decoded


@dataclass(slots=True, eq=False)
class _Incoming:
    """Device memory for a result's payload. free: after its last use."""

    memory: torch.Tensor | None = None
    free: Event | None = None


class _Piece(NamedTuple):
    """Of what is copied down. first: its first byte in the whole; start: where it lies in its slot; last: no further one follows."""

    coming: Coming
    source: torch.Tensor
    first: int
    start: int
    last: bool

    def place(self, slot: Slot) -> torch.Tensor:
        return slot.memory[self.start : self.start + self.source.numel()]


class Engine:
    """See the module's text."""

    def __init__(self, runtime: Runtime, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.runtime = runtime
        self.name = str(runtime.device)
        self.compute, self.down, self.up = runtime.stream(), runtime.stream(), runtime.stream()
        self._rings = Ring(runtime, slots, slot_bytes), Ring(runtime, slots, slot_bytes)
        self._completions = Completions(self.name)
        self._scratch: torch.Tensor | None = None
        self._scratch_lock = threading.Lock()
        self._incoming: queue.SimpleQueue[_Incoming] = queue.SimpleQueue()
        for _ in range(INCOMING):
            self._incoming.put(_Incoming())
        self._codecs: dict[tuple[str, str], DeviceCodec | None] = {}
        self.launches, self.results = Launches(self, slot_bytes), Results(self, slot_bytes)

    def side_stream(self) -> Stream:
        """A further stream, for a group's collectives: two groups never share one, since ranks may begin their collectives in different orders."""
        return self.runtime.stream()

    def codec(self, codec: Codec) -> DeviceCodec | None:
        """The codec's kernels for this device; None where it has none."""
        key = codec.canonical, codec.dtype
        if key not in self._codecs:
            self._codecs[key] = self.runtime.codec(codec)
        return self._codecs[key]

    def state(self, scheme: Scheme, numel: int) -> DeviceState | None:
        """A new state of the scheme, whose memory is ``compute``'s; None where the device has no kernels for it. Raises CodecError."""
        made: list[DeviceState | None] = []
        self.compute_on(lambda: made.append(self.runtime.state(scheme, numel)), [], [])
        return made[0]

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Memory for one kernel's intermediate values, to be enqueued on ``compute`` within the block."""
        with self._scratch_lock:
            if self._scratch is None or self._scratch.numel() < nbytes:
                self._scratch = self.empty(max(nbytes, 16), torch.uint8)
            yield self._scratch

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device. Raises DeviceError where there is too little."""
        with device_faults(self.name):
            return self.runtime.empty(numel, dtype)

    def download(self, coming: Sequence[Coming], ready: Event) -> Event:
        """Copy device bytes to the host once ``ready``: of one source in pieces as large as a slot; of several, which fit into a slot together, at once, with
        one event. Returns an event after which the sources may be written. Called in a pool thread: waits for free slots."""
        failed: list[DeviceError] = []
        with device_faults(self.name):
            self.down.wait(ready)
            for pieces in self._pieces(coming):
                slot, event = self._copied_down(pieces)
                for piece in pieces:
                    if piece.last:
                        piece.coming.noted(event)
                self._completions.when(event, partial(self._arrived, slot, pieces, failed))
        return event

    def _pieces(self, coming: Sequence[Coming]) -> list[list[_Piece]]:
        """Slot by slot."""
        if len(coming) > 1:
            starts, _ = _placed([each.source.numel() for each in coming])
            return [[_Piece(each, each.source, 0, start, True) for each, start in zip(coming, starts, strict=True)]]
        (one,), most = coming, self._rings[0].slot_bytes
        total = one.source.numel()
        return [[_Piece(one, one.source[first : first + most], first, 0, first + most >= total)] for first in range(0, total, most)]

    def _copied_down(self, pieces: Sequence[_Piece]) -> tuple[Slot, Event]:
        """A slot that the pieces are copied to, and when they are there."""
        slot = self._rings[0].take()
        places, sources = [piece.place(slot) for piece in pieces], [piece.source for piece in pieces]

        def copy() -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)

        try:
            self.down.run(copy, sources, places)
            return slot, self.down.record()
        except BaseException:
            self._rings[0].give_back(slot)
            raise

    def _arrived(self, slot: Slot, pieces: Sequence[_Piece], failed: list[DeviceError], fault: DeviceError | None) -> None:
        """failed: what has gone wrong with earlier pieces."""
        for piece in pieces if fault is None else ():
            place = piece.place(slot)
            self.runtime.host_reads(place)
            piece.coming.take(piece.first, place.numpy())
        failed.extend([] if fault is None else [fault])
        self._rings[0].give_back(slot)
        for piece in pieces:
            if piece.last:
                piece.coming.then(failed[0] if failed else None)

    def upload(self, payload: Bytes, target: torch.Tensor) -> Event:
        """Copy host bytes to the device; on return they have been read. Returns the event at which they are there."""
        ring, total = self._rings[1], payload.size
        with device_faults(self.name):
            for first in range(0, total, ring.slot_bytes):
                count = min(ring.slot_bytes, total - first)
                self._copied_up([payload[first : first + count]], [0], target[first : first + count])
            return self.up.record()

    def _copied_up(self, pieces: Sequence[Bytes], starts: Sequence[int], target: torch.Tensor) -> None:
        """Copy what fits into a slot to the device at once, each piece to its start there."""
        ring = self._rings[1]
        slot = ring.take()
        try:
            place = slot.memory[: target.numel()]
            self.runtime.host_writes(place)
            held = place.numpy()
            for start, piece in zip(starts, pieces, strict=True):
                np.copyto(held[start : start + piece.size], piece)
            self.up.run(lambda: target.copy_(place, non_blocking=True), [place], [target])
            slot.last = self.up.record()
        finally:
            ring.give_back(slot)

    @contextmanager
    def incoming(self, payloads: Sequence[Bytes]) -> Iterator[list[torch.Tensor]]:
        """The payloads in device memory, for work that is enqueued on ``compute`` within the block. On entry the host's have been read."""
        starts, total = _placed([payload.size for payload in payloads])
        place = self._incoming.get()
        try:
            if place.memory is None or place.memory.numel() < total:
                place.memory = self.empty(max(total, 16), torch.uint8)
            memory = place.memory
            if place.free is not None:
                self.up.wait(place.free)
            targets = [memory[start : start + payload.size] for start, payload in zip(starts, payloads, strict=True)]
            if len(payloads) > 1 and total <= self._rings[1].slot_bytes:
                with device_faults(self.name):
                    self._copied_up(payloads, starts, memory[:total])
            else:
                for payload, target in zip(payloads, targets, strict=True):
                    self.upload(payload, target)
            self.compute.wait(self.up.record())
            yield targets
            place.free = self.compute.record()
        finally:
            self._incoming.put(place)

    def fetch(self, tensor: torch.Tensor) -> NDArray[Any]:
        """A copy on the host of what ``compute`` leaves in the tensor. Waits for the device; for use between steps, and on the way to an error."""
        with device_faults(self.name):
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.compute.run(lambda: host.copy_(tensor), [tensor], [host])
            self.compute.record().synchronize()
        self.runtime.host_reads(host)
        return host.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else host.numpy()

    def put(self, values: NDArray[Any], target: torch.Tensor) -> None:
        """Write host values to a tensor on the device, before what ``compute`` does next. May wait for the device; for use between steps."""
        with device_faults(self.name):
            host = torch.from_numpy(np.array(values))
            self.runtime.host_writes(host)
            self.compute.run(lambda: target.copy_(host), [host], [target])

    def brought(self, values: F32) -> torch.Tensor:
        """A copy of host values on the device, flat, for what ``compute`` does next; for use between steps."""
        target = self.empty(values.size, torch.float32)
        self.put(values.reshape(-1), target)
        return target

    def compute_on(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Enqueue ``work`` on ``compute``."""
        with device_faults(self.name):
            self.compute.run(work, reads, writes)


def _placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where payloads of these sizes begin one after the other, each where kernels read aligned, and the bytes of all."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += aligned(size)
    return starts, total
