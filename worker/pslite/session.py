"""The session of a worker that speaks BytePS's wire (PSGC_WIRE=pslite): every tensor is a bucket of its own, numbered as BytePS numbers it.

ps-lite carries neither errors nor values between workers, so a job over it has no plans, no groups of workers and no saved residuals of servers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.errors import JobFailed, PsgcError, RemoteProtocolError, UsageError
from psgc.layout import Bucket, Declaration, Layout
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.machines import Machines
from psgc.observe.figures import Figures
from psgc.processes.checkpoints import SAVES
from psgc.processes.descriptors import raise_limit
from psgc.processes.pool import threads_of
from psgc.processes.reminder import Reminder
from psgc.pslite.byteps.commands import PART_BYTES, part_bound
from psgc.pslite.byteps.turns import ENDPOINT_NAME, keys_of, refuse_races, two_key_servers
from psgc.pslite.kv import KVWorker
from psgc.pslite.nodes import WORKER_GROUP
from psgc.pslite.postoffice import Postoffice
from psgc.pslite.settings import Settings
from psgc.worker.executor.bucket import BucketWork
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.executor.lying import OnHost
from psgc.worker.pslite.compression import Compression
from psgc.worker.pslite.numbering import CARRIED_AS, Numbering
from psgc.worker.pslite.part import PsLitePart
from psgc.worker.pslite.servers import PsLiteServers, WireKey
from psgc.worker.residuals.kept import Kept
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.session import BucketBuffer, Session, Ticket
from psgc.worker.submission import Submission
from psgc.worker.tickets import StepTicket, TicketBoard

logger = logging.getLogger(__name__)
POOL_CORES: Final = 4


class PsLiteSession(Session):
    """See Session. Built by ``open``, which returns once every node of the job is there."""

    def __init__(self, config: Config, office: Postoffice) -> None:
        self.config = config
        self.rank, self.size = config.node, config.nodes
        self.local_rank, self.local_size = 0, 1
        self.node_sizes = (1,) * config.nodes
        self.figures = Figures(time.monotonic())
        self._office = office
        office.endpoint_name = ENDPOINT_NAME
        self._two_key_servers: frozenset[int] = frozenset()  # by rank; known once the job is complete
        self._kv = KVWorker(office)
        self._servers = PsLiteServers(self._kv)
        host = Host(
            self.rank, self.ranks, self._has_no_groups, self.fail, lambda: self.failed, lambda key: None, self._servers,
            served=lambda layout, bucket: self._works[bucket.parts[0].key],
        )  # fmt: skip
        self._executor = Executor(host, config.cpu_threads or threads_of(POOL_CORES))
        placement = HashPlacement.parse(config.hashed or "djb2")
        placement.check(config.servers, config.nodes)
        # BytePS's mixed mode has the servers on machines without workers first; ps-lite's scheduler orders them so.
        apart = max(config.servers - config.nodes, 0)
        machines = Machines(tuple(range(config.servers)), (0,) * apart + (1,) * config.nodes, config.nodes)
        self._numbering = Numbering(placement, machines, part_bound(config.part_bytes if config.part_bytes_given else PART_BYTES))
        self._board = TicketBoard()
        self._lock = threading.RLock()
        self._declared: dict[str, tuple[Declaration, Layout]] = {}
        self._works: dict[int, BucketWork] = {}  # by the first part's key: a tensor that is declared again goes on with it
        self._endings: list[Callable[[], None]] = []
        self._error: PsgcError | None = None
        self._closed = False
        self._waits: dict[StepTicket, tuple[float, str]] = {}
        self._reminder: Reminder | None = None
        self._launcher = Launcher(config.launcher)
        SAVES.tell_to(self._launcher.tell_saving, config.save_timeout_s)
        office.on_fail, office.on_tick = self._broken, self._tick

    @classmethod
    def open(cls, config: Config) -> PsLiteSession:
        """Join the job. Raises ConfigError, or JobFailed saying who or what is missing."""
        settings = Settings.of(config)
        logger.warning("%s", settings.warning)
        raise_limit()
        office = Postoffice(settings)
        session = cls(config, office)
        session._launcher.tell("joining")
        try:
            office.start(barrier=False)
            refuse_races(office)
            session._two_key_servers = two_key_servers(office)
            office.barrier()
        except BaseException:
            office.finalize(barrier=False)
            raise
        session._launcher.tell("joined", rank=session.rank)
        return session

    def expect_names(self, names: Iterable[str]) -> None:
        with self._lock:
            self._numbering.expect(names)

    def declare(self, declaration: Declaration) -> Layout:
        layout, works = self._laid_out(declaration)
        tickets = [self._board.issue() for _ in works]
        for work, ticket in zip(works, tickets, strict=True):
            self._note_wait(ticket, f"the first push of tensor {layout.tensor_at(work.bucket, 0)!r} of all workers")
            self._servers.when_ready([part.key for part in work.bucket.parts], ticket.finish)
        self.wait(tickets)
        return layout

    def _laid_out(self, declaration: Declaration) -> tuple[Layout, list[BucketWork]]:
        """The layout, and its buckets, which may be those of another one; the servers are told of new ones."""
        self.check()
        with self._lock:
            known = self._declared.get(declaration.name)
            if known is not None:
                before = known[0]
                if (before.tensors, before.codec, before.mean, before.root, before.kind) != (
                    declaration.tensors, declaration.codec, declaration.mean, declaration.root, declaration.kind,
                ):  # fmt: skip
                    raise UsageError(f"{declaration.name!r} was declared before with other tensors, codec or root; use another name")
                return known[1], [self._works[bucket.parts[0].key] for bucket in known[1].buckets]
            compression = Compression("none" if declaration.kind == "broadcast" else declaration.codec, self.config.seed)
            layout, places = self._numbering.layout(declaration, len(self._declared), self.size)
            keys = [[keys_of(place, self._two_key_servers) for place in parts] for parts in places]
            made = [self._bucket(layout, bucket, own, compression) for bucket, own in zip(layout.buckets, keys, strict=True)]
            self._declared[declaration.name] = (declaration, layout)
            fresh = [(bucket, own) for bucket, own, work in zip(layout.buckets, keys, made, strict=True) if work.kept.layout is layout]
            self._works |= {bucket.parts[0].key: work for bucket, work in zip(layout.buckets, made, strict=True)}
            if fresh:
                self._executor.add(layout)
            for bucket, own in fresh:
                self._tell(layout, bucket, own, compression if bucket.codec != "none" else None)
        return layout, made

    def _bucket(self, layout: Layout, bucket: Bucket, keys: list[tuple[int, ...]], compression: Compression) -> BucketWork:
        """A tensor that is declared again, as by broadcasts from two roots, goes on with the rounds of its keys. Raises UsageError, CodecError."""
        known = self._works.get(bucket.parts[0].key)
        if known is None:
            own = zip(bucket.parts, keys, strict=True)
            compressors = [compression.compressor(part.numel, len(each)) if bucket.codec != "none" else None for part, each in own]
            parts = [PsLitePart(layout, bucket, part, self.rank, c) for part, c in zip(bucket.parts, compressors, strict=True)]
            kept = Kept(layout, bucket, (), True, (), "", goes_back=False)
            return BucketWork(parts, [[(part.offset, part.numel)] for part in bucket.parts], kept, OnHost())
        if (known.bucket.dtype, known.bucket.codec, known.layout.mean) != (bucket.dtype, bucket.codec, layout.mean):
            raise UsageError(
                f"tensor {layout.tensor_at(bucket, 0)!r} was exchanged before with another dtype, codec or average, but BytePS has one key for each name; "
                f"use another name"
            )
        return known

    def _tell(self, layout: Layout, bucket: Bucket, keys: list[tuple[int, ...]], compression: Compression | None) -> None:
        """Tell the servers of a bucket's parts. Few tensors are broadcast twice: the second keys of a broadcast's parts wait for that."""
        for part, own in zip(bucket.parts, keys, strict=True):
            wire = CARRIED_AS[bucket.dtype]
            of = [WireKey(key, None if compression is None else compression.registration_of(turn)) for turn, key in enumerate(own)]
            self._servers.add(part.numel * np.dtype(wire).itemsize, wire, of, 1 if layout.kind == "broadcast" else len(own))

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        self.check()
        ticket = self._board.issue()
        if self.figures is not None:
            self.figures.submitted(time.monotonic())
        self._note_wait(ticket, f"the sum of tensor {layout.tensor_at(layout.buckets[bucket], 0)!r}")
        work = self._works[layout.buckets[bucket].parts[0].key]
        self._executor.submit(work.layout, work.bucket.index, Submission(buffer, ticket, skip))
        return ticket

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        layout, _ = self._laid_out(declaration)
        return self.submit(layout, 0, buffer, skip=skip)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        self._board.wait(cast("Iterable[StepTicket]", tickets))
        self.check()

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

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UsageError("psgc has been shut down in this process")

    @property
    def synchronised(self) -> bool:
        return any(declaration.kind != "broadcast" for declaration, _ in self._declared.values())

    @property
    def failed(self) -> bool:
        return self._error is not None

    def fail(self, text: str) -> None:
        self._broken(JobFailed(text))

    def _broken(self, error: BaseException) -> None:
        """This rank cannot go on. ps-lite tells nobody."""
        with self._lock:
            if self._error is not None or self._closed:
                return
            if isinstance(error, RemoteProtocolError) or not isinstance(error, PsgcError):
                error = JobFailed(f"rank {self.rank}: {error if isinstance(error, PsgcError) else repr(error)}")
            self._error = error
        if isinstance(error, JobFailed):
            error.told = self._launcher.tell("job failed", str(error))
        self._office.fail(error)
        self._board.fail()
        self._run_endings()

    def residuals(self) -> dict[str, NDArray[Any]]:
        return {}

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        self._lacks("saved residuals")

    def remember(self, layout: Layout, memory: LayoutMemory) -> None:
        if memory.tensors or memory.servers:
            self._lacks("saved residuals")

    def at_end(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._error is None:
                self._endings.append(call)
                return
        call()

    def _run_endings(self) -> None:
        endings, self._endings = self._endings, []
        for call in endings:
            call()

    def statistics(self) -> dict[str, int]:
        works = list(self._works.values())
        of_steps = [work for work in works if work.layout.kind == "plan"]
        moved, of_gradients = (self._servers.moved_bytes(p.key for work in some for p in work.bucket.parts) for some in (works, of_steps))
        return {
            "wire_bytes": moved, "resent": 0, "gradient_bytes": of_gradients,
            "uncompressed_bytes": sum(2 * work.step * work.bucket.numel * 4 for work in of_steps),
            "slowest_rank": -1, "least_waited_ms": 0, "most_waited_ms": 0,
        }  # fmt: skip

    def close(self) -> None:
        if self._closed:
            return
        if self._error is None:
            self._board.wait(self._board.outstanding())
        self._run_endings()
        try:
            self._office.finalize(barrier=self._error is None, timeout_s=self.config.step_timeout_s)
        except JobFailed as error:
            logger.warning("%s", error)
        finally:
            self._closed = True
            self._executor.close()

    def _note_wait(self, ticket: StepTicket, what: str) -> None:
        with self._lock:
            self._waits = (
                {known: value for known, value in self._waits.items() if not known.done} if len(self._waits) > 4096 else self._waits
            )
            self._waits[ticket] = (time.monotonic(), what)

    def _tick(self, now: float) -> None:
        """Say what this rank waits for, and give up after a while. In the van's thread."""
        with self._lock:
            self._waits = {ticket: value for ticket, value in self._waits.items() if not ticket.done}
            oldest = min(self._waits.values(), default=None)
        if oldest is None or now - oldest[0] < self.config.silence_s:
            self._reminder = None
            return
        text = f"rank {self.rank}: {oldest[1]} has not come for {now - oldest[0]:.0f} s; {len(self._waits)} requests are under way"
        if now - oldest[0] > self.config.step_timeout_s:
            self._broken(JobFailed(f"{text}; ps-lite does not tell who is late: see the servers' output"))
            return
        self._reminder = self._reminder or Reminder(now - self.config.silence_s)
        if self._reminder.due(now, self.config.silence_s):
            logger.warning("%s", text)
