"""Payloads on their way between a device's memory and the host's, through pinned slots of fixed number and size.

Each direction has a stream of its own, beside the trainer's kernels. Whoever copies waits for a free slot, so pool threads do; the completions' thread tells of
what has arrived on the host.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.errors import DeviceError
from psgc.torch.device.completions import Completions
from psgc.torch.device.faults import device_faults
from psgc.torch.device.launches import Coming, aligned
from psgc.torch.device.rings import Ring, Slot
from psgc.torch.device.runtime import Event, Runtime, Stream

Bytes = NDArray[np.uint8]
INCOMING: Final = 2  # payloads of results on the device at a time: one arrives while the other is decoded


class _Piece(NamedTuple):
    """Of what is copied down. first: its first byte in the whole; start: where it lies in its slot; last: no further one follows."""

    coming: Coming
    source: torch.Tensor
    first: int
    start: int
    last: bool

    def place(self, slot: Slot) -> torch.Tensor:
        return slot.memory[self.start : self.start + self.source.numel()]


class Down:
    """From the device to the host. name: the device's."""

    def __init__(self, runtime: Runtime, name: str, slots: int, slot_bytes: int) -> None:
        self.stream = runtime.stream()
        self._runtime, self._name = runtime, name
        self._ring, self._completions = Ring(runtime, slots, slot_bytes), Completions(name)

    def copy(self, coming: Sequence[Coming], ready: Event) -> Event:
        """Copy device bytes to the host once ``ready``: of one source in pieces as large as a slot; of several, which fit into a slot together, at once, with
        one event. Returns an event after which the sources may be written. Called in a pool thread: waits for free slots."""
        failed: list[DeviceError] = []
        with device_faults(self._name):
            self.stream.wait(ready)
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
        (one,), most = coming, self._ring.slot_bytes
        total = one.source.numel()
        return [[_Piece(one, one.source[first : first + most], first, 0, first + most >= total)] for first in range(0, total, most)]

    def _copied_down(self, pieces: Sequence[_Piece]) -> tuple[Slot, Event]:
        """A slot that the pieces are copied to, and when they are there."""
        slot = self._ring.take()
        places, sources = [piece.place(slot) for piece in pieces], [piece.source for piece in pieces]

        def copy() -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)

        try:
            self.stream.run(copy, sources, places)
            return slot, self.stream.record()
        except BaseException:
            self._ring.give_back(slot)
            raise

    def _arrived(self, slot: Slot, pieces: Sequence[_Piece], failed: list[DeviceError], fault: DeviceError | None) -> None:
        """failed: what has gone wrong with earlier pieces."""
        for piece in pieces if fault is None else ():
            place = piece.place(slot)
            self._runtime.host_reads(place)
            piece.coming.take(piece.first, place.numpy())
        failed.extend([] if fault is None else [fault])
        self._ring.give_back(slot)
        for piece in pieces:
            if piece.last:
                piece.coming.then(failed[0] if failed else None)


@dataclass(slots=True, eq=False)
class _Incoming:
    """Device memory for a result's payload. free: after its last use."""

    memory: torch.Tensor | None = None
    free: Event | None = None


class Up:
    """From the host to the device. name: the device's."""

    def __init__(self, runtime: Runtime, name: str, slots: int, slot_bytes: int) -> None:
        self.stream = runtime.stream()
        self._runtime, self._name = runtime, name
        self._ring = Ring(runtime, slots, slot_bytes)
        self._incoming: queue.SimpleQueue[_Incoming] = queue.SimpleQueue()
        for _ in range(INCOMING):
            self._incoming.put(_Incoming())

    def copy(self, payload: Bytes, target: torch.Tensor) -> Event:
        """Copy host bytes to the device; on return they have been read. Returns the event at which they are there."""
        ring, total, there = self._ring, payload.size, None
        with device_faults(self._name):
            for first in range(0, total, ring.slot_bytes):
                count = min(ring.slot_bytes, total - first)
                there = self._copied_up([payload[first : first + count]], [0], target[first : first + count])
            return self.stream.record() if there is None else there

    def _copied_up(self, pieces: Sequence[Bytes], starts: Sequence[int], target: torch.Tensor) -> Event:
        """Copy what fits into a slot to the device at once, each piece to its start there. Returns the event at which they are there."""
        ring = self._ring
        slot = ring.take()
        try:
            place = slot.memory[: target.numel()]
            self._runtime.host_writes(place)
            held = place.numpy()
            for start, piece in zip(starts, pieces, strict=True):
                np.copyto(held[start : start + piece.size], piece)
            self.stream.run(lambda: target.copy_(place, non_blocking=True), [place], [target])
            slot.last = there = self.stream.record()
            return there
        finally:
            ring.give_back(slot)

    @contextmanager
    def arriving(self, payloads: Sequence[Bytes], compute: Stream) -> Iterator[list[torch.Tensor]]:
        """The payloads in device memory, for work that is enqueued on ``compute`` within the block. On entry the host's have been read."""
        starts, total = _placed([payload.size for payload in payloads])
        place = self._incoming.get()
        try:
            if place.memory is None or place.memory.numel() < total:
                with device_faults(self._name):
                    place.memory = self._runtime.empty(max(total, 16), torch.uint8)
            memory = place.memory
            if place.free is not None:
                self.stream.wait(place.free)
            targets = [memory[start : start + payload.size] for start, payload in zip(starts, payloads, strict=True)]
            if len(payloads) > 1 and total <= self._ring.slot_bytes:
                with device_faults(self._name):
                    there = self._copied_up(payloads, starts, memory[:total])
            else:
                there = [self.copy(payload, target) for payload, target in zip(payloads, targets, strict=True)][-1]
            compute.wait(there)
            yield targets
            place.free = compute.record()
        finally:
            self._incoming.put(place)


def _placed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where payloads of these sizes begin one after the other, each where kernels read aligned, and the bytes of all."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += aligned(size)
    return starts, total
