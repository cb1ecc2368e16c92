"""Which server each part of a layout lies on: the one that has the least bytes so far.

The law: at every point in the order of priority, the bytes of any two servers differ by at most the largest part so far. So no server has more than the
mean and one part, and the parts of one layer, which become ready together, do not all go to one server.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class Placement:
    """Places parts one after the other, in the order of priority. servers: their number, at least 1; turn: the server of the first part, modulo
    their number. Of servers with equally few bytes the one that has waited longest for a part is taken, so equal parts go to the servers in turn."""

    def __init__(self, servers: int, turn: int = 0) -> None:
        self._taken = servers
        self._heap = [(0.0, place, (turn + place) % servers) for place in range(servers)]  # bytes, when it was last taken, number: sorted

    def place(self, nbytes: float) -> int:
        """The server of the next part, which has so many bytes."""
        load, _, server = self._heap[0]
        heapq.heapreplace(self._heap, (load + nbytes, self._taken, server))
        self._taken += 1
        return server

    def put(self, server: int, nbytes: float) -> None:
        """Count a part whose server was chosen by somebody else."""
        self._heap = [(load + nbytes * (own == server), taken, own) for load, taken, own in self._heap]
        heapq.heapify(self._heap)


def balanced_servers(buckets: Iterable[Sequence[float]], servers: int, turn: int = 0) -> list[tuple[int, ...]]:
    """The server of each part. buckets: the bytes of each one's parts, in the order of priority."""
    placement = Placement(servers, turn)
    return [tuple(placement.place(nbytes) for nbytes in sizes) for sizes in buckets]
