"""Results that have come for parts on a device: those that are small and here together share a copy to the device, and its launches.

Each thread returns when its payload has been read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from psgc.device.codec import Decoding, DeviceCodec
from psgc.torch.device.launches import SMALL_ELEMENTS, Together
from psgc.worker.device import Bytes


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


class Results(Together[Result]):
    """See the module's text."""

    def nbytes(self, part: Result) -> int:
        return part.payload.size

    def alike(self, one: Result, other: Result) -> bool:
        return one.numel <= SMALL_ELEMENTS and other.numel <= SMALL_ELEMENTS and one.pull is other.pull and one.push is other.push

    def apply(self, result: Result) -> None:
        """Commit the residual and decode the payload, or leave both to the thread that does so now. On return the payload has been read. Raises what was
        raised over it, or over those that shared its launches."""
        self.put(result)
        result.done.wait()
        self._device.runtime.received(result)
        if result.error is not None:
            raise result.error

    def work(self, parts: Sequence[Result]) -> None:
        device, results = self._device, parts
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


def _used(codec: DeviceCodec, items: Sequence[Decoding]) -> None:
    if len(items) > 1:
        codec.decode_many(items)
    else:
        codec.decode_one(items[0])
