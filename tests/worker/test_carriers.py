"""Carriers that push and pull: a new one is one file, which this one could be, and one row in the table."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed, UsageError
from psgc.layout import Declaration, Layout, TensorSpec, build_layout
from psgc.program.ranks import Ranks
from psgc.wire.carriers import MODULES
from psgc.worker.connect import open_session
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.outcome import SessionWithOutcome
from psgc.worker.session import BucketBuffer, Session, Ticket
from psgc.worker.submission import Submission
from tests.worker.memory_servers import MemoryServers
from tests.worker.over_groups import Buffer


class InMemory(SessionWithOutcome):
    """A rank of a job whose ranks and servers are in one process. No groups, and nothing that ranks tell each other."""

    servers: ClassVar[MemoryServers]  # of the job under way

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rank, self.ranks = config.node, Ranks((1,) * config.nodes)
        self.layouts: dict[str, Layout] = {}
        self.executor = Executor(Host(self, self._lacks, lambda key: None, self.servers.of(self.rank)), 1)

    @classmethod
    def open(cls, config: Config) -> InMemory:
        return cls(config)

    def declare(self, declaration: Declaration) -> Layout:
        if declaration.name not in self.layouts:
            layout = self.layouts[declaration.name] = build_layout(
                declaration, layout_id=1 + len(self.layouts), servers=1, workers=self.size
            )
            self.servers.add(layout, 1)
            self.executor.add(layout)
        return self.layouts[declaration.name]

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0, rescale: float = 1.0
    ) -> Ticket:
        self.check()
        ticket = self.outcome.board.issue()
        self.executor.submit(layout, bucket, Submission(buffer, ticket, skip, previous_skipped, rescale))
        return ticket

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        return self.submit(self.declare(declaration), 0, buffer, skip=skip)

    def fail(self, text: str) -> None:
        if self.outcome.fail(JobFailed(text)):
            self.outcome.board.fail()
            self.outcome.run_calls()

    def _lacks(self, *_: Any) -> NoReturn:
        raise UsageError("ranks of one process have no groups, and publish nothing")

    barrier = publish = lookup = remembered = remember = _lacks

    def residuals(self) -> dict[str, NDArray[Any]]:
        return {}

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.outcome.run_calls()
        self.outcome.closed = True
        self.executor.close()


SESSION = InMemory


@pytest.mark.parametrize("codec", ["none", "onebit", "topk:k=0.1"])
def test_a_row_of_ones_own_carries_steps_with_their_codecs_and_residuals(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    failures: list[str] = []
    monkeypatch.setitem(MODULES, "memory", __name__)
    monkeypatch.setattr(InMemory, "servers", MemoryServers(failures.append), raising=False)
    ranks = [open_session(Config(nodes=2, servers=1, root_host="127.0.0.1", root_port=1, node=node, wire="memory")) for node in range(2)]
    declaration = Declaration("model", "plan", (TensorSpec("w", (5000,), "float32"),), codec, True, min_compress_bytes=0)
    layouts = [session.declare(declaration) for session in ranks]
    random, put, out = np.random.default_rng(1), np.zeros(5000), np.zeros(5000)
    for _ in range(3):
        values = [random.standard_normal(5000).astype(np.float32) for _ in ranks]
        put += sum(value.astype(np.float64) for value in values) / 2
        buffers = [Buffer(value.copy()) for value in values]
        tickets = [session.submit(layout, 0, buffer) for session, layout, buffer in zip(ranks, layouts, buffers, strict=True)]
        for session, ticket in zip(ranks, tickets, strict=True):
            session.wait([ticket])
        assert (buffers[0].array == buffers[1].array).all()
        out += buffers[0].array
    assert not failures
    if codec == "none":
        np.testing.assert_allclose(out, put, atol=1e-5)
    else:
        assert np.dot(out, put) > 0
    for session in ranks:
        session.close()


def test_an_error_of_a_row_of_ones_own_ends_its_waits_and_its_calls_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "memory", __name__)
    monkeypatch.setattr(InMemory, "servers", MemoryServers(lambda text: None), raising=False)
    session = open_session(Config(nodes=2, servers=1, root_host="127.0.0.1", root_port=1, node=0, wire="memory"))
    declaration = Declaration("model", "plan", (TensorSpec("w", (5000,), "float32"),), "none", True, min_compress_bytes=0)
    ticket = session.submit(session.declare(declaration), 0, Buffer(np.zeros(5000, np.float32)))  # the other rank never comes
    calls: list[int] = []
    session.at_end(lambda: calls.append(1))
    session.fail("the switch is on fire")
    with pytest.raises(JobFailed, match="the switch is on fire"):
        session.wait([ticket])
    session.fail("a second reason")
    session.at_end(lambda: calls.append(2))
    assert calls == [1, 2] and ticket.done
    with pytest.raises(JobFailed, match="the switch is on fire"):
        session.check()
    session.close()
    assert calls == [1, 2]


@pytest.mark.parametrize("name", MODULES)
def test_every_row_has_a_session_that_joins_a_job(name: str) -> None:
    session = import_module(MODULES[name]).SESSION
    assert issubclass(session, Session) and callable(session.open)
