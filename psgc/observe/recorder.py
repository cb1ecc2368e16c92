"""Spans of one process, in memory that is allotted when tracing begins. Recording one takes about a microsecond and never waits for anything.

Owns the memory and the steps that are recorded. What a span means is ``lanes``'; who records which, ``worker_trace``'s and ``server_trace``'s.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

from psgc.observe.lanes import Line

ROW: Final = struct.Struct("<QIBBHqqQ")
CAPACITY: Final = 1 << 19  # spans; 20 MB, of which the kernel gives only what is written


class Recorded(NamedTuple):
    """One span. key: of the part; line, track: what was busy, and which of several; action: one of ``lanes``', or an action's place in the bucket's
    option; times: of the machine's monotonic clock; nbytes: that travelled, 0 where none did."""

    key: int
    step: int
    line: int
    track: int
    action: int
    began_ns: int
    ended_ns: int
    nbytes: int


class Recorder:
    """See the module's text. first, last: the steps whose spans are kept, by each key's own count. dropped: spans that found no room."""

    def __init__(self, first: int, last: int, capacity: int = CAPACITY) -> None:
        self.first, self.last = first, last
        self.dropped = 0
        self._capacity = capacity
        self._memory = bytearray(ROW.size * capacity)
        self._count = 0
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}

    def wants(self, step: int) -> bool:
        """Whether the spans of a key's step are kept."""
        return self.first <= step <= self.last

    def add(
        self, line: Line, track: int, action: int, key: int, step: int, began_ns: int, ended_ns: int, nbytes: int = 0
    ) -> None:  # fmt: skip
        """Keep a span, if its step is wanted and there is room. Any thread may call it."""
        if not self.first <= step <= self.last:
            return
        with self._lock:
            if self._count == self._capacity:
                self.dropped += 1
                return
            ROW.pack_into(self._memory, ROW.size * self._count, key, step, line, track, action, began_ns, ended_ns, nbytes)
            self._count += 1

    def thread(self) -> int:
        """A small number for the calling thread, the same each time."""
        ident = threading.get_ident()
        number = self._threads.get(ident)
        if number is None:
            with self._lock:
                number = self._threads.setdefault(ident, len(self._threads))
        return number

    def __len__(self) -> int:
        return self._count

    def spans(self) -> list[Recorded]:
        """What has been recorded, in the order in which the spans ended."""
        with self._lock:
            count = self._count
        return list(map(Recorded._make, ROW.iter_unpack(memoryview(self._memory)[: ROW.size * count])))
