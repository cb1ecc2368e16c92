"""Carriers of groups: a new one is one file and one row in the table."""

from __future__ import annotations

import numpy as np
import pytest

from psgc.config import Config
from psgc.program.memory_groups import MemoryGroup, MemoryWorld
from psgc.torch.collectives import groups as groups_module
from psgc.torch.collectives.carriers import CARRIERS
from psgc.torch.collectives.groups import JobGroups
from psgc.torch.device.engine import Engine
from psgc.worker.session import Session
from tests.torch.rank_threads import Rank, on_ranks


class _Group(MemoryGroup):
    def abort(self) -> None:
        """Nothing of it waits for long."""

    def close(self) -> None:
        """It has no connections."""


class Queues:
    """A carrier between threads of one process, for groups of all ranks."""

    name, on_gpus = "queues", False

    def __init__(self, size: int) -> None:
        self.world, self.connected = MemoryWorld(size), list[tuple[int, ...]]()

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        return len(members) == self.world.size

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> _Group:
        self.connected.append(members)
        return _Group(self.world, members, members.index(session.rank))


def test_a_group_uses_the_first_row_of_the_table_that_takes_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = Queues(3)
    monkeypatch.setattr(groups_module, "CARRIERS", (queues, *CARRIERS))

    def run(groups: JobGroups, rank: Rank) -> None:
        for members in ((0, 1, 2), (0, 2)):
            if rank.rank in members:
                array = np.full(5, rank.rank, np.float32)
                groups.group(members).all_reduce(array, "float32")
                assert (array == sum(members)).all()

    assert on_ranks(3, run, Config(nodes=3, servers=0, root_host="127.0.0.1", root_port=1, node=0)) == [None] * 3
    assert queues.connected == [(0, 1, 2)] * 3


def test_rows_have_names_of_their_own_and_the_last_one_of_each_kind_is_a_way_out() -> None:
    names = [carrier.name for carrier in CARRIERS]
    assert len(set(names)) == len(names)
    assert names[-1] == "sockets" and not CARRIERS[-1].on_gpus, "groups on GPUs may have none, and then use this one"
