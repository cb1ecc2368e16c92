"""Steps of named tensors and broadcasts that workers aggregate among themselves: who has submitted which, and what is late. Pure.

``psgc.program.agenda`` gives them their turns; this knows names and times.
"""

from __future__ import annotations

from psgc.program.agenda import Turn, Turns, Use
from psgc.scheduler.rendezvous import Gathering


class Submissions:
    """The steps of named tensors that all ranks have submitted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turns = Turns(size)
        self._open: dict[Use, Gathering] = {}

    def submitted(self, rank: int, use: Use, received: int, name: str, now: float) -> list[tuple[int, Turn]]:
        """A rank has submitted a step of ``name``, and knows the first ``received`` turns. Whom to tell which turn."""
        if (turn := self._turns.again(use)) is not None:
            return [(rank, turn)]
        found = self._turns.submitted(rank, use, received)
        if use.step > self._turns.numbered(use.key):
            self._open.setdefault(use, Gathering(f"step {use.step} of {name!r}", self._size, now)).came.add(rank)
        for turn in found:
            self._open.pop(turn.use, None)
        return [(rank, turn) for turn in found for rank in range(self._size)]

    @property
    def turns(self) -> Turns:
        """The turns that were given."""
        return self._turns

    def open(self) -> list[Gathering]:
        """Steps that some rank has not submitted."""
        return list(self._open.values())
