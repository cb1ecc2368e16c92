"""How fast a connection is, found out once: messages that the server sends back, each twice as long as the last, until one takes long
enough to tell.

Pure: no sockets or clocks; ``now`` is passed in. A few messages on a fast connection, two or three on a slow one.
"""

from __future__ import annotations

import math
from typing import Final

from psgc.wire.messages import MEASURE_BYTES

LEAST_BYTES: Final = 16 << 10
TELLING_S: Final = 0.1  # beyond an empty echo's time: what the processes themselves take is then a few percent
# The first echo of a size may wait for a server that has not been woken up yet, or for TCP, which begins slowly: the better of two counts.
ECHOES: Final = 2
# Buffers in the network may take most of a short echo at once, so that a second size is needed; but not where the first alone takes so long.
ENOUGH_S: Final = 1.0


class Pace:
    """See the module's text. ``done``, then ``rate`` in bytes a second of one direction; where the two differ, of both together."""

    def __init__(self) -> None:
        self.done = False
        self.rate = math.inf
        self._size = self._echoes = 0
        self._took = self._empty_s = math.inf
        self._before: tuple[int, float] = (0, 0.0)  # size and time of the last echo but this
        self._said = 0.0

    def say(self, now: float) -> int:
        """The bytes that are to be echoed now. On a new connection: the message that the last one lost is sent again."""
        self._said = now
        return self._size

    def echoed(self, nbytes: int, now: float) -> None:
        """An echo has come; unless ``done``, another is to be said."""
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
        if size:  # what buffers in the network take at once is in both
            self.rate = min(self.rate, _both_ways(nbytes - size, self._took - took))


def _both_ways(nbytes: int, seconds: float) -> float:
    return 2 * nbytes / seconds if seconds > 0 else math.inf
