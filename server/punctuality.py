"""For how long of each step the ranks that are quick wait for each of the others, and for how long sums are under way.

A key awaits a rank from when half of the others have contributed to its step until the rank has. What counts is the time in which some key does: a rank with a
slow link holds up one key after the other, while the server's window keeps those that are quick from contributing to the rest.

Pure: ``now`` is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from psgc.observe.lately import LEAST_STEPS, MOST_STEPS, Busy, LastSteps
from psgc.observe.others import beyond_others
from psgc.wire.reports import MOST_NAMES

MOST_KEPT: Final = 4096  # numbers, of all ranks and steps


@dataclass(slots=True)
class KeyWaits:
    """Whom a key awaits. ranks: that contribute to it; last: whether a step of its layout counts as over with its own."""

    ranks: Sequence[int]
    last: bool = False
    awaited: set[int] = field(default_factory=set)

    @property
    def enough(self) -> int:
        """Contributions after which the rest is awaited: then the lower median of the others of each that is missing is there."""
        return max(1, len(self.ranks) // 2)


class Punctuality:
    """See the module's text. workers: of the job. folds: that are under way."""

    def __init__(self, workers: int) -> None:
        self.folds = Busy()
        self._awaited = [Busy() for _ in range(workers)]  # by rank
        self._steps = LastSteps(min(MOST_STEPS, max(3 * LEAST_STEPS, MOST_KEPT // workers)), forgets=True)  # of each: seconds, by rank
        self._before = [0.0] * workers

    def came(self, key: KeyWaits, rank: int, here: Collection[int], absent: Collection[int], now: float) -> None:
        """A rank's contribution to the key's step has come. here: all ranks whose contributions have; absent: those that the job goes on without."""
        if rank in key.awaited:
            key.awaited.discard(rank)
            self._awaited[rank].end(now)
        elif len(here) == key.enough:
            for other in key.ranks:
                if other not in here and other not in absent and other not in key.awaited:
                    key.awaited.add(other)
                    self._awaited[other].begin(now)

    def over(self, key: KeyWaits, now: float) -> None:
        """The key's step is complete."""
        for rank in key.awaited:  # that the job goes on without since
            self._awaited[rank].end(now)
        key.awaited.clear()
        if key.last:
            so_far = [busy.so_far_s(now) for busy in self._awaited]
            self._steps.add(now, [total - before for total, before in zip(so_far, self._before, strict=True)])
            self._before = so_far

    def late_ms(self, now: float) -> dict[int, float]:
        """By rank, for how long it is awaited in most of the last steps, beyond the others: of those for which that is longest."""
        beyond = beyond_others(dict(enumerate(self._steps.medians(now))))
        latest = heapq.nlargest(MOST_NAMES, beyond, key=beyond.__getitem__)
        return {rank: 1e3 * beyond[rank] for rank in sorted(latest) if beyond[rank] > 0}
