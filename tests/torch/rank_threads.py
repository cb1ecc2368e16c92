"""Ranks as threads of one process, with groups between them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from psgc.config import Config
from psgc.errors import JobFailed
from psgc.torch.collectives.groups import JobGroups, job_groups
from tests.torch.conftest import FakeJob, FakeSession
from tests.torch.limited import limit_step


class Rank(FakeSession):
    """One rank of a job whose failure ends what ranks have asked to be ended, as a real one's does."""

    @property
    def failed(self) -> bool:
        return self.job.error is not None

    def fail(self, text: str) -> None:
        super().fail(text)
        self.end()

    def end(self) -> None:
        calls, self.endings = self.endings, []
        for call in calls:
            call()


def on_ranks(size: int, run: Callable[[JobGroups, Rank], None], config: Config) -> list[BaseException | None]:
    """What each rank, a thread, ended with."""
    job = FakeJob(size, config)
    ranks = [Rank(job, rank) for rank in range(size)]
    ended: list[BaseException | None] = [None] * size

    def play(rank: Rank) -> None:
        try:
            run(job_groups(rank), rank)
        except BaseException as error:
            ended[rank.rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.end()
    return ended


def all_well(ended: list[BaseException | None]) -> None:
    for error in ended:
        if error is not None:
            raise error


def said_when_another_leaves(config: Config) -> str:
    """How rank 0's job fails when rank 1 closes its groups while rank 0 is in a collective."""

    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1))
        group.maximum(np.zeros(1, np.int32))
        if rank.rank == 1:
            groups.close()
        else:
            group.all_reduce(np.zeros(7, np.float32), "float32")

    (error, nothing) = on_ranks(2, run, config)
    assert nothing is None
    assert isinstance(error, JobFailed)
    return str(error)


def said_when_nobody_comes(config: Config, limit_s: float) -> str:
    """How rank 0's exchange with rank 1 ends, which is in no collective."""
    done = threading.Event()

    def run(groups: JobGroups, rank: Rank) -> None:
        group = groups.group((0, 1))
        if rank.rank == 1:
            done.wait()
            return
        limit_step(group, limit_s)
        try:
            group.exchange([None, np.zeros(9, np.uint8)], [None, np.zeros(9, np.uint8)])
        finally:
            done.set()

    (error, _) = on_ranks(2, run, config)
    assert isinstance(error, Exception)
    return str(error)
