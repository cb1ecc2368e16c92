"""A bucket's elements on a device: encoded there, so that only payloads travel to the host, and results decoded there.

Implements psgc.worker.device.DeviceBucket. Everything runs on the engine's ``compute`` stream, in the order in which pool threads ask for it; a slice's
payload is copied down beside it. Owns the payloads that were sent last, on the device, where the residual is committed from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import SchemeState
from psgc.codecs.codec import Stream
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.device.codec import DeviceCodec
from psgc.errors import DeviceError
from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import Coming, Ready, coming
from psgc.torch.device.results import Result
from psgc.torch.device.sent import STATUS_BYTES, Sent
from psgc.worker.device import Bytes, DevicePayload, EncodedThen, bytes_of
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


class HeldPayload:
    """A payload that stays on the device, behind its status. See psgc.worker.device.DevicePayload."""

    def __init__(self, engine: Engine, sent: Sent) -> None:
        self.engine, self.sent = engine, sent

    def to_host(self) -> Bytes:
        found: Bytes = self.engine.fetch(self.sent.memory)
        count = int(found[:STATUS_BYTES].view(np.int64)[1])
        if not 0 <= count <= found.size - STATUS_BYTES:
            raise DeviceError(
                f"{self.engine.name}: a payload of {count} bytes has come from a GPU, where {found.size - STATUS_BYTES} are possible"
            )
        return found[STATUS_BYTES : STATUS_BYTES + count]


class DeviceElements:
    """See the module's text. push, pull: of a pair's one round; None for a scheme with a state (``StateElements``). elements: the step's, flat, on the
    device, for work on ``compute``; the same tensor until the step is stored."""

    def __init__(self, engine: Engine, push: DeviceCodec | None, pull: DeviceCodec | None, elements: Callable[[], torch.Tensor]) -> None:
        self._engine, self._elements = engine, elements
        self._codecs = push, pull
        self._sent: dict[tuple[int, int, int], Sent] = {}
        self._rooms: dict[tuple[int, ...], torch.Tensor] = {}
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
        """``_enqueue``, and copy the payload down."""
        self._enqueue(sent, scratch_bytes, work, reads, writes)
        self._copy_down(sent, out, then)

    def _copy_down(self, sent: Sent, out: Bytes, then: EncodedThen) -> None:
        self._engine.download([coming(sent, out, then)], self._engine.compute.record())

    def _enqueue(
        self, sent: Sent, scratch_bytes: int, work: Callable[[torch.Tensor], None], reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:  # fmt: skip
        """Enqueue ``work``, which is given scratch memory and writes status and payload to ``sent``."""
        engine = self._engine
        if sent.copied is not None:
            engine.compute.wait(sent.copied)

        def whole() -> None:
            sent.status.zero_()
            work(scratch)

        with engine.scratch(scratch_bytes) as scratch:
            engine.compute_on(whole, reads, [*writes, sent.memory, scratch])

    def take(self, index: int, lo: int, hi: int, payload: Bytes) -> None:
        raise NotImplementedError("a pair has one round")

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        pull, kept = self._codec(1), values_of(residual)
        pull.codec.validate(payload, hi - lo)
        result = Result(pull, payload, self._elements()[lo:hi], rescale=rescale)
        if kept is not None:
            result.push, result.sent, result.residual = self._codec(0), self._sent_of(lo, hi).payload, kept
        self._engine.results.apply(result)

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
        added = self._engine.empty(values.size, torch.float32)
        self._engine.put(values, added)
        self._engine.compute_on(lambda: grad.copy_(grad.float().add_(added)), [grad, added], [grad])

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
        sent = self._sent_of(lo, hi, slot)
        self._finish(sent, slot, lo, hi, old, new, rescale, stream)
        self._copy_down(sent, out, then)

    def finish_there(
        self, slot: int, lo: int, hi: int, old: Residual | None, new: Residual | None, rescale: float, stream: Stream, place: int
    ) -> HeldPayload:  # fmt: skip
        sent = self._sent_of(lo, hi, place, self._codec(slot).codec.payload_bound(hi - lo))
        self._finish(sent, slot, lo, hi, old, new, rescale, stream)
        return HeldPayload(self._engine, sent)

    def _finish(
        self, sent: Sent, slot: int, lo: int, hi: int, old: Residual | None, new: Residual | None, rescale: float, stream: Stream
    ) -> None:  # fmt: skip
        codec, kept, left, acc = self._codec(slot), values_of(old), values_of(new), self._elements()[lo:hi]

        def work(scratch: torch.Tensor) -> None:
            codec.finish(acc, hi - lo, 1, kept, left, rescale, stream, sent.room, sent.status, scratch)

        writes = [acc, *([] if left is None else [left])]
        self._enqueue(sent, codec.scratch_bytes(hi - lo), work, [] if kept is None else [kept], writes)

    def tell(self, payloads: Sequence[DevicePayload], then: Callable[[bool | DeviceError], None]) -> None:
        flags: list[bool] = []

        def last(fault: DeviceError | None) -> None:
            then(any(flags) if fault is None else fault)

        def take(first: int, piece: Bytes) -> None:
            flags.append(bool(piece.view(np.int64)[0] & 1))

        told = []
        for number, payload in enumerate(payloads, 1):
            assert isinstance(payload, HeldPayload)
            sent = payload.sent
            thens = last if number == len(payloads) else _nothing
            told.append(Coming(sent.memory[:STATUS_BYTES], take, thens, partial(setattr, sent, "copied")))
        self._engine.download(told, self._engine.compute.record())

    def fold(self, slot: int, lo: int, hi: int, payloads: Sequence[Bytes | DevicePayload]) -> None:
        codec, acc = self._codec(slot), self._elements()[lo:hi]
        for payload in payloads:
            if isinstance(payload, np.ndarray):
                codec.codec.validate(payload, hi - lo)
        for begin in range(0, len(payloads), MAX_PAYLOADS):
            with self._arrived(payloads[begin : begin + MAX_PAYLOADS]) as arrived:
                self._engine.compute_on(
                    lambda arrived=arrived, fresh=begin == 0: codec.fold(arrived, hi - lo, acc, fresh),  # type: ignore[misc]
                    [*arrived, *([acc] if begin else [])],
                    [acc],
                )

    def add_payload(self, slot: int, payload: Bytes | DevicePayload, residual: Residual, numel: int) -> None:
        codec, kept = self._codec(slot), values_of(residual)
        assert kept is not None
        with self._arrived([payload]) as arrived:
            self._engine.compute_on(lambda: codec.fold(arrived, numel, kept, False), [*arrived, kept], [kept])

    @contextmanager
    def _arrived(self, payloads: Sequence[Bytes | DevicePayload]) -> Iterator[list[torch.Tensor]]:
        """The payloads on this device, as ``Engine.incoming`` gives them. Of those that have stayed on a device each is as long as its bound."""
        rooms = [each.sent.room if isinstance(each, HeldPayload) and each.engine is self._engine else None for each in payloads]
        away = [bytes_of(each) for each, room in zip(payloads, rooms, strict=True) if room is None]
        if not away:
            yield [room for room in rooms if room is not None]
            return
        with self._engine.incoming(away) as arrived:
            come = iter(arrived)
            yield [next(come) if room is None else room for room in rooms]

    # what groups on GPUs ask

    def room(self, place: tuple[int, ...], nbytes: int) -> torch.Tensor:
        """Memory for bytes on the device, the same in every step."""
        with self._lock:
            found = self._rooms.get(place)
            if found is None or found.numel() < nbytes:
                found = self._rooms[place] = self._engine.empty(max(nbytes, 16), torch.uint8)
            return found[:nbytes]

    def held(self, payload: Bytes | DevicePayload, bound: int, place: tuple[int, ...]) -> torch.Tensor:
        """The payload on this device, behind its status, in memory of its bound; place: of its own, if it has to be brought there."""
        if isinstance(payload, HeldPayload) and payload.engine is self._engine:
            return payload.sent.memory
        values = bytes_of(payload)
        room = self.room(place, STATUS_BYTES + bound)
        whole = np.concatenate([np.array([0, values.size], np.int64).view(np.uint8), values])
        with self._engine.incoming([whole]) as (arrived,):
            self._engine.compute_on(lambda: room[: whole.size].copy_(arrived), [arrived], [room])
        return room

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

        copied = engine.download([Coming(source, take, then)], engine.compute.record())
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


def _nothing(fault: DeviceError | None) -> None:
    return


def values_of(residual: Residual | None) -> torch.Tensor | None:
    assert residual is None or isinstance(residual, DeviceResidual)
    return None if residual is None else residual.values
