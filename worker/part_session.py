"""A group of a job's ranks as a job of its own: the session of one dimension of a mesh. Its ranks are numbered from 0 in the job's order.

Names are the group's own, so that groups may declare and publish different things at different times. Barriers are the whole job's. Everything else is the
job's session's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.layout import Declaration, Layout
from psgc.observe.figures import Figures
from psgc.observe.worker_trace import WorkerTrace
from psgc.program.groups import Groups
from psgc.program.ranks import Ranks
from psgc.wire.reports import Report
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import BucketBuffer, Session, Ticket


class PartSession(Session):
    """See the module's text. members: the job's ranks in the group, ascending, this one among them; what: the group, in messages; part: see
    ``Session.part``."""

    def __init__(self, job: Session, members: tuple[int, ...], what: str, part: Mapping[str, Sequence[int]]) -> None:
        self._job, self.members, self._what, self._part = job, members, what, part
        self.config, self.rest, self.incarnation = job.config, job.rest, job.incarnation
        self.rank, self.ranks = members.index(job.rank), Ranks((1,) * len(members))
        self._lock = threading.Lock()
        self._layouts: dict[str, Layout] = {}  # the job's, by the group's names
        self._given: dict[str, tuple[Declaration, Declaration]] = {}  # as given, and as the job knows it

    @property
    def between_nodes(self) -> bool:
        return len({self._job.ranks.node_of[rank] for rank in self.members}) > 1

    @property
    def whole(self) -> Session:
        return self._job

    @property
    def part(self) -> Mapping[str, Sequence[int]]:
        return self._part

    @property
    def local_rank(self) -> int:
        return self._job.local_rank

    @property
    def local_size(self) -> int:
        return self._job.local_size

    # what the job's session reads of its front end

    @property
    def figures(self) -> Figures | None:
        return self._job.figures

    @figures.setter
    def figures(self, figures: Figures | None) -> None:
        self._job.figures = figures

    @property
    def trace(self) -> WorkerTrace | None:  # type: ignore[override]
        return self._job.trace

    @property
    def groups_of(self) -> Callable[[str], Groups] | None:  # type: ignore[override]
        return self._job.groups_of

    # names

    def _name(self, name: str) -> str:
        return f"{name}@{self.members[0]}"

    def _of_job(self, given: Declaration) -> Declaration:
        """The same object each time for the same one, which the job's session knows again by that."""
        with self._lock:
            known = self._given.get(given.name)
            if known is not None and known[0] is given:
                return known[1]
        if given.kind == "weights":
            raise UsageError(f"{given.name!r}: servers hold weights of whole jobs, not of {self._what}; call init() without mesh")
        made = replace(
            given, name=self._name(given.name), members=self.members, root=self.members[given.root],
            buckets=tuple(replace(bucket, members=self._members_of(bucket.members)) for bucket in given.buckets),
        )  # fmt: skip
        with self._lock:
            self._given[given.name] = given, made
        return made

    def _members_of(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.members[rank] for rank in members)

    def _own(self, name: str, layout: Layout) -> Layout:
        """A layout as the group numbers its ranks."""
        with self._lock:
            self._layouts[name] = layout
        places = {rank: place for place, rank in enumerate(self.members)}
        buckets = tuple(
            replace(bucket, members=() if bucket.members == self.members else tuple(places[rank] for rank in bucket.members))
            for bucket in layout.buckets
        )
        return replace(layout, name=name, root=places.get(layout.root, 0), workers=len(self.members), buckets=buckets, members=())

    def declare(self, declaration: Declaration) -> Layout:
        return self._own(declaration.name, self._job.declare(self._of_job(declaration)))

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        return self._job.submit(self._layouts[layout.name], bucket, buffer, skip=skip, previous_skipped=previous_skipped, rescale=rescale)

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        return self._job.submit_named(self._of_job(declaration), buffer, skip=skip, priority=priority)

    def memory(self, layout: Layout, bucket: int) -> NDArray[Any] | None:
        return self._job.memory(self._layouts[layout.name], bucket)

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        return self._job.remembered(self._layouts[layout.name], dropped)

    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        self._job.remember(self._layouts[layout.name], memory, alone)

    def retire(self, layout: Layout) -> None:
        self._job.retire(self._layouts[layout.name])

    def publish(self, name: str, value: bytes) -> None:
        self._job.publish(self._name(name), value)

    def lookup(self, name: str) -> bytes:
        return self._job.lookup(self._name(name))

    def lookup_soon(self, name: str, then: Callable[[bytes], None]) -> None:
        self._job.lookup_soon(self._name(name), then)

    def give_up_lookup(self, name: str, then: Callable[[bytes], None]) -> None:
        self._job.give_up_lookup(self._name(name), then)

    # the job's

    def wait(self, tickets: Iterable[Ticket]) -> None:
        self._job.wait(tickets)

    def wait_for_all(self) -> None:
        self._job.wait_for_all()

    def barrier(self) -> None:
        self._job.barrier()

    def check(self) -> None:
        self._job.check()

    @property
    def synchronised(self) -> bool:
        return self._job.synchronised

    @property
    def failed(self) -> bool:
        return self._job.failed

    def fail(self, text: str) -> None:
        self._job.fail(text)

    def tell_broken(self, text: str) -> None:
        self._job.tell_broken(text)

    def residuals(self) -> dict[str, NDArray[Any]]:
        return self._job.residuals()

    def at_end(self, call: Callable[[], None]) -> None:
        self._job.at_end(call)

    def statistics(self) -> dict[str, int]:
        return self._job.statistics()

    def report(self) -> Report | None:
        return self._job.report()

    def note_waited(self, seconds: float) -> None:
        self._job.note_waited(seconds)

    def close(self) -> None:
        self._job.close()
