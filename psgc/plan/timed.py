"""A question to the timeline: one codec on a profile and a cluster, every bucket the same way, each side as it is best done.

Owns what is asked of the timeline, and how. Which plan a bucket by bucket search would find is ``methods``'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

from psgc.plan.problem import Problem, simulate
from psgc.plan.regimes import needed_ratio
from psgc.plan.uniform import Uniform, best_uniform, codec_us, compressed, uncompressed
from psgc.plan.vary import SAME, Change, varied, with_halved_bytes

GBPS_RANGE: Final = (1e-3, 1e5)
FINE_ENOUGH: Final = 1.01  # bandwidths and budgets are found to a hundredth
MOST_SLOWER: Final = 2.0**20  # a codec that still pays then costs nothing worth a figure
MOST_OFF: Final = 0.1  # what a measured step may be from the simulated one without a warning


@dataclass(frozen=True)
class TimelineTimes:
    """A problem's times, as ``verdict`` asks for them. spread: by what factor the codec's times may be off; measured_ms: without
    compression, if known; peer_bytes: what an element takes without compression, 4, or 2 for bf16 gradients."""

    problem: Problem
    spread: float = 1.1
    measured_ms: float | None = None
    peer_bytes: float = 4.0

    @property
    def name(self) -> str:
        return self.problem.codec.name

    @property
    def place(self) -> str:
        cluster = self.problem.cluster
        return f"at {cluster.inter.gbps:g} Gbit/s on {cluster.nodes} x {cluster.gpus_per_node} GPUs"

    @property
    def gbps(self) -> float:
        return self.problem.cluster.inter.gbps

    @property
    def peer(self) -> Problem:
        """The problem without compression."""
        return self.problem if self.peer_bytes == 4 else replace(self.problem, cluster=with_halved_bytes(self.problem.cluster))

    @cached_property
    def plans(self) -> tuple[Uniform, Uniform]:
        """Without compression, and with."""
        return _best_without(self.peer), _best_with(self.problem)

    @property
    def codec_ms(self) -> float:
        return codec_us(self.problem, self.plans[1].buckets) / 1e3

    def sync_ms(self, change: Change) -> float:
        plain = replace(change, codec=1.0, payload=1.0)  # what is not encoded takes as long whatever the codec
        return self.plans[0].step_us / 1e3 if plain == SAME else _best_without(varied(self.peer, plain)).step_us / 1e3

    def method_ms(self, change: Change) -> float:
        return self.plans[1].step_us / 1e3 if change == SAME else _best_with(varied(self.problem, change)).step_us / 1e3

    def gains_elsewhere(self) -> Sequence[float]:
        """With the plans as they are: who runs them does not know better either."""
        gains = []
        for link, backward, codec in product((0.9, 1.1), (1.0, 1.1), (1 / self.spread, self.spread)):
            change = Change(link=link, backward=backward, codec=codec)
            sync = simulate(varied(self.peer, change), self.plans[0].buckets).step_us
            gains.append(1 - simulate(varied(self.problem, change), self.plans[1].buckets).step_us / sync)
        return gains

    def crossover_gbps(self) -> float:
        """Bandwidth below which the codec is faster: 0 if it never is, infinity if it always is."""
        low, high = GBPS_RANGE
        if self._gain_ms(high) > 0:
            return math.inf
        if self._gain_ms(low) <= 0:
            return 0.0
        while high / low > FINE_ENOUGH:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._gain_ms(middle) > 0 else (low, middle)
        return low

    def _gain_ms(self, gbps: float) -> float:
        change = Change(link=gbps / self.gbps)
        return self.sync_ms(change) - self.method_ms(change)

    def required_ratio(self) -> float:
        return needed_ratio(self.problem.profile, self.problem.cluster, self.peer_bytes)

    def encode_budget_ms(self) -> float:
        """What encoding and decoding take now, times how many times as slow they may be, plans made anew; where no time at all would do,
        how much too slow the codec is even so."""
        sync = self.sync_ms(SAME)

        def pays(factor: float) -> bool:
            return self.method_ms(Change(codec=factor)) < sync

        if not pays(0.0):
            return sync - self.method_ms(Change(codec=0.0))
        low, high = 0.0, 1.0
        while pays(high) and high < MOST_SLOWER:
            low, high = high, 2 * high
        while high - low > (FINE_ENOUGH - 1) * high:
            middle = (low + high) / 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        return low * self.codec_ms

    def warnings(self) -> list[str]:
        if self.measured_ms is None:
            return []
        simulated, measured = self.plans[0].step_us / 1e3, self.measured_ms
        backward = self.problem.profile.backward_us / 1e3
        if measured < backward:
            return [f"the measured {measured:g} ms are less than the profile's backward alone takes ({backward:.3g} ms)"]
        cluster = self.problem.cluster
        one = 2 * (cluster.nodes - 1) * cluster.inter.latency_us / 1e3
        if backward + one > measured:
            return [
                f"a latency of {cluster.inter.latency_us:g} us is ruled out by the measured {measured:g} ms: the last bucket waits 2 x {cluster.nodes - 1} "
                f"messages = {one:.3g} ms after {backward:.3g} ms of backward, over links of any bandwidth"
            ]
        if abs(simulated / measured - 1) > MOST_OFF:
            return [
                f"the timeline says {simulated:.3g} ms without compression where {measured:g} ms were measured: profile or cluster are another set-up's"
            ]
        return []


def _best_without(problem: Problem) -> Uniform:
    return best_uniform(problem, uncompressed(problem))


def _best_with(problem: Problem) -> Uniform:
    return best_uniform(problem, compressed(problem))
