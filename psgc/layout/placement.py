"""Chooses the server of each part of a layout, according to the servers' ideal shares (``machines``).

If all servers' machines are equal: at every point in the order of priority, the loads of any two servers differ by at most the
largest part so far. So no server has more than the mean plus one part, and the parts of one layer, which become ready together, do not all go to
one server. If machines differ, the same holds for the loads beyond each server's share, until a machine would exceed its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from psgc.layout.machines import Machines

# A server's time for an element of one contribution, on one thread: docs/codecs.md has a quarter of 0.9 to 1.8 ns for four of them, whichever the
# codec; a server has about as many threads as this.
SUM_S_PER_ELEMENT: Final = 0.35e-9
SERVER_THREADS: Final = 4
USUAL_BYTES_PER_S: Final = 1.25e9  # assumed for a link that has not been measured: 10 Gbit/s
SLACK: Final = 1.01  # a machine may exceed its ideal cost by this factor before a part goes elsewhere
CYCLE: Final = 4  # parts for each server in ``servers_in_turn``


class Load(NamedTuple):
    """The cost of a part. nbytes: one worker's pushed and pulled bytes; work: time of a server's processor, in units of the bytes that a worker's link
    carries meanwhile, divided by the number of workers."""

    nbytes: float
    work: float = 0.0

    @property
    def weight(self) -> float:
        """The cost that limits a server which has only such parts."""
        return max(self.nbytes, self.work)


NOTHING: Final = Load(0.0)


def total_of(loads: Iterable[Load]) -> Load:
    """The sum of the loads."""
    each = tuple(loads)
    return Load(sum(load.nbytes for load in each), sum(load.work for load in each))


def work_of(elements: float, rate: float = 0.0) -> float:
    """``Load.work`` of a sum of this many elements. rate: bytes per second of the slowest connection, 0 if it has not been measured."""
    return elements * SUM_S_PER_ELEMENT / SERVER_THREADS * 2 * (rate or USUAL_BYTES_PER_S)  # both ways of the link at once


class Excess(NamedTuple):
    """By how many bytes the busiest machine's load exceeds the least possible one, and that least load: bytes over its link, both directions together."""

    bytes: float
    least: float


class Placement:
    """Places parts one after the other, in the order of priority. Ties go to the server that has waited longest for a part, so equal parts go to the
    servers in turn. total: the load of all parts; turn: the server of the first part, modulo the number of servers, if machines are equal."""

    def __init__(self, machines: Machines, total: Load, turn: int = 0) -> None:
        count = len(machines.servers)
        self._machine, self._own = machines.of_server, machines.own[machines.of_server]
        self._workers = max(sum(machines.workers), 1)
        self._shares, least = machines.ideal(self._workers * total.work / max(total.nbytes, 1e-9))
        self._least = least * total.nbytes
        self._fixed = machines.fixed[machines.of_server] * total.nbytes
        self._bytes = np.zeros(len(machines.workers))  # by machine; the next ones are by server
        self._work, self._weight = np.zeros(count), np.zeros(count)
        self._placed, self._taken = 0.0, count
        self._last = np.array([(server - turn) % count for server in range(count)])

    def place(self, load: Load) -> int:
        """The server of the next part."""
        cost = self._cost(load)
        fits = cost <= SLACK * self._least
        # Take the server with the least load beyond its share, unless its machine would then exceed the ideal cost.
        score = np.where(fits, self._weight - self._shares * (self._placed + load.weight), np.inf) if fits.any() else cost
        least = np.flatnonzero(score == score.min())
        server = int(least[self._last[least].argmin()])
        self._last[server] = self._taken
        self._taken += 1
        self.put(server, load)
        return server

    def put(self, server: int, load: Load) -> None:
        """Count a part whose server the caller has chosen."""
        self._bytes[self._machine[server]] += load.nbytes
        self._work[server] += load.work
        self._weight[server] += load.weight
        self._placed += load.weight

    def _cost(self, more: Load) -> np.ndarray:
        """[servers] the cost of each server's machine if this load were added to the server."""
        link = self._fixed + self._own * (self._bytes[self._machine] + more.nbytes)
        return np.asarray(np.maximum(link, self._workers * (self._work + more.work)))

    @property
    def excess(self) -> Excess:
        return Excess(max(0.0, float(self._cost(NOTHING).max(initial=0.0)) - self._least), self._least)


@lru_cache(maxsize=8)
def servers_in_turn(machines: Machines) -> tuple[int, ...]:
    """The servers of an endless sequence of equal parts: a cycle in which each server has its share."""
    count = CYCLE * len(machines.servers)
    placement = Placement(machines, Load(count))
    return tuple(placement.place(Load(1)) for _ in range(count))


def balanced_servers(buckets: Iterable[Sequence[float]], servers: int, turn: int = 0) -> list[tuple[int, ...]]:
    """The server of each part, on equal machines. buckets: the bytes of each bucket's parts, in the order of priority."""
    sizes = [tuple(map(float, each)) for each in buckets]
    placement = Placement(Machines.alone(servers, 1), Load(sum(map(sum, sizes))), turn)
    return [tuple(placement.place(Load(nbytes)) for nbytes in each) for each in sizes]
