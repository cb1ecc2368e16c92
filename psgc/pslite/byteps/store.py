"""The state of a BytePS server: for each key, sums of the workers' pushes, one round after another, and when requests are answered. Pure.

BytePS's own server counts pushes and has one buffer for a key: a worker that is quick overwrites a round's sum before a slow one has pulled it. Here a worker's
n-th push and its n-th pull of a key belong to round n, whatever others do, and a sum stays until every worker has pulled it. Pushes are added in
the order of the workers' ids, so that a sum does not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import CodecError, PayloadError, RemoteProtocolError
from psgc.pslite.byteps.commands import REGISTER, parse_command
from psgc.pslite.byteps.compressor import Compressor
from psgc.pslite.byteps.registration import MAX_BYTES, Registration
from psgc.pslite.pairs import KVMeta, KVPairs

MAX_KEYS: Final = 1 << 18
MAX_STORED_BYTES: Final = 64 << 30  # of all keys' values
MAX_ROUNDS_AHEAD: Final = 4  # a worker that pulls what it pushes is one ahead of another at most
Answer = tuple[KVMeta, KVPairs]


@dataclass(slots=True)
class _Round:
    """One step of a key. total: the sum of the first ``added`` workers' values. result: what is pulled, once all have pushed."""

    began: float
    waiting: dict[int, NDArray[Any]] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)
    total: NDArray[Any] | None = None
    added: int = 0
    result: memoryview | None = None
    pulls: list[KVMeta] = field(default_factory=list)
    pulled: int = 0


@dataclass(slots=True)
class _Key:
    """size: bytes of its value. asked: the workers' initial pushes, or their registrations, which are answered together."""

    wire_key: int
    dtype: str
    size: int
    began: float
    asked: list[KVMeta] = field(default_factory=list)
    ready: bool = False
    registration: Registration | None = None
    registering: list[KVMeta] = field(default_factory=list)
    compressor: Compressor | None = None
    pushes: dict[int, int] = field(default_factory=dict)  # by worker
    pulls: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, _Round] = field(default_factory=dict)


class Store:
    """workers: their node ids. own_keys: the range of this server's keys. ``handle`` raises RemoteProtocolError for a request that no worker of the job
    would send; ps-lite has no answer that would say so, so the server's part in the job ends with it."""

    def __init__(self, workers: Sequence[int], own_keys: range) -> None:
        self._workers, self._own = tuple(sorted(workers)), own_keys
        self._keys: dict[int, _Key] = {}
        self._stored_bytes = 0
        self.sums = 0  # rounds that are complete

    def handle(self, meta: KVMeta, pairs: KVPairs, now: float) -> list[Answer]:
        """Handle a request. Returns the answers that can be sent now."""
        if meta.sender not in self._workers:
            raise RemoteProtocolError(f"a request of node {meta.sender}, which is no worker of this job")
        if len(pairs.keys) != 1 or pairs.keys[0] not in self._own:
            raise RemoteProtocolError(
                f"a request of keys {list(pairs.keys)[:4]}; expected one key of {self._own.start} to {self._own.stop - 1}"
            )
        request, dtype = parse_command(meta.cmd)
        wire_key = pairs.keys[0]
        key = self._keys.get(wire_key)
        if not meta.push:
            return self._pull(self._known(key, wire_key), meta, now)
        value = pairs.value()
        if request == REGISTER:
            return self._register(self._known(key, wire_key), meta, value, now)
        if key is None or not key.ready:
            return self._begin(key, wire_key, meta, dtype, len(value), now)
        return self._push(key, meta, dtype, value, now)

    def stalled(self, now: float, after_s: float) -> list[str]:
        """The rounds and the initial pushes of keys that have waited for some workers for longer than ``after_s``."""
        found = []
        for key in self._keys.values():
            if not key.ready and now - key.began > after_s:
                found.append(f"{self._named(key)} waits for the first push of worker {self._missing({m.sender for m in key.asked})}")
            elif key.registering and now - key.began > after_s:
                found.append(
                    f"{self._named(key)} waits for the registration of worker {self._missing({m.sender for m in key.registering})}"
                )
            for number, one in key.rounds.items():
                if one.result is None and now - one.began > after_s:
                    found.append(f"{self._named(key)}, round {number}, waits for the push of worker {self._missing(one.pushed)}")
        return found

    def _missing(self, came: set[int]) -> str:
        return ", ".join(str(worker) for worker in self._workers if worker not in came)

    def _named(self, key: _Key) -> str:
        own = key.wire_key - self._own.start
        return f"key {own} (tensor {own >> 16}, part {own & 0xFFFF})"

    def _known(self, key: _Key | None, wire_key: int) -> _Key:
        if key is None or not key.ready:
            raise RemoteProtocolError(f"a request of key {wire_key - self._own.start}, which not all workers have pushed first")
        return key

    def _begin(self, key: _Key | None, wire_key: int, meta: KVMeta, dtype: str, size: int, now: float) -> list[Answer]:
        """Handle a worker's first push of a key. It sets the key's size; its contents are ignored. Answers are sent when all have come."""
        if key is None:
            if len(self._keys) >= MAX_KEYS or self._stored_bytes + size > MAX_STORED_BYTES:
                raise RemoteProtocolError(
                    f"key {len(self._keys) + 1} of {size} bytes; at most {MAX_KEYS} keys, and {MAX_STORED_BYTES >> 30} GiB in all, are kept"
                )
            if not size or size % np.dtype(dtype).itemsize:
                raise RemoteProtocolError(
                    f"a first push of {size} bytes of {dtype}; expected a multiple of {np.dtype(dtype).itemsize} above 0"
                )
            key = self._keys[wire_key] = _Key(wire_key, dtype, size, now)
            self._stored_bytes += size
        if (key.dtype, key.size) != (dtype, size):
            raise RemoteProtocolError(
                f"{self._named(key)} is {size} bytes of {dtype} on worker {meta.sender}, but {key.size} of {key.dtype} on worker "
                f"{key.asked[0].sender}; all workers must declare the same tensors in the same order"
            )
        key.asked.append(meta)
        if len({one.sender for one in key.asked}) < len(self._workers):
            return []
        key.ready = True
        asked, key.asked = key.asked, []
        return [(one, KVPairs()) for one in asked]

    def _register(self, key: _Key, meta: KVMeta, text: memoryview, now: float) -> list[Answer]:
        registration = Registration.parse(bytes(text[: MAX_BYTES + 1]))
        if key.registration not in (None, registration):
            assert key.registration is not None
            raise RemoteProtocolError(
                f"{self._named(key)} is compressed as {registration.text()!r} by worker {meta.sender}, but as {key.registration.text()!r} by another; "
                f"give all workers the same settings"
            )
        if key.compressor is None:
            if key.dtype != "float32":
                raise RemoteProtocolError(f"{self._named(key)} is {key.dtype}; psgc's server compresses float32 only")
            try:
                key.compressor = registration.compressor(key.size // 4)
            except CodecError as error:
                raise RemoteProtocolError(f"{self._named(key)}: {error}") from None
            key.registration, key.began = registration, now
        key.registering.append(meta)
        if len({one.sender for one in key.registering}) < len(self._workers):
            return []
        asked, key.registering = key.registering, []
        return [(one, KVPairs()) for one in asked]

    def _push(self, key: _Key, meta: KVMeta, dtype: str, value: memoryview, now: float) -> list[Answer]:
        number = key.pushes.get(meta.sender, 0)
        if number - min(key.pulls.get(worker, 0) for worker in self._workers) >= MAX_ROUNDS_AHEAD:
            raise RemoteProtocolError(
                f"push {number + 1} of {self._named(key)}, which some worker has pulled {MAX_ROUNDS_AHEAD} times fewer; expected a pull of each push"
            )
        one = key.rounds.setdefault(number, _Round(now))
        one.waiting[meta.sender] = self._decoded(key, dtype, value)
        one.pushed.add(meta.sender)
        key.pushes[meta.sender] = number + 1
        while one.added < len(self._workers) and self._workers[one.added] in one.waiting:
            values = one.waiting.pop(self._workers[one.added])
            if one.added == 0:
                one.total = values if key.compressor is not None else values.copy()
            else:
                assert one.total is not None
                with np.errstate(all="ignore"):  # infinities are the workers' affair
                    np.add(one.total, values, out=one.total)
            one.added += 1
        answers: list[Answer] = [(meta, KVPairs())]
        if one.added == len(self._workers):
            assert one.total is not None
            total, one.total = one.total, None
            one.result = total.view(np.uint8).data if key.compressor is None else memoryview(key.compressor.encode(total))
            self.sums += 1
            pulls, one.pulls = one.pulls, []
            answers += [self._answer(key, number, one, pull) for pull in pulls]
        return answers

    def _decoded(self, key: _Key, dtype: str, value: memoryview) -> NDArray[Any]:
        if dtype != key.dtype or len(value) > key.size or (key.compressor is None and len(value) != key.size):
            raise RemoteProtocolError(
                f"a push of {len(value)} bytes of {dtype} to {self._named(key)}, which has {key.size} bytes of {key.dtype}"
            )
        if key.compressor is None:
            return np.frombuffer(value, np.dtype(key.dtype).newbyteorder("<"))
        try:
            return key.compressor.decode(value)
        except PayloadError as error:
            raise RemoteProtocolError(f"{self._named(key)}: {error}") from None

    def _pull(self, key: _Key, meta: KVMeta, now: float) -> list[Answer]:
        number = key.pulls.get(meta.sender, 0)
        if number > key.pushes.get(meta.sender, 0):
            raise RemoteProtocolError(
                f"pull {number + 1} of {self._named(key)} after {key.pushes.get(meta.sender, 0)} pushes; expected a push before each pull"
            )
        key.pulls[meta.sender] = number + 1
        one = key.rounds.setdefault(number, _Round(now))
        if one.result is None:
            one.pulls.append(meta)
            return []
        return [self._answer(key, number, one, meta)]

    def _answer(self, key: _Key, number: int, one: _Round, pull: KVMeta) -> Answer:
        """Drop the round once all workers have its sum."""
        one.pulled += 1
        if one.pulled == len(self._workers):
            del key.rounds[number]
        assert one.result is not None
        return pull, KVPairs((key.wire_key,), one.result, (len(one.result),))
