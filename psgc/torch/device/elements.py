"""A bucket's elements on a device: encoded there, so that only payloads travel to the host, and results decoded there.

Implements psgc.worker.device.DeviceBucket. Everything runs on the engine's ``compute`` stream, in the order in which pool threads ask for it; a slice's
payload is copied down beside it. Owns the payloads that were sent last, on the device, where the residual is committed from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import SchemeState
from psgc.codecs.codec import Stream
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.errors import DeviceError
from psgc.torch.device.codec import DeviceCodec
from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import Coming, Ready, coming
from psgc.torch.device.sent import STATUS_BYTES, Sent
from psgc.worker.device import Bytes, EncodedThen
from psgc.worker.residuals.residual import F32, Residual


class DeviceResidual:
    """A residual on the device. See psgc.worker.residuals.residual.Residual; each method waits for the device."""

    def __init__(self, engine: Engine, numel: int) -> None:
        self._engine = engine
        self.values = values = engine.empty(numel, torch.float32)
        engine.compute_on(values.zero_, [], [values])

    @property
    def bytes(self) -> Bytes:
        return self.load().view(np.uint8)

    def load(self) -> F32:
        values: F32 = self._engine.fetch(self.values)
        return values

    def keep(self, values: F32) -> None:
        self._engine.put(values, self.values)

    def keep_bytes(self, saved: Bytes) -> None:
        self.keep(np.ascontiguousarray(saved).view(np.float32))


class DeviceElements:
    """See the module's text. push, pull: of a pair's one round; None for a scheme with a state (``StateElements``). elements: the step's, flat, on the
    device, for work on ``compute``; the same tensor until the step is stored."""

    def __init__(self, engine: Engine, push: DeviceCodec | None, pull: DeviceCodec | None, elements: Callable[[], torch.Tensor]) -> None:
        self._engine, self._elements = engine, elements
        self._codecs = push, pull
        self._sent: dict[tuple[int, int, int], Sent] = {}
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        return self._engine

    def slice(self, lo: int, hi: int) -> torch.Tensor:
        """The step's elements there, for work that ``compute`` is ordered with."""
        return self._elements()[lo:hi]

    def residual(self, numel: int) -> Residual:
        return DeviceResidual(self._engine, numel)

    def encode(
        self, index: int, lo: int, hi: int, residual: Residual | None, rescale: float, stream: Stream, out: Bytes, then: EncodedThen
    ) -> None:
        grad, sent = self._elements()[lo:hi], self._sent_of(lo, hi)
        self._engine.launches.put(Ready(self._codec(0), grad, values_of(residual), rescale, stream, sent, out, then))

    def _encode(
        self, sent: Sent, scratch_bytes: int, work: Callable[[torch.Tensor], None], reads: list[torch.Tensor], writes: list[torch.Tensor],
        out: Bytes, then: EncodedThen,
    ) -> None:  # fmt: skip
        """Enqueue ``work``, which is given scratch memory and writes status and payload to ``sent``; then copy them down."""
        engine = self._engine
        if sent.copied is not None:
            engine.compute.wait(sent.copied)

        def whole() -> None:
            sent.status.zero_()
            work(scratch)

        with engine.scratch(scratch_bytes) as scratch:
            engine.compute_on(whole, reads, [*writes, sent.memory, scratch])
        engine.download(coming(sent, out, then), engine.compute.record())

    def take(self, index: int, lo: int, hi: int, payload: Bytes) -> None:
        raise NotImplementedError("a pair has one round")

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        pull, target = self._codec(1), self._elements()[lo:hi]
        pull.codec.validate(payload, hi - lo)
        self._commit(lo, hi, residual, rescale)
        with self._engine.incoming([payload]) as (arrived,):
            self._engine.compute_on(lambda: pull.decode(arrived, hi - lo, target), [arrived], [target])

    def _commit(self, lo: int, hi: int, residual: Residual | None, rescale: float) -> None:
        push, kept, gradient = self._codec(0), values_of(residual), self._elements()[lo:hi]
        if kept is not None:
            sent = self._sent_of(lo, hi).payload
            self._engine.compute_on(lambda: push.commit(sent, hi - lo, gradient, kept, rescale), [sent, gradient, kept], [kept])

    def add_back(self, lo: int, hi: int, residual: Residual) -> None:
        push, kept, sent = self._codec(0), values_of(residual), self._sent_of(lo, hi).payload
        assert kept is not None
        self._engine.compute_on(lambda: push.fold([sent], hi - lo, kept, False), [sent, kept], [kept])

    def add(self, lo: int, values: F32) -> None:
        grad = self._elements()[lo : lo + values.size]
        owed = self._engine.empty(values.size, torch.float32)
        self._engine.put(values, owed)
        self._engine.compute_on(lambda: grad.copy_(grad.float().add_(owed)), [grad, owed], [grad])

    def fill(self, lo: int, hi: int, value: float) -> None:
        target = self._elements()[lo:hi]
        self._engine.compute_on(lambda: target.fill_(value), [], [target])

    def nonfinite(self, lo: int, hi: int) -> int | None:
        grad = self._elements()[lo:hi]
        found = self._engine.fetch(grad)
        values: NDArray[Any] = found.view(np.uint16) if grad.dtype == torch.bfloat16 else found
        wrong = (values & 0x7F80) == 0x7F80 if grad.dtype == torch.bfloat16 else ~np.isfinite(values)
        return int(wrong.argmax()) if wrong.any() else None

    def finish(
        self, slot: int, lo: int, hi: int, old: Residual | None, new: Residual | None, rescale: float, stream: Stream, out: Bytes,
        then: EncodedThen,
    ) -> None:  # fmt: skip
        codec, kept, left = self._codec(slot), values_of(old), values_of(new)
        acc, sent = self._elements()[lo:hi], self._sent_of(lo, hi, slot)

        def work(scratch: torch.Tensor) -> None:
            codec.finish(acc, hi - lo, 1, kept, left, rescale, stream, sent.room, sent.status, scratch)

        writes = [acc, *([] if left is None else [left])]
        self._encode(sent, codec.scratch_bytes(hi - lo), work, [] if kept is None else [kept], writes, out, then)

    def fold(self, slot: int, lo: int, hi: int, payloads: Sequence[Bytes]) -> None:
        codec, acc = self._codec(slot), self._elements()[lo:hi]
        for payload in payloads:
            codec.codec.validate(payload, hi - lo)
        for begin in range(0, len(payloads), MAX_PAYLOADS):
            with self._engine.incoming(payloads[begin : begin + MAX_PAYLOADS]) as arrived:
                self._engine.compute_on(
                    lambda arrived=arrived, fresh=begin == 0: codec.fold(arrived, hi - lo, acc, fresh),  # type: ignore[misc]
                    [*arrived, *([acc] if begin else [])],
                    [acc],
                )

    def add_payload(self, slot: int, payload: Bytes, residual: Residual, numel: int) -> None:
        codec, kept = self._codec(slot), values_of(residual)
        assert kept is not None
        with self._engine.incoming([payload]) as arrived:
            self._engine.compute_on(lambda: codec.fold(arrived, numel, kept, False), [*arrived, kept], [kept])

    def divide(self, lo: int, hi: int, divisor: int) -> None:
        target = self._elements()[lo:hi]
        by = self._engine.empty(1, torch.float32)

        def work() -> None:
            by.fill_(divisor)
            target.div_(by.expand_as(target))  # by a number, torch would multiply with its reciprocal

        self._engine.compute_on(work, [target], [target, by])

    def to_host(self, lo: int, hi: int, target: NDArray[Any]) -> None:
        source, engine = self._elements()[lo:hi].view(torch.uint8), self._engine
        whole, done, faults = target.view(np.uint8), threading.Event(), list[DeviceError]()

        def take(first: int, piece: Bytes) -> None:
            whole[first : first + piece.size] = piece

        def then(fault: DeviceError | None) -> None:
            faults.extend([] if fault is None else [fault])
            done.set()

        copied = engine.download(Coming(source, take, then), engine.compute.record())
        done.wait()
        engine.compute.wait(copied)
        if faults:
            raise faults[0]

    def from_host(self, lo: int, hi: int, values: NDArray[Any]) -> None:
        target = self._elements()[lo:hi]
        with self._engine.incoming([values.view(np.uint8)]) as (arrived,):
            self._engine.compute_on(lambda: target.copy_(arrived.view(target.dtype)), [arrived], [target])

    def state_to_host(self, lo: int, hi: int, state: SchemeState) -> None:
        return  # a pair keeps a residual alone

    def state_from_host(self, lo: int, hi: int, state: SchemeState) -> None:
        return

    def _codec(self, slot: int) -> DeviceCodec:
        found = self._codecs[min(slot, 1)]
        assert found is not None, "a scheme with a state has no codecs of its own here"
        return found

    def _sent_of(self, lo: int, hi: int, slot: int = 0, bound: int | None = None) -> Sent:
        """bound: most bytes of a payload there, if the slot's codec does not say."""
        with self._lock:
            found = self._sent.get((lo, hi, slot))
            if found is None:
                most = self._codec(slot).codec.payload_bound(hi - lo) if bound is None else bound
                found = self._sent[lo, hi, slot] = Sent(self._engine.empty(STATUS_BYTES + most, torch.uint8))
            return found


def values_of(residual: Residual | None) -> torch.Tensor | None:
    assert residual is None or isinstance(residual, DeviceResidual)
    return None if residual is None else residual.values
