"""Carries out the steps of named tensors and broadcasts over groups: one thread, on one set of groups for all of them.

Scripts submit them in any order, and hundreds of names may come; so none has threads and connections of its own, as a model's layout has, and steps begin in
an order that is the same on all ranks (``psgc.program.voting``). What a step does to numbers is the GroupPart's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from psgc.errors import PsgcError
from psgc.layout import Bucket, Layout, make_key
from psgc.processes.reminder import Reminder
from psgc.program.groups import Groups
from psgc.program.ranks import Ranks
from psgc.program.steps import Decode, Encode, Transfer
from psgc.program.voting import Voting
from psgc.worker.executor.bucket import GroupBucket
from psgc.worker.executor.control import Control
from psgc.worker.submission import Submission

logger = logging.getLogger(__name__)
GROUPS: Final = "named"  # the name of the set of groups


class _Line:
    """A bucket, and the submissions that have not been issued yet."""

    def __init__(self, layout: Layout, bucket: Bucket) -> None:
        self.layout, self.bucket = layout, bucket
        self.waiting: deque[Submission] = deque()
        self.work: GroupBucket | None = None  # from the first step on


class NamedExecutor:
    """See the module's text. groups_of: makes sets of groups by name; ask: asks for the turn of a key's next step; fail: ends the job with a line; failed:
    whether it has ended; raises: whether a NaN or infinity ends the job."""

    def __init__(
        self, rank: int, ranks: Ranks, groups_of: Callable[[str], Groups], ask: Callable[[int], None], fail: Callable[[str], None],
        failed: Callable[[], bool], raises: bool = False,
    ) -> None:  # fmt: skip
        self._rank, self._ranks, self._groups_of, self._ask = rank, ranks, groups_of, ask
        self._fail, self._failed, self._raises = fail, failed, raises
        self._lock = threading.Condition()
        self._lines: dict[int, _Line] = {}  # by key of the bucket's first part
        self._voting = Voting()
        self._closing = False
        self._line: _Line  # that the thread works on
        self._contributed: bool | None  # to its step: see ``Issue``
        self._what = ""  # the step that the thread works on, or proposes
        self._awaited: tuple[str, Reminder] | None = None  # the step under way
        self._proposed: int | None = None  # the key that this rank proposes first in the vote under way
        self._groups: Groups | None = None
        self._thread = threading.Thread(target=self._run, name="psgc-named", daemon=True)
        self._thread.start()

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        """Enqueue the bucket's next step. From any thread."""
        key = make_key(layout.id, bucket, 0)
        with self._lock:
            line = self._lines.setdefault(key, _Line(layout, layout.buckets[bucket]))
            line.waiting.append(submission)
            self._voting.submit(key, not submission.skip)
            self._lock.notify()
        self._ask(key)

    def turn(self, key: int) -> None:
        """The key's next step has its turn, after all before. From the network thread."""
        with self._lock:
            self._voting.turn(key)
            self._lock.notify()

    def works(self) -> list[GroupBucket]:
        """The buckets so far. Their state is only to be touched while none of their steps is under way."""
        with self._lock:
            return [line.work for line in self._lines.values() if line.work is not None]

    def late(self, now: float, first_s: float) -> list[str]:
        """What to say of a step that this rank has been in for long. first_s: until the first message."""
        with self._lock:
            if self._proposed is not None and self._awaited is None and self._voting.has_turn(self._proposed):
                self._awaited = (
                    self._named(self._lines[self._proposed]),
                    Reminder(now),
                )  # until then the scheduler names who has not submitted it
            awaited = self._awaited
        if awaited is None or not awaited[1].due(now, first_s):
            return []
        return [f"rank {self._rank} waits for other ranks in {awaited[0]}, which all of them have submitted; is one stopped, or cut off?"]

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received."""
        return sum(work.moved_bytes for work in self.works())

    def close(self) -> None:
        """End the thread, unless it is in a collective."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join(1.0)

    # the thread

    def _run(self) -> None:
        while self._await():
            try:
                if self._proposed is None:
                    self._step(self._line, self._contributed)
                else:
                    self._vote()
            except Exception as error:
                self._broken(error, self._what)
        if self._groups is not None:
            self._groups.close()

    def _await(self) -> bool:
        """Sleep until there is a step to issue, or a vote; False: the executor is closed."""
        with self._lock:
            self._awaited = self._proposed = None
            while not self._closing:
                if not self._failed():
                    issue = self._voting.next()
                    if issue is not None:
                        self._line, self._contributed = self._lines[issue.key], issue.contributed
                        self._what = self._named(self._line)
                        self._awaited = (self._what, Reminder(time.monotonic()))
                        return True
                    if self._voting.votes:
                        self._proposed = self._voting.first
                        self._what = self._named(self._lines[self._proposed])
                        return True
                self._lock.wait()
            return False

    @staticmethod
    def _named(line: _Line) -> str:
        return f"step {1 if line.work is None else line.work.step + 1} of {line.layout.name!r}"

    def _vote(self) -> None:
        with self._lock:
            words = self._voting.proposal()
        assert self._groups is not None, "the first step is issued without a vote"
        self._groups.group(self._ranks.everybody).maximum(words)
        with self._lock:
            self._voting.voted(words)

    def _step(self, line: _Line, contributed: bool | None) -> None:
        with self._lock:
            submission = line.waiting.popleft()
        if line.work is None:
            line.work = GroupBucket(line.layout, line.bucket, self._ranks, self._rank)
        work = line.work
        tensor = work.begin(submission, self._raises)
        if tensor is not None:
            raise PsgcError(f"{tensor!r} holds NaN or infinity, and PSGC_NONFINITE=raise")
        if self._groups is None:
            self._groups = self._groups_of(GROUPS)
        for part in work.parts:
            for step in part.program.steps:
                if isinstance(step, Encode | Decode):
                    part.compute(step, _raise)
                elif isinstance(step, Transfer):
                    part.transfer(step, self._groups, self._ranks.everybody)
        for number, (part, control) in enumerate(zip(work.parts, self._controls(work, self._groups, contributed), strict=True)):
            part.agreement.agreed(control)
            work.end(number)
        work.store()
        submission.ticket.finish()

    def _controls(self, work: GroupBucket, groups: Groups, contributed: bool | None) -> list[Control]:
        """What the ranks agree on at the end of a step, of each part. Only encoding meets NaNs and keeps something, so where nothing is encoded a vote has told
        all of it."""
        if contributed is not None and not any(part.program.encodes for part in work.parts):
            return [Control(contributed, False, False) for _ in work.parts]
        words = np.concatenate([part.agreement.control.word() for part in work.parts])  # of all parts at once
        groups.group(self._ranks.everybody).maximum(words)
        return [Control.of(word) for word in np.split(words, len(work.parts))]

    def _broken(self, error: Exception, what: str) -> None:
        if self._failed():
            return
        logger.debug("named", exc_info=error)
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self._fail(f"rank {self._rank}: {what}: {kind}{error}")


def _raise(fault: PsgcError | None) -> None:
    if fault is not None:
        raise fault
