"""Several ranks as threads of one process, with exact sums in rank order: the job that hook logic is tested against, without a network.

A step is worked on when its last rank submits it: until then no buffer is loaded, so whoever changes a gradient under way is caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from psgc.codecs import Stream, parse_codec
from psgc.config import Config
from psgc.errors import JobFailed, PsgcError
from psgc.layout import Declaration, Layout, build_layout, compare
from psgc.program import ranks as program_ranks
from psgc.torch.session import api
from psgc.worker.residuals.residual import LayoutMemory, TensorMemory
from psgc.worker.rest import Rest
from psgc.worker.session import BucketBuffer, Session, Ticket

WAIT_S = 100.0  # a rank that waits longer hangs


@dataclass
class FakeTicket:
    done: bool = False


@dataclass(frozen=True)
class Submission:
    """What one rank said when it submitted a step of a bucket."""

    layout: str
    bucket: int
    tensors: tuple[str, ...]
    skip: bool
    previous_skipped: int
    rescale: float


@dataclass
class _Step:
    buffers: dict[int, BucketBuffer] = field(default_factory=dict)
    skips: dict[int, bool] = field(default_factory=dict)
    tickets: dict[int, FakeTicket] = field(default_factory=dict)


class FakeJob:
    """What the ranks share."""

    def __init__(self, size: int, config: Config) -> None:
        self.size, self.config = size, config
        self.changed = threading.Condition(threading.RLock())
        self.declared: dict[str, dict[int, Declaration]] = {}
        self.layouts: dict[str, Layout] = {}
        self.steps: dict[tuple[str, int, int], _Step] = {}
        self.published: dict[str, bytes] = {}
        self.error: PsgcError | None = None
        self.arrived = [0] * size

    def fail(self, error: PsgcError) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: ready() or self.error is not None, WAIT_S), "a rank waits for ever"
            if self.error is not None:
                raise self.error

    def complete(self, layout: Layout, bucket: int, step: _Step) -> None:
        dtype = layout.buckets[bucket].dtype
        live = [rank for rank in range(self.size) if not step.skips[rank]]
        arrays = {rank: step.buffers[rank].load() for rank in range(self.size)} if live else {}
        if live and layout.buckets[bucket].option:
            _gather(layout, bucket, arrays)
        elif live:
            total = _sum([_widened(arrays[rank], dtype) for rank in live])
            if layout.mean:
                total = total // self.size if total.dtype.kind == "i" else total / total.dtype.type(self.size)
            result = arrays[live[0]].copy() if layout.kind == "broadcast" else _narrowed(total, arrays[live[0]])
            for array in arrays.values():
                array[:] = result
        for rank in range(self.size):
            step.buffers[rank].store(not live)
            step.tickets[rank].done = True


def _gather(layout: Layout, bucket: int, arrays: dict[int, Any]) -> None:
    """What the option GATHERED does: all payloads are decoded and added on every rank."""
    codec, payloads = parse_codec(layout.buckets[bucket].codec), []
    for _, array in sorted(arrays.items()):
        out = np.empty(codec.payload_bound(array.size), np.uint8)
        payloads.append(out[: codec.finish(array, array.size, 0, array.size, 1, None, None, 1.0, Stream(0, 0, 0, 0), out).payload_bytes])
    for array in arrays.values():
        codec.fold(payloads, array.size, 0, array.size, array, True)


def _sum(terms: list[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _widened(array: Any, dtype: str) -> Any:
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    return array.astype(np.float64 if dtype == "float64" else np.float32)


def _narrowed(total: Any, like: Any) -> Any:
    if like.dtype == np.uint16:
        return torch.from_numpy(np.ascontiguousarray(total)).to(torch.bfloat16).view(torch.uint16).numpy()
    return total.astype(like.dtype)


class FakeSession(Session):
    """One rank's view of a FakeJob. submissions: everything it submitted, in order."""

    def __init__(self, job: FakeJob, rank: int) -> None:
        self.job, self.rank, self.ranks = job, rank, program_ranks.Ranks((job.size,))
        self.config, self.rest = job.config, Rest()
        self.submissions: list[Submission] = []
        self.tickets: list[FakeTicket] = []
        self.counts: dict[tuple[str, int], int] = {}
        self.failed_with: str | None = None
        self.endings: list[Callable[[], None]] = []
        self.memories: dict[str, TensorMemory] = {}
        self.priorities: list[int | None] = []  # of submit_named

    def declare(self, declaration: Declaration) -> Layout:
        job = self.job
        ranks = self._compared(declaration)
        job.until(lambda: len(ranks) == job.size)
        return self._layout(declaration.name)

    def _compared(self, declaration: Declaration) -> dict[int, Declaration]:
        """Declarations of this name by rank, with this rank's, after it has been compared with the others'."""
        job = self.job
        with job.changed:
            ranks = job.declared.setdefault(declaration.name, {})
            for other, seen in ranks.items():
                try:
                    compare(seen, other, declaration, self.rank)
                except PsgcError as error:
                    job.fail(error)
            ranks[self.rank] = declaration
            job.changed.notify_all()
        return ranks

    def _layout(self, name: str) -> Layout:
        job = self.job
        with job.changed:
            if name not in job.layouts:
                declarations = [d for _, d in sorted(job.declared[name].items())]
                used = frozenset.intersection(*(frozenset(d.used) for d in declarations)) if declarations[0].kind == "plan" else None
                job.layouts[name] = build_layout(
                    declarations[0], layout_id=len(job.layouts) + 1, servers=1, workers=len(declarations), used_by_all=used
                )
            return job.layouts[name]

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        self.check()
        names = tuple(layout.tensors[i].name for i in layout.buckets[bucket].tensors)
        job, key = self.job, (layout.name, bucket)
        with job.changed:
            self.submissions.append(Submission(layout.name, bucket, names, skip, previous_skipped, rescale))
            self.counts[key] = self.counts.get(key, 0) + 1
            step = job.steps.setdefault((*key, self.counts[key]), _Step())
            ticket = step.tickets[self.rank] = FakeTicket()
            self.tickets.append(ticket)
            step.buffers[self.rank], step.skips[self.rank] = buffer, skip
            if len(step.buffers) == job.size:
                job.complete(layout, bucket, step)
                job.changed.notify_all()
        return ticket

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        self.priorities.append(priority)
        self._compared(declaration)
        with self.job.changed:
            layout = self._layout(declaration.name)
        return self.submit(layout, 0, buffer, skip=skip)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        awaited = list(tickets)
        self.job.until(lambda: all(ticket.done for ticket in awaited))

    def wait_for_all(self) -> None:
        self.wait(self.tickets)

    def barrier(self) -> None:
        with self.job.changed:
            self.job.arrived[self.rank] += 1
            number = self.job.arrived[self.rank]
            self.job.changed.notify_all()
        self.job.until(lambda: min(self.job.arrived) >= number)

    def publish(self, name: str, value: bytes) -> None:
        with self.job.changed:
            self.job.published[name] = value
            self.job.changed.notify_all()

    def at_end(self, call: Callable[[], None]) -> None:
        self.endings.append(call)

    def lookup(self, name: str) -> bytes:
        self.job.until(lambda: name in self.job.published)
        return self.job.published[name]

    def check(self) -> None:
        if self.job.error is not None:
            raise self.job.error

    def fail(self, text: str) -> None:
        self.failed_with = text
        self.job.fail(JobFailed(text))

    def residuals(self) -> dict[str, Any]:
        return {}

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        steps = max((count for (name, _), count in self.counts.items() if name == layout.name), default=0)
        kept = {tensor.name: self.memories[tensor.name] for tensor in layout.tensors if tensor.name in self.memories}
        return LayoutMemory(kept, steps=layout.past_steps + steps)

    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        for tensor in layout.tensors:
            self.memories.pop(tensor.name, None)
        self.memories |= memory.tensors

    def statistics(self) -> dict[str, int]:
        return {"wire_bytes": 0}

    def close(self) -> None:
        """Nothing is open."""


class Ranks:
    """Runs a function as every rank of a fake job, each in its own thread, with its session as the current one. apart: each is on a node of its own."""

    def __init__(self, own: threading.local) -> None:
        self._own, self.apart = own, False
        self.sessions: list[FakeSession] = []

    def run(self, size: int, work: Callable[[int], Any], **config: Any) -> list[Any]:
        """The results by rank. The first rank to raise ends the job, and its error is raised here."""
        torch.zeros(1)  # what torch sets up on first use is no thread's business
        job = FakeJob(size, Config(**config))
        self.sessions = [FakeSession(job, rank) for rank in range(size)]
        for session in self.sessions if self.apart else ():
            session.ranks = program_ranks.Ranks((1,) * size)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def be(rank: int) -> None:
            self._own.session = self.sessions[rank]
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                job.fail(JobFailed(f"rank {rank} ended with {error!r}"))

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        if errors:
            raise errors[0]
        return results

    @property
    def steps(self) -> list[Submission]:
        """What rank 0 submitted."""
        return self.sessions[0].submissions


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    own = threading.local()
    monkeypatch.setattr(api, "current_session", lambda: own.session)
    return Ranks(own)


@pytest.fixture
def ranks_apart(ranks: Ranks) -> Ranks:
    ranks.apart = True
    return ranks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """psgc initialized in this process, which is alone."""
    for name in ("DMLC_PS_ROOT_URI", "WORLD_SIZE", "PSGC_CODEC", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    api.init()
    yield
    api.shutdown()
