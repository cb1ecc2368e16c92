"""A server with the semantics of byteps 0.2.5's (server/server.cc): one buffer for a key, pushes and pulls counted whoever sent them. And an adversary.

The adversary makes the race happen that a network can: it handles a late worker's pull of a round only after a quick worker's push of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.pslite import WORKER_GROUP, KVMeta, KVPairs, KVServer, Postoffice
from psgc.pslite.byteps.commands import REGISTER, parse_command
from psgc.pslite.byteps.compressor import Compressor
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.byteps.turns import SECOND_KEY


@dataclass
class Key:
    """stored: the one buffer. payload: with a compressor, the memory that encoded sums are sent from and pushes are decoded in."""

    stored: NDArray[Any]
    ready: bool = False
    asked: list[KVMeta] = field(default_factory=list)
    compressor: Compressor | None = None
    payload: bytes = b""
    pushed: int = 0
    finished: bool = False
    pulled: set[int] = field(default_factory=set)
    waiting: list[KVMeta] = field(default_factory=list)


class OverwritingServer:
    """late: ids of workers whose pulls of the first tensor are delayed, in all of its ``rounds`` but the last. It joins as byteps's programs do, without a
    name."""

    def __init__(self, office: Postoffice, late: Collection[int] = (), rounds: int = 0) -> None:
        self._office, self._late, self._rounds = office, late, rounds
        self._keys: dict[int, Key] = {}
        self._seen: Counter[tuple[int, int, bool]] = Counter()  # pushes (the first ones are of no round) and pulls, by worker and part
        self._held: dict[tuple[int, int], list[tuple[KVMeta, KVPairs]]] = {}  # by part and round
        KVServer(office).set_request_handle(self._adversary)

    @property
    def keys(self) -> list[int]:
        """As tensors and parts number them."""
        start = self._office.server_key_ranges()[self._office.my_rank].start
        return sorted(key - start for key in self._keys)

    def _adversary(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        known = self._keys.get(pairs.keys[0])
        if meta.push and (known is None or not known.ready):
            self._handle(meta, pairs, server)
            return
        start = self._office.server_key_ranges()[self._office.my_rank].start
        part = pairs.keys[0] - start & SECOND_KEY - 1  # whichever of its keys it is
        round_ = self._seen[meta.sender, part, meta.push]
        self._seen[meta.sender, part, meta.push] += 1
        quick = max(self._seen[worker, part, True] for worker in self._office.node_ids(WORKER_GROUP) if worker not in self._late)
        if not meta.push and meta.sender in self._late and part >> 16 == 0 and quick < round_ + 2 and round_ < self._rounds - 1:
            self._held.setdefault((part, round_), []).append((meta, pairs))
            return
        self._handle(meta, pairs, server)
        if meta.push and meta.sender not in self._late:
            for one in self._held.pop((part, round_ - 1), []):
                self._handle(*one, server)

    def _handle(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        workers = len(self._office.node_ids(WORKER_GROUP))
        request, dtype = parse_command(meta.cmd)
        key = self._keys.get(pairs.keys[0])
        if not meta.push:
            assert key is not None and key.ready
            if key.finished and meta.sender not in key.pulled:
                self._answer(key, meta, pairs.keys[0], workers, server)
            else:
                key.waiting.append(meta)
            return
        value = pairs.value()
        if key is None:
            key = self._keys[pairs.keys[0]] = Key(np.zeros(len(value) // np.dtype(dtype).itemsize, dtype))
        if request == REGISTER:
            key.compressor = key.compressor or Registration.parse(bytes(value)).compressor(key.stored.size)
        if request == REGISTER or not key.ready:
            key.asked.append(meta)
            if len(key.asked) == workers:
                key.ready = True
                for one in key.asked:
                    server.response(one)
                key.asked = []
            return
        values = np.frombuffer(value, dtype) if key.compressor is None else key.compressor.decode(value)
        key.payload = bytes(value)
        if key.pushed == 0:
            key.stored[:] = values  # COPY_FIRST, over a sum that somebody may not have
        else:
            key.stored += values
        key.pushed += 1
        server.response(meta)
        if key.pushed == workers:
            key.pushed, key.finished = 0, True
            if key.compressor is not None:
                key.payload = key.compressor.encode(key.stored)
            waiting, key.waiting = key.waiting, []
            for one in waiting:
                if one.sender in key.pulled:
                    key.waiting.append(one)
                else:
                    self._answer(key, one, pairs.keys[0], workers, server)

    def _answer(self, key: Key, meta: KVMeta, number: int, workers: int, server: KVServer) -> None:
        value = key.payload if key.compressor is not None else key.stored.tobytes()
        server.response(meta, KVPairs((number,), memoryview(value), (len(value),)))
        key.pulled.add(meta.sender)
        if len(key.pulled) == workers:
            key.pulled.clear()
            key.finished = False
