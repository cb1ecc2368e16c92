"""One tensor's steps over ps-lite: its parts are pushed, pulled and decoded, one step after another. Each part takes its keys in turn (``turns``).

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

    def __init__(
        self, kv: KVWorker, pool: Pool, layout: Layout, bucket: Bucket, places: list[PartPlace], keys: list[tuple[int, ...]],
        compression: Compression,
    ) -> None:  # fmt: skip
        self._kv, self._pool, self.layout, self.bucket, self._places, self._keys = kv, pool, layout, bucket, places, keys
        self._turns = max(map(len, keys))
        self._wire = np.dtype(CARRIED_AS[bucket.dtype])
        self._command = command(PUSH_PULL, CARRIED_AS[bucket.dtype])
        self._compression = compression if bucket.codec != "none" else None
        self._compressors: list[Compressor | None] = [
            compression.compressor(part.numel, len(own)) if bucket.codec != "none" else None
            for part, own in zip(bucket.parts, keys, strict=True)
        ]  # raises CodecError
        self._lock = threading.Lock()
        self._begun = 0  # turns whose keys the servers have been told of
        self._unready = 0
        self._steps: deque[_Step] = deque()
        self._running = False
        self._ready_calls: list[Callable[[], None]] = []
        self.moved_bytes = 0
        self.steps = 0

    def begin(self) -> None:
        """Tell the servers of every part's size, and of its compressor. Few tensors are broadcast
        twice: the second keys of a broadcast's parts wait for that."""
        self._begin(1 if self.layout.kind == "broadcast" else self._turns)

    def _begin(self, turns: int) -> None:
        with self._lock:
            fresh = [
                (place, own[turn], turn)
                for turn in range(self._begun, turns)
                for place, own in zip(self._places, self._keys, strict=True)
                if turn < len(own)
            ]
            self._begun, self._unready = turns, self._unready + len(fresh)
        for place, key, turn in fresh:
            zeros = bytes(place.stop - place.start)
            self._kv.push((key,), zeros, (len(zeros),), self._command, lambda _, key=key, turn=turn: self._began(key, turn))  # type: ignore[misc]

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

    def _began(self, key: int, turn: int) -> None:
        registration = self._compression.registration_of(turn) if self._compression is not None else None
        if registration is None:
            self._key_ready()
            return
        text = registration.text()
        self._kv.push((key,), text, (len(text),), command(REGISTER, str(self._wire)), lambda _: self._key_ready())

    def _key_ready(self) -> None:
        with self._lock:
            self._unready -= 1
            calls: list[Callable[[], None]] = []
            if not self._unready:
                calls, self._ready_calls = self._ready_calls, []
        for call in calls:
            call()
        self._next()

    def _next(self) -> None:
        """Start the next step, if none is under way."""
        with self._lock:
            if self._running or self._unready or not self._steps:
                return
            begun = not self.steps or self._begun == self._turns
            if begun:
                self._running = True
                step = self._steps.popleft()
        if not begun:
            self._begin(self._turns)
            return
        self._pool.submit(self.bucket.priority, self._send, step)

    def _send(self, step: _Step) -> None:
        turn, self.steps = self.steps, self.steps + 1
        step.array, step.left = step.buffer.load(), len(self._places)
        for index, own in enumerate(self._keys):
            key = own[turn % len(own)]
            payload = self._encoded(step, index)
            self.moved_bytes += len(payload)
            done = lambda _, index=index, key=key: self._pull(step, index, key)  # noqa: E731
            self._kv.push((key,), payload, (len(payload),), self._command, done)

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

    def _pull(self, step: _Step, index: int, key: int) -> None:
        place = self._places[index]
        self._kv.pull(
            (key,),
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
