"""One order over the steps of named tensors and broadcasts, which every rank submits in an order of its own. Pure.

Ranks that issued the collectives of one group as their scripts submit them would wait for each other for ever. So a step is issued once every rank has
submitted it, and in an order that one place, the scheduler, gives to all of them: ``Turns`` numbers steps as they become complete, and the ``Agenda`` of
each rank takes up the numbers one after the other, or passes them over where ranks have agreed by a vote (``voting.py``). The step with the lowest
number that is not over can always go on, because every rank has submitted it and has nothing before it left to do. Messages may come twice, and late.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple


class Use(NamedTuple):
    """One step of a key. step: counted from 1, on each rank in the order of its submissions."""

    key: int
    step: int


class Turn(NamedTuple):
    """A step that every rank has submitted, and its number, from 0."""

    number: int
    use: Use


class Turns:
    """Numbers the steps that all of ``size`` ranks have submitted; a key's steps in their order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._came: dict[Use, set[int]] = {}  # of steps without a number
        self._numbered: Counter[int] = Counter()  # by key, its steps that have a number
        self._known: deque[Turn] = deque()  # that some rank may have to be told again
        self._numbers: dict[Use, int] = {}  # of these
        self._next = 0
        self._taken = [0] * size  # by rank, how many turns it has been told

    def submitted(self, rank: int, use: Use, taken: int) -> list[Turn]:
        """A rank has submitted a step, and knows the first ``taken`` turns. Returns turns that all ranks are to be told."""
        self._taken[rank] = max(self._taken[rank], taken)
        self._forget()
        if use.step <= self._numbered[use.key]:
            return []
        self._came.setdefault(use, set()).add(rank)
        found = []
        while len(self._came.get(use, ())) == self._size and use.step == self._numbered[use.key] + 1:
            del self._came[use]
            self._numbered[use.key] += 1
            found.append(Turn(self._next, use))
            self._numbers[use] = self._next
            self._next += 1
            use = Use(use.key, use.step + 1)
        self._known += found
        return found

    def again(self, use: Use) -> Turn | None:
        """The turn of a step that a rank asks for once more; None for one without a number, or that all ranks have been told."""
        number = self._numbers.get(use)
        return None if number is None else Turn(number, use)

    def numbered(self, key: int) -> int:
        """The last step of a key that has a number; 0: none has."""
        return self._numbered[key]

    def _forget(self) -> None:
        told = min(self._taken)
        while self._known and self._known[0].number < told:
            del self._numbers[self._known.popleft().use]


class Agenda:
    """One rank's part: its submissions that have no turn yet, and which step it issues next."""

    def __init__(self) -> None:
        self._submitted: Counter[int] = Counter()  # by key
        self._unanswered: dict[Use, None] = {}
        self._early: dict[int, Use] = {}  # turns whose predecessors have not come, by number
        self.taken = 0  # turns that have come without a gap

    def submit(self, key: int) -> Use:
        """This rank's next step of a key; tell the scheduler of it."""
        self._submitted[key] += 1
        use = Use(key, self._submitted[key])
        self._unanswered[use] = None
        return use

    def told(self, turn: Turn) -> list[Use]:
        """The steps that may be issued now, in this order, after those of earlier answers."""
        if turn.number < self.taken:
            return []
        self._unanswered.pop(turn.use, None)
        self._early[turn.number] = turn.use
        found = []
        while self.taken in self._early:
            found.append(self._early.pop(self.taken))
            self.taken += 1
        return found

    @property
    def unanswered(self) -> list[Use]:
        """What to say again on a new connection."""
        return list(self._unanswered)
