"""Who may go on: how many pushes each rank has made, and how far it may be ahead of the slowest. Pure.

A rank that has left the job in order counts no more: it holds nobody up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psgc.layout.update_rule import UNBOUNDED


@dataclass(slots=True)
class Pace:
    """pushes: by rank, how many of its deltas have been applied. staleness: the bound, or UNBOUNDED."""

    pushes: list[int]
    staleness: int = UNBOUNDED
    left: set[int] = field(default_factory=set)

    def live(self) -> list[int]:
        """Ranks that have not left."""
        return [rank for rank in range(len(self.pushes)) if rank not in self.left]

    def holds_up(self, rank: int) -> list[int]:
        """The ranks that ``rank`` must wait for before it goes on: those that are more than ``staleness`` pushes behind it."""
        if self.staleness == UNBOUNDED:
            return []
        return [other for other in self.live() if self.pushes[rank] - self.pushes[other] > self.staleness]

    def may_go_on(self, rank: int) -> bool:
        return not self.holds_up(rank)
