"""Memory that payloads are received into, used again once nothing refers to the payload that lay there.

The kernel clears each page that a process touches first: for payloads of megabytes that takes as long as receiving them. A payload is lent as an array; the
array and all views of it keep the memory, and whichever thread drops the last of them gives it back.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
SMALLEST_BYTES: Final = 64 << 10  # smaller ones come from the allocator's own lists
MOST_IDLE_BYTES: Final = 64 << 20  # that are kept of each size


class ReceiveBuffers:
    """See the module's text. Sizes are powers of two, so that a layout's parts, which are nearly equal, share them. ``take`` is for one thread."""

    def __init__(self, most_idle_bytes: int = MOST_IDLE_BYTES) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: dict[int, deque[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """An array of ``nbytes`` bytes of any content. Its memory is lent to nobody else while the array or a view of it lives."""
        if nbytes < SMALLEST_BYTES:
            return np.empty(nbytes, np.uint8)
        size = 1 << (nbytes - 1).bit_length()
        idle = self._idle.get(size)
        if idle is None:
            idle = self._idle[size] = deque(maxlen=self._most_idle_bytes // size)
        try:
            memory = idle.pop()  # the last one used is the likeliest to be in a cache
        except IndexError:
            memory = np.empty(size, np.uint8)
        # Views of it refer to it, and not to ``memory`` in its place: numpy looks through arrays, but not through a memoryview.
        lent: Bytes = np.frombuffer(memory.data[:nbytes], np.uint8)
        weakref.finalize(lent, idle.append, memory).atexit = False
        return lent
