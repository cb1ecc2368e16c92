"""What a front end sees of the job: declare tensors, submit buckets, wait. Two kinds: one alone, one over the network.

Owns the interface only; `solo.py` and `cluster.py` implement it. Knows NumPy arrays, not tensors.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from psgc.codecs import Scheme
from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import Declaration, Layout
from psgc.observe.figures import Figures
from psgc.observe.worker_trace import WorkerTrace
from psgc.program.groups import Groups
from psgc.program.ranks import Ranks
from psgc.wire.reports import MOST_TEXT, Report
from psgc.worker.device import DeviceBucket
from psgc.worker.residuals.residual import LayoutMemory
from psgc.worker.rest import Rest

# What begins the names by which ranks agree on broadcasts: on their roots, and on which tensors differ. They synchronise nothing of the script's.
ROOT_OF: Final = "root of "
DIGESTS_OF: Final = "digests of "
OF_BROADCASTS: Final = (ROOT_OF, DIGESTS_OF)
RAISED: Final = 2  # of ``previous_skipped``, which is else a bool


class BucketBuffer(Protocol):
    """Where a bucket's elements come from and go to. Both methods run in one of psgc's threads, once a step; ``load`` runs before ``store``."""

    @property
    def waits(self) -> bool:
        """Whether ``load`` or ``store`` of this step may wait for a device."""

    def load(self) -> NDArray[Any]:
        """The bucket's elements: flat, contiguous, writable, of the push codec's ``array_dtype``. Parts are decoded into
        this same array, so it must stay as it is until ``store``. For a skip its contents do not matter."""

    def store(self, skipped: bool) -> None:
        """The array now holds the aggregate; copy it to the tensors. skipped: all ranks skipped, and the array's contents mean nothing."""


class DeviceBuffer(ABC):
    """A BucketBuffer whose elements may lie on a device. A base class, which steps ask for: that costs a hundredth of what asking for a protocol does."""

    @abstractmethod
    def on_device(self, scheme: Scheme, wanted: bool = False, slices: Sequence[tuple[int, int]] = ()) -> DeviceBucket | None:
        """Where this step's elements lie, if that is a device with kernels for ``scheme``: then ``load`` is not called. The same object from step to step
        while they lie there. wanted: a program is to work on them there, in float32; raises UsageError where it cannot. slices: the first element of each slice
        and the one after its last, of which a scheme with state keeps its state on the device."""

    @abstractmethod
    def located(self) -> DeviceBucket | None:
        """Where this step's elements lie, if that is one device, for a program that moves and adds them as they are: in their own dtype, float32 or shorter.
        The same object from step to step while they lie there."""


class Ticket(Protocol):
    """One bucket's (or one named tensor's) step under way."""

    @property
    def done(self) -> bool:
        """True once ``store`` has returned, or the job has failed."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The job's state goes from one rank to another, whose process has taken a dead one's place. number: of all that the job has had; 0: the one under way has
    failed. other: the rank at the other end. takes: whether this rank takes it; else it gives it."""

    number: int
    other: int
    takes: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come between two steps. steps: of each layout, by name; barriers: that it has called."""

    steps: Mapping[str, int]
    barriers: int


class Session(ABC):
    """One process's membership of a job. All methods may be called from any thread; none calls back into the caller's locks."""

    config: Config
    rest: Rest  # of the threads that wait for this session
    rank: int
    ranks: Ranks  # all of the job's
    figures: Figures | None = None  # of its steps, where somebody is told of them
    trace: WorkerTrace | None = None  # where this process records its timeline, if it does
    incarnation: int = 1  # which of the processes that follow one another in its rank's place it is
    alone_in: str = ""  # a call of the script's that the thread that trains is in, and other ranks perhaps not
    groups_of: Callable[[str], Groups] | None = None  # makes groups by a name, where the front end has a backend for them

    @property
    def size(self) -> int:
        """Workers of the job."""
        return self.ranks.size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.ranks.on_node(self.ranks.node_of[self.rank]).index(self.rank)

    @property
    def local_size(self) -> int:
        """Workers of its node."""
        return self.ranks.node_sizes[self.ranks.node_of[self.rank]]

    @property
    def between_nodes(self) -> bool:
        """Whether its ranks are on more than one node."""
        return self.ranks.nodes > 1

    @property
    def whole(self) -> Session:
        """The job's session, of which this may be a group of ranks alone."""
        return self

    @property
    def part(self) -> Mapping[str, Sequence[int]]:
        """Which of the job's groups this is: by each other dimension of the mesh, its place along it and how many there are. Empty for the job itself."""
        return {}

    def expect_names(self, names: Iterable[str]) -> None:  # noqa: B027 - psgc's own wire numbers nothing by order
        """An optimizer's gradients and parameters, by BytePS's names, in its order: the first tensors where tensors are numbered as they are declared."""

    @abstractmethod
    def declare(self, declaration: Declaration) -> Layout:
        """Declare tensors under a name and wait until every rank has. Raises LayoutMismatch/JobFailed. Same name again: the
        same layout, if the declaration's tensors agree (else UsageError)."""

    @abstractmethod
    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        """Enqueue the next step of a bucket; returns at once. A bucket's steps follow one another in the order of submission.

        skip: this rank has nothing to add (a broadcast: this rank is not the root); it still gets the result.
        previous_skipped: the trainer did not apply the last step's result (AMP); RAISED if that is so because this rank's
        backward had raised. rescale: the residual's unit of the last
        step over that of this one (loss scale, learning rate).
        """

    @abstractmethod
    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        """``declare`` at first use, without waiting, and ``submit``: for ad-hoc push_pull and broadcasts. One tensor a declaration,
        hence one bucket. Declaration order does not matter between names. priority: of this step, on this rank; None: that of its declaration. Of what
        is ready to be sent the highest priority leaves first. Without effect where no servers are."""

    @abstractmethod
    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Sleep until all are done. Raises JobFailed (or the error that ended the job)."""

    @abstractmethod
    def wait_for_all(self) -> None:
        """``wait`` for everything that has been submitted so far."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every worker has called it as often as this one."""

    def check_together(self) -> None:
        """Raise UsageError where this thread is ``alone_in`` a call, and so must synchronise nothing."""
        if self.alone_in and threading.get_ident() == self.rest.trains:
            raise UsageError(
                f"{self.alone_in}: a process that takes a dead worker's place is told alone, at its first step, so nothing can be synchronised here "
                f"(PSGC_ON_WORKER_LOSS={self.config.on_worker_loss}); do it in the loop of psgc.torch.Elastic"
            )

    @property
    def progress(self) -> Progress:
        """How far this rank has come. Nothing is under way."""
        return Progress({}, 0)

    def catch_up(self, progress: Progress) -> None:  # noqa: B027 - nobody takes the place of a process that is alone
        """This process has taken another's place, and has the state of a rank that has come so far. Nothing has been declared yet."""

    def hear_of_handovers(self, hear: Callable[[Handover], None]) -> None:  # noqa: B027
        """Have ``hear`` called, in one of psgc's threads, for each handover of the job's state in which this rank takes part. Raises UsageError
        where something else does already, and the job's workers may be followed."""

    def ask_state(self, failed: int) -> None:  # noqa: B027
        """Ask who gives this rank the job's state: ``hear_of_handovers`` tells. failed: how many handovers have failed."""

    def stepped(self) -> None:  # noqa: B027
        """This process, which has taken another's place, has completed a step: its launcher starts another again, should it die, too."""

    def came_back(self) -> None:  # noqa: B027
        """This process, which has taken another's place, has the state of a training that has no step left: its launcher waits for its end, as for others'."""

    @abstractmethod
    def publish(self, name: str, value: bytes) -> None:
        """Keep a value with the scheduler, to the job's end, for every rank that looks it up. A name has one value in a job. Returns at once.

        name: 1 to 200 letters. value: at most 64 KiB. Raises UsageError for larger ones; a name that has another value ends the job.
        """

    @abstractmethod
    def lookup(self, name: str) -> bytes:
        """The value that a rank has published, or will: waits for it. Raises JobFailed, also when it has been waited for too long."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error that ended the job, if one has."""

    def lookup_soon(self, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then``, in one of psgc's threads, with a published value once it is there; never if the job fails before."""
        then(self.lookup(name))

    def give_up_lookup(self, name: str, then: Callable[[bytes], None]) -> None:  # noqa: B027 - where lookup_soon waits, nothing is left to be given up
        """Do not call ``then`` any more, which ``lookup_soon`` was given."""

    @property
    def synchronised(self) -> bool:
        """Whether gradients, or tensors for push_pull, have been declared. Broadcasts do not count."""
        return True

    @property
    def failed(self) -> bool:
        """Whether the job has ended by an error."""
        return False

    @abstractmethod
    def fail(self, text: str) -> None:
        """Tell the whole job that this rank has met an error it cannot go on from; every rank's next call raises ``text``."""

    def tell_broken(self, text: str) -> None:
        """Like ``fail``, for a collective that broke: the job may end with more than ``text``, because the scheduler knows which ranks have left."""
        self.fail(text)

    def memory(self, layout: Layout, bucket: int) -> NDArray[Any] | None:
        """Bytes as long as the bucket, in which servers read what a buffer that lies there pushes, without a copy, until the layout is retired; None: no memory
        is better than a buffer's own."""
        return None

    @abstractmethod
    def residuals(self) -> dict[str, NDArray[Any]]:
        """A copy of this rank's residuals by "layout name/bucket index", float32, of buckets whose codec keeps one."""

    @abstractmethod
    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        """A copy of what is kept between steps of the layout's tensors: by this rank, and by the servers of the buckets that
        it answers for (number modulo size), as of this rank's last step. None of the layout's steps may be under way. dropped: the
        trainer did not apply the last step's result, and no later submission has said so."""

    @abstractmethod
    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        """Go on from ``memory``, before the layout's first step. Every rank must call it, with the buckets that it answers for; it returns when all
        ranks have called it. alone: the memory has nothing of servers', and other ranks need not call it."""

    def retire(self, layout: Layout) -> None:  # noqa: B027 - a session of one process has nothing to end
        """No rank submits steps of the layout any more, or asks what is kept of it, and all of its steps are over on every rank: end what it has of its
        own, and give back its memory, here and on servers."""

    @abstractmethod
    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once: at the start of ``close``, or, if the job fails before, then and in psgc's network thread (at once, if it has
        failed). It must be quick and raise nothing."""

    @abstractmethod
    def statistics(self) -> dict[str, int]:
        """Counters: wire_bytes (both directions, headers included); resent, contributions that were lost with a
        connection and sent again; gradient_bytes, the payloads of optimizers' steps in both directions,
        and uncompressed_bytes, what those steps would have carried uncompressed; least_waited_ms, of slowest_rank (-1: not known), and
        most_waited_ms: what ranks had told of their waiting (``note_waited``) about a second ago."""

    def report(self) -> Report | None:
        """What this process tells of itself, with all of its buckets and codecs; None: nobody is told of it. Any thread may ask."""
        figures = self.figures
        if figures is None:
            return None
        now, counted = time.monotonic(), self.statistics()
        exchange_s, waited_s = figures.so_far(now)
        compute_s, coding_s, waits_s = figures.lately(now, self.rest.rested_s(now)) or (0.0, 0.0, 0.0)
        return Report(
            int(1e3 * (now - figures.began)), counted["wire_bytes"], figures.steps, int(1e6 * figures.step_s), int(1e3 * exchange_s), int(1e3 * waited_s),
            counted["gradient_bytes"], counted["uncompressed_bytes"], resent=counted["resent"], plan_version=figures.plan_version,
            travels=figures.travels[:MOST_TEXT], compute_us=int(1e6 * compute_s), coding_us=int(1e6 * coding_s), waits_us=int(1e6 * waits_s),
        )  # fmt: skip

    def note_waited(self, seconds: float) -> None:  # noqa: B027 - a process that is alone tells nobody
        """This rank has waited for a step's results: tell the job, which finds out who is waited for."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job in order: wait for what is under way, tell the scheduler, end the threads. Idempotent."""
