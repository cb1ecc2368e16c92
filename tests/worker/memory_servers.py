"""Servers of one process, without connections: the real state of each key, the real sums, and nothing between them and the ranks' executors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from psgc.layout import Layout
from psgc.server.engine import Engine, Folded, KeyWork
from psgc.server.state import specs_of
from psgc.server.step import Action, Commit, Fold, KeyState, Lend, Reply
from psgc.server.store import KeyShape, Store
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place
from psgc.wire.frames import Flag, Header, Kind
from psgc.worker.contributions import Contribution


class MemoryServers:
    """All servers of a job. fail: ends it with a line."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.states: dict[int, KeyState] = {}
        self.pushes: list[tuple[int, int, int]] = []  # rank, key, payload bytes
        self._works: dict[int, KeyWork] = {}
        self._store, self._arena = Store(), Arena("test-push")
        self._slots: dict[tuple[int, int], Place] = {}
        self._bounds: dict[int, int] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._awaited: dict[tuple[int, int], Contribution] = {}
        self._lock = threading.RLock()
        self._fail = fail
        self._engine = Engine(1, self._folded, lambda error: fail(f"server: {error}"))

    def of(self, rank: int) -> _Servers:
        """What one rank sees of them."""
        return _Servers(self, rank)

    def add(self, layout: Layout, servers: int) -> None:
        specs = {spec.key: spec for server in range(servers) for spec in specs_of(layout, server, layout.workers)[0]}
        for bucket, part in layout.served.parts():
            if part.key not in self.states:
                spec, pair = specs[part.key], layout.scheme(bucket).rounds(part.numel)[0].pair
                self.states[part.key] = KeyState(spec)
                self._works[part.key] = KeyWork(spec, pair, bucket.index, part.offset, False, layout.number, layout.seed)
                self._store.add_keys([KeyShape(part.key, pair.pull.payload_bound(spec.numel), spec.numel if spec.pull_feedback else 0)])
                self._bounds[part.key] = pair.push.payload_bound(part.numel)

    def slot(self, rank: int, key: int) -> Place:
        with self._lock:
            if (rank, key) not in self._slots:
                self._slots[rank, key] = self._arena.cut(self._bounds[key])
            return self._slots[rank, key]

    def contribute(self, rank: int, said: Contribution) -> None:
        with self._lock:
            step = self._steps[rank, said.key] = self._steps.get((rank, said.key), 0) + 1
            self._awaited[rank, said.key] = said
            nbytes = 0 if said.nonfinite else said.payload_bytes
            self.pushes.append((rank, said.key, nbytes))
            flags = Flag.WANT_RESULT | Flag.NONFINITE * said.nonfinite | Flag.PREVIOUS_SKIPPED * said.previous_skipped
            codec, rescale = self.states[said.key].spec.push_codec, float(np.float32(said.rescale))
            header = Header(Kind.PUSH, flags, key=said.key, step=step, codec=codec, sender=rank, rescale=rescale, payload_bytes=nbytes)
            try:
                actions = self.states[said.key].contribute(rank, header, self._slots[rank, said.key].bytes[:nbytes])
            except Exception as error:
                self._fail(f"server: {error}")
                return
            self._apply(said.key, actions)

    def residual(self, key: int, add_back: bool = False) -> Any:
        """A copy of what the key's server keeps, in units of the mean, with the last result added back if need be."""
        with self._lock:
            step = self.states[key].step - 1
            flags = Flag.PREVIOUS_SKIPPED if add_back else Flag.NONE
            (lend,) = self.states[key].residual(0, Header(Kind.RESIDUAL, flags, key=key, step=step))
            assert isinstance(lend, Lend)
            kept = self._engine.lend(self._works[key], self._store.keys[key], step, lend.add_back)
            return kept.copy() * np.float32(lend.header.rescale)

    def close(self) -> None:
        self._engine.close()
        self._store.close()
        self._arena.close()

    def _folded(self, folded: Folded) -> None:
        key, *outcome = folded
        with self._lock:
            self._apply(key, self.states[key].folded(*outcome))

    def _apply(self, key: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Fold):
                self._engine.start(action, self._works[key], self._store.keys[key])
            elif isinstance(action, Commit):
                self._store.keys[key].commit(action)
            elif isinstance(action, Reply) and action.result is not None:
                result = action.result
                payload = self._store.keys[key].result(result.slot)[: result.payload_bytes] if result.payload_bytes else None
                self._awaited.pop((action.rank, key)).then(result.flags, payload)


class _Servers:
    def __init__(self, servers: MemoryServers, rank: int) -> None:
        self._servers, self._rank = servers, rank

    def slot(self, key: int) -> Place:
        return self._servers.slot(self._rank, key)

    def in_place(self, key: int) -> bool:
        return False

    def contribute(self, contribution: Contribution) -> None:
        self._servers.contribute(self._rank, contribution)

    def taken(self, key: int) -> None:
        """Two results are kept, so that one is read while the next is made."""
