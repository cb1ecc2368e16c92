"""Parts that are ready to be encoded on a device: those that are small and ready together share a launch, a copy to the host and an event.

Owns how threads share launches (``Together``, which results do, too), and what a launch that encodes is.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from psgc.codecs.codec import Stream
from psgc.device.codec import DeviceCodec, Encoding
from psgc.errors import DeviceError
from psgc.torch.device.faults import fault_of
from psgc.torch.device.runtime import Event, Runtime
from psgc.torch.device.runtime import Stream as DeviceStream
from psgc.torch.device.sent import Sent, Taking
from psgc.worker.device import Bytes, EncodedThen

Part = TypeVar("Part")
# Of a part that shares a launch: its work takes less than starting a launch does (3 us at 300 GB/s and more).
SMALL_ELEMENTS: Final = 1 << 17
# Of the payloads of a launch, at their bounds: 65 us on the way to the host at 16 GB/s, for which the first one waits.
TOGETHER_BYTES: Final = 1 << 20


class Coming(NamedTuple):
    """What is to be copied to the host. take(first byte, bytes) is called for each piece that has arrived, then ``then`` once, both in the completions' thread;
    before them ``noted``, with the event after which the source may be written."""

    source: torch.Tensor
    take: Callable[[int, Bytes], None]
    then: Callable[[DeviceError | None], None]
    noted: Callable[[Event], None] = lambda event: None


class Device(Protocol):
    """What launching, and decoding, ask of the engine."""

    name: str
    runtime: Runtime
    compute: DeviceStream

    def scratch(self, nbytes: int) -> AbstractContextManager[torch.Tensor]: ...

    def compute_on(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None: ...

    def download(self, coming: Sequence[Coming], ready: Event) -> Event: ...

    def incoming(self, payloads: Sequence[Bytes]) -> AbstractContextManager[list[torch.Tensor]]: ...


class Together(ABC, Generic[Part]):
    """Parts that threads bring, of which none waits for others. One thread at a time works on them; what others bring meanwhile waits for it, and is done
    together if it follows each other and is alike. slot_bytes: of a staging slot, which what is done together has to fit into.

    rounds, parts: how often parts have been worked on so far, and how many there were."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        self._device, self._most_bytes = device, min(slot_bytes, TOGETHER_BYTES)
        self._waiting: deque[Part] = deque()
        self._working = threading.Lock()
        self.rounds = self.parts = 0

    def put(self, part: Part) -> None:
        """Work on the part, or leave it to the thread that does so now."""
        self._device.runtime.handed(part)
        self._waiting.append(part)
        while self._waiting and self._working.acquire(blocking=False):
            try:
                if parts := self._next():
                    self.rounds, self.parts = self.rounds + 1, self.parts + len(parts)
                    for each in parts:
                        self._device.runtime.received(each)
                    self.work(parts)
            finally:
                self._working.release()

    def _next(self) -> list[Part]:
        """The parts that are next. Called by the thread that works."""
        found: list[Part] = []
        total = 0
        while self._waiting:
            part = self._waiting[0]
            total += aligned(self.nbytes(part))
            if found and not (self.alike(found[0], part) and total <= self._most_bytes):
                break
            found.append(self._waiting.popleft())
        return found

    @abstractmethod
    def nbytes(self, part: Part) -> int:
        """What the part takes of a staging slot."""

    @abstractmethod
    def alike(self, one: Part, other: Part) -> bool:
        """Whether the two may be done together: both are small, and of the same codecs."""

    @abstractmethod
    def work(self, parts: Sequence[Part]) -> None:
        """Do what these need, together. Tells each of them of errors."""


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


class Launches(Together[Ready]):
    """See the module's text. A larger part is launched by itself, so that its payload can leave as soon as it is done. Errors go to a part's ``then``."""

    def nbytes(self, part: Ready) -> int:
        return part.sent.memory.numel()

    def alike(self, one: Ready, other: Ready) -> bool:
        return one.small and other.small and one.codec is other.codec

    def work(self, parts: Sequence[Ready]) -> None:
        device = self._device
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
            device.download([coming(part.sent, part.out, part.then) for part in parts], device.compute.record())
        except Exception as error:
            for part in parts:
                part.then(fault_of(error, device.name))


def _encode(parts: Sequence[Ready], scratch: Sequence[torch.Tensor]) -> None:
    torch._foreach_zero_([part.sent.status for part in parts])
    items = [
        Encoding(part.grad, part.residual, part.rescale, part.stream, part.sent.room, part.sent.status, piece)
        for part, piece in zip(parts, scratch, strict=True)
    ]
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
