"""Carries out the steps of layouts' buckets, each by its programs: threads, and nothing else.

A pool encodes and decodes. Where programs run over groups, a thread for each lane of a layout runs the lane's transfers, one after the other, on groups of its
own: ranks agree on an order within a layout, and two layouts that shared a group might be interleaved differently on two ranks; these threads and groups are
made when a layout needs them. Contributions to servers are handed to the network thread. What starts when is the Runner's, under one lock; what a step does
to numbers is the PartWork's, or the BucketWork's of a bucket that every rank pushes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from psgc.errors import DeviceError, PsgcError, raised_alone
from psgc.layout import ITEM_BYTES, Bucket, Layout
from psgc.observe.worker_trace import WorkerTrace
from psgc.processes.pool import Pool
from psgc.processes.reminder import Reminder
from psgc.program.groups import Groups
from psgc.program.ranks import Range, Ranks
from psgc.program.run import Runner, Start
from psgc.program.steps import Agree, Decode, Encode, Lane, Serve, Transfer, lane_of
from psgc.worker.bucket import BucketWork
from psgc.worker.contributions import Contribution, Servers
from psgc.worker.executor.bucket import GroupBucket
from psgc.worker.executor.part import PartWork
from psgc.worker.executor.served import ServedPart, served_parts
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
_DECODE_PRIORITY: Final = 1 << 40  # it frees memory, and the next step waits for it; a gradient only starts
HERE_NUMEL: Final = 16384  # a kernel takes about as long for so many elements as another thread takes to wake up
GroupsOf = Callable[[str], Groups]  # by a name that is unique among the groups of the job


class _Bucket:
    """A bucket, the submissions that wait for its step under way, and its parts, each of which is a chain."""

    def __init__(self, work: GroupBucket | BucketWork, parts: Sequence[PartWork | ServedPart], first: int) -> None:
        self.work, self.parts, self.chains = work, parts, range(first, first + len(parts))
        self.priority = work.bucket.priority
        self.waiting: deque[Submission] = deque()
        self.current: Submission | None = None
        self.left = 0  # parts whose step is not over

    @property
    def first_tensor(self) -> str:
        return self.work.layout.tensors[self.work.bucket.tensors[0]].name

    @property
    def computes_here(self) -> bool:
        """Whether the thread at hand encodes and decodes the step under way, since another would take as long to wake up. A bucket's first step always goes to
        the pool, because its kernels may have to be compiled."""
        submission, work = self.current, self.work
        small = isinstance(work, BucketWork) and work.step > 1 and work.bucket.numel <= HERE_NUMEL
        return small and submission is not None and not submission.buffer.waits


class _Awaited(NamedTuple):
    """A transfer that this rank takes part in now."""

    run: _LayoutRun
    start: Start
    reminder: Reminder


class _Lane(threading.Thread):
    """Runs one lane's transfers in the order in which they come."""

    def __init__(self, lane: Lane, groups: Groups, work: Callable[[_LayoutRun, Start, Groups], None]) -> None:
        super().__init__(name=f"psgc-{lane}", daemon=True)
        self._groups, self._work = groups, work
        self.awaited: _Awaited | None = None  # the transfer under way
        self._jobs: queue.SimpleQueue[tuple[_LayoutRun, Start] | None] = queue.SimpleQueue()
        self.start()

    def put(self, run: _LayoutRun, start: Start) -> None:
        self._jobs.put((run, start))

    def end(self) -> None:
        self._jobs.put(None)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.awaited = _Awaited(*job, Reminder(time.monotonic()))
            self._work(*job, self._groups)
            self.awaited = None
        self._groups.close()


class _LayoutRun:
    """A layout's buckets, and what may start of them. raises: whether a NaN or infinity of this rank's ends the job."""

    def __init__(self, layout: Layout, ranks: Ranks, rank: int, servers: Servers | None, collectives: str, raises: bool) -> None:
        self.layout = layout
        self.lanes: dict[Lane, _Lane] = {}
        self.buckets: list[_Bucket] = []
        self.owner: list[tuple[_Bucket, int]] = []  # by chain, its bucket and its part's number there
        over_groups = [bucket for bucket in layout.buckets if bucket.over_groups and in_layout(layout, bucket)]
        for bucket in over_groups:  # the layout's order numbers their chains from 0
            group_work = GroupBucket(layout, bucket, ranks, rank, servers, collectives)
            self._add(group_work, group_work.parts)
        for bucket in (bucket for bucket in layout.buckets if not bucket.over_groups):
            assert servers is not None
            work = BucketWork(layout, bucket, {part.key: servers.slot(part.key) for part in bucket.parts}, rank)
            self._add(work, served_parts(work, rank, raises))
        self.unanswered = [0] * len(self.owner)  # pieces of the chain's contribution to servers that have no result yet
        self.runner = Runner([part.program for bucket in self.buckets for part in bucket.parts], layout.order if over_groups else ())

    def _add(self, work: GroupBucket | BucketWork, parts: Sequence[PartWork | ServedPart]) -> None:
        one = _Bucket(work, parts, len(self.owner))
        self.buckets.append(one)
        self.owner += [(one, number) for number in range(len(parts))]

    def part(self, chain: int) -> PartWork | ServedPart:
        one, number = self.owner[chain]
        return one.parts[number]

    def what(self, start: Start) -> str:
        """A transfer in words."""
        one = self.owner[start.chain][0]
        return f"{(*one.work.bucket.option, 'the control word')[start.step.action]} of {one.first_tensor!r} in its step {one.work.step}"

    def key(self, chain: int) -> tuple[int, int]:
        """The key and the step of the part that is worked on."""
        one, number = self.owner[chain]
        return one.work.bucket.parts[number].key, one.work.step


def in_layout(layout: Layout, bucket: Bucket) -> bool:
    """Whether the bucket's transfers follow an order within its layout; else they are among named tensors' (``named.py``), in an order of all of them."""
    return not bucket.over_groups or layout.kind == "plan"


def _counts(works: Iterable[GroupBucket | BucketWork], ranks: int) -> tuple[int, int]:
    """Bytes that buckets over groups have moved, and what a ring of all ranks would have moved of them, each way, uncompressed."""
    moved = plain = 0
    for work in (work for work in works if isinstance(work, GroupBucket)):
        moved += sum(part.moved_bytes for part in work.parts)
        plain += work.step * work.bucket.numel * ITEM_BYTES[work.bucket.dtype]
    return moved, 4 * plain * (ranks - 1) // ranks


class Executor:
    """See the module's text. groups_of: makes the groups of a layout's lane; fail: ends the job with a line; failed: whether it has ended; threads: that encode
    and decode; raises: whether a NaN or infinity ends the job; servers: reaches them, where layouts have such options; collectives: PSGC_COLLECTIVES."""

    def __init__(
        self, rank: int, ranks: Ranks, groups_of: GroupsOf, fail: Callable[[str], None], failed: Callable[[], bool], threads: int,
        raises: bool = False, trace: WorkerTrace | None = None, servers: Servers | None = None, collectives: str = "host",
    ) -> None:  # fmt: skip
        self._rank, self._ranks, self._groups_of, self._failed = rank, ranks, groups_of, failed
        self._fail, self._raises, self._trace = fail, raises, trace
        self._servers, self._collectives = servers, collectives
        self._lock = threading.Lock()
        self._layouts: dict[int, _LayoutRun] = {}
        self._by_bucket: dict[tuple[int, int], tuple[_LayoutRun, _Bucket]] = {}
        self._pool = Pool("psgc-codec", threads, self._broken)
        self._before = (0, 0)  # of layouts that were given up: bytes moved, and what a ring would have moved

    # called by other threads

    def add(self, layout: Layout) -> None:
        """Make the layout's buckets, once."""
        with self._lock:
            if layout.id in self._layouts:
                return
            run = _LayoutRun(layout, self._ranks, self._rank, self._servers, self._collectives, self._raises)
            run.lanes = {lane: _Lane(lane, self._groups_of(f"{layout.name}/{lane}"), self._transfer) for lane in run.runner.lanes}
            self._by_bucket |= {(layout.id, one.work.bucket.index): (run, one) for one in run.buckets}
            self._layouts[layout.id] = run

    def retire(self, layout: Layout) -> None:
        """No rank uses the layout any more: end its threads and groups, and forget what it keeps."""
        with self._lock:
            run = self._layouts.get(layout.id)
            if run is None:
                return
            self._before = (self.moved_bytes, self.uncompressed_bytes)
            self._layouts = {id_: one for id_, one in self._layouts.items() if id_ != layout.id}
            for one in run.buckets:
                del self._by_bucket[layout.id, one.work.bucket.index]
            others = _counts(self.works(), self._ranks.size)
            self._before = (self._before[0] - others[0], self._before[1] - others[1])
        for lane in run.lanes.values():
            lane.end()

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        """Enqueue the bucket's next step."""
        run, one = self._by_bucket[layout.id, bucket]
        with self._lock:
            one.waiting.append(submission)
            idle = one.current is None
            if idle:
                one.current = one.waiting.popleft()
        if idle:
            self._next(run, one)

    def works(self, layout: Layout | None = None) -> list[GroupBucket | BucketWork]:
        """Buckets, of one layout or of all. Their state is only to be touched while none of their steps is under way."""
        runs: Iterable[_LayoutRun] = (
            list(self._layouts.values()) if layout is None else [r for i, r in self._layouts.items() if i == layout.id]
        )
        return [one.work for run in runs for one in run.buckets]

    def late(self, now: float, first_s: float) -> list[str]:
        """What to say of transfers for which this rank has waited long. first_s: until the first message."""
        texts = []
        for run in list(self._layouts.values()):
            for lane in run.lanes.values():
                awaited = lane.awaited
                if awaited is not None and awaited.reminder.due(now, first_s):
                    others = _others(awaited.start, self._rank, self._ranks)
                    texts.append(
                        f"rank {self._rank} waits in {run.what(awaited.start)} for {others}; does each of them call backward() and step()?"
                    )
        return texts

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received for gradients."""
        return self._before[0] + _counts(self.works(), self._ranks.size)[0]

    @property
    def uncompressed_bytes(self) -> int:
        """What a ring of all ranks would have moved of them, each way, uncompressed."""
        return self._before[1] + _counts(self.works(), self._ranks.size)[1]

    def close(self) -> None:
        """End the threads, as far as they are not in a collective."""
        lanes = [lane for run in self._layouts.values() for lane in run.lanes.values()]
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join(1.0)
        self._pool.close(timeout_s=1.0)

    # pool threads; of small buckets over servers, the thread that submits and the network thread

    def _next(self, run: _LayoutRun, one: _Bucket) -> None:
        """The bucket's current submission has its turn."""
        if one.current is not None and one.current.priority is not None:
            one.priority = one.current.priority
        if isinstance(one.work, GroupBucket):  # which takes the gradient at once
            self._pool.submit(one.priority, self._load, run, one)
        else:
            self._load(run, one)

    def _load(self, run: _LayoutRun, one: _Bucket) -> None:
        submission = one.current
        if self._failed() or submission is None:
            return
        if isinstance(one.work, BucketWork):
            one.work.begin(submission.buffer, submission.previous_skipped, submission.rescale)
            for part in one.parts:
                assert isinstance(part, ServedPart)
                part.begin(submission)
        else:
            with _named(one):
                tensor = one.work.begin(submission.buffer, submission.skip, submission.previous_skipped, submission.rescale, self._raises)
            if tensor is not None:
                self._broken(
                    PsgcError(f"gradient of {tensor!r} holds NaN or infinity in its step {one.work.step}, and PSGC_NONFINITE=raise")
                )
                return
        with self._lock:
            one.left = len(one.chains)
            starts = [start for chain in one.chains for start in run.runner.begin(chain)]
        self._start(run, starts)

    def _compute(self, run: _LayoutRun, start: Start) -> None:
        if self._failed():
            return
        with _named(run.owner[start.chain][0]):
            self._compute_part(run.part(start.chain), run, start)

    def _compute_part(self, part: PartWork | ServedPart, run: _LayoutRun, start: Start) -> None:
        if isinstance(start.step, Serve):
            self._contribute(run, start, start.step)
            return
        began_ns = 0 if self._trace is None else time.monotonic_ns()
        if isinstance(part, ServedPart):
            assert isinstance(start.step, Encode)
            part.encode(start.step, partial(self._computed, run, start, began_ns))
            return
        if isinstance(start.step, Encode) and part.on_gpu(start.step):
            part.encode_there(start.step, partial(self._computed, run, start, began_ns))
            return
        if isinstance(start.step, Encode):
            part.encode(start.step)
        elif isinstance(start.step, Decode):
            part.decode_there(start.step) if part.on_gpu(start.step) else part.decode(start.step)
        self._computed(run, start, began_ns, None)

    def _computed(self, run: _LayoutRun, start: Start, began_ns: int, fault: PsgcError | None) -> None:
        part = run.part(start.chain)
        if fault is not None:
            named = isinstance(part, ServedPart) or not isinstance(fault, DeviceError)
            self._broken(fault if named else DeviceError(f"gradient of {run.owner[start.chain][0].first_tensor!r}: {fault}"))
            return
        if self._trace is not None and isinstance(part, ServedPart):
            if not part.skips:
                assert isinstance(start.step, Encode)
                self._trace.encoded(part.key(start.step), run.owner[start.chain][0].work.step, began_ns, part.payload_bytes)
        elif self._trace is not None:
            self._trace.ran(None, start.step.action, *run.key(start.chain), began_ns)
        self._over(run, start)

    def _contribute(self, run: _LayoutRun, start: Start, step: Serve) -> None:
        """Hand this rank's contributions to the network thread, which calls ``_answered`` with each one's result."""
        assert self._servers is not None
        one, number = run.owner[start.chain]
        part = one.parts[number]
        run.unanswered[start.chain] = len(step.pieces)
        for piece in step.pieces:
            then = partial(self._answered, run, start, piece)
            if isinstance(part, ServedPart):
                self._servers.contribute(part.contribution(step, then))
            else:
                assert isinstance(one.work, GroupBucket)
                payload_bytes, nonfinite = part.contribution(step, piece)
                key = one.work.keys[number][piece]
                self._servers.contribute(Contribution(key, payload_bytes, nonfinite, part.dropped, part.rescale, then))

    def _answered(self, run: _LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        """In the network thread."""
        self._run(run.owner[start.chain][0], _DECODE_PRIORITY, self._take, run, start, piece, flags, payload)

    def _take(self, run: _LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        if self._failed():
            return
        assert self._servers is not None
        one, number = run.owner[start.chain]
        part = one.parts[number]
        assert isinstance(start.step, Serve)
        if isinstance(part, ServedPart):
            began_ns = 0 if self._trace is None else time.monotonic_ns()
            part.take(start.step, flags, payload)
            if self._trace is not None:
                self._trace.decoded(part.key(start.step), one.work.step, began_ns)
            self._servers.taken(part.key(start.step))
        else:
            assert isinstance(one.work, GroupBucket)
            part.take(start.step, piece, flags, payload)
            self._servers.taken(one.work.keys[number][piece])
        with self._lock:
            run.unanswered[start.chain] -= 1
            if run.unanswered[start.chain]:
                return
        self._over(run, start)

    def _end_part(self, run: _LayoutRun, chain: int) -> None:
        one, number = run.owner[chain]
        if isinstance(one.work, GroupBucket):
            with _named(one):
                one.work.end(number)
        with self._lock:
            one.left -= 1
            if one.left:
                return
        with _named(one):
            one.work.store()
        with self._lock:
            submission, one.current = one.current, one.waiting.popleft() if one.waiting else None
            more = one.current is not None
        assert submission is not None
        submission.ticket.finish()
        if more:
            self._next(run, one)

    # lanes' threads

    def _transfer(self, run: _LayoutRun, start: Start, groups: Groups) -> None:
        if self._failed():
            return
        part = run.part(start.chain)
        assert isinstance(part, PartWork)
        moved_bytes, began_ns = part.moved_bytes, 0 if self._trace is None else time.monotonic_ns()
        try:
            if isinstance(start.step, Agree):
                part.agree(groups.group(self._ranks.everybody))
                if part.control.disagreed:
                    if part.control.raised >= 0:
                        raise PsgcError(raised_alone(part.control.raised, "the step before"))
                    raise PsgcError("some ranks applied the last step and others did not; give every rank the same loss scaler")
            elif isinstance(start.step, Transfer):
                for number, collective in enumerate(start.step.collectives):
                    part.transfer(collective, groups, start.step.action, number)
            if self._trace is not None:
                self._trace.ran(lane_of(start.step), start.step.action, *run.key(start.chain), began_ns, part.moved_bytes - moved_bytes)
            self._over(run, start)
        except Exception as error:
            self._broken(error, run, start)

    def _over(self, run: _LayoutRun, start: Start) -> None:
        with self._lock:
            starts, through = run.runner.over(start.chain)
        self._start(run, starts)
        if through and isinstance(start.step, Serve):
            self._end_part(run, start.chain)
        elif through:
            self._pool.submit(_DECODE_PRIORITY, self._end_part, run, start.chain)

    def _start(self, run: _LayoutRun, starts: list[Start]) -> None:
        for start in starts:
            lane, one = lane_of(start.step), run.owner[start.chain][0]
            if lane is not None:
                run.lanes[lane].put(run, start)
            elif isinstance(start.step, Serve) and start.step.slot is not None:  # its payloads are there
                self._compute(run, start)
            else:
                self._run(one, _DECODE_PRIORITY if isinstance(start.step, Decode) else one.priority, self._compute, run, start)

    def _run(self, one: _Bucket, priority: int, job: Callable[..., None], *args: Any) -> None:
        """In a pool thread, or in this one where switching threads would cost more than the job."""
        if not one.computes_here:
            self._pool.submit(priority, job, *args)
            return
        try:
            job(*args)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: BaseException, run: _LayoutRun | None = None, start: Start | None = None) -> None:
        if self._failed():
            return
        logger.debug("executor", exc_info=error)
        where = ""
        if run is not None and start is not None:
            where = f"{run.what(start)}: "
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self._fail(f"rank {self._rank}: {where}{kind}{error}")


@contextmanager
def _named(one: _Bucket) -> Iterator[None]:
    """A device's error is raised with the tensor that it was about, which a BucketWork knows itself."""
    try:
        yield
    except DeviceError as error:
        if isinstance(one.work, BucketWork):
            raise
        raise DeviceError(f"gradient of {one.first_tensor!r}: {error}") from error


def _others(start: Start, rank: int, ranks: Ranks) -> str:
    """Those that a transfer waits for, in words."""
    step = start.step
    members = {member for one in step.collectives for member in one.members} if isinstance(step, Transfer) else set(ranks.everybody)
    names = ", ".join(map(str, sorted(members - {rank})))
    return f"rank {names}" if len(members) == 2 else f"some of ranks {names}"
