"""Carries out Folds: sums one block's payloads in one pass, in slices that stay in cache, then divides, adds the residual and encodes.

Numbers only: no protocol, no sockets. Runs in a pool of blocking threads, where kernels release the GIL; what takes less time than two threads take to
hand it to each other is run by whoever has it (``KeySpec.at_once``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair, Encoded, Stream
from psgc.codecs.codec import Adder, Codec
from psgc.codecs.relay import RelayCodec, join_payloads
from psgc.layout import Layout
from psgc.observe.server_trace import ServerTrace
from psgc.processes.pool import Pool
from psgc.server.step import NO_SLOT, Fold, KeySpec
from psgc.server.store import KeyStore
from psgc.server.weights.versions import Versions

Bytes = NDArray[np.uint8]
SERVER_RANK = 0xFFFFFFFF  # the server's place in random streams, apart from every worker's


@dataclass(frozen=True, slots=True)
class KeyWork:
    """A key's constants for the engine. first: index of its element 0 in its bucket; layout, seed, past_steps: identify the layout's random streams."""

    spec: KeySpec
    pair: CodecPair
    bucket: int
    first: int
    broadcast: bool
    layout: int = 0
    seed: int = 0
    past_steps: int = 0


class Folded(NamedTuple):
    """The outcome of a Fold. payload_bytes: of the result, once the last block is in it; slot: that holds the result."""

    key: int
    last: bool
    payload_bytes: int
    nonfinite: bool
    slot: int


Done = Callable[[Folded], None]


class Engine:
    """A pool thread calls ``done`` with the outcome of each Fold that was queued, or ``broken`` with the exception that it raised."""

    def __init__(self, threads: int, done: Done, broken: Callable[[BaseException], None], trace: ServerTrace | None = None) -> None:
        self._trace = trace
        self.threads = threads
        self._busy_ns: dict[int, int] = {}  # by thread
        self._folds: dict[int, int] = {}  # by thread
        self._pool = Pool("psgc-sum", threads, broken)
        self._done = done
        self._accumulators: dict[int, NDArray[Any]] = {}  # keys of more than one block of ranks, while their sum is under way
        self._relayed: dict[int, list[Bytes]] = {}  # keys whose payloads are forwarded, while more blocks of ranks are awaited

    def start(self, fold: Fold, work: KeyWork, store: KeyStore) -> None:
        """Queue a Fold. The state machine has at most one under way for a key."""
        self._pool.submit(0, self._start, fold, work, store)

    def update(self, fold: Fold, weights: Versions) -> None:
        """Queue the making of the next version of a key's weights. The state machine has at most one under way for a key."""
        weights.prepare(fold.slot)
        self._pool.submit(0, self._update, fold, weights)

    @staticmethod
    def lend(work: KeyWork, store: KeyStore, step: int, add_back: int) -> NDArray[np.float32]:
        """The residual after ``step``, with the result in buffer ``add_back`` added, unless that is NO_SLOT. The residual itself stays."""
        residuals = store.residuals()
        assert residuals is not None
        if add_back == NO_SLOT:
            return residuals[0]
        both, ready = store.lent(step)
        if not ready:
            numel, pull = work.spec.numel, work.pair.pull
            both[:] = residuals[0]
            for lo, hi in _slices(pull, pull, numel):
                pull.fold([store.result(add_back)[: store.recorded_bytes(add_back)]], numel, lo, hi, both[lo:hi], False)
        return both

    def load_codecs(self, layout: Layout, then: Callable[[], None]) -> None:
        """Load a layout's kernels in the pool (they are compiled at a codec's first use on a machine), then run ``then``."""
        self._pool.submit(0, self._load, layout, then)

    @staticmethod
    def _load(layout: Layout, then: Callable[[], None]) -> None:
        for bucket in {(bucket.codec, bucket.dtype): bucket for bucket in layout.buckets}.values():
            layout.scheme(bucket).warm()
        then()

    @property
    def busy_ms(self) -> int:
        """Seconds that the engine's threads have worked, summed over the threads."""
        return sum(self._busy_ns.copy().values()) // 1_000_000

    @property
    def folds(self) -> int:
        """Folds that have been carried out."""
        return sum(self._folds.copy().values())

    def close(self) -> None:
        self._pool.close(timeout_s=1.0)

    def _update(self, fold: Fold, weights: Versions) -> None:
        began_ns = monotonic_ns()
        payload_bytes = weights.update(fold, _slices(weights.pair.push, weights.pair.pull, weights.numel))
        self._worked(fold, began_ns)
        self._done(Folded(fold.key, True, payload_bytes, False, fold.slot))

    def _worked(self, fold: Fold, began_ns: int) -> None:
        if self._trace is not None:
            self._trace.folded(fold.key, fold.step, began_ns)
        thread = threading.get_ident()
        self._busy_ns[thread] = self._busy_ns.get(thread, 0) + monotonic_ns() - began_ns
        self._folds[thread] = self._folds.get(thread, 0) + 1

    def _start(self, fold: Fold, work: KeyWork, store: KeyStore) -> None:
        self._done(self.run(fold, work, store))

    def run(self, fold: Fold, work: KeyWork, store: KeyStore) -> Folded:
        """Carry out a Fold in the calling thread. The state machine has at most one under way for a key. Raises what its codecs raise."""
        began_ns = monotonic_ns()
        if fold.step == 1:
            store.populate()
        if fold.late:
            fold = fold._replace(payloads=tuple(store.late_payload(slot) for slot in fold.late))
        for payload in fold.payloads:
            if not work.broadcast:
                work.pair.push.validate(payload, work.spec.numel)
        if work.broadcast:
            encoded = self._copy(fold, store)
        elif isinstance(work.pair.pull, RelayCodec):
            encoded = self._relay(fold, store)
        elif work.pair.adder is not None:
            encoded = self._add(work.pair.adder, fold, work, store)
        elif fold.last:
            encoded = self._last_block(fold, work, store)
        else:
            self._block(fold, work)
            encoded = Encoded(0, False)
        self._worked(fold, began_ns)
        return Folded(fold.key, fold.last, encoded.payload_bytes, encoded.nonfinite, fold.slot)

    @staticmethod
    def _copy(fold: Fold, store: KeyStore) -> Encoded:
        """A broadcast: copy the root's bytes unchanged."""
        payload = fold.payloads[0]
        store.result(fold.slot)[: len(payload)] = payload
        return Encoded(len(payload), False)

    def _relay(self, fold: Fold, store: KeyStore) -> Encoded:
        """Forward the payloads unchanged, once all have come."""
        payloads = [] if fold.fresh else self._relayed[fold.key]  # those of a step that was given up may be there still
        self._relayed[fold.key] = payloads
        payloads += fold.payloads
        if not fold.last:
            return Encoded(0, False)
        del self._relayed[fold.key]
        return Encoded(join_payloads(payloads, store.result(fold.slot)), False)

    def _add(self, codec: Adder, fold: Fold, work: KeyWork, store: KeyStore) -> Encoded:
        """Sum payloads without decoding them: their sum is a payload, too."""
        numel = work.spec.numel
        total = np.empty(work.pair.push.payload_bound(numel), np.uint8) if fold.fresh else self._accumulators.pop(fold.key)
        if fold.payloads:
            codec.add(fold.payloads, numel, total, fold.fresh)
        if not fold.last:
            self._accumulators[fold.key] = total
            return Encoded(0, False)
        encoded = codec.divide(total, numel, fold.divisor)
        store.result(fold.slot)[: encoded.payload_bytes] = total[: encoded.payload_bytes]
        return encoded

    def _block(self, fold: Fold, work: KeyWork) -> None:
        """Add a block that is not the last one; the sum stays in full precision."""
        push, numel = work.pair.push, work.spec.numel
        acc = self._accumulators.get(fold.key)
        if acc is None:
            acc = self._accumulators[fold.key] = np.empty(numel, push.acc_dtype)
        for lo, hi in _slices(push, push, numel):
            self._fold(push, fold, numel, lo, hi, acc[lo:hi])
            if fold.rescale != 1:  # of late contributions
                np.multiply(acc[lo:hi], acc.dtype.type(fold.rescale), out=acc[lo:hi])

    def _last_block(self, fold: Fold, work: KeyWork, store: KeyStore) -> Encoded:
        push, pull, numel = work.pair.push, work.pair.pull, work.spec.numel
        acc = None if fold.fresh else self._accumulators.pop(fold.key)
        out = store.result(fold.slot)
        residuals = store.residuals()
        stream = Stream(work.seed, work.past_steps + fold.step, SERVER_RANK, work.bucket, work.first, work.layout)
        if fold.fresh:
            old, new = (None, None) if residuals is None else residuals
            if old is not None and fold.add_back != NO_SLOT:
                old = self._with_skipped(fold, pull, store, numel, 0, numel, old)
            at_once = pull.fold_and_finish(push, fold.payloads, numel, fold.divisor, old, new, fold.rescale, stream, out)
            if at_once is not None:
                return at_once
        ranges = _slices(push, pull, numel)
        scratch = np.empty(ranges[0][1], push.acc_dtype) if acc is None else np.empty(0, push.acc_dtype)
        payload_bytes, nonfinite = 0, False
        for lo, hi in ranges:
            part = scratch[: hi - lo] if acc is None else acc[lo:hi]
            self._fold(push, fold, numel, lo, hi, part)
            old = new = None
            if residuals is not None:
                old, new = residuals[0][lo:hi], residuals[1][lo:hi]
                if fold.add_back != NO_SLOT:
                    old = self._with_skipped(fold, pull, store, numel, lo, hi, old)
            encoded = pull.finish(part, numel, lo, hi, fold.divisor, old, new, fold.rescale, stream, out)
            payload_bytes, nonfinite = encoded.payload_bytes, nonfinite or encoded.nonfinite
        return Encoded(payload_bytes, nonfinite)

    @staticmethod
    def _fold(push: Codec, fold: Fold, numel: int, lo: int, hi: int, acc: NDArray[Any]) -> None:
        if fold.payloads:
            push.fold(fold.payloads, numel, lo, hi, acc, fold.fresh)

    @staticmethod
    def _with_skipped(
        fold: Fold, pull: Codec, store: KeyStore, numel: int, lo: int, hi: int, old: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """A scratch copy of the residual, with the result added back that the trainer did not apply: nothing durable changes before the commit."""
        recorded = store.recorded_bytes(fold.add_back)
        both = old.copy()
        pull.fold([store.result(fold.add_back)[:recorded]], numel, lo, hi, both, False)
        return both


def _slices(push: Codec, pull: Codec, numel: int) -> list[tuple[int, int]]:
    """Ranges that both codecs can work in: the whole part if either needs it."""
    if not push.chunk or not pull.chunk or numel <= min(push.chunk, pull.chunk):
        return [(0, numel)]
    step = max(push.chunk, pull.chunk)
    assert step % push.chunk == 0
    assert step % pull.chunk == 0
    return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)]
