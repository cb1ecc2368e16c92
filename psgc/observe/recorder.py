"""Records one process's spans, in memory that is allocated when tracing begins. Recording a span takes about a microsecond and never blocks.

Owns the memory and the range of recorded steps. ``lanes`` says what a span means; ``worker_trace`` and ``server_trace`` say who records which.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

from psgc.observe.lanes import Line

ROW: Final = struct.Struct("<QIBBHqqQ")
CAPACITY: Final = 1 << 19  # spans: 20 MB, of which only written pages take memory


class Recorded(NamedTuple):
    """One span. key: the part's key; line, track: the resource that was busy, and which one of several; action: one of ``lanes``' actions, or an index into
    the bucket's option; began_ns, ended_ns: times of the machine's monotonic clock; nbytes: bytes that were sent, 0 if none."""

    key: int
    step: int
    line: int
    track: int
    action: int
    began_ns: int
    ended_ns: int
    nbytes: int


class Recorder:
    """See the module's text. first, last: the range of steps whose spans are kept, by each key's own count; dropped: number of spans for which there was no
    memory left."""

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
        """The recorded spans, in the order in which they ended."""
        with self._lock:
            count = self._count
        return list(map(Recorded._make, ROW.iter_unpack(memoryview(self._memory)[: ROW.size * count])))
