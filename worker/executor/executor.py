"""Carries out the steps of layouts' buckets, each by its programs: threads, and nothing else.

A pool encodes and decodes. Where programs run over groups, a thread for each lane of a layout runs the lane's transfers, one after the other, on groups of its
own: ranks agree on an order within a layout, and two layouts that shared a group might be interleaved differently on two ranks; these threads and groups are
made when a layout needs them. Named tensors without servers share one lane, whose thread also computes, and their steps begin in an order of all of them
(``named.py``). Contributions to servers are handed to the network thread. What starts when is the Runner's, under one lock; what a step does to numbers is
the part's (``work.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from psgc.errors import PsgcError
from psgc.layout import Layout, make_key
from psgc.processes.pool import Pool
from psgc.program.groups import Groups
from psgc.program.ranks import Range
from psgc.program.run import Start
from psgc.program.steps import Agree, Decode, Encode, Serve, Transfer, lane_of
from psgc.worker.executor.bucket import BucketWork
from psgc.worker.executor.lanes import FirstCome, Lane
from psgc.worker.executor.layouts import BucketRun, Host, LayoutRun, is_named
from psgc.worker.executor.named import NAMED, NamedStep, VotedOrder
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
Carried = dict[str, tuple[int, int]]
_DECODE_PRIORITY: Final = 1 << 40  # it frees memory, and the next step waits for it; a gradient only starts


class _LaneJob(NamedTuple):
    """A ``Job``: a transfer, or the exchange of control words. carry_out: in the lane's thread."""

    carry_out: Callable[[LayoutRun, Start, Groups], None]
    layout: LayoutRun
    start: Start

    def run(self, groups: Groups) -> None:
        self.carry_out(self.layout, self.start, groups)

    def what(self) -> str:
        return self.layout.what(self.start)

    def late(self) -> str | None:
        return self.layout.late(self.start)


class Executor:
    """See the module's text. threads: that encode and decode."""

    def __init__(self, host: Host, threads: int) -> None:
        self._host, self._member = host, host.member
        self._lock = threading.Lock()
        self._layouts: dict[int, LayoutRun] = {}
        self._pool = Pool("psgc-codec", threads, self._broken)
        self._order = VotedOrder(host.member.ranks.everybody, host.ask, lambda: host.member.failed)
        self._named: Lane | None = None  # once it is needed
        self._retired: Carried = {}  # of layouts that were given up

    # called by other threads

    def add(self, layout: Layout, steps: int = 0) -> None:
        """Make the layout's buckets, once. Those of named tensors are made when the first one's turn comes. steps: that this rank has taken of it already, in
        another process."""
        with self._lock:
            if layout.id not in self._layouts and not is_named(layout):
                run = LayoutRun(layout, self._host)
                run.lanes = {lane: self._lane(lane, f"{layout.name}/{lane}") for lane in run.runner_lanes}
                for lane in run.lanes.values():
                    lane.groups  # noqa: B018 - a rank that cannot have any hears of it here
                for one in run.buckets.values():
                    one.work.step = steps
                self._layouts[layout.id] = run

    def _lane(self, name: str, groups: str, order: VotedOrder | None = None) -> Lane:
        return Lane(name, order or FirstCome(), lambda: self._host.groups_of(groups), self._broken)

    def retire(self, layout: Layout) -> None:
        """No rank uses the layout any more: end its threads and groups, and forget what it keeps."""
        with self._lock:
            run = self._layouts.get(layout.id)
            if run is None or run.named:
                return
            self._layouts = {id_: one for id_, one in self._layouts.items() if id_ != layout.id}
            self._retired = _counted([run], self._retired)
        for lane in run.lanes.values():
            lane.order.end()

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        """Enqueue the bucket's next step."""
        if is_named(layout):
            with self._lock:
                self._named = self._named or self._lane(NAMED, NAMED, self._order)
            step = NamedStep(partial(self._issued, layout, bucket, submission), f"a step of {layout.name!r}")
            self._order.submit(make_key(layout.id, bucket, 0), not submission.skip, step)
            return
        run = self._layouts[layout.id]
        one = run.buckets[bucket]
        with self._lock:
            one.waiting.append(submission)
            idle = one.current is None
            if idle:
                one.current = one.waiting.popleft()
        if idle:
            self._next(run, one)

    def turn(self, key: int) -> None:
        """The next step of a named bucket, by the key of its first part, has its turn."""
        self._order.turn(key)

    def works(self, layout: Layout | None = None) -> list[BucketWork]:
        """Buckets, of one layout or of all. What they keep is only to be touched while none of their steps is under way."""
        runs = [run for run in list(self._layouts.values()) if layout is None or run.layout.id == layout.id]
        return [one.work for run in runs for one in run.buckets.values()]

    def late(self, now: float, first_s: float) -> list[str]:
        """What to say of transfers for which this rank has waited long. first_s: until the first message."""
        return [text for lane in self._lanes() if (text := lane.late(now, first_s)) is not None]

    def _lanes(self) -> list[Lane]:
        own = [lane for run in list(self._layouts.values()) if not run.named for lane in run.lanes.values()]
        return own if self._named is None else [*own, self._named]

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received over groups."""
        named = _counted(run for run in list(self._layouts.values()) if run.named)
        return sum(moved for moved, _ in (*self.carried().values(), *named.values()))

    def carried(self) -> Carried:  # without the lock, which is held while groups are made
        """By codec, gradients of plans: bytes that this rank has sent and received of them over groups, and what a ring of all ranks would have moved of them,
        each way, uncompressed."""
        return _counted((run for run in list(self._layouts.values()) if not run.named), self._retired)

    def close(self) -> None:
        """End the threads, as far as they are not in a collective."""
        lanes = self._lanes()
        for lane in lanes:
            lane.order.end()
        for lane in lanes:
            lane.join(1.0)
        self._pool.close(timeout_s=1.0)

    # pool threads; of small buckets over servers, the thread that submits and the network thread; of named tensors, the lane's

    def _issued(self, layout: Layout, bucket: int, submission: Submission, contributed: bool | None) -> None:
        """A named tensor's step has its turn. In the lane's thread."""
        with self._lock:
            run = self._layouts.get(layout.id)
            if run is None:
                assert self._named is not None
                run = self._layouts[layout.id] = LayoutRun(layout, self._host)
                run.lanes = dict.fromkeys(run.runner_lanes, self._named)
        one = run.buckets[bucket]
        one.current, one.contributed, one.inline = submission, contributed, True
        self._run(run, one.chains[0], one.priority, self._load, run, one)

    def _next(self, run: LayoutRun, one: BucketRun) -> None:
        """The bucket's current submission has its turn."""
        assert one.current is not None
        if one.current.priority is not None:
            one.priority = one.current.priority
        one.inline = one.work.is_small(one.current.buffer)
        self._run(run, one.chains[0], one.priority, self._load, run, one)

    def _load(self, run: LayoutRun, one: BucketRun) -> None:
        if self._member.failed or one.current is None:
            return
        figures, waits = self._member.figures, one.current.buffer.waits
        one.work.begin(one.current, self._host.raises)
        if waits and figures is not None:  # a device had to compute it
            figures.made_at = time.monotonic()
        with self._lock:
            one.left = len(one.chains)
            starts = [start for chain in one.chains for start in one.runner.begin(chain)]
        here = next((start for start in starts if lane_of(start.step) is None), None)
        self._start(run, [start for start in starts if start is not here])
        if here is not None:  # in this thread, which has nothing else to do, and the gradient in its cache
            self._guarded(run, here.chain, self._compute, run, here)

    def _compute(self, run: LayoutRun, start: Start) -> None:
        if self._member.failed:
            return
        if isinstance(start.step, Serve):
            self._contribute(run, start, start.step)
        elif isinstance(start.step, Encode | Decode):
            run.part(start.chain).compute(start.step, partial(self._computed, run, start, self._now_ns()))

    def _computed(self, run: LayoutRun, start: Start, began_ns: int, fault: PsgcError | None) -> None:
        if fault is not None:
            self._broken(run.with_tensor(fault, start.chain))
            return
        self._note_encoded(run, start)
        self._record(run, start, began_ns)
        self._over(run, start)

    def _note_encoded(self, run: LayoutRun, start: Start) -> None:
        """Note when an encode is over that waits for no other rank: the first step of a part's program."""
        figures = self._member.figures
        if figures is not None and isinstance(start.step, Encode) and not start.step.action:
            if run.part(start.chain).on_device:
                figures.made_at = time.monotonic()
            else:
                figures.encoded_at = time.monotonic()

    def _note_arrived(self) -> None:
        """Note when something of other ranks has come."""
        if self._member.figures is not None:
            self._member.figures.arrived_at = time.monotonic()

    def _now_ns(self) -> int:
        return 0 if self._member.trace is None else time.monotonic_ns()

    def _record(self, run: LayoutRun, start: Start, began_ns: int, moved_bytes: int = 0) -> None:
        """Note in the timeline that a step is over."""
        trace = self._member.trace
        span = None if trace is None else run.part(start.chain).span(start.step)
        if trace is not None and span is not None:
            step, nbytes = run.owner[start.chain][0].work.step, moved_bytes or span.nbytes
            trace.ran(lane_of(start.step), span.what, span.key, step, began_ns, nbytes)

    def _contribute(self, run: LayoutRun, start: Start, step: Serve) -> None:
        """Hand this rank's contributions to the network thread, which calls ``_answered`` with each one's result."""
        assert self._host.servers is not None
        run.unanswered[start.chain] = len(step.pieces)
        for piece in step.pieces:
            contribution = run.part(start.chain).contribution(step, piece, partial(self._answered, run, start, piece))
            self._host.servers.contribute(contribution)

    def _answered(self, run: LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        """In the network thread."""
        self._note_arrived()
        self._run(run, start.chain, _DECODE_PRIORITY, self._take, run, start, piece, flags, payload)

    def _take(self, run: LayoutRun, start: Start, piece: Range, flags: int, payload: Any) -> None:
        if self._member.failed:
            return
        assert self._host.servers is not None and isinstance(start.step, Serve)
        began_ns = self._now_ns()
        key = run.part(start.chain).take(start.step, piece, flags, payload)
        self._record(run, start, began_ns)
        self._host.servers.taken(key)
        with self._lock:
            run.unanswered[start.chain] -= 1
            if run.unanswered[start.chain]:
                return
        self._over(run, start)

    def _end_part(self, run: LayoutRun, chain: int) -> None:
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

    def _transfer(self, run: LayoutRun, start: Start, groups: Groups) -> None:
        if self._member.failed:
            return
        began_ns, moved_bytes = self._now_ns(), 0
        one = run.owner[start.chain][0]
        if isinstance(start.step, Agree):
            numbers = [run.owner[chain][1] for chain in one.runner.agreeing(start.chain)]
            one.work.agree(numbers, groups.group(one.work.bucket.members or self._member.ranks.everybody), one.contributed)
        elif isinstance(start.step, Transfer):
            moved_bytes = run.part(start.chain).transfer(start.step, groups)
        self._note_arrived()
        self._record(run, start, began_ns, moved_bytes)
        self._over(run, start)

    def _over(self, run: LayoutRun, start: Start) -> None:
        one = run.owner[start.chain][0]
        with self._lock:
            starts, through = one.runner.over(start.chain)
        self._start(run, starts)
        for chain in through:
            if isinstance(start.step, Serve):
                self._end_part(run, chain)
            else:
                self._run(run, chain, _DECODE_PRIORITY, self._end_part, run, chain)

    def _start(self, run: LayoutRun, starts: list[Start]) -> None:
        for start in starts:
            lane, one = lane_of(start.step), run.owner[start.chain][0]
            if lane is not None:
                run.lanes[lane].order.put(_LaneJob(self._transfer, run, start))
            elif isinstance(start.step, Serve) and start.step.slot is not None:  # its payloads are there
                self._compute(run, start)
            else:
                self._run(run, start.chain, _DECODE_PRIORITY if isinstance(start.step, Decode) else one.priority, self._compute, run, start)

    def _run(self, run: LayoutRun, chain: int, priority: int, job: Callable[..., None], *args: Any) -> None:
        """A job about a part: in a pool thread, or in this one where switching threads would cost more than the job, or the order of jobs is this thread's."""
        if run.owner[chain][0].inline:
            self._guarded(run, chain, job, *args)
        else:
            self._pool.submit(priority, self._guarded, run, chain, job, *args)

    def _guarded(self, run: LayoutRun, chain: int, job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        except Exception as error:
            self._broken(run.with_tensor(error, chain))

    def _broken(self, error: BaseException, what: str = "") -> None:
        """what: a lane's job that has raised it."""
        if self._member.failed:
            return
        logger.debug("executor", exc_info=error)
        where = f"{what}: " if what else ""
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self._member.fail(f"rank {self._member.rank}: {where}{kind}{error}")


def _counted(runs: Iterable[LayoutRun], before: Carried | None = None) -> Carried:
    """By codec, bytes that buckets over groups have moved, and would have uncompressed. before: to which these are added."""
    found = dict(before or {})
    for work in [one.work for run in runs for one in run.buckets.values()]:
        if moved := work.moved_bytes:
            so_far = found.get(work.codec, (0, 0))
            found[work.codec] = so_far[0] + moved, so_far[1] + work.plain_bytes
    return found
