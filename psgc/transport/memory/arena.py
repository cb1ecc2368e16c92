"""One process's shared memory: a few segments, each at least twice as large as the one before, from which pieces are cut.

However many pieces there are, there are as many descriptors as doublings. A segment is made whole, but takes memory only where a piece of it
is used, so what is left over in it costs nothing. Pieces stay until the process ends. For one thread, but for ``Piece.populate``.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psgc.transport.memory.mapping import populate
from psgc.transport.memory.segment import Segment, aligned

FIRST_BYTES: Final = 4 << 20  # of the first segment; the thirty-second would have 8 PiB


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a segment, zero when they are new. segment: its number in the arena, from 0."""

    segment: int
    offset: int
    bytes: NDArray[np.uint8]

    def populate(self) -> None:
        """Make its pages, from any thread and without the GIL. Raises OSError where there is no memory."""
        populate(self.bytes)


class Arena:
    """See the module's text. segments: by number; whoever owns the arena passes new ones to its peers."""

    def __init__(self, name: str) -> None:
        self.segments: dict[int, Segment] = {}
        self._name = name
        self._used = 0  # bytes of the last segment

    def cut(self, nbytes: int) -> Piece:
        """A new piece, at a cache line of its own. Raises OSError where no segment can be made."""
        last = len(self.segments) - 1
        if last < 0 or self._used + nbytes > self.segments[last].nbytes:
            last, self._used = last + 1, 0
            self.segments[last] = Segment.create(f"{self._name}-{last}", self._next_bytes(nbytes))
        offset = self._used
        self._used += aligned(nbytes)
        return Piece(last, offset, self.segments[last].view(offset, nbytes))

    def _next_bytes(self, nbytes: int) -> int:
        before = self.segments[len(self.segments) - 1].nbytes if self.segments else FIRST_BYTES // 2
        return max(2 * before, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
