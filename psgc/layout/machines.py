"""The machines of a job's servers and workers, and the share of a layout's bytes that each server ideally has.

Pure. A machine with workers already carries their traffic over its link. The link of a machine with only servers (a CPU machine in Jiang et
al., OSDI 2020) carries nothing else. So servers on machines with workers get fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

Costs = np.ndarray  # [servers] or [machines] float64
_HALVINGS: Final = 60  # of the interval that the least time is in: more than a float64 has digits


@dataclass(frozen=True)
class Machines:
    """servers: the machine of each server; workers: how many workers each machine has; nodes: DMLC_NUM_WORKER, 0 for the machines with workers.

    The cost of a machine's link in one direction, in units of one worker's bytes: w of the W workers send M bytes each, except to servers on their own
    machine, and these servers send what they sum to the other workers. That is w * M + (W - 2 w) * x, where x bytes are summed on the machine (Jiang et
    al. 2020, section 4.1, for w = 1). As much is received. If a machine has half of all workers or more, x costs nothing.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    nodes: int = 0

    @classmethod
    def alone(cls, servers: int, workers: int) -> Machines:
        """Each server on a separate machine without workers; the default if nothing is known."""
        return cls(tuple(range(servers)), (0,) * servers + (workers,))

    @classmethod
    def of_hosts(cls, servers: Sequence[str], workers: Sequence[str], nodes: int = 0) -> Machines:
        """From the name of each server's machine and of each worker's machine."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys((*servers, *workers)))}
        counts = [0] * len(numbers)
        for host in workers:
            counts[numbers[host]] += 1
        return cls(tuple(numbers[host] for host in servers), tuple(counts), nodes)

    @cached_property
    def of_server(self) -> np.ndarray:
        """[servers] the machine of each server."""
        return np.array(self.servers, np.int64)

    @cached_property
    def fixed(self) -> Costs:
        """[machines] bytes that a machine's link carries for each byte of the layout, whichever servers hold it."""
        workers = np.array(self.workers, float)
        return workers if len({*self.servers, *np.flatnonzero(workers)}) > 1 else 0 * workers

    @cached_property
    def own(self) -> Costs:
        """[machines] bytes that a machine's link carries for each byte that is summed there."""
        workers = np.array(self.workers, float)
        return np.asarray(np.maximum(workers.sum() - 2 * workers, 0.0))

    @cached_property
    def alike(self) -> bool:
        """Whether all servers have the same ideal share."""
        shares, _ = self.ideal()
        return float(np.ptp(shares)) < 1e-9 if len(shares) else True

    @cached_property
    def colocated(self) -> tuple[bool, ...]:
        """Whether each server's machine has workers."""
        return tuple(self.workers[machine] > 0 for machine in self.servers)

    def ideal(self, work: float = 0.0) -> tuple[np.ndarray, float]:
        """The ideal share of each server if parts could be of any size ([servers] float64, of sum 1), and the busiest machine's cost per byte of the
        layout, which is the least possible. work: time of a server's processor for the whole layout, in units of the bytes that a link carries
        meanwhile. If several choices cost the least, the shares are as equal as possible."""
        machines, counts = self.of_server, np.bincount(self.of_server, minlength=len(self.workers))

        def most(cost: float) -> np.ndarray:
            """[servers] the largest share of each server at this cost of the busiest machine."""
            with np.errstate(divide="ignore", invalid="ignore"):
                link = np.where(self.own > 0, (cost - self.fixed) / self.own, np.inf) / counts
                processor = cost / work if work else np.inf
            return np.asarray(np.minimum(np.clip(link[machines], 0.0, None), processor))

        low, high = float(self.fixed.max()), float(self.fixed.max() + self.own.max() + work)
        if most(low).sum() < 1:
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if most(middle).sum() >= 1 else (middle, high)
        else:
            high = low
        return _equalized(most(high)), high


def _equalized(most: np.ndarray) -> np.ndarray:
    """Shares of sum 1, none above its limit, and as equal as the limits allow. most: [servers], of sum 1 or more."""
    shares, left = np.zeros(len(most)), 1.0
    open_ = np.ones(len(most), bool)
    while left > 0 and open_.any():
        level = left / np.count_nonzero(open_)
        full = open_ & (most <= level)
        if not full.any():
            shares[open_] = level
            return shares
        shares[full] = most[full]
        left -= float(most[full].sum())
        open_ &= ~full
    return np.asarray(shares / shares.sum())
