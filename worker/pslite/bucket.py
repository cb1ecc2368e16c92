"""One tensor's steps over ps-lite: its parts are pushed, pulled and decoded, one step after another.

``load``, ``encode`` and ``decode`` run in pool threads; answers come in the thread that receives.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.floats import reference_narrow_bf16, reference_widen_bf16
from psgc.errors import RemoteProtocolError
from psgc.layout import Bucket, Layout
from psgc.processes.pool import Pool
from psgc.pslite.byteps.commands import PUSH_PULL, REGISTER, PartPlace, command
from psgc.pslite.byteps.compressor import Compressor
from psgc.pslite.kv import KVWorker
from psgc.pslite.pairs import KVPairs
from psgc.worker.pslite.compression import Compression
from psgc.worker.pslite.numbering import CARRIED_AS
from psgc.worker.session import BucketBuffer
from psgc.worker.tickets import StepTicket

Array = NDArray[Any]


@dataclass(slots=True)
class _Step:
    buffer: BucketBuffer
    ticket: StepTicket
    skip: bool
    array: Array | None = None
    left: int = 0


class PsLiteBucket:
    """See the module's text. It is ready once all workers have sent their first push, and registration, of all parts."""

    def __init__(self, kv: KVWorker, pool: Pool, layout: Layout, bucket: Bucket, places: list[PartPlace], compression: Compression) -> None:
        self._kv, self._pool, self.layout, self.bucket, self._places = kv, pool, layout, bucket, places
        self._wire = np.dtype(CARRIED_AS[bucket.dtype])
        self._command = command(PUSH_PULL, CARRIED_AS[bucket.dtype])
        self._registration = compression.registration if bucket.codec != "none" else None
        maker = compression.maker() if self._registration is not None else None
        self._compressors: list[Compressor | None] = [maker(part.numel) if maker else None for part in bucket.parts]  # raises CodecError
        self._lock = threading.Lock()
        self._unready = len(places)
        self._steps: deque[_Step] = deque()
        self._running = False
        self._ready_calls: list[Callable[[], None]] = []
        self.moved_bytes = 0
        self.steps = 0

    def begin(self) -> None:
        """Tell the servers of every part's size, and of its compressor."""
        for place in self._places:
            zeros = bytes(place.stop - place.start)
            self._kv.push((place.wire_key,), zeros, (len(zeros),), self._command, lambda _, place=place: self._began(place))  # type: ignore[misc]

    def when_ready(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._unready:
                self._ready_calls.append(call)
                return
        call()

    def submit(self, buffer: BucketBuffer, ticket: StepTicket, skip: bool) -> None:
        with self._lock:
            self._steps.append(_Step(buffer, ticket, skip))
        self._next()

    def _began(self, place: PartPlace) -> None:
        if self._registration is None:
            self._part_ready()
            return
        text = self._registration.text()
        self._kv.push((place.wire_key,), text, (len(text),), command(REGISTER, str(self._wire)), lambda _: self._part_ready())

    def _part_ready(self) -> None:
        with self._lock:
            self._unready -= 1
            calls = self._ready_calls if not self._unready else []
        for call in calls:
            call()
        self._next()

    def _next(self) -> None:
        """Start the next step, if none is under way."""
        with self._lock:
            if self._running or self._unready or not self._steps:
                return
            self._running = True
            step = self._steps.popleft()
        self._pool.submit(self.bucket.priority, self._send, step)

    def _send(self, step: _Step) -> None:
        self.steps += 1
        step.array, step.left = step.buffer.load(), len(self._places)
        for index, place in enumerate(self._places):
            payload = self._encoded(step, index)
            self.moved_bytes += len(payload)
            done = lambda _, index=index, place=place: self._pull(step, index, place)  # noqa: E731
            self._kv.push((place.wire_key,), payload, (len(payload),), self._command, done)

    def _encoded(self, step: _Step, index: int) -> memoryview:
        assert step.array is not None
        part, compressor = self.bucket.parts[index], self._compressors[index]
        own = step.array[part.offset : part.offset + part.numel]
        if step.skip:
            own = np.zeros(part.numel, self._wire)
        elif self.bucket.dtype == "bfloat16":
            own = reference_widen_bf16(own)
        else:
            own = np.ascontiguousarray(own, self._wire)
        return own.view(np.uint8).data if compressor is None else memoryview(compressor.encode(own))

    def _pull(self, step: _Step, index: int, place: PartPlace) -> None:
        self._kv.pull(
            (place.wire_key,),
            place.stop - place.start,
            self._command,
            lambda pairs: self._pool.submit(self.bucket.priority, self._take, step, index, pairs),
        )

    def _take(self, step: _Step, index: int, pairs: KVPairs) -> None:
        """Decode one part's sum into the bucket's array."""
        assert step.array is not None
        part, compressor, value = self.bucket.parts[index], self._compressors[index], pairs.value()
        self.moved_bytes += len(value)
        wanted = part.numel * self._wire.itemsize
        if compressor is None and len(value) != wanted:
            name = self.layout.tensor_at(self.bucket, 0)
            raise RemoteProtocolError(f"the sum of tensor {name!r}, part {index}, is {len(value)} bytes; expected {wanted} of {self._wire}")
        total = np.frombuffer(value, self._wire) if compressor is None else compressor.decode(value)
        step.array[part.offset : part.offset + part.numel] = self._result(total, step.array.dtype)
        with self._lock:
            step.left -= 1
            if step.left:
                return
        step.buffer.store(False)
        with self._lock:
            self._running = False
        step.ticket.finish()
        self._next()

    def _result(self, total: Array, dtype: np.dtype[Any]) -> Array:
        if self.layout.mean and total.dtype.kind in "iu":
            total = total // self.layout.workers
        elif self.layout.mean:
            wide: Array = total.astype(np.float64 if total.dtype.itemsize == 8 else np.float32)
            total = (wide / wide.dtype.type(self.layout.workers)).astype(total.dtype)
        if self.bucket.dtype == "bfloat16":
            return reference_narrow_bf16(np.asarray(total, np.float32))
        return total != 0 if self.bucket.dtype == "bool" else total.astype(dtype)
