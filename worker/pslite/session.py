"""The session of a worker that speaks BytePS's wire (PSGC_WIRE=pslite): every tensor is a bucket of its own, numbered as BytePS numbers it.

ps-lite carries neither errors nor values between workers, so a job over it has no plans, no groups of workers and no saved residuals of servers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed, PsgcError, RemoteProtocolError, UsageError
from psgc.layout import Declaration, Layout
from psgc.observe.figures import Figures
from psgc.processes.descriptors import raise_limit
from psgc.processes.pool import threads_of
from psgc.program.ranks import Ranks
from psgc.pslite.byteps.turns import ENDPOINT_NAME, refuse_races, two_key_servers
from psgc.pslite.kv import KVWorker
from psgc.pslite.nodes import WORKER_GROUP
from psgc.pslite.postoffice import Postoffice
from psgc.pslite.settings import Settings
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.outcome import SessionWithOutcome
from psgc.worker.pslite.declared import Declared
from psgc.worker.pslite.servers import PsLiteServers
from psgc.worker.pslite.waits import Waits
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import BucketBuffer, Ticket
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
POOL_CORES: Final = 4


class PsLiteSession(SessionWithOutcome):
    """See Session. Built by ``open``, which returns once every node of the job is there."""

    def __init__(self, config: Config, office: Postoffice) -> None:
        super().__init__(config)
        self.rank, self.ranks = config.node, Ranks((1,) * config.nodes)
        self.figures = Figures(time.monotonic())
        self._office = office
        office.endpoint_name = ENDPOINT_NAME
        self._servers = PsLiteServers(KVWorker(office))
        self._declared = Declared(config, self._servers)
        host = Host(self, self._has_no_groups, lambda key: None, self._servers, served=self._declared.work)
        self._executor = Executor(host, config.cpu_threads or threads_of(POOL_CORES))
        self._waits = Waits(self.rank, config.silence_s, config.step_timeout_s)
        office.on_fail, office.on_tick = self._broken, self._tick

    @classmethod
    def open(cls, config: Config) -> PsLiteSession:
        """Join the job. Raises ConfigError, or JobFailed saying who or what is missing."""
        settings = Settings.of(config)
        logger.warning("%s", settings.warning)
        raise_limit()
        office = Postoffice(settings)
        session = cls(config, office)
        session.outcome.launcher.tell("joining")
        try:
            office.start(barrier=False)
            refuse_races(office)
            session._declared.two_key_servers = two_key_servers(office)
            office.barrier()
        except BaseException:
            office.finalize(barrier=False)
            raise
        session.outcome.launcher.tell("joined", rank=session.rank)
        return session

    def expect_names(self, names: Iterable[str]) -> None:
        self._declared.expect(names)

    def declare(self, declaration: Declaration) -> Layout:
        self.check()
        layout = self._declared.lay_out(declaration, self._executor.add)
        tickets = [self.outcome.board.issue() for _ in layout.buckets]
        for bucket, ticket in zip(layout.buckets, tickets, strict=True):
            self._waits.add(ticket, f"the first push of tensor {layout.tensor_at(bucket, 0)!r} of all workers")
            self._servers.when_ready([part.key for part in bucket.parts], ticket.finish)
        self.wait(tickets)
        return layout

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        ticket = self.issue(layout, bucket)
        self._waits.add(ticket, f"the sum of tensor {layout.tensor_at(layout.buckets[bucket], 0)!r}")
        work = self._declared.work(layout, layout.buckets[bucket])
        self._executor.submit(work.layout, work.bucket.index, Submission(buffer, ticket, skip))
        return ticket

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        self.check()
        layout = self._declared.lay_out(declaration, self._executor.add)
        return self.submit(layout, 0, buffer, skip=skip)

    def barrier(self) -> None:
        self.check()
        self._office.barrier(WORKER_GROUP, self.config.step_timeout_s)

    def publish(self, name: str, value: bytes) -> None:
        self._lacks("values that ranks publish")

    def lookup(self, name: str) -> bytes:
        self._lacks("values that ranks publish")

    def _has_no_groups(self, name: str) -> NoReturn:
        self._lacks("groups of workers")

    def _lacks(self, what: str) -> NoReturn:
        raise UsageError(f"ps-lite (PSGC_WIRE=pslite) has no {what}, which this call needs; use psgc's own wire for it")

    @property
    def synchronised(self) -> bool:
        return self._declared.any

    def fail(self, text: str) -> None:
        self._broken(JobFailed(text))

    def _broken(self, error: BaseException) -> None:
        """This rank cannot go on. ps-lite tells nobody."""
        if isinstance(error, RemoteProtocolError) or not isinstance(error, PsgcError):
            error = JobFailed(f"rank {self.rank}: {error if isinstance(error, PsgcError) else repr(error)}")
        if not self.outcome.closed and self.outcome.fail(error):
            self._office.fail(error)
            self.outcome.board.fail()
            self.outcome.run_calls()

    def residuals(self) -> dict[str, NDArray[Any]]:
        return {}

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        self._lacks("saved residuals")

    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        if memory.tensors or memory.servers:
            self._lacks("saved residuals")

    def statistics(self) -> dict[str, int]:
        works = self._declared.works
        of_steps = [work for work in works if work.layout.kind == "plan"]
        moved, of_gradients = (self._servers.moved_bytes(p.key for work in some for p in work.bucket.parts) for some in (works, of_steps))
        return {
            "wire_bytes": moved, "resent": 0, "gradient_bytes": of_gradients,
            "uncompressed_bytes": sum(2 * work.step * work.bucket.numel * 4 for work in of_steps),
            "slowest_rank": -1, "least_waited_ms": 0, "most_waited_ms": 0,
        }  # fmt: skip

    def close(self) -> None:
        if self.outcome.closed:
            return
        if not self.failed:
            self.outcome.board.wait(self.outcome.board.outstanding())
        self.outcome.run_calls()
        try:
            self._office.finalize(barrier=not self.failed, timeout_s=self.config.step_timeout_s)
        except JobFailed as error:
            logger.warning("%s", error)
        finally:
            self.outcome.closed = True
            self._executor.close()

    def _tick(self, now: float) -> None:
        why = self._waits.tick(now)
        if why is not None:
            self._broken(JobFailed(why))


SESSION: Final = PsLiteSession  # of the row in psgc/wire/carriers.py
