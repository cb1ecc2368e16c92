"""Staging memory of fixed size between host and device: pinned slots, and what gives them back when they are free.

A slot on its way down (device to host) is free when a host thread has read it; one on its way up is free when the device has. Payloads larger
than a slot travel in pieces.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Final

import torch

from psgc.torch.device.runtime import Event, Runtime

SLOT_BYTES: Final = 4 << 20  # at 16 GB/s such a copy takes 0.26 ms, 30 times what starting it takes
SLOTS: Final = 4


@dataclass(slots=True, eq=False)
class Slot:
    """Pinned memory. last: after its last use by the device."""

    memory: torch.Tensor
    last: Event | None = None


class Ring:
    """A fixed number of slots, made at first use."""

    def __init__(self, runtime: Runtime, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._runtime, self.slot_bytes = runtime, slot_bytes
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(None)

    def take(self) -> Slot:
        """A free slot: waits until there is one, and until the device is done with it. Give it back with ``give_back``."""
        slot = self._free.get() or Slot(self._runtime.pinned(self.slot_bytes))
        self._runtime.received(slot)
        if slot.last is not None:
            slot.last.synchronize()
            slot.last = None
        return slot

    def give_back(self, slot: Slot) -> None:
        """Nobody on the host uses the slot any more; the device may, until its ``last``."""
        self._runtime.handed(slot)
        self._free.put(slot)
