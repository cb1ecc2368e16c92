"""Decides which named step a rank issues next: by a vote of the ranks while their scripts submit in the same order, else by the scheduler's turns. Pure.

A turn (``agenda.py``) costs a message to the scheduler and its answer. But scripts mostly submit the same names in the same order on all ranks, which a
maximum over the ranks can show. In a vote, each rank proposes the first steps that it has submitted but not issued, and the common prefix of all proposals
is issued. A rank votes as soon as it has something to propose. If the proposals differ in their first steps, the vote issues nothing, and all ranks
follow turns for a number of steps that doubles with each such vote. A vote also tells whether some rank contributes to a step, so that an
uncompressed step needs no control word of its own. Whether ranks vote or follow turns depends only on what has been issued, which is the
same on all ranks, so all of them do the same.

No rank waits forever: if every rank has submitted a step that none has issued, every rank has something to propose, so the vote ends. If the vote issues
nothing, the step has a turn, because the scheduler is told of every submission. Turns of steps that votes have issued are skipped.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PROPOSED: Final = 16  # steps in a vote: 320 bytes, which take about as long as one
MOST_TURNS: Final = 1024  # between two votes
NOTHING: Final = -1  # fills up a proposal of fewer steps
LOW_BITS: Final = 24  # bits of the bucket in a key, and of the part behind it, which is always the first


class Issue(NamedTuple):
    """A step that all ranks issue. contributed: whether some rank contributes to it; None: nobody has told, because it has a turn."""

    key: int
    contributed: bool | None


class _Submitted(NamedTuple):
    key: int
    contributes: bool


class Voting:
    """See the module's text. Keys are those of the first part of a bucket."""

    def __init__(self) -> None:
        self._submitted: deque[_Submitted] = deque()  # steps submitted but not issued, in this rank's order
        self._turns: deque[int] = deque()  # turns received; the step of the first one has not been issued
        self._told: Counter[int] = Counter()  # number of turns that have left ``_turns``, by key
        self._issued: Counter[int] = Counter()  # number of issued steps, by key
        self._agreed: deque[Issue] = deque()  # steps that the last vote agreed on, not yet issued
        # Groups connect in the first step. It has a turn, so that no rank begins to connect before all ranks have submitted it.
        self._by_turns = 1  # steps to issue before the next vote
        self._penalty = 1

    def submit(self, key: int, contributes: bool = True) -> None:
        """Note that this rank has submitted the key's next step. contributes: it does not skip the step."""
        self._submitted.append(_Submitted(key, contributes))

    def turn(self, key: int) -> None:
        """Note that the key's next step has received its turn."""
        self._turns.append(key)
        self._pass_over()

    def _pass_over(self) -> None:
        """Drop the turns of steps that have been issued."""
        while self._turns and self._told[self._turns[0]] < self._issued[self._turns[0]]:
            self._told[self._turns.popleft()] += 1

    def next(self) -> Issue | None:
        """The step that must be issued now; None if there is none (see ``votes``)."""
        issue = self._next_agreed()
        if issue is not None:
            self._issued[issue.key] += 1
            del self._submitted[next(place for place, one in enumerate(self._submitted) if one.key == issue.key)]
            self._pass_over()
        return issue

    def _next_agreed(self) -> Issue | None:
        if self._agreed:
            return self._agreed.popleft()
        if self._by_turns and self._turns:
            self._by_turns -= 1
            return Issue(self._turns[0], None)
        return None

    @property
    def votes(self) -> bool:
        """Whether this rank must take part in a vote now. Ask after ``next`` has returned None."""
        return not self._agreed and not self._by_turns and bool(self._submitted)

    @property
    def first(self) -> int:
        """The key that this rank proposes first."""
        return self._submitted[0].key

    def has_turn(self, key: int) -> bool:
        """Whether this rank has received a turn for the key's next step, so that all ranks have submitted it."""
        return self._told[key] + self._turns.count(key) > self._issued[key]

    def proposal(self) -> NDArray[np.int32]:
        """This rank's proposal. The element-wise maximum of all ranks' proposals is the vote's result. It holds each step's layout and bucket, both
        negated, so that the result contains their maxima and minima, and whether this rank contributes."""
        words = np.empty((5, PROPOSED), np.int32)
        words[:2], words[4] = NOTHING, 0
        for place, (key, contributing) in enumerate(islice(self._submitted, PROPOSED)):
            words[0, place], words[1, place] = key >> 2 * LOW_BITS, key >> LOW_BITS & (1 << LOW_BITS) - 1
            words[4, place] = contributing
        np.negative(words[:2], out=words[2:4])
        return words.reshape(-1)

    def voted(self, words: NDArray[np.int32]) -> None:
        """Take the result of a vote."""
        for layout, bucket, least_layout, least_bucket, contributed in zip(*words.reshape(5, PROPOSED).tolist(), strict=True):
            if layout == NOTHING or layout != -least_layout or bucket != -least_bucket:
                break
            self._agreed.append(Issue(layout << 2 * LOW_BITS | bucket << LOW_BITS, bool(contributed)))
        if self._agreed:
            self._penalty = 1
        else:
            self._penalty = min(2 * self._penalty, MOST_TURNS)
            self._by_turns = self._penalty


__all__ = ["Issue", "Voting"]
