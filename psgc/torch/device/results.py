"""Results that have come for parts on a device: those that are small and here together share a copy to the device, and its launches.

No result waits for others. One thread at a time has results decoded; what other threads bring meanwhile waits for it, and is decoded together if it is
small, follows each other and has the same codecs. Each thread returns when its payload has been read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from psgc.torch.device.codec import Decoding, DeviceCodec
from psgc.torch.device.launches import SMALL_ELEMENTS, TOGETHER_BYTES, aligned
from psgc.torch.device.runtime import Runtime
from psgc.worker.device import Bytes


class Device(Protocol):
    """What decoding asks of the engine."""

    runtime: Runtime

    def incoming(self, payloads: Sequence[Bytes]) -> AbstractContextManager[list[torch.Tensor]]: ...

    def compute_on(self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None: ...


@dataclass(slots=True, eq=False)
class Result:
    """A part's result. target: what was encoded, and becomes the result. push, sent, residual: what this rank sent, by which the residual is committed
    first; None where there is none. done: set once the payload has been read, or with an error."""

    pull: DeviceCodec
    payload: Bytes
    target: torch.Tensor
    push: DeviceCodec | None = None
    sent: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    rescale: float = 1.0
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def numel(self) -> int:
        return self.target.numel()


class Results:
    """See the module's text."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: of a staging slot, in which the payloads that share a copy have to fit."""
        self._device, self._most_bytes = device, min(slot_bytes, TOGETHER_BYTES)
        self._waiting: deque[Result] = deque()
        self._decoding = threading.Lock()
        self.copied = self.parts = 0  # copies to the device so far, and the results in them

    def apply(self, result: Result) -> None:
        """Commit the residual and decode the payload, or leave both to the thread that does so now. On return the payload has been read. Raises what was
        raised over it, or over those that shared its launches."""
        self._device.runtime.handed(result)
        self._waiting.append(result)
        while self._waiting and self._decoding.acquire(blocking=False):
            try:
                if results := self._next():
                    self._decode(results)
            finally:
                self._decoding.release()
        result.done.wait()
        self._device.runtime.received(result)
        if result.error is not None:
            raise result.error

    def _next(self) -> list[Result]:
        """The results that are decoded next. Called by the thread that decodes."""
        found: list[Result] = []
        total = 0
        while self._waiting:
            result = self._waiting[0]
            total += aligned(result.payload.size)
            if found and not (_alike(found[0], result) and total <= self._most_bytes):
                break
            found.append(self._waiting.popleft())
        return found

    def _decode(self, results: Sequence[Result]) -> None:
        device = self._device
        self.copied, self.parts = self.copied + 1, self.parts + len(results)
        for result in results:
            device.runtime.received(result)
        try:
            self._commit(results)
            pull, targets = results[0].pull, [result.target for result in results]
            with device.incoming([result.payload for result in results]) as arrived:
                items = [Decoding([payload], result.numel, result.target) for payload, result in zip(arrived, results, strict=True)]
                device.compute_on(lambda: _used(pull, items), arrived, targets)
        except BaseException as error:
            for result in results:
                result.error = error
        for result in results:
            device.runtime.handed(result)
            result.done.set()

    def _commit(self, results: Sequence[Result]) -> None:
        push, items = results[0].push, []
        for result in results:
            if result.sent is not None and result.residual is not None:
                items.append(Decoding([result.sent], result.numel, result.residual, "commit", result.target, result.rescale))
        if push is not None and items:
            reads = [tensor for item in items for tensor in (*item.payloads, item.target, item.grad) if tensor is not None]
            self._device.compute_on(lambda: _used(push, items), reads, [item.target for item in items])


def _alike(one: Result, other: Result) -> bool:
    """Whether the two may share launches."""
    return one.numel <= SMALL_ELEMENTS and other.numel <= SMALL_ELEMENTS and one.pull is other.pull and one.push is other.push


def _used(codec: DeviceCodec, items: Sequence[Decoding]) -> None:
    if len(items) > 1:
        codec.decode_many(items)
        return
    ((payload,), numel, target, grad, rescale) = (items[0].payloads, items[0].numel, items[0].target, items[0].grad, items[0].rescale)
    if grad is None:
        codec.decode(payload, numel, target)
    else:
        codec.commit(payload, numel, grad, target, rescale)
