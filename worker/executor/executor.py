"""Carries out the steps of layouts' buckets, each by its programs: threads, and nothing else.

A pool encodes and decodes. Where programs run over groups, a thread for each lane of a layout runs the lane's transfers, one after the other, on groups of its
own: ranks agree on an order within a layout, and two layouts that shared a group might be interleaved differently on two ranks; these threads and groups are
made when a layout needs them. Contributions to servers are handed to the network thread. What starts when is the Runner's, under one lock; what a step does
to numbers is the part's (``work.py``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from psgc.errors import DeviceError, PsgcError
from psgc.layout import Bucket, Layout
from psgc.observe.worker_trace import WorkerTrace
from psgc.processes.pool import Pool
from psgc.processes.reminder import Reminder
from psgc.program.groups import Groups
from psgc.program.ranks import Range, Ranks
from psgc.program.run import Runner, Start
from psgc.program.steps import Agree, Decode, Encode, Lane, Serve, Transfer, lane_of
from psgc.worker.bucket import BucketWork
from psgc.worker.contributions import Servers
from psgc.worker.executor.bucket import GroupBucket
from psgc.worker.executor.served import ServedBucket
from psgc.worker.executor.work import PartWork, Work
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
_DECODE_PRIORITY: Final = 1 << 40  # it frees memory, and the next step waits for it; a gradient only starts
GroupsOf = Callable[[str], Groups]  # by a name that is unique among the groups of the job


class _Bucket:
    """A bucket, the submissions that wait for its step under way, and its parts, each of which is a chain."""

    def __init__(self, work: Work, kept: GroupBucket | BucketWork, first: int) -> None:
        """kept: what has the bucket's state between steps; first: the first part's chain."""
        self.work, self.kept, self.chains = work, kept, range(first, first + len(work.parts))
        self.priority = work.bucket.priority
        self.waiting: deque[Submission] = deque()
        self.current: Submission | None = None
        self.left = 0  # parts whose step is not over

    @property
    def first_tensor(self) -> str:
        return self.work.layout.tensors[self.work.bucket.tensors[0]].name


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
    """A layout's buckets, and what may start of them."""

    def __init__(self, layout: Layout, ranks: Ranks, rank: int, servers: Servers | None, collectives: str) -> None:
        self.layout = layout
        self.lanes: dict[Lane, _Lane] = {}
        self.buckets: dict[int, _Bucket] = {}  # by index
        self.owner: list[tuple[_Bucket, int]] = []  # by chain, its bucket and its part's number there
        over_groups = [bucket for bucket in layout.buckets if bucket.over_groups and in_layout(layout, bucket)]
        for bucket in over_groups:  # the layout's order numbers their chains from 0
            over = GroupBucket(layout, bucket, ranks, rank, servers, collectives)
            self._add(over, over)
        for bucket in (bucket for bucket in layout.buckets if not bucket.over_groups):
            assert servers is not None
            served = ServedBucket(layout, bucket, servers, rank)
            self._add(served, served.numbers)
        self.unanswered = [0] * len(self.owner)  # pieces of the chain's contribution to servers that have no result yet
        self.runner = Runner(
            [part.program for one in self.buckets.values() for part in one.work.parts], layout.order if over_groups else ()
        )

    def _add(self, work: Work, kept: GroupBucket | BucketWork) -> None:
        one = self.buckets[work.bucket.index] = _Bucket(work, kept, len(self.owner))
        self.owner += [(one, number) for number in range(len(work.parts))]

    def part(self, chain: int) -> PartWork:
        one, number = self.owner[chain]
        return one.work.parts[number]

    def what(self, start: Start) -> str:
        """A transfer in words."""
        one = self.owner[start.chain][0]
        return f"{(*one.work.bucket.option, 'the control word')[start.step.action]} of {one.first_tensor!r} in its step {one.work.step}"


def in_layout(layout: Layout, bucket: Bucket) -> bool:
    """Whether the bucket's transfers follow an order within its layout; else they are among named tensors' (``named.py``), in an order of all of them."""
    return not bucket.over_groups or layout.kind == "plan"


def _counted(runs: Iterable[_LayoutRun], before: tuple[int, int]) -> tuple[int, int]:
    """Bytes that buckets over groups have moved, and bytes of their gradients. before: to which these are added."""
    works = [one.work for run in runs for one in run.buckets.values()]
    return before[0] + sum(work.moved_bytes for work in works), before[1] + sum(work.plain_bytes for work in works)


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
        self._pool = Pool("psgc-codec", threads, self._broken)
        self._retired = (0, 0)  # of layouts that were given up: bytes moved, and bytes of the gradients

    # called by other threads

    def add(self, layout: Layout) -> None:
        """Make the layout's buckets, once."""
        with self._lock:
            if layout.id in self._layouts:
                return
            run = _LayoutRun(layout, self._ranks, self._rank, self._servers, self._collectives)
            run.lanes = {lane: _Lane(lane, self._groups_of(f"{layout.name}/{lane}"), self._transfer) for lane in run.runner.lanes}
            self._layouts[layout.id] = run

    def retire(self, layout: Layout) -> None:
        """No rank uses the layout any more: end its threads and groups, and forget what it keeps."""
        with self._lock:
            run = self._layouts.get(layout.id)
            if run is None:
                return
            self._layouts = {id_: one for id_, one in self._layouts.items() if id_ != layout.id}
            self._retired = _counted([run], self._retired)
        for lane in run.lanes.values():
            lane.end()

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        """Enqueue the bucket's next step."""
        run = self._layouts[layout.id]
        one = run.buckets[bucket]
        with self._lock:
            one.waiting.append(submission)
            idle = one.current is None
            if idle:
                one.current = one.waiting.popleft()
        if idle:
            self._next(run, one)

    def works(self, layout: Layout | None = None) -> list[GroupBucket | BucketWork]:
        """What buckets keep, of one layout or of all. It is only to be touched while none of their steps is under way."""
        runs = [run for run in list(self._layouts.values()) if layout is None or run.layout.id == layout.id]
        return [one.kept for run in runs for one in run.buckets.values()]

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
        return _counted(list(self._layouts.values()), self._retired)[0]  # without the lock, which is held while groups are made

    @property
    def uncompressed_bytes(self) -> int:
        """What a ring of all ranks would have moved of them, each way, uncompressed."""
        return 4 * _counted(list(self._layouts.values()), self._retired)[1] * (self._ranks.size - 1) // self._ranks.size

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
        if one.work.takes_gradient:
            self._pool.submit(one.priority, self._guarded, one, self._load, run, one)
        else:
            self._load(run, one)

    def _load(self, run: _LayoutRun, one: _Bucket) -> None:
        if self._failed() or one.current is None:
            return
        tensor = one.work.begin(one.current, self._raises)
        if tensor is not None:
            self._broken(PsgcError(f"gradient of {tensor!r} holds NaN or infinity in its step {one.work.step}, and PSGC_NONFINITE=raise"))
            return
        with self._lock:
            one.left = len(one.chains)
            starts = [start for chain in one.chains for start in run.runner.begin(chain)]
        self._start(run, starts)

    def _compute(self, run: _LayoutRun, start: Start) -> None:
        if self._failed():
            return
        if isinstance(start.step, Serve):
            self._contribute(run, start, start.step)
        elif isinstance(start.step, Encode | Decode):
            began_ns = 0 if self._trace is None else time.monotonic_ns()
            run.part(start.chain).compute(start.step, partial(self._computed, run, start, began_ns))

    def _computed(self, run: _LayoutRun, start: Start, began_ns: int, fault: PsgcError | None) -> None:
        if fault is not None:
            self._broken(run.owner[start.chain][0].work.named(fault))
            return
        self._record(run, start, began_ns)
        self._over(run, start)

    def _record(self, run: _LayoutRun, start: Start, began_ns: int, moved_bytes: int = 0) -> None:
        """Note in the timeline that a step is over."""
        span = None if self._trace is None else run.part(start.chain).span(start.step)
        if self._trace is not None and span is not None:
            step, nbytes = run.owner[start.chain][0].work.step, moved_bytes or span.nbytes
            self._trace.ran(lane_of(start.step), span.what, span.key, step, began_ns, nbytes)

    def _contribute(self, run: _LayoutRun, start: Start, step: Serve) -> None:
        """Hand this rank's contributions to the network thread, which calls ``_answered`` with each one's result."""
        assert self._servers is not None
        run.unanswered[start.chain] = len(step.pieces)
        for piece in step.pieces:
            contribution = run.part(start.chain).contribution(step, piece, partial(self._answered, run, start, piece))
            self._servers.contribute(contribution)

    def _answered(self, run: _LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        """In the network thread."""
        self._run(run.owner[start.chain][0], _DECODE_PRIORITY, self._take, run, start, piece, flags, payload)

    def _take(self, run: _LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        if self._failed():
            return
        assert self._servers is not None and isinstance(start.step, Serve)
        began_ns = 0 if self._trace is None else time.monotonic_ns()
        key = run.part(start.chain).take(start.step, piece, flags, payload)
        self._record(run, start, began_ns)
        self._servers.taken(key)
        with self._lock:
            run.unanswered[start.chain] -= 1
            if run.unanswered[start.chain]:
                return
        self._over(run, start)

    def _end_part(self, run: _LayoutRun, chain: int) -> None:
        one, number = run.owner[chain]
        one.work.end(number)
        with self._lock:
            one.left -= 1
            if one.left:
                return
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
        assert isinstance(start.step, Transfer | Agree)
        began_ns = 0 if self._trace is None else time.monotonic_ns()
        try:
            moved_bytes = run.part(start.chain).transfer(start.step, groups, self._ranks.everybody)
            self._record(run, start, began_ns, moved_bytes)
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
            self._pool.submit(_DECODE_PRIORITY, self._guarded, run.owner[start.chain][0], self._end_part, run, start.chain)

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
        if one.work.small:
            self._guarded(one, job, *args)
        else:
            self._pool.submit(priority, self._guarded, one, job, *args)

    def _guarded(self, one: _Bucket, job: Callable[..., None], *args: Any) -> None:
        """Run a job about the bucket. A device's error is told with the tensor that it was about."""
        try:
            job(*args)
        except DeviceError as error:
            self._broken(one.work.named(error))
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


def _others(start: Start, rank: int, ranks: Ranks) -> str:
    """Those that a transfer waits for, in words."""
    step = start.step
    members = {member for one in step.collectives for member in one.members} if isinstance(step, Transfer) else set(ranks.everybody)
    names = ", ".join(map(str, sorted(members - {rank})))
    return f"rank {names}" if len(members) == 2 else f"some of ranks {names}"
