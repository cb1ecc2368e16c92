"""Steps of buckets that every rank pushes to servers: which of a bucket's is under way, and its encoding and decoding in the pool.

The network thread submits and is told of what is over; a pool thread, the network thread or a device's events do the numbers' work (``worker/bucket.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from psgc.codecs import Encoded
from psgc.config import Config
from psgc.errors import DeviceError, PsgcError
from psgc.layout import Layout
from psgc.observe.worker_trace import WorkerTrace
from psgc.processes.mailbox import Mailbox
from psgc.processes.pool import Pool
from psgc.transport.memory.arena import Arena
from psgc.worker.bucket import BucketWork, Slot, make_slots
from psgc.worker.client import Action, Client, Decode
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
ENCODE_PRIORITY: Final = 0
HERE_NUMEL: Final = 16384  # a kernel takes about as long for so many elements as another thread takes to wake up
DECODE_PRIORITY: Final = 1 << 40  # before encoding: decoding a result frees memory and lets the next step begin


class _Running:
    """A bucket known to the network thread, and the submissions that wait for its step under way."""

    def __init__(self, work: BucketWork) -> None:
        self.work = work
        self.waiting: deque[Submission] = deque()
        self.current: Submission | None = None
        self.stored = False  # the last result of the step under way has been decoded


class Owner(Protocol):
    """What steps ask of the network thread. error: why the job has failed."""

    error: PsgcError | None
    mailbox: Mailbox

    @property
    def ident(self) -> int | None:
        """The thread's."""

    def apply(self, actions: list[Action]) -> None: ...
    def fault(self, text: str) -> None:
        """End the job; from any thread."""


class BucketSteps:
    """See the module's text. owner: the network thread itself."""

    def __init__(self, config: Config, threads: int, trace: WorkerTrace | None, owner: Owner) -> None:
        self._config, self._trace, self._owner = config, trace, owner
        self._client: Client
        self._buckets: dict[tuple[int, int], _Running] = {}
        self._by_key: dict[int, _Running] = {}
        self._pool = Pool("psgc-codec", threads, self._broken)

    # the network thread

    def begin(self, client: Client) -> None:
        """The job has begun."""
        self._client = client

    def add(self, layout: Layout, arena: Arena) -> dict[int, int]:
        """Make the layout's buckets, and their slots. Returns the push codecs' ids by key."""
        slots = make_slots(layout, arena)
        ids: dict[int, int] = {}
        for bucket in layout.buckets:
            work = BucketWork(layout, bucket, slots, self._client.rank)
            running = self._buckets[(layout.id, bucket.index)] = _Running(work)
            for part in bucket.parts:
                self._by_key[part.key] = running
            ids |= work.push_codec_ids()
        return ids

    def remove(self, layout: Layout) -> None:
        """Forget the layout's buckets, whose steps are over, and give their slots' memory back."""
        for running in [running for (id_, _), running in self._buckets.items() if id_ == layout.id]:
            del self._buckets[layout.id, running.work.bucket.index]
            for part in running.work.bucket.parts:
                running.work.slot(part.key).release()
                del self._by_key[part.key]

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        """Enqueue the bucket's next step."""
        running = self._buckets[(layout.id, bucket)]
        running.waiting.append(submission)
        if running.current is None:
            self._begin(running)

    def encode(self, key: int) -> None:
        """Encode the part, as the client says."""
        self._work(ENCODE_PRIORITY + self._client.parts[key].priority, self._encode, self._by_key[key], key)

    def decode(self, action: Decode) -> None:
        """Decode the part's result, as the client says."""
        self._work(DECODE_PRIORITY, self._decode, self._by_key[action.key], action)

    def close(self) -> None:
        self._pool.close(timeout_s=1.0)

    # any thread

    def slot(self, key: int) -> Slot:
        """Where this rank's payloads of the key are encoded."""
        return self._by_key[key].work.slot(key)

    def works(self) -> list[BucketWork]:
        """All buckets so far. Their state may only be touched while none of their steps is under way."""
        return [running.work for running in list(self._buckets.values())]

    # the network thread

    def _begin(self, running: _Running) -> None:
        submission = running.current = running.waiting.popleft()
        if self._owner.error is not None:
            return
        client, work = self._client, running.work
        work.begin(submission.buffer, submission.previous_skipped, submission.rescale)
        now = time.monotonic()
        if submission.priority is not None:
            client.prioritise((part.key for part in work.bucket.parts), submission.priority)
        for part in work.bucket.parts:
            if part.round == 0:
                self._owner.apply(
                    client.submit(
                        part.key, now, skip=submission.skip, previous_skipped=submission.previous_skipped, rescale=submission.rescale
                    )
                )

    def _work(self, priority: int, job: Callable[..., None], running: _Running, what: Any) -> None:
        """Run a codec's job in the pool, or in this thread if switching threads would cost more than the job.

        A bucket's first step always goes to the pool, because its kernels may have to be compiled.
        """
        submission = running.current
        if running.work.step == 1 or running.work.bucket.numel > HERE_NUMEL or submission is None or submission.buffer.waits:
            self._pool.submit(priority, job, running, what)
            return
        try:
            job(running, what)
        except Exception as error:
            self._broken(error)

    def _encoded(self, key: int, payload_bytes: int, nonfinite: bool) -> None:
        if self._owner.error is None:
            self._owner.apply(self._client.encoded(key, payload_bytes, nonfinite))

    def _decoded(self, running: _Running, key: int, last: bool) -> None:
        self._owner.apply(self._client.decoded(key, time.monotonic()))
        running.stored = running.stored or last
        # The pool may report earlier parts after the last one; the next step must find all of them idle.
        if running.stored and running.current is not None and self._client.idle(part.key for part in running.work.bucket.parts):
            running.stored = False
            ticket, running.current = running.current.ticket, None
            ticket.finish()
            if running.waiting:
                self._begin(running)

    # pool threads, the network thread, or the one that a device's events call back in

    def _encode(self, running: _Running, key: int) -> None:
        if self._owner.error is not None:
            return
        began_ns = 0 if self._trace is None else time.monotonic_ns()
        running.work.encode(key, partial(self._after_encode, running, key, began_ns))

    def _after_encode(self, running: _Running, key: int, began_ns: int, encoded: Encoded | DeviceError) -> None:
        if isinstance(encoded, DeviceError):
            self._broken(encoded)
            return
        if self._trace is not None:
            self._trace.encoded(key, running.work.step, began_ns, encoded.payload_bytes)
        checked = encoded.nonfinite or not running.work.scheme.flags_nonfinite
        if self._config.nonfinite == "raise" and checked and (tensor := running.work.first_nonfinite(key)) is not None:
            what = "update" if running.work.layout.kind == "weights" else "gradient"
            self._owner.fault(f"rank {self._client.rank}: {what} of {tensor!r} holds NaN or infinity in its step {running.work.step}, "
                              f"and PSGC_NONFINITE=raise")  # fmt: skip
            return
        self._tell(self._encoded, key, encoded.payload_bytes, encoded.nonfinite)

    def _decode(self, running: _Running, action: Decode) -> None:
        if self._owner.error is not None:
            return
        began_ns = 0 if self._trace is None else time.monotonic_ns()
        last = running.work.decode(action.key, action.flags, action.payload, action.own)
        if self._trace is not None:
            self._trace.decoded(action.key, action.step, began_ns)
        self._tell(self._decoded, running, action.key, last)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        if threading.get_ident() == self._owner.ident:
            call(*args)
        else:
            self._owner.mailbox.put(call, *args)

    def _broken(self, error: BaseException) -> None:
        logger.debug("codec pool", exc_info=error)
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self._owner.fault(f"rank {self._client.rank}: {kind}{error}")
