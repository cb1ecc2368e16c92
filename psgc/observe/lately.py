"""What the last steps, or the last seconds, were like: medians and shares that forget. ``now`` is passed in."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

LAST_S: Final = 10.0  # what is told is of so long; on a busy machine shorter is another rank's each time
MOST_STEPS: Final = 512  # of that time
LEAST_STEPS: Final = 5  # however long they take; fewer say nothing yet
OLD_S: Final = 60.0  # since the newest step, and longer than the last few took: they say nothing of now
APART_S: Final = 0.25  # between two looks at counts that grow


class Busy:
    """For how long at least one of several things has been under way. One thread changes it, any thread asks."""

    __slots__ = ("_ended_s", "_since", "_under_way")

    def __init__(self) -> None:
        self._under_way = 0
        self._since = self._ended_s = 0.0

    def begin(self, now: float) -> None:
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def end(self, now: float) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._ended_s += now - self._since

    def so_far_s(self, now: float) -> float:
        """What is under way counts."""
        return self._ended_s + (max(0.0, now - self._since) if self._under_way else 0.0)


class LastSteps:
    """Some figures of each of the last steps, as many of all. One thread adds, any thread asks. most: steps that are kept; forgets: nothing is told any more
    once the newest is long over."""

    def __init__(self, most: int = MOST_STEPS, forgets: bool = False) -> None:
        self._steps: deque[tuple[float, Sequence[float]]] = deque(maxlen=most)
        self._forgets = forgets

    def add(self, now: float, figures: Sequence[float]) -> None:
        self._steps.append((now, figures))

    def medians(self, now: float) -> list[float]:
        """The median of each figure; none while there are too few steps, or if they are forgotten."""
        steps = list(self._steps)
        if len(steps) < LEAST_STEPS or (self._forgets and now - steps[-1][0] > max(OLD_S, steps[-1][0] - steps[-LEAST_STEPS][0])):
            return []
        counted = [figures for at, figures in steps if now - at <= LAST_S]
        if len(counted) < LEAST_STEPS:
            counted = [figures for _, figures in steps[-LEAST_STEPS:]]
        return [statistics.median(each) for each in zip(*counted, strict=True)]


class Shares:
    """How fast counts have grown over the last seconds. Any thread may ask; looks that follow at once change nothing.

    Invariant: the looks are a tuple, which is replaced as a whole: of two threads that look at once, one's look may be lost."""

    def __init__(self) -> None:
        self._looks: tuple[tuple[float, Sequence[float]], ...] = ()

    def grown(self, now: float, counts: Sequence[float]) -> list[float]:
        """By how much each has grown in a second. counts: as they are now, as many as ever; none while there was no earlier look."""
        looks = self._looks
        while len(looks) > 1 and now - looks[1][0] >= LAST_S:
            looks = looks[1:]
        found: list[float] = []
        if looks and now - looks[0][0] >= APART_S:
            at, before = looks[0]
            found = [max(0.0, value - old) / (now - at) for value, old in zip(counts, before, strict=True)]
        if not looks or now - looks[-1][0] >= APART_S:
            looks = (*looks, (now, counts))
        self._looks = looks
        return found
