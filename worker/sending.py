"""Which payloads may leave for one server now: its window, the worker's credit, and what its connection's queue holds. Pure.

Invariant: the payloads in flight are within the credit, or one alone is; a part holds credit from when it may leave until the server has accepted it.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from psgc.worker.parts import PartState

# Payloads that may wait in a connection's own queue: one that the kernel is taking, and one to follow without a pause. All others wait here,
# where a payload of higher priority can still overtake them. The kernel itself buffers what the link's bandwidth and delay can hold.
MOST_UNSENT: Final = 2


class Credit(NamedTuple):
    """How much may be in flight to each server. nbytes: 0 is no limit; parts: -1 is no limit, 0 first come first served, else a limit."""

    nbytes: int = 0
    parts: int = -1


class Sending:
    """See the module's text."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._waiting: list[tuple[int, int, int, PartState]] = []  # heap of (-priority, position, sequence, part)
        self._sequence = 0
        self.windows: dict[int, int] = {}  # layout -> limit
        self.queues = False  # whether payloads wait in the connection's queue, and ``departed`` tells when one has left it
        self.unsent = 0  # payloads in that queue
        self.in_flight = 0
        self.parts_in_flight = 0

    @property
    def waits(self) -> bool:
        """Whether some part waits to be sent."""
        return bool(self._waiting)

    @property
    def queued(self) -> int:
        """How many parts wait to be sent."""
        return len(self._waiting)

    def connected(self, queues: bool) -> None:
        """On a new connection, whose queue is empty."""
        self.queues, self.unsent = queues, 0

    def put(self, part: PartState) -> None:
        """The part's payload is there. Of equal priorities the one leaves first that comes first in its layout, so that a server has the same parts from
        every rank, though encoding may end in another order on each."""
        self._sequence += 1
        order = (0, 0) if self._credit.parts == 0 else (-part.priority, part.place.position)
        heapq.heappush(self._waiting, (*order, self._sequence, part))

    def admit(self) -> list[PartState]:
        """The parts that leave now, the highest priority first."""
        admitted: list[PartState] = []
        outside: list[tuple[int, int, int, PartState]] = []
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            part = entry[3]
            if part.ticket >= self.windows.get(part.place.layout, 0):
                outside.append(entry)
                continue
            if not self._has_credit(part.said.payload_bytes):
                outside.append(entry)
                break
            self._spend(part)
            admitted.append(part)
        for entry in outside:
            heapq.heappush(self._waiting, entry)
        return admitted

    def _has_credit(self, payload_bytes: int) -> bool:
        if payload_bytes and self.unsent >= MOST_UNSENT:
            return False
        if self.parts_in_flight == 0:
            return True  # a part larger than the credit must pass, too
        if self._credit.parts > 0 and self.parts_in_flight >= self._credit.parts:
            return False
        return not self._credit.nbytes or self.in_flight + payload_bytes <= self._credit.nbytes

    def _spend(self, part: PartState) -> None:
        nbytes = part.said.payload_bytes
        part.credit = nbytes + 1  # + 1: a part without payload counts as a part in flight, too
        self.in_flight += nbytes
        self.parts_in_flight += 1
        if self.queues and nbytes:
            self.unsent += 1

    def give_back(self, part: PartState) -> None:
        """The part's credit, if it holds any."""
        if part.credit:
            self.in_flight -= part.credit - 1
            self.parts_in_flight -= 1
            part.credit = 0
