"""Which named step a rank issues next: by a vote among the ranks while their scripts submit in the same order, else by the scheduler's turns. Pure.

A turn (``agenda.py``) costs a message to the scheduler and its answer. Scripts mostly submit the same names in the same order on all ranks, and then a maximum
over the ranks tells all of them so: each proposes the first steps that it has submitted and not issued, and what all proposals begin with is issued. A
rank votes as soon as it has something to propose. If the proposals' first steps differ, nothing is issued by that vote, and all ranks go on with turns for a
number of steps that doubles with each such vote. All of this follows from what has been issued, which is the same on all ranks, so all ranks
vote, or take turns, at the same time.

No rank waits for ever: a step that every rank has submitted and none has issued gives every rank something to propose, so a vote ends; if
it issues nothing, the step has a turn, because the scheduler is told of every submission. Turns of steps that votes have issued are passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

PROPOSED: Final = 16  # steps in a vote: 256 bytes, which take about as long as one
MOST_TURNS: Final = 1024  # between two votes
NOTHING: Final = -1  # in place of a step that is not there
LOW_BITS: Final = 24  # a key's part, which is always the first; and its bucket


class Voting:
    """See the module's text. Keys are those of the first part of a bucket."""

    def __init__(self) -> None:
        self._submitted: deque[int] = deque()  # and not issued, in this rank's order
        self._turns: deque[int] = deque()  # the first one's step has not been issued
        self._told: Counter[int] = Counter()  # turns by key, of those that have left ``_turns``
        self._issued: Counter[int] = Counter()  # steps by key
        self._agreed: deque[int] = deque()  # by the last vote
        # Groups connect in the first step, which has a turn: a rank that is late then would be missed by those that connect.
        self._by_turns = 1  # steps to issue before the next vote
        self._penalty = 1

    def submit(self, key: int) -> None:
        """This rank has submitted the key's next step."""
        self._submitted.append(key)

    def turn(self, key: int) -> None:
        """The key's next step has its turn."""
        self._turns.append(key)
        self._pass_over()

    def _pass_over(self) -> None:
        """Forget turns of steps that have been issued."""
        while self._turns and self._told[self._turns[0]] < self._issued[self._turns[0]]:
            self._told[self._turns.popleft()] += 1

    def next(self) -> int | None:
        """The key whose next step is to be issued now; None: none, see ``votes``."""
        key = self._next_agreed()
        if key is not None:
            self._issued[key] += 1
            self._submitted.remove(key)
            self._pass_over()
        return key

    def _next_agreed(self) -> int | None:
        if self._agreed:
            return self._agreed.popleft()
        if self._by_turns and self._turns:
            self._by_turns -= 1
            return self._turns[0]
        return None

    @property
    def votes(self) -> bool:
        """Whether this rank is to take part in a vote now. Ask when ``next`` has returned None."""
        return not self._agreed and not self._by_turns and bool(self._submitted)

    @property
    def first(self) -> int:
        """The key that this rank proposes first."""
        return self._submitted[0]

    def has_turn(self, key: int) -> bool:
        """Whether all ranks have submitted the key's next step, as far as this rank has been told."""
        return self._told[key] + self._turns.count(key) > self._issued[key]

    def proposal(self) -> NDArray[np.int32]:
        """The words whose maximum over the ranks is the vote's result: of each step layout and bucket, and both negated, whose maximum is the least."""
        layouts = np.full(PROPOSED, NOTHING, np.int32)
        buckets = np.full(PROPOSED, NOTHING, np.int32)
        for place, key in enumerate(islice(self._submitted, PROPOSED)):
            layouts[place], buckets[place] = key >> 2 * LOW_BITS, key >> LOW_BITS & (1 << LOW_BITS) - 1
        return np.concatenate([layouts, buckets, -layouts, -buckets])

    def voted(self, words: NDArray[np.int32]) -> None:
        """Take the result of a vote."""
        layouts, buckets, least_layouts, least_buckets = (each.tolist() for each in np.split(words, 4))
        for layout, bucket, least_layout, least_bucket in zip(layouts, buckets, least_layouts, least_buckets, strict=True):
            if layout == NOTHING or layout != -least_layout or bucket != -least_bucket:
                break
            self._agreed.append(layout << 2 * LOW_BITS | bucket << LOW_BITS)
        if self._agreed:
            self._penalty = 1
        else:
            self._penalty = min(2 * self._penalty, MOST_TURNS)
            self._by_turns = self._penalty


__all__ = ["Voting"]
