"""When steps of named tensors and broadcasts without servers begin: an order of all of them, which is the same on all ranks.

Scripts submit them in any order, and hundreds of names may come. So all of them share one lane and one set of groups, and the lane asks here what it does
next: the jobs of the step under way, or else a vote on the steps to begin, or the next step (``psgc.program.voting``). Any thread submits.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from psgc.program.groups import Groups
from psgc.program.voting import Voting
from psgc.worker.executor.lanes import Job

NAMED: Final = "named"  # the lane, and its set of groups


class NamedStep(NamedTuple):
    """A step that has been submitted. begin: called in the lane's thread when its turn has come, with whether some rank contributes (None: nobody has
    told); named: it in words."""

    begin: Callable[[bool | None], None]
    named: str


class _Beginning(NamedTuple):
    """A ``Job``: a step begins. contributed: whether some rank contributes to it."""

    step: NamedStep
    contributed: bool | None

    def run(self, groups: Groups) -> None:
        self.step.begin(self.contributed)

    def what(self) -> str:
        return self.step.named

    def late(self) -> str | None:
        return None


class _Vote(NamedTuple):
    """A ``Job``: a vote on the steps to begin. key, named: the step that this rank proposes first."""

    order: VotedOrder
    key: int
    named: str

    def run(self, groups: Groups) -> None:
        self.order.vote(groups)

    def what(self) -> str:
        return self.named

    def late(self) -> str | None:
        return awaited(self.named) if self.order.has_turn(self.key) else None  # until then the scheduler names who has not submitted it


class VotedOrder:
    """An ``Order``. everybody: all ranks; ask: asks the scheduler for the turn of a key's next step; failed: whether the job has ended."""

    def __init__(self, everybody: tuple[int, ...], ask: Callable[[int], None], failed: Callable[[], bool]) -> None:
        self._everybody, self._ask, self._failed = everybody, ask, failed
        self._changed = threading.Condition()
        self._voting = Voting()
        self._waiting: defaultdict[int, deque[NamedStep]] = defaultdict(deque)  # by key: submitted, and not begun
        self._jobs: deque[Job] = deque()  # of the step under way
        self._ended = False

    def submit(self, key: int, contributes: bool, step: NamedStep) -> None:
        """Enqueue a key's next step. contributes: this rank does not skip it."""
        with self._changed:
            self._waiting[key].append(step)
            self._voting.submit(key, contributes)
            self._changed.notify()
        self._ask(key)

    def turn(self, key: int) -> None:
        """The key's next step has its turn, after all before. From the network thread."""
        with self._changed:
            self._voting.turn(key)
            self._changed.notify()

    def put(self, job: Job) -> None:
        """In the lane's thread."""
        self._jobs.append(job)

    def next(self) -> Job | None:
        if self._jobs:
            return self._jobs.popleft()
        with self._changed:
            while not self._ended:
                if not self._failed():
                    issue = self._voting.next()
                    if issue is not None:
                        return _Beginning(self._waiting[issue.key].popleft(), issue.contributed)
                    if self._voting.votes:
                        key = self._voting.first
                        return _Vote(self, key, self._waiting[key][0].named)
                self._changed.wait()
            return None

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    # of a vote

    def vote(self, groups: Groups) -> None:
        """Take part in one. In the lane's thread."""
        with self._changed:
            words = self._voting.proposal()
        groups.group(self._everybody).maximum(words)
        with self._changed:
            self._voting.voted(words)

    def has_turn(self, key: int) -> bool:
        """Whether all ranks have submitted the key's next step, to this rank's knowledge."""
        with self._changed:
            return self._voting.has_turn(key)


def awaited(what: str) -> str:
    """What to say of a step that has taken long."""
    return f"waits for other ranks in {what}, which all of them have submitted; is one stopped, or cut off?"
