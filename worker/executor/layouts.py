"""A layout's buckets as the executor runs them: their works, the lanes of their transfers, and what may start of them.

Data only; the executor changes it under its lock. Invariant: the steps of a bucket never overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from psgc.errors import DeviceError
from psgc.layout import Bucket, Layout
from psgc.observe.figures import Figures
from psgc.observe.worker_trace import WorkerTrace
from psgc.program.groups import Groups
from psgc.program.ranks import Ranks
from psgc.program.run import InTurn, Runner, Start
from psgc.program.steps import LANES, Lane, Transfer
from psgc.worker.contributions import Servers
from psgc.worker.executor import lanes, named
from psgc.worker.executor.bucket import BucketWork, over_groups, over_servers
from psgc.worker.executor.work import PartWork
from psgc.worker.submission import Submission


class Member(Protocol):
    """Whose executor it is: one rank of a job that may fail. A session, as far as it is concerned."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def trace(self) -> WorkerTrace | None: ...
    @property
    def figures(self) -> Figures | None: ...
    @property
    def failed(self) -> bool: ...
    def fail(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """What a session gives its executor. groups_of: makes the groups of a lane, by a name that is unique among the groups of the job; ask: asks for the turn of
    a named step; servers: reaches them, where layouts have such options; raises: whether a NaN or infinity ends the job; collectives: PSGC_COLLECTIVES;
    served: makes a bucket that every rank pushes, where that is not psgc's own."""

    member: Member
    groups_of: Callable[[str], Groups]
    ask: Callable[[int], None]
    servers: Servers | None = None
    raises: bool = False
    collectives: str = "host"
    served: Callable[[Layout, Bucket], BucketWork] | None = None


@dataclass(slots=True, eq=False)
class BucketRun:
    """A bucket. chains: its parts, each of which is a chain of ``runner``; waiting: submissions whose step begins after the one under way; left: parts whose
    step is not over; contributed: what a vote has told of the step under way (``BucketWork.agree``); inline: computations of the step run in the thread
    at hand."""

    work: BucketWork
    chains: range
    runner: Runner | InTurn
    priority: int
    waiting: deque[Submission] = field(default_factory=deque)
    current: Submission | None = None
    left: int = 0
    contributed: bool | None = None
    inline: bool = False


class LayoutRun:
    """This rank's buckets of a layout. named: whether its steps begin in the order of all named tensors'."""

    def __init__(self, layout: Layout, host: Host) -> None:
        self.layout, self._host, self.named = layout, host, is_named(layout)
        self.lanes: dict[Lane, lanes.Lane] = {}
        self.buckets: dict[int, BucketRun] = {}  # by index
        self.owner: list[tuple[BucketRun, int]] = []  # by chain, its bucket and its part's number there
        # The layout's order numbers the chains of buckets over groups from 0; this rank has some of them, or all.
        buckets = sorted((bucket for bucket in layout.buckets if bucket.is_of(host.member.rank)), key=lambda bucket: not bucket.over_groups)
        works = [self._work(bucket) for bucket in buckets]
        runner = Runner([part.program for work in works for part in work.parts], () if self.named else layout.order_for(host.member.rank))
        for bucket, work in zip(buckets, works, strict=True):
            first = len(self.owner)
            own = InTurn([part.program for part in work.parts], first) if self.named else runner
            one = self.buckets[bucket.index] = BucketRun(work, range(first, first + len(work.parts)), own, bucket.priority)
            self.owner += [(one, number) for number in range(len(work.parts))]
        self.runner_lanes = LANES if self.named else runner.lanes
        self.unanswered = [0] * len(self.owner)  # pieces of the chain's contribution to servers that have no result yet

    def _work(self, bucket: Bucket) -> BucketWork:
        host, member = self._host, self._host.member
        if bucket.over_groups:
            return over_groups(self.layout, bucket, member.ranks, member.rank, host.servers, host.collectives)
        if host.served is not None:
            return host.served(self.layout, bucket)
        assert host.servers is not None
        return over_servers(self.layout, bucket, host.servers, member.rank)

    def part(self, chain: int) -> PartWork:
        one, number = self.owner[chain]
        return one.work.parts[number]

    def with_tensor(self, error: Exception, chain: int) -> Exception:
        """An error that a job about the part has met. A device's is told with the tensor that it was about."""
        one, number = self.owner[chain]
        return one.work.with_tensor(error, number) if isinstance(error, DeviceError) else error

    # transfers, in words

    def what(self, start: Start) -> str:
        work = self.owner[start.chain][0].work
        return f"{(*work.bucket.option, 'the control word')[start.step.action]} of {work.tensor_of(0)!r} in its step {work.step}"

    def late(self, start: Start) -> str:
        """What to say of one that has taken long."""
        rank, ranks, step, work = self._host.member.rank, self._host.member.ranks, start.step, self.owner[start.chain][0].work
        if self.named:
            return f"rank {rank} {named.awaited(self.what(start))}"
        members = (
            {member for one in step.collectives for member in one.members}
            if isinstance(step, Transfer)
            else set(work.bucket.members or ranks.everybody)
        )
        names = ", ".join(map(str, sorted(members - {rank})))
        others = f"rank {names}" if len(members) == 2 else f"some of ranks {names}"
        return f"rank {rank} waits in {self.what(start)} for {others}; does each of them call backward() and step()?"


def is_named(layout: Layout) -> bool:
    """Whether its buckets run over groups, and follow no order of their own: a script submits them in any order, beside other layouts'. All ranks vote on that
    order; a layout of some ranks alone has lanes of its own instead."""
    return layout.kind != "plan" and any(bucket.over_groups and not bucket.members for bucket in layout.buckets)
