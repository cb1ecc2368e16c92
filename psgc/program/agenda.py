"""One global order of the steps of named tensors and broadcasts, which each rank's script submits in its own order. Pure.

If ranks issued collectives in the order of their scripts, they could deadlock. So a step is issued only after every rank has submitted it, in an order
that the scheduler decides. ``Turns``, on the scheduler, numbers the steps that all ranks have submitted. Each rank's ``Agenda`` issues steps in the
order of their numbers, and skips those that the ranks have already agreed on by a vote (``voting.py``). The unfinished step with the lowest number can
always proceed, because every rank has submitted it and has finished all steps before it. Messages may be duplicated and late.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple


class Use(NamedTuple):
    """One step of a key. step: counted from 1 in the order of each rank's submissions."""

    key: int
    step: int


class Turn(NamedTuple):
    """A step that every rank has submitted, and its number in the global order, from 0."""

    number: int
    use: Use


class Turns:
    """Numbers the steps that all ``size`` ranks have submitted; a key's steps are numbered in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._came: dict[Use, set[int]] = {}  # the ranks that have submitted each step without a number
        self._numbered: Counter[int] = Counter()  # how many steps of each key have a number
        self._known: deque[Turn] = deque()  # turns that some rank may not have received yet
        self._numbers: dict[Use, int] = {}  # the numbers of these turns
        self._next = 0
        self._received = [0] * size  # how many turns each rank has received

    def submitted(self, rank: int, use: Use, received: int) -> list[Turn]:
        """Note that a rank has submitted a step and has received the first ``received`` turns. Returns the turns to send to all ranks."""
        self._received[rank] = max(self._received[rank], received)
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
        """The turn of a step, for a rank that asks again; None if the step has no number, or if all ranks have received its turn."""
        number = self._numbers.get(use)
        return None if number is None else Turn(number, use)

    def numbered(self, key: int) -> int:
        """The last numbered step of a key; 0 if none is numbered."""
        return self._numbered[key]

    @property
    def count(self) -> int:
        """How many turns there are."""
        return self._next

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The keys that have turns, and each one's last numbered step."""
        return [(key, step) for key, step in self._numbered.items() if step]

    @property
    def known(self) -> list[Turn]:
        """The turns that some rank may not have received yet."""
        return list(self._known)

    def begin_at(self, count: int, key: int, step: int) -> None:
        """Of turns that were given elsewhere: there were ``count``, and a key's last step among them."""
        self._next, self._numbered[key] = max(self._next, count), max(self._numbered[key], step)

    def given(self, turn: Turn) -> None:
        """A turn that was given elsewhere, and that some rank may not have received."""
        self.begin_at(turn.number + 1, turn.use.key, turn.use.step)
        self._numbers[turn.use] = turn.number
        self._known.append(turn)

    def _forget(self) -> None:
        told = min(self._received)
        while self._known and self._known[0].number < told:
            del self._numbers[self._known.popleft().use]


class Agenda:
    """One rank's submissions that have no turn yet, and the turns that it has received."""

    def __init__(self) -> None:
        self._submitted: Counter[int] = Counter()  # by key
        self._unanswered: dict[Use, None] = {}
        self._early: dict[int, Use] = {}  # turns that have arrived before one of their predecessors, by number
        self.received = 0  # number of turns that have arrived without a gap

    def submit(self, key: int) -> Use:
        """Submit this rank's next step of a key. Returns the step, of which the caller tells the scheduler."""
        self._submitted[key] += 1
        use = Use(key, self._submitted[key])
        self._unanswered[use] = None
        return use

    def told(self, turn: Turn) -> list[Use]:
        """Take a turn from the scheduler. Returns the steps that may be issued now, in this order, after those returned before."""
        if turn.number < self.received:
            return []
        self._unanswered.pop(turn.use, None)
        self._early[turn.number] = turn.use
        found = []
        while self.received in self._early:
            found.append(self._early.pop(self.received))
            self.received += 1
        return found

    @property
    def unanswered(self) -> list[Use]:
        """The submissions to send again on a new connection."""
        return list(self._unanswered)
