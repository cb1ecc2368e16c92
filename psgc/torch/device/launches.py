"""Parts that are ready to be encoded on a device: those that are small and ready together share a launch, a copy to the host and an event.

No part waits for others. One thread at a time launches; parts that become ready meanwhile wait for it, and are launched together if they are small, follow
each other and have one codec. A larger part is launched by itself, so that its payload can leave as soon as it is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch

from psgc.codecs.codec import Stream
from psgc.errors import DeviceError
from psgc.torch.device.codec import DeviceCodec, Encoding
from psgc.torch.device.faults import fault_of
from psgc.torch.device.runtime import Event, Runtime
from psgc.torch.device.runtime import Stream as DeviceStream
from psgc.torch.device.sent import Sent, Taking
from psgc.worker.device import Bytes, EncodedThen

SMALL_ELEMENTS: Final = (
    1 << 17
)  # of a part that shares a launch: its work takes less than starting a launch does (3 us at 300 GB/s and more)
TOGETHER_BYTES: Final = (
    1 << 20
)  # of the payloads of a launch, at their bounds: 65 us on the way to the host at 16 GB/s, for which the first one waits


class Coming(NamedTuple):
    """What is to be copied to the host. take(first byte, bytes) is called for each piece that has arrived, then ``then`` once, both in the completions' thread;
    before them ``noted``, with the event after which the source may be written."""

    source: torch.Tensor
    take: Callable[[int, Bytes], None]
    then: Callable[[DeviceError | None], None]
    noted: Callable[[Event], None] = lambda event: None


class Device(Protocol):
    """What launching asks of the engine."""

    name: str
    runtime: Runtime
    compute: DeviceStream

    def scratch(self, nbytes: int) -> AbstractContextManager[torch.Tensor]: ...

    def compute_on(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None: ...

    def download_all(self, coming: Sequence[Coming], ready: Event) -> None: ...


@dataclass(slots=True, eq=False)
class Ready:
    """A part to be encoded. out: where its payload goes on the host; then: called when it is there."""

    codec: DeviceCodec
    grad: torch.Tensor
    residual: torch.Tensor | None
    rescale: float
    stream: Stream
    sent: Sent
    out: Bytes
    then: EncodedThen

    @property
    def small(self) -> bool:
        return self.grad.numel() <= SMALL_ELEMENTS


class Launches:
    """See the module's text."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: of a staging slot, which what a launch gives has to fit into."""
        self._device, self._most_bytes = device, min(slot_bytes, TOGETHER_BYTES)
        self._waiting: deque[Ready] = deque()
        self._launching = threading.Lock()
        self.launched = self.parts = 0  # launches so far, and the parts in them

    def put(self, part: Ready) -> None:
        """Launch the part, or leave it to the thread that launches now. Errors go to the part's ``then``."""
        self._device.runtime.handed(part)
        self._waiting.append(part)
        while self._waiting and self._launching.acquire(blocking=False):
            try:
                if parts := self._next():
                    self._launch(parts)
            finally:
                self._launching.release()

    def _next(self) -> list[Ready]:
        """The parts of the next launch. Called by the thread that launches."""
        found: list[Ready] = []
        total = 0
        while self._waiting:
            part = self._waiting[0]
            total += aligned(part.sent.memory.numel())
            if found and not (found[0].small and part.small and part.codec is found[0].codec and total <= self._most_bytes):
                break
            found.append(self._waiting.popleft())
        return found

    def _launch(self, parts: Sequence[Ready]) -> None:
        device = self._device
        self.launched, self.parts = self.launched + 1, self.parts + len(parts)
        for part in parts:
            device.runtime.received(part)
        try:
            for part in parts:
                if part.sent.copied is not None:
                    device.compute.wait(part.sent.copied)
            sizes = [aligned(part.codec.scratch_bytes(part.grad.numel())) for part in parts]
            with device.scratch(sum(sizes)) as scratch:
                pieces = torch.split(scratch[: sum(sizes)], sizes)
                kept = [part.residual for part in parts if part.residual is not None]
                device.compute_on(
                    lambda: _encode(parts, pieces),
                    [*(part.grad for part in parts), *kept],
                    [*(part.sent.memory for part in parts), scratch],
                )
            device.download_all([coming(part.sent, part.out, part.then) for part in parts], device.compute.record())
        except Exception as error:
            for part in parts:
                part.then(fault_of(error, device.name))


def _encode(parts: Sequence[Ready], scratch: Sequence[torch.Tensor]) -> None:
    items = []
    for part, piece in zip(parts, scratch, strict=True):
        part.sent.status.zero_()
        items.append(Encoding(part.grad, part.residual, part.rescale, part.stream, part.sent.room, part.sent.status, piece))
    if len(items) > 1:
        parts[0].codec.encode_many(items)
    else:
        (one,) = items
        parts[0].codec.encode(one.grad, one.residual, one.rescale, one.stream, one.out, one.status, one.scratch)


def coming(sent: Sent, out: Bytes, then: EncodedThen) -> Coming:
    """The copy of a payload to ``out``."""
    taking = Taking(sent, out)
    return Coming(
        sent.memory, taking.take, lambda fault: then(taking.encoded if fault is None else fault), partial(setattr, sent, "copied")
    )


def aligned(size: int) -> int:
    """The bytes that are set aside for so many, where the next ones have to begin at a multiple of 16."""
    return -(-size // 16) * 16
