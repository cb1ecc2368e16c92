"""Who gives the job's state to a worker's process that has taken a dead one's place. Pure; knows ranks, not connections.

Invariants: a rank that has no state yet gives none; a handover that is asked for again is the same, unless it has failed, or another process of the scheduler
has begun it; each has a number of its own in the job, and the newest to a rank counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Handover(NamedTuple):
    """number: of all that the job has had, from 1; failed: how many of the taker's had failed before."""

    number: int
    giver: int
    taker: int
    failed: int


@dataclass(slots=True)
class Handovers:
    """without: ranks that have no state yet. unheard: those of them that may have got it while the scheduler's process was followed by another: they say so
    again. count: of all handovers."""

    without: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    count: int = 0
    _open: dict[int, Handover] = field(default_factory=dict)  # by taker

    def replaced(self, rank: int) -> None:
        """Another process has taken the rank's place: it has no state, and what it gave or took has ended."""
        self.without.add(rank)
        self.unheard.discard(rank)
        self._open.pop(rank, None)

    def resumed(self, rank: int) -> None:
        """As ``replaced``, when another process of the scheduler had seen it."""
        self.replaced(rank)
        self.unheard.add(rank)

    def ask(self, taker: int, failed: int, living: Iterable[int]) -> Handover | None:
        """A rank asks for the state, once or again. failed: how many handovers to this process have failed. living: ranks whose processes live. None: nobody
        has it."""
        self.unheard.discard(taker)
        known, givers = self._open.get(taker), [rank for rank in living if rank != taker and rank not in self.without]
        if known is not None and known.failed >= failed and known.giver in givers:
            return known
        if not givers:
            return None
        self.count += 1
        self._open[taker] = Handover(self.count, min(givers), taker, failed)
        return self._open[taker]

    def fail(self, giver: int) -> list[int]:
        """A rank's process has ended, and with it what it gave. Returns who was to take that; they get others."""
        takers = [taker for taker, handover in self._open.items() if handover.giver == giver]
        for taker in takers:
            del self._open[taker]
        return takers

    def done(self, taker: int) -> None:
        """The rank has the state."""
        self._open.pop(taker, None)
        self.without.discard(taker)
        self.unheard.discard(taker)
