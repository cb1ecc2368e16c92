"""Which ranks take part in a step of a training that goes on without those that die (PSGC_ON_WORKER_LOSS=shrink), and who is told.

Invariant: all ranks know the same of a step. It follows from the result of a sum of the step before, which servers make once for all: each rank adds a one at
its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch

from psgc.errors import UsageError
from psgc.torch.session import api
from psgc.torch.tensors.push_pull import push_pull_async, synchronize
from psgc.worker.session import Session

NAME: Final = "psgc.members"


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part in ``step`` and those that follow, as far as is known at its beginning. ranks: ascending. rank: the one that is told. size: of the job
    with nobody missing."""

    step: int
    ranks: tuple[int, ...]
    rank: int
    size: int

    @property
    def shard(self) -> tuple[int, int]:
        """This rank's number among them, and how many there are: which part of the data is its own. A rank that has just come back is among them at the
        second step after that at the latest; until then its part is another rank's, too."""
        count = len(self.ranks)
        return (self.ranks.index(self.rank) if self.rank in self.ranks else self.rank % count), count


Call = Callable[[Members], object]


@dataclass(slots=True)
class _Calls:
    calls: list[Call]
    closed: bool = False


_calls: WeakKeyDictionary[Session, _Calls] = WeakKeyDictionary()


def on_membership(callback: Call) -> Call:
    """Have ``callback`` told which ranks take part in the training: by ``psgc.torch.Elastic`` at the beginning of its first step, and of each step at which
    they have changed, the same step on all ranks, in the thread that trains. A process that takes a dead worker's place is told alone, at its first step: so
    under PSGC_ON_WORKER_LOSS=wait and shrink nothing can be synchronised within ``callback`` (UsageError). Every rank must ask for it, before the first step.
    Returns the callback, so that it can be a decorator. Raises UsageError once steps have begun."""
    of = _calls.setdefault(api.current_session(), _Calls([]))
    if of.closed:
        raise UsageError("on_membership() after the first step of Elastic: call it before, on every rank")
    if not callable(callback):
        raise UsageError(f"on_membership(): {type(callback).__name__} cannot be called; give a function that takes psgc.torch.Members")
    of.calls.append(callback)
    return callback


class Attendance:
    """Of one training. follows: whether ranks may come and go; wanted: by others than callbacks."""

    def __init__(self, session: Session, follows: bool, wanted: bool) -> None:
        of = _calls.setdefault(session, _Calls([]))
        of.closed = True
        self._session, self._calls = session, of.calls
        self._exchanges = follows and session.size > 1 and bool(wanted or of.calls)
        self._under_way: int | None = None
        self._told: tuple[int, ...] = ()
        self.ranks = tuple(range(session.size))

    @property
    def share(self) -> float:
        """How many ranks take part, over how many the job has."""
        return len(self.ranks) / self._session.size

    def begin(self, step: int) -> None:
        """A step begins: know who took part in the last one, and tell."""
        if self._under_way is not None:
            came, self._under_way = synchronize(self._under_way), None
            assert came is not None
            self.ranks = tuple(torch.nonzero(came).flatten().tolist())
        if self.ranks != self._told:
            self._told = self.ranks
            self._tell(Members(step, self.ranks, self._session.rank, self._session.size))

    def _tell(self, members: Members) -> None:
        session = self._session
        session.alone_in = "on_membership's callback" if session.config.on_worker_loss != "stop" and session.size > 1 else ""
        try:
            for call in self._calls:
                call(members)
        finally:
            session.alone_in = ""

    def take_part(self) -> None:
        """In the step that begins, once its state is kept."""
        if self._exchanges:
            own = torch.zeros(self._session.size)
            own[self._session.rank] = 1.0
            self._under_way = push_pull_async(own, average=False, name=NAME)
