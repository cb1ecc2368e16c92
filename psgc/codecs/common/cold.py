"""Times operations on data that other work has driven out of the caches, as a training's forward and backward do between two exchanges: a kernel of a few
thousand elements then takes ten times as long as when it runs again and again, one of a million twice as long."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import numpy as np

OTHER_BYTES: Final = 32 << 20
REPEATS: Final = 15
Clock = Callable[[], int]


class Cold:
    """repeats: the median of so many runs counts. clock: in nanoseconds, of the CPU time of what runs: other work on the machine does not count."""

    def __init__(self, clock: Clock, repeats: int = REPEATS) -> None:
        self._clock, self._repeats = clock, repeats
        self._other = np.ones(OTHER_BYTES // 8)

    def us(self, run: Callable[[], object]) -> float:
        """Microseconds that ``run`` takes, at least one nanosecond."""
        run()  # compiled, and its memory mapped
        return 1e-3 * statistics.median(self._ns(run) for _ in range(self._repeats))

    def _ns(self, run: Callable[[], object]) -> int:
        self._other.sum()
        begun = self._clock()
        run()
        return max(1, self._clock() - begun)
