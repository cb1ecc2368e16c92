"""One process's shared memory: a few segments, each at least twice as large as the one before, from which places are cut.

So the number of descriptors grows with the logarithm of the bytes, not with the number of places. A segment takes memory only where its places
are used; the rest of it costs nothing. Places stay until the process ends;
``Place.release`` gives their memory back, not their addresses. For one thread, except for ``Place.populate``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Final

from psgc.transport.memory.segment import Place, Segment, aligned

FIRST_BYTES: Final = 4 << 20  # size of the first segment; the thirty-second would have 8 PiB


class Arena:
    """See the module's text. segments: in the order in which they were made, numbered from 0. made: told of each new one, before anything is cut from it."""

    def __init__(self, name: str, made: Callable[[int, Segment], None] | None = None) -> None:
        self.segments: dict[int, Segment] = {}
        self._name, self._made = name, made
        self._used = 0  # bytes of the last segment

    def cut(self, nbytes: int) -> Place:
        """A new place of zeros that shares no cache line with others. Raises OSError if no segment can be made."""
        return self.cut_row([nbytes])[0]

    def cut_row(self, sizes: Sequence[int]) -> list[Place]:
        """New places, each as ``cut`` makes them, of one segment, one behind the other: without a gap behind one that is whole cache lines."""
        nbytes = sum(map(aligned, sizes))
        last = len(self.segments) - 1
        if last < 0 or self._used + nbytes > self.segments[last].nbytes:
            last, self._used = last + 1, 0
            self.segments[last] = Segment.create(f"{self._name}-{last}", self._next_bytes(nbytes))
            if self._made is not None:
                self._made(last, self.segments[last])
        segment, places = self.segments[last], []
        for size in sizes:
            places.append(Place(segment, self._used, segment.view(self._used, size)))
            self._used += aligned(size)
        return places

    def adopt(self, segment: Segment, used: int) -> None:
        """Go on in a segment that a former process has made, behind its first ``used`` bytes. Segments come in their order, before anything is cut."""
        self.segments[len(self.segments)], self._used = segment, used

    def _next_bytes(self, nbytes: int) -> int:
        before = self.segments[len(self.segments) - 1].nbytes if self.segments else FIRST_BYTES // 2
        return max(2 * before, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
