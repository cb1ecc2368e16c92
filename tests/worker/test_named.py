"""Named tensors and broadcasts without servers, over groups of threads: any order of submission, every element type, one set of groups."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from psgc.config import Config
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.layout.records import LayoutKind
from psgc.observe.lanes import Line
from psgc.observe.worker_trace import WorkerTrace
from psgc.program.agenda import Agenda, Turns
from psgc.program.checks import DTYPES
from psgc.program.memory_groups import MemoryGroup, MemoryGroups, MemoryWorld
from psgc.program.ranks import Ranks
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.submission import Submission
from psgc.worker.tickets import StepTicket, TicketBoard
from tests.worker.over_groups import Buffer, RankOf


class Job:
    """An executor for each rank, and a scheduler that gives turns at once."""

    def __init__(self, node_sizes: tuple[int, ...], raises: bool = False, traces: Sequence[WorkerTrace] | None = None) -> None:
        self.ranks, self.errors = Ranks(node_sizes), list[str]()
        self.world = MemoryWorld(self.ranks.size, timeout_s=100.0)
        self.asked: list[str] = []  # names of sets of groups
        self._turns, self._lock = Turns(self.ranks.size), threading.Lock()
        self._agendas = [Agenda() for _ in self.ranks.everybody]
        self.boards = [TicketBoard() for _ in self.ranks.everybody]
        self.executors = [
            Executor(
                Host(
                    RankOf(self, rank, None if traces is None else traces[rank]), lambda name, rank=rank: self._groups(name, rank),
                    lambda key, rank=rank: self._ask(rank, key), raises=raises,
                ),
                1,
            )
            for rank in self.ranks.everybody
        ]  # fmt: skip

    def _groups(self, name: str, rank: int) -> MemoryGroups:
        self.asked.append(name)
        return self.world.groups(rank)

    def _ask(self, rank: int, key: int) -> None:
        with self._lock:
            agenda = self._agendas[rank]
            for turn in self._turns.submitted(rank, agenda.submit(key), agenda.received):
                for other, executor in enumerate(self.executors):
                    for use in self._agendas[other].told(turn):
                        executor.turn(use.key)

    def fail(self, text: str) -> None:
        self.errors.append(text)
        for board in self.boards:
            board.fail()

    def layout(
        self, number: int, shapes: list[int], codec: str, dtype: str, mean: bool, kind: LayoutKind = "adhoc", root: int = 0
    ) -> Layout:
        tensors = tuple(TensorSpec(f"t{index}", (numel,), dtype) for index, numel in enumerate(shapes))
        declaration = Declaration(f"n{number}", kind, tensors, codec, mean, root, seed=3, part_bytes=1 << 16, fuse_bytes=0)
        return build_layout(declaration, layout_id=number, servers=0, workers=self.ranks.size, ranks=self.ranks)

    def submit(self, rank: int, layout: Layout, bucket: int, buffer: Buffer, skip: bool = False) -> StepTicket:
        ticket = self.boards[rank].issue()
        self.executors[rank].submit(layout, bucket, Submission(buffer, ticket, skip))
        return ticket

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


@pytest.fixture(params=[(2,), (1, 2)], ids=str)
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(request.param)
    yield job
    job.close()
    assert not job.errors


def test_steps_submitted_in_any_order_give_every_rank_the_exact_mean_over_one_set_of_groups(job: Job) -> None:
    layouts = [job.layout(number, [1, 40_000], "none", dtype, True) for number, dtype in enumerate(DTYPES)]
    uses = [(layout, bucket.index, step) for layout in layouts for bucket in layout.buckets for step in range(2)]
    buffers, tickets = {}, []
    for rank in job.ranks.everybody:
        order = list(uses)
        random.Random(rank).shuffle(order)
        turns: dict[tuple[int, int], int] = {}
        for layout, bucket, _ in order:
            step = turns[layout.id, bucket] = turns.get((layout.id, bucket), 0) + 1
            dtype = layout.tensors[0].dtype
            numbers = np.random.default_rng([rank, layout.id, bucket, step])
            values = numbers.integers(0, 120, layout.buckets[bucket].numel)
            array = values.astype(np.float32).view(np.uint32)[:] >> 16 if dtype == "bfloat16" else values
            buffers[rank, layout.id, bucket, step] = buffer = Buffer(array.astype(DTYPES[dtype]))
            tickets.append((rank, job.submit(rank, layout, bucket, buffer), buffer, (layout.id, bucket, step), values))
    for rank, ticket, *_ in tickets:
        job.boards[rank].wait([ticket])
    for rank, _, buffer, (number, bucket, step), _ in tickets:
        every = [entry[-1] for entry in tickets if entry[3] == (number, bucket, step)]
        dtype = layouts[number].tensors[0].dtype
        total = sum(every)
        if dtype == "bool":
            wanted = sum(values != 0 for values in every) // job.ranks.size != 0
        elif np.dtype(DTYPES[dtype]).kind == "f":
            wanted = (total.astype(np.float64 if dtype == "float64" else np.float32) / job.ranks.size).astype(DTYPES[dtype])
        elif dtype == "bfloat16":
            assert (buffer.array == buffers[0, number, bucket, step].array).all()
            continue
        else:
            wanted = (total // job.ranks.size).astype(DTYPES[dtype])  # in int64: of bytes, the sum of three leaves their range
        assert (buffer.array == wanted).all(), (dtype, rank, buffer.array[:5], wanted[:5])
    assert set(job.asked) == {"named"}


def test_a_broadcast_copies_the_roots_bytes_whatever_they_are(job: Job) -> None:
    for root in job.ranks.everybody:
        layout = job.layout(root, [30_000], "none", "float32", False, "broadcast", root)
        bits = np.random.default_rng(root).integers(0, 1 << 32, 30_000, dtype=np.uint32)  # NaNs with all payloads, and minus zeros
        buffers = [Buffer(bits.view(np.float32) if rank == root else np.full(30_000, np.nan, np.float32)) for rank in job.ranks.everybody]
        tickets = [job.submit(rank, layout, 0, buffer, skip=rank != root) for rank, buffer in enumerate(buffers)]
        for board, ticket in zip(job.boards, tickets, strict=True):
            board.wait([ticket])
        for buffer in buffers:
            assert (buffer.array.view(np.uint32) == bits).all()


def test_what_codecs_leave_out_is_kept_between_the_steps_of_a_name(job: Job) -> None:
    layout = job.layout(0, [20_000], "onebit", "float32", False)
    put, out = np.zeros(20_000), np.zeros(20_000)
    for step in range(3):
        buffers = [Buffer(np.random.default_rng([step, rank]).standard_normal(20_000).astype(np.float32)) for rank in job.ranks.everybody]
        put += sum(buffer.array.astype(np.float64) for buffer in buffers)
        tickets = [job.submit(rank, layout, 0, buffer) for rank, buffer in enumerate(buffers)]
        for board, ticket in zip(job.boards, tickets, strict=True):
            board.wait([ticket])
        out += buffers[0].array
    kept = sum(
        m.residual.astype(np.float64) for e in job.executors for m in e.works()[0].kept.remembered().values() if m.residual is not None
    )
    np.testing.assert_allclose(out + kept, put, atol=2e-3)
    assert all(executor.moved_bytes for executor in job.executors)


def test_an_uncompressed_step_takes_one_maximum_the_votes_which_tells_who_contributes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has a turn. A step that all ranks skip leaves what was there, one that some rank contributes to is a mean with zeros."""
    maxima = list[int]()  # calls of all ranks
    counted = MemoryGroup.maximum

    def maximum(self: MemoryGroup, array: np.ndarray) -> None:
        maxima.append(len(array))
        counted(self, array)

    monkeypatch.setattr(MemoryGroup, "maximum", maximum)
    for codec, each in (("none", 1), ("int8", 2)):
        layout = job.layout(each, [30_000], codec, "float32", True)
        for step, skipping in enumerate(([], [], job.ranks.everybody, [0], job.ranks.everybody, [])):
            maxima.clear()
            buffers = [Buffer(np.full(30_000, job.ranks.size, np.float32)) for _ in job.ranks.everybody]
            tickets = [job.submit(rank, layout, 0, buffer, rank in skipping) for rank, buffer in enumerate(buffers)]
            for board, ticket in zip(job.boards, tickets, strict=True):
                board.wait([ticket])
            contributing = job.ranks.size - len(skipping)
            assert all(buffer.skipped == (contributing == 0) for buffer in buffers)
            assert all(np.allclose(buffer.array, contributing, atol=0.1) for buffer in buffers) or not contributing
            assert len(maxima) == each * job.ranks.size or (codec, step) == ("none", 0)


def test_a_nan_ends_the_job_where_that_is_asked_for_and_the_name_is_told() -> None:
    job = Job((2,), raises=True)
    layout = job.layout(0, [10], "none", "float32", False)
    tickets = [job.submit(rank, layout, 0, Buffer(np.full(10, np.nan if rank else 1, np.float32))) for rank in range(2)]
    for board, ticket in zip(job.boards, tickets, strict=True):
        board.wait([ticket])
    assert job.errors[0] == "rank 1: gradient of 't0' holds NaN or infinity in its step 1, and PSGC_NONFINITE=raise"
    job.close()


def test_a_timeline_has_the_transfers_of_named_tensors(tmp_path: Path) -> None:
    traces = [WorkerTrace(Config(trace=str(tmp_path), trace_first=1, trace_last=2)) for _ in range(2)]
    job = Job((2,), traces=traces)
    layout = job.layout(0, [10], "none", "float32", False)
    for rank, trace in enumerate(traces):
        trace.joined(rank, (2,))
        trace.laid_out(layout)
    for _ in range(2):
        tickets = [job.submit(rank, layout, 0, Buffer(np.ones(10, np.float32))) for rank in range(2)]
        for board, ticket in zip(job.boards, tickets, strict=True):
            board.wait([ticket])
    job.close()
    for trace in traces:
        spans = [(span.step, span.action) for span in trace.recorder.spans() if span.line == Line.FLAT]
        assert sorted(spans) == [(1, 0), (1, 1), (2, 0), (2, 1)]
