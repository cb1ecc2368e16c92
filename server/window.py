"""How far ahead a server lets workers push: up to the last key of one layout, in the plan's order, for which it has room.

Pure. A position counts the layout's parts on this server over all steps: part p of step t (from 1) is position (t - 1) * n + p.
Workers may push every position below ``limit``. Room for all W contributions of a position is reserved when it is admitted and
given back when its step is complete. So an admitted step can always complete, in whichever order the ranks' gradients become ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

OPEN: Final = 1 << 62  # the limit of a layout that fits as a whole: never announced again


class Window:
    """``costs[p]``: the largest payload bytes of all workers' contributions to part p. ``budget``: the bytes that the server has room for. steps[p]: the last
    step of part p that is complete, where a server goes on from a former process: the limit is then at least that process's."""

    def __init__(self, costs: Sequence[int], budget: int, steps: Sequence[int] = ()) -> None:
        self._costs = tuple(costs)
        self._budget = budget
        n = len(self._costs)
        self._base = min((step * n + part for part, step in enumerate(steps)), default=0)  # every position below it is complete
        self._complete = {  # positions at or above it that are complete
            turn * n + part for part, step in enumerate(steps) for turn in range(self._base // n, step) if turn * n + part >= self._base
        }
        self._reserved = 0
        self.limit = OPEN if sum(self._costs) <= budget else self._base
        self._admit()

    def complete(self, part: int, step: int) -> bool:
        """Part ``part`` has completed ``step``: give its room to later positions. True if ``limit`` has grown."""
        if self.limit == OPEN:
            return False
        n, before = len(self._costs), self.limit
        position = (step - 1) * n + part
        self._complete.add(position)
        if position < self.limit:  # a position that all ranks skipped may complete before it is admitted; it has no room reserved
            self._reserved -= self._costs[part]
        while self._base in self._complete:
            self._complete.remove(self._base)
            self._base += 1
        self._admit()
        return self.limit > before

    def admits(self, part: int, step: int) -> bool:
        return (step - 1) * len(self._costs) + part < self.limit

    def _admit(self) -> None:
        n = len(self._costs)
        while self.limit < self._base + n:
            if self.limit < self._base or self.limit in self._complete:
                self.limit += 1
                continue
            cost = self._costs[self.limit % n]
            if self._reserved and self._reserved + cost > self._budget:
                return
            self._reserved += cost
            self.limit += 1
