"""BytePS's servers as programs see them: what a rank contributes to a key is pushed, and once the server has accepted it, the sum is pulled.

Knows keys and bytes, not tensors. A part has one key on the wire, or two, which its rounds take in turn (``psgc.pslite.byteps.turns``). Invariant: a key is
pushed when the servers know it from all workers, and, since the executor begins a part's next round when it has taken the last one's sum, never before this
worker has pulled the round before. Calls come from any thread, answers in the thread that receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from psgc.errors import LocalProtocolError
from psgc.pslite.byteps.commands import PUSH_PULL, REGISTER, command
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.kv import KVWorker
from psgc.worker.contributions import Contribution


@dataclass(slots=True)
class WireKey:
    """One of a part's keys. registration: what the server is told of its compressor; unready: messages that all workers have not been answered yet,
    None: nothing has been sent; waiting: the contribution that leaves when there are none."""

    key: int
    registration: Registration | None
    unready: int | None = None
    waiting: Contribution | None = None


@dataclass(slots=True)
class _Part:
    """nbytes: of the part; dtype: on the wire; rounds: that have begun; moved_bytes: payloads, both ways."""

    nbytes: int
    dtype: str
    keys: Sequence[WireKey]
    rounds: int = 0
    moved_bytes: int = 0
    calls: list[Callable[[], None]] = field(default_factory=list)  # when its keys are ready


class PsLiteServers:
    """Implements ``Servers``, by the key that a layout has of a part: the first one on the wire."""

    def __init__(self, kv: KVWorker) -> None:
        self._kv = kv
        self._lock = threading.Lock()
        self._parts: dict[int, _Part] = {}

    def add(self, nbytes: int, dtype: str, keys: Sequence[WireKey], turns: int) -> None:
        """Tell the servers of a part: of its size, and of its compressors. turns: of how many of its keys; of the others, when their first round begins."""
        part = self._parts[keys[0].key] = _Part(nbytes, dtype, keys)
        for key in keys[:turns]:
            self._begin(part, key)

    def when_ready(self, parts: Sequence[int], call: Callable[[], None]) -> None:
        """Call once the servers know from all workers of each key of these parts of which this worker has told them."""
        with self._lock:
            late = next((part for part in map(self._parts.__getitem__, parts) if any(key.unready for key in part.keys)), None)
            if late is not None:
                late.calls.append(lambda: self.when_ready(parts, call))
                return
        call()

    def moved_bytes(self, parts: Iterable[int]) -> int:
        """Payloads of these parts, both ways."""
        return sum(self._parts[key].moved_bytes for key in parts)

    def slot(self, key: int) -> NoReturn:
        raise LocalProtocolError("payloads for ps-lite leave from where they lie")

    def in_place(self, key: int) -> bool:
        """Sums come into memory of ps-lite's."""
        return False

    def contribute(self, contribution: Contribution) -> None:
        part = self._parts[contribution.key]
        with self._lock:
            key = part.keys[part.rounds % len(part.keys)]
            part.rounds += 1
            ready, fresh = key.unready == 0, key.unready is None
            if not ready:
                key.waiting = contribution
        if ready:
            self._push(part, key, contribution)
        elif fresh:
            self._begin(part, key)

    def taken(self, key: int) -> None:
        """Sums are of this rank alone."""

    def _begin(self, part: _Part, key: WireKey) -> None:
        key.unready = 1
        zeros = bytes(part.nbytes)
        self._kv.push((key.key,), zeros, (len(zeros),), command(PUSH_PULL, part.dtype), lambda _: self._register(part, key))

    def _register(self, part: _Part, key: WireKey) -> None:
        if key.registration is None:
            self._ready(part, key)
            return
        text = key.registration.text()
        self._kv.push((key.key,), text, (len(text),), command(REGISTER, part.dtype), lambda _: self._ready(part, key))

    def _ready(self, part: _Part, key: WireKey) -> None:
        with self._lock:
            key.unready = 0
            waiting, key.waiting = key.waiting, None
            calls: list[Callable[[], None]] = []
            if not any(one.unready for one in part.keys):
                calls, part.calls = part.calls, []
        for call in calls:
            call()
        if waiting is not None:
            self._push(part, key, waiting)

    def _push(self, part: _Part, key: WireKey, contribution: Contribution) -> None:
        payload = memoryview(contribution.payload).cast("B")
        part.moved_bytes += len(payload)
        over = lambda _: self._pull(part, key, contribution)  # noqa: E731
        self._kv.push((key.key,), payload, (len(payload),), command(PUSH_PULL, part.dtype), over)

    def _pull(self, part: _Part, key: WireKey, contribution: Contribution) -> None:
        def came(value: memoryview) -> None:
            part.moved_bytes += len(value)
            contribution.then(0, value)

        self._kv.pull((key.key,), part.nbytes, command(PUSH_PULL, part.dtype), lambda pairs: came(pairs.value()))
