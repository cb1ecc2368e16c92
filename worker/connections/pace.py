"""Measures a connection's rate once: the server echoes messages, each twice as long as the last, until one takes long enough to measure.

Pure: no sockets or clocks; ``now`` is passed in. A few messages on a fast connection, two or three on a slow one.
"""

from __future__ import annotations

import math
from typing import Final

from psgc.wire.messages import MEASURE_BYTES

LEAST_BYTES: Final = 16 << 10
TELLING_S: Final = 0.1  # longer than an empty echo: the processes' own time is then a few percent of it
# The first echo of a size may wait for a server that sleeps, or for TCP's slow start: the faster of two counts.
ECHOES: Final = 2
# Buffers in the network may take most of a short echo at once, so a second size is measured, unless the first one took as long as this.
ENOUGH_S: Final = 1.0


class Pace:
    """See the module's text. Once ``done``, ``rate`` is in bytes a second in one direction; if the two differ, their harmonic mean."""

    def __init__(self) -> None:
        self.done = False
        self.rate = math.inf
        self._size = self._echoes = 0
        self._took = self._empty_s = math.inf
        self._before: tuple[int, float] = (0, 0.0)  # size and time of the last echo but this
        self._said = 0.0

    def say(self, now: float) -> int:
        """How many bytes to send for the next echo. On a new connection, the echo that was lost with the old one is repeated."""
        self._said = now
        return self._size

    @property
    def round_trip_s(self) -> float:
        """Of an empty message, once ``done``."""
        return self._empty_s

    def echoed(self, nbytes: int, now: float) -> None:
        """An echo has come; unless ``done``, call ``say`` for another."""
        if self.done or nbytes != self._size:
            return
        self._echoes += 1
        self._took = min(self._took, now - self._said)
        if nbytes == 0:
            self._empty_s = self._took
        tells = nbytes == 0 or self._took - self._empty_s >= TELLING_S or nbytes >= MEASURE_BYTES
        if tells and self._echoes < ECHOES:
            return
        if tells and nbytes and (self._before[0] or self._took >= ENOUGH_S):
            self._conclude(nbytes)
            return
        self._before = nbytes, self._took
        self._size, self._echoes, self._took = max(2 * nbytes, LEAST_BYTES), 0, math.inf

    def _conclude(self, nbytes: int) -> None:
        self.done = True
        self.rate = _both_ways(nbytes, self._took - self._empty_s)
        size, took = self._before
        if size:  # the share that buffers in the network take at once is in both times, and cancels
            self.rate = min(self.rate, _both_ways(nbytes - size, self._took - took))


def _both_ways(nbytes: int, seconds: float) -> float:
    return 2 * nbytes / seconds if seconds > 0 else math.inf
