"""The goodput of a job and its price: items (tokens, images) a second, the time of one, and the price of a million.

Owns the arithmetic, from the time of an iteration, the batch of a GPU, and hourly prices. Every item counts the same. If quality differs, compare
the times to reach a loss instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster

_HOUR_US: Final = 3.6e9
MOST_ITEMS, MOST_PRICE = 10**9, 1e9  # a typing error beyond


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour, all in one currency. node: a machine with GPUs; server: a CPU machine that sums; link: the link of one of either."""

    node: float = 0.0
    server: float = 0.0
    link: float = 0.0

    def __post_init__(self) -> None:
        for name, price in (("node", self.node), ("server", self.server), ("link", self.link)):
            if not (math.isfinite(price) and 0 <= price <= MOST_PRICE):
                raise UsageError(f"the price of a {name} is {price:g} an hour, expected 0 to {MOST_PRICE:g}")

    def of(self, cluster: Cluster) -> float:
        """The price of an hour of the whole cluster."""
        return cluster.nodes * self.node + cluster.servers * self.server + (cluster.nodes + cluster.servers) * self.link


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput over many iterations. million: the price of a million items, None if no prices are given."""

    items_per_s: float
    us_per_item: float
    million: float | None

    def to_json(self) -> dict[str, Any]:
        return {"items_per_s": self.items_per_s, "us_per_item": self.us_per_item, "price_per_million": self.million}


def goodput(iteration_us: float, items_a_gpu: int, cluster: Cluster, prices: Prices) -> Goodput:
    """The goodput of iterations of this length. items_a_gpu: in one GPU's batch. Raises UsageError for a number outside 1 to MOST_ITEMS, and for an iteration
    that takes no time."""
    if not 1 <= items_a_gpu <= MOST_ITEMS:
        raise UsageError(f"{items_a_gpu} items a GPU and iteration, expected 1 to {MOST_ITEMS}")
    if not iteration_us:
        raise UsageError("an iteration takes no time, so there is no goodput: expected a profile with ready_us or forward_us above 0")
    us = iteration_us / (items_a_gpu * cluster.gpus)
    hour = prices.of(cluster)
    return Goodput(1e6 / us, us, 1e6 * us * hour / _HOUR_US if hour else None)
