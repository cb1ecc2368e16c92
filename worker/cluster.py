"""A worker's membership of a real job: the session that front ends use, over the network thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import BucketContext, parse_scheme
from psgc.config import Config
from psgc.errors import JobFailed, PsgcError, UsageError
from psgc.layout import OF_MODELS, Declaration, Layout, build_layout
from psgc.layout.backup import check_backup
from psgc.layout.byteps_hash import HashPlacement
from psgc.observe.figures import Figures
from psgc.observe.lately import Shares
from psgc.processes.descriptors import raise_limit
from psgc.program.groups import Groups
from psgc.program.ranks import Ranks
from psgc.transport.security import encryption
from psgc.wire.reports import MOST_TEXT, Report, shortened
from psgc.worker.executor.executor import Executor
from psgc.worker.executor.layouts import Host
from psgc.worker.network import Network
from psgc.worker.outcome import SessionWithOutcome
from psgc.worker.published import check_value
from psgc.worker.residuals.memory import own_memory, questions, take_answers, take_up
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.residuals.transfers import Transfer
from psgc.worker.session import OF_BROADCASTS, BucketBuffer, Handover, Progress, Ticket
from psgc.worker.submission import Submission
from psgc.worker.threads import pool_threads

logger = logging.getLogger(__name__)
LAST_WORDS_S: Final = 3.0  # limit on telling the scheduler why this rank could not join


class _Declared(NamedTuple):
    """given: the object that the front end gave, which need not be looked at again."""

    declaration: Declaration
    given: Declaration


class ClusterSession(SessionWithOutcome):
    """See Session. Built by ``open``, which returns once every member of the job is there."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._network = Network(config, self.outcome)
        self.trace = self._network.trace
        self.figures = Figures(time.monotonic())
        self._shares = Shares()  # of what servers do for it
        self._executor: Executor  # once the job has begun
        self._names: dict[str, _Declared] = {}
        self._early: dict[str, list[Submission]] = {}  # steps of named tensors whose layouts are not there yet
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._barriers = 0
        self._meetings: dict[int, int] = {}  # by layout, the number of its last barrier
        self._behind = False  # this process has taken another's place, and has not the job's state yet

    @classmethod
    def open(cls, config: Config) -> ClusterSession:
        """Join the job. Raises ConfigError, or JobFailed saying who or what is missing."""
        config.require_cluster()
        if config.encrypt:
            encryption.require()
        raise_limit()
        session = cls(config)
        session._network.start()
        session._network.stages.ready.wait()
        try:
            session.check()
        except PsgcError:
            session._network.close()
            session._network.stages.stopped.wait(
                LAST_WORDS_S
            )  # the others are to hear why this rank ends, which this process may do at once
            raise
        topology = session._network.membership.topology
        assert topology is not None
        session.rank, session.ranks = topology.rank, Ranks(topology.node_sizes, topology.node_roots, topology.switches)
        host = Host(session, session._groups, session._network.ask_turn, session._network, config.nonfinite == "raise", config.collectives)
        executor = session._executor = Executor(host, pool_threads(config))
        session.incarnation = max(1, topology.incarnation)
        session._behind = session.incarnation > 1
        session._network.steps_of, session._network.handovers = executor, session._without_state
        session._network.membership.reporter = session._short_report
        logger.info("joined rank=%d size=%d servers=%d", topology.rank, topology.size, len(topology.servers))
        return session

    def declare(self, declaration: Declaration) -> Layout:
        self.check_together()
        declaration = self._checked(declaration)
        known = self._network.membership.layouts.get(declaration.name)
        if known is not None:
            return known
        ticket = self.outcome.board.issue()
        self._network.declare(declaration, lambda _: ticket.finish())
        self.wait([ticket])
        layout = self._network.membership.layouts[declaration.name]
        if self.config.on_worker_loss != "stop" and any(bucket.over_groups for bucket in layout.buckets):
            raise UsageError(
                f"PSGC_ON_WORKER_LOSS={self.config.on_worker_loss}: {layout.name!r} has options over groups of ranks, whose connections do not outlive a "
                f"member; use a plan in which every rank pushes to servers, or PSGC_ON_WORKER_LOSS=stop"
            )
        self._executor.add(layout, self._network.membership.taken.get(layout.name, 0))
        return layout

    def _groups(self, name: str) -> Groups:
        if self.groups_of is None:
            raise UsageError("the layout runs over groups of ranks, but its front end has no collectives; declare it through psgc.torch")
        return self.groups_of(name)

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        self.check_together()
        ticket = self.issue(layout, bucket)
        self._executor.submit(layout, bucket, Submission(buffer, ticket, skip, previous_skipped, rescale))
        return ticket

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        self.check_together()
        declaration = self._checked(declaration)
        ticket = self.outcome.board.issue()
        submission = Submission(buffer, ticket, skip, priority=priority)
        with self._opening:
            known, early = self._network.membership.layouts.get(declaration.name), self._early.get(declaration.name)
            if early is not None:
                early.append(submission)
                return ticket
            if known is None:
                self._early[declaration.name] = [submission]
        if known is not None:
            self._executor.submit(known, 0, submission)
        else:
            self._network.declare(declaration, self._opened)
        return ticket

    def _opened(self, layout: Layout) -> None:
        """A named tensor's layout is there: its steps begin in the order of their submission. In the network thread."""
        self._executor.add(layout, self._network.membership.taken.get(layout.name, 0))
        with self._opening:
            for submission in self._early.pop(layout.name):
                self._executor.submit(layout, 0, submission)

    def barrier(self) -> None:
        self.check_together()
        with self._lock:
            self._barriers += 1
            number = self._barriers
        self._meet(number)

    def _meet(self, number: int, layout: int = 0) -> None:
        self.check()  # nobody would answer in a session that has been left
        passed = threading.Event()
        self._network.barrier(number, passed, layout)
        with self.rest.resting():
            passed.wait()
        self.check()

    @property
    def progress(self) -> Progress:
        network = self._network
        own = {name: network.steps(layout) for name, layout in list(network.membership.layouts.items())}
        # What this process has not declared yet itself, having taken another's place, may be used again all the same: by its own successor, too.
        return Progress({**network.membership.taken, **own}, self._barriers)

    def catch_up(self, progress: Progress) -> None:
        self._network.membership.taken.update(progress.steps)
        self._barriers, self._behind = progress.barriers, False
        self._network.tell_state()

    def _without_state(self, handover: Handover) -> None:
        """The script has made no Elastic. It may be preparing: whoever needs the state asks again at each heartbeat, and the limit is that of its look-up."""
        if not handover.takes and self.synchronised:
            self.fail(
                f"rank {handover.other} died and another process takes its place, but the script of rank {self.rank} has no psgc.torch.Elastic, which would "
                f"give it the job's state (PSGC_ON_WORKER_LOSS={self.config.on_worker_loss})"
            )

    def stepped(self) -> None:
        self.outcome.launcher.tell("stepped")

    def came_back(self) -> None:
        self.outcome.launcher.tell("back")

    def hear_of_handovers(self, hear: Callable[[Handover], None]) -> None:
        if self.config.on_worker_loss != "stop" and self._network.handovers != self._without_state:
            raise UsageError(
                "this process has a psgc.torch.Elastic already, and a process that takes a dead worker's place could not follow two; train in the one's loop, "
                "or set PSGC_ON_WORKER_LOSS=stop"
            )
        self._network.handovers = hear

    def ask_state(self, failed: int) -> None:
        self._network.ask_state(failed)

    def publish(self, name: str, value: bytes) -> None:
        self.check()
        check_value(name, value)
        self._network.publish(name, value)

    def lookup_soon(self, name: str, then: Callable[[bytes], None]) -> None:
        check_value(name)
        self._network.look_up(name, then)

    def give_up_lookup(self, name: str, then: Callable[[bytes], None]) -> None:
        self._network.give_up_look_up(name, then)

    def lookup(self, name: str) -> bytes:
        self.check()
        check_value(name)
        ticket, found = self.outcome.board.issue(), []

        def keep(value: bytes) -> None:
            found.append(value)
            ticket.finish()

        self._network.look_up(name, keep)
        self.wait([ticket])
        return found[0]

    @property
    def synchronised(self) -> bool:
        return any(
            declaration.kind != "broadcast" and not name.startswith(OF_BROADCASTS) for name, (declaration, _) in list(self._names.items())
        )

    def fail(self, text: str) -> None:
        if not self.outcome.closed:
            self._network.fault(text)

    def tell_broken(self, text: str) -> None:
        if not self.outcome.closed:
            self._network.tell_broken(text)

    def memory(self, layout: Layout, bucket: int) -> NDArray[Any] | None:
        place = self._network.memory(layout, layout.buckets[bucket])
        if place is None:
            return None
        place.populate()
        return place.bytes

    def residuals(self) -> dict[str, NDArray[Any]]:
        kept = [work.kept for work in self._executor.works() if work.kept.keeps_residual]
        return {one.name: np.concatenate([m.residual for m in one.remembered().values() if m.residual is not None]) for one in kept}

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        self.check()
        works = self._executor.works(layout)
        memory = own_memory(layout, works, dropped)
        members = [(work, work.bucket.members or self.ranks.everybody) for work in works]
        mine = [work for work, of in members if of[work.bucket.index % len(of)] == self.rank]  # of servers' residuals
        answers = questions(mine, dropped)
        meets = layout.backup and any(work.kept.server_parts for work in works)
        if meets:  # else the others might take two steps before this rank has asked
            self._meet_again(layout)
        self._transfer([transfer for asked in answers.values() for transfer in asked])
        if meets:
            self._meet_again(layout)
        take_answers(memory, mine, answers)
        return memory

    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        self.check()
        works = self._executor.works(layout)
        self._transfer(take_up(memory, layout, works))
        if not alone and any(work.kept.server_parts for work in works):
            self._meet(1, layout.id)  # a push must not overtake another rank's residual, which servers take before the first step only

    def _meet_again(self, layout: Layout) -> None:
        self._meetings[layout.id] = number = self._meetings.get(layout.id, 1) + 1
        self._meet(number, layout.id)

    def retire(self, layout: Layout) -> None:
        self._executor.retire(layout)
        self._network.retire(layout)

    def _transfer(self, transfers: list[Transfer]) -> None:
        if transfers:
            ticket = self.outcome.board.issue()
            self._network.transfer(transfers, ticket)
            self.wait([ticket])

    def statistics(self) -> dict[str, int]:
        over_servers, waiting = self._network.statistics(), self._network.membership.waiting
        carried = self._carried().values()
        return {
            "wire_bytes": over_servers["wire_bytes"] + self._executor.moved_bytes, "resent": over_servers["resent"],
            "gradient_bytes": sum(moved for moved, _ in carried), "uncompressed_bytes": sum(plain for _, plain in carried),
            "slowest_rank": waiting.slowest_rank, "least_waited_ms": waiting.least_ms, "most_waited_ms": waiting.most_ms,
        }  # fmt: skip

    def _carried(self) -> dict[str, tuple[int, int]]:
        """By codec, bytes of gradients in both directions, and what they stand for."""
        over_servers, over_groups = self._network.carried(), self._executor.carried()
        return {
            codec: (a[0] + b[0], a[1] + b[1])
            for codec in dict.fromkeys((*over_servers, *over_groups))
            for a, b in ((over_servers.get(codec, (0, 0)), over_groups.get(codec, (0, 0))),)
        }

    def report(self) -> Report:
        common = super().report()
        assert common is not None
        carried, over_servers, works = self._carried(), self._network.statistics(), self._executor.works()
        buckets = Counter(work.codec for work in works if work.layout.kind in OF_MODELS)
        return replace(
            common, reconnects=over_servers["reconnects"], queued=over_servers["queued"], in_flight_bytes=over_servers["in_flight_bytes"],
            codecs={codec: [*carried.get(codec, (0, 0)), buckets[codec]] for codec in dict.fromkeys((*carried, *buckets))},
            servers=self._at_servers(time.monotonic()),
            residuals={
                f"{work.kept.name} {work.tensor_of(0)}"[:MOST_TEXT]: ratio for work in works if (ratio := work.residual_ratio) is not None
            },
        )  # fmt: skip

    def _at_servers(self, now: float) -> dict[str, list[float]]:
        """By server, of the last seconds: the share in which it has had gradients of this rank's, their payloads' bytes a second, and the share in which what
        was sent to it had not arrived."""
        grown = self._shares.grown(now, [count for of in self._network.served(now) for count in of])
        each = zip(grown[::3], grown[1::3], grown[2::3], strict=True)
        return {str(index): [min(1.0, has), rate, min(1.0, leaving)] for index, (has, rate, leaving) in enumerate(each) if has}

    def _short_report(self) -> Report:
        """What this rank tells the scheduler of itself."""
        return shortened(self.report())

    def note_waited(self, seconds: float) -> None:
        self._network.membership.waiting.own_s += seconds

    def close(self) -> None:
        if self.outcome.closed:
            return
        if not self.failed:
            try:
                self.outcome.board.wait(self.outcome.board.outstanding())
            except JobFailed:
                logger.debug("closing a failed job")
        self.outcome.run_calls()
        self.outcome.closed = True
        self._executor.close()
        self._network.close()
        if self.trace is not None:
            self.trace.close()
        if self._network.stages.stopped.wait(max(self.config.step_timeout_s, self.config.dead_s) + 5.0):
            self._network.join()  # its last moments: a process that counts its threads after shutdown finds none of ours

    def _checked(self, given: Declaration) -> Declaration:
        """With the job's seed and placement. Checked before it is sent: its codec, and that it agrees with an earlier one of this name."""
        self.check()
        if self._behind:
            raise UsageError(
                f"this process has taken the place of rank {self.rank}'s, which died, and has not the job's state yet: before {given.name!r} is synchronised, "
                f"go through the steps of psgc.torch.Elastic"
            )
        with self._lock:
            known = self._names.get(given.name)
            if known is not None and known.given is given:
                return known.declaration
            declaration = self._seeded(given)
            if known is None:
                for dtype in {tensor.dtype for tensor in declaration.tensors}:
                    parse_scheme(declaration.codec, BucketContext(dtype))
                layout = build_layout(  # the scheduler's own would end the job
                    declaration, layout_id=0, servers=self.config.servers, workers=self.size, ranks=self.ranks
                )
                self._check_shrinks(layout)
                check_backup(layout)
                self._names[declaration.name] = _Declared(declaration, given)
                return declaration
        declaration.check_same(known.declaration)
        return declaration

    def _check_shrinks(self, layout: Layout) -> None:
        """Raise UsageError for means that workers take themselves, who do not know how many ranks each sum is of."""
        if self.config.on_worker_loss != "shrink" or not layout.mean:
            return
        for bucket, part in {bucket.codec: (bucket, part) for bucket, part in layout.parts()}.values():
            if not all(round_.divides for round_ in layout.scheme(bucket).rounds(part.numel)):
                raise UsageError(
                    f"PSGC_ON_WORKER_LOSS=shrink: codec {bucket.codec} of {layout.name!r} has workers divide by the number of ranks, of which some may be "
                    f"missing; use one whose means servers take, such as int8, onebit or topk, or PSGC_ON_WORKER_LOSS=wait"
                )

    def _seeded(self, declaration: Declaration) -> Declaration:
        seed = declaration.seed if declaration.seed >= 0 else self.config.seed
        if self.config.hashed:
            HashPlacement.parse(self.config.hashed).check(self.config.servers, self.config.nodes)
        return replace(declaration, seed=seed, hashed=self.config.hashed)


SESSION: Final = ClusterSession  # of the row in psgc/wire/carriers.py
