"""Tries a plan's candidates in turn, and says which one a job keeps. Pure, and the same on every rank.

A candidate runs for a window of steps, which gives one figure. Candidates take turns (A B C, C B A, A B C, ...), so that a machine that slows down, or other
work on it, meets all of them alike; two candidates are compared by the ratios of their figures of the same round. Those that are much slower than the quickest
leave after a round, and the trials end when further rounds would change nothing, or have become too many. The present candidate's first figure is of the
window before, which may be the reason for the plan, because something held it up; so it does not leave before it has run again.

A candidate is better than another if it saves at least GAIN of the step in the mean of these ratios, and beyond what their scatter may come from. Of
candidates of which none is better, the one with the smallest loss of quality is kept; of those that lose the same, the present one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

GAIN: Final = 0.05  # share of the step that a change must save
# Share beyond the quickest at which a candidate leaves, by the rounds so far.
CLOSE: Final = {1: 1.0, 2: 0.3, 3: 0.2, 4: 0.2, 5: 0.2}
LEAST_ROUNDS: Final = 3  # in which the candidates that are left have run
MOST_ROUNDS: Final = 5
MOST_WINDOWS: Final = 13  # of all trials of a plan: with a step or two after each switch, some 90 steps
LEAST_MS: Final = 1e-6  # figures are divided
# Student's t, one-sided 97.5 %, by the number of ratios; one ratio says nothing of its scatter.
STUDENT: Final = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}

Compared = Literal["better", "tie", "unclear"]


class Trials:
    """losses: of each candidate a number that grows with its loss of quality, 0 for none; the job's present candidate is the first.
    first_ms: the present one's figure of the window before, in milliseconds.
    over: whether there is nothing left to try."""

    def __init__(self, losses: Sequence[float], first_ms: float) -> None:
        self._losses = losses
        self._rounds: list[dict[int, float]] = [{0: max(first_ms, LEAST_MS)}]
        self._alive = list(range(len(losses)))
        self.over = False
        self._end_round()

    @property
    def next(self) -> int:
        """Whose turn it is."""
        waiting = [one for one in self._alive if one not in self._rounds[-1]]
        return waiting[0] if len(self._rounds) % 2 else waiting[-1]

    def take(self, ms: float) -> None:
        """The figure of the candidate whose turn it was."""
        self._rounds[-1][self.next] = max(ms, LEAST_MS)
        self._end_round()

    @property
    def windows(self) -> int:
        """Windows so far, the one before the trials included."""
        return sum(map(len, self._rounds))

    def figure_ms(self, candidate: int) -> float:
        """The median of its figures; of two the lower one, since what holds a window up only adds to it."""
        return statistics.median_low(of_round[candidate] for of_round in self._rounds if candidate in of_round)

    def windows_of(self, candidate: int) -> int:
        return sum(candidate in of_round for of_round in self._rounds)

    @property
    def best(self) -> int:
        """The candidate to keep, by the rounds so far."""
        order = sorted(self._alive, key=lambda one: (self._losses[one], one))
        best = order[0]
        for one in order[1:]:
            compared = self._compare(one, best)
            # Where figures cannot tell, the job stays as it is.
            if compared == "better" or (compared == "unclear" and one == 0):
                best = one
        return best

    def _end_round(self) -> None:
        if any(one not in self._rounds[-1] for one in self._alive):
            return
        rounds = len(self._rounds)
        limit = 1 + CLOSE[rounds]
        least = {one: min(of_round[one] for of_round in self._rounds) for one in self._alive}
        close = limit * min(least.values())
        self._alive = [one for one in self._alive if least[one] <= close or (rounds == 1 and one == 0)]
        full = rounds >= MOST_ROUNDS or self.windows + len(self._alive) > MOST_WINDOWS
        self.over = len(self._alive) < 2 or full or (rounds >= LEAST_ROUNDS and self._is_clear)
        if not self.over:
            self._rounds.append({})

    @property
    def _is_clear(self) -> bool:
        """Whether no comparison of those that are left is undecided."""
        return all(self._compare(one, other) != "unclear" for one in self._alive for other in self._alive if one != other)

    def _compare(self, one: int, other: int) -> Compared:
        """one against other."""
        ratios = [math.log(of_round[one] / of_round[other]) for of_round in self._rounds if one in of_round and other in of_round]
        mean = statistics.fmean(ratios)
        if mean > math.log1p(-GAIN):
            return "tie"  # or worse
        if len(ratios) > 1:
            scatter = STUDENT[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
            return "better" if mean + scatter < 0 else "unclear"
        return "unclear"
