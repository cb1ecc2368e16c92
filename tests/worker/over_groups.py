"""Ranks of one process that run layouts' options over groups of threads: executors without a job around them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.observe.figures import Figures
from psgc.observe.worker_trace import WorkerTrace
from psgc.program.groups import Groups
from psgc.program.memory_groups import MemoryWorld
from psgc.program.ranks import Ranks
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.submission import Submission
from psgc.worker.tickets import StepTicket, TicketBoard
from tests.worker.memory_servers import MemoryServers

SERVERS = 2


class Buffer:
    """A bucket's memory: what was put in, and what came out."""

    waits = False

    def __init__(self, values: NDArray[Any]) -> None:
        self.array = values.copy()
        self.skipped: bool | None = None

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        self.skipped = skipped


class Failing(Protocol):
    """A job. errors: that have ended it."""

    ranks: Ranks
    errors: list[str]

    def fail(self, text: str) -> None: ...


@dataclass
class RankOf:
    """One rank of a job, as its executor knows it."""

    job: Failing
    rank: int
    trace: WorkerTrace | None
    figures: Figures | None = None

    @property
    def ranks(self) -> Ranks:
        return self.job.ranks

    @property
    def failed(self) -> bool:
        return bool(self.job.errors)

    def fail(self, text: str) -> None:
        self.job.fail(text)


class Job:
    """One executor a rank."""

    def __init__(
        self, node_sizes: tuple[int, ...], raises: bool = False, traces: Sequence[WorkerTrace] | None = None,
        groups_of: Callable[[str, int], Groups] | None = None, collectives: str = "host",
    ) -> None:  # fmt: skip
        """groups_of: a lane's groups for a rank, in place of groups of threads; collectives: PSGC_COLLECTIVES."""
        self.ranks = Ranks(node_sizes)
        self.errors: list[str] = []
        worlds: dict[str, MemoryWorld] = defaultdict(lambda: MemoryWorld(self.ranks.size, timeout_s=100.0))
        self.servers = MemoryServers(self.fail)
        self.boards = [TicketBoard() for _ in self.ranks.everybody]
        self.executors = [
            Executor(
                Host(
                    RankOf(self, rank, None if traces is None else traces[rank]),
                    lambda name, rank=rank: worlds[name].groups(rank) if groups_of is None else groups_of(name, rank),
                    lambda key: None,
                    self.servers.of(rank),
                    raises,
                    collectives,
                ),
                1,
            )
            for rank in self.ranks.everybody
        ]

    def fail(self, text: str) -> None:
        self.errors.append(text)
        for board in self.boards:
            board.fail()

    def layout(
        self, options: Sequence[tuple[str, ...]], numel: int, codec: str, dtype: str = "float32", mean: bool = True, parts: int = 1
    ) -> Layout:
        """A tensor and bucket for each option."""
        tensors = tuple(TensorSpec(f"t{number}", (numel,), dtype) for number in range(len(options)))
        buckets = tuple(BucketSpec((number,), codec, -number, parts, option=option) for number, option in enumerate(options))
        declaration = Declaration(f"gradients{len(self.executors[0].works())}", "plan", tensors, "none", mean, buckets=buckets, seed=7)
        layout = build_layout(
            declaration,
            layout_id=len(self.executors[0].works()),
            servers=SERVERS,
            workers=self.ranks.size,
            ranks=self.ranks,
        )
        self.servers.add(layout, SERVERS)
        for executor in self.executors:
            executor.add(layout)
        return layout

    def step(
        self, layout: Layout, values: Sequence[Sequence[NDArray[Any]]], skips: Sequence[int] = (), previous_skipped: bool | Sequence[bool] = False,
        rescale: float = 1.0, backwards: bool = False,
    ) -> list[list[Buffer]]:  # fmt: skip
        """One step of all buckets. values: by rank and bucket; skips: ranks that skip; backwards: odd ranks submit in the opposite order."""
        buffers = [[Buffer(own) for own in mine] for mine in values]
        tickets: list[list[StepTicket]] = [[] for _ in values]
        for rank, executor in enumerate(self.executors):
            order = range(len(layout.buckets))
            skipped = previous_skipped if isinstance(previous_skipped, bool) else previous_skipped[rank]
            for index in reversed(order) if backwards and rank % 2 else order:
                ticket = self.boards[rank].issue()
                executor.submit(layout, index, Submission(buffers[rank][index], ticket, rank in skips, skipped, rescale))
                tickets[rank].append(ticket)
        for board, own in zip(self.boards, tickets, strict=True):
            board.wait(own)
        return buffers

    def close(self) -> None:
        threads = [threading.Thread(target=executor.close) for executor in self.executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.servers.close()


def integers(ranks: int, buckets: int, numel: int, seed: int = 0) -> list[list[NDArray[np.float32]]]:
    """Small whole numbers, whose sums are exact in any order."""
    random = np.random.default_rng(seed)
    return [[random.integers(-50, 50, numel).astype(np.float32) for _ in range(buckets)] for _ in range(ranks)]
