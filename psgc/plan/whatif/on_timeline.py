"""A question to the timeline: one codec on a profile and a cluster, with the plans that psgc finds with and without it.

If psgc would compress nothing, the codec's plan is the best one that compresses everything, which shows the cost of doing so anyway. Owns the
simulations that answer the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

from psgc.plan.methods.result import Found
from psgc.plan.methods.search import search
from psgc.plan.methods.uniform import best_uniform, codec_us, compressed
from psgc.plan.model.gains import share_saved
from psgc.plan.model.options import encodes
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.quality import is_cast
from psgc.plan.model.vary import SAME, Change, in_halves, varied
from psgc.plan.whatif.regimes import BF16_BYTES, needed_ratio
from psgc.plan.whatif.verdict import LEAST_MARGIN, gain

GBPS_RANGE: Final = (1e-3, 1e5)
FINE_ENOUGH: Final = 1.01  # a bandwidth is found to a hundredth, a budget to a thousandth
MOST_OFF: Final = 0.1  # share by which a measured step may differ from the simulated one without a warning


@dataclass(frozen=True)
class TimelineTimes:
    """A problem's times, in the form that ``verdict`` takes. spread: factor by which the codec's times may be off; measured_ms: the measured
    uncompressed step, if known; peer_bytes: most bytes per uncompressed element, 4, or 2 for gradients as bf16."""

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
        return self.problem if self.peer_bytes == 4 else in_halves(self.problem)

    @cached_property
    def plans(self) -> tuple[Found, Found]:
        """The plans without and with compression."""
        return _best_without(self.peer), _best_with(self.problem)

    @property
    def codec_ms(self) -> float:
        return codec_us(self.problem, self.plans[1].buckets) / 1e3

    def sync_ms(self, change: Change) -> float:
        plain = replace(change, codec=1.0, payload=1.0)  # without encoding, the codec's speed does not matter
        return self.plans[0].step_us / 1e3 if plain == SAME else _best_without(varied(self.peer, plain)).step_us / 1e3

    def method_ms(self, change: Change) -> float:
        return self.plans[1].step_us / 1e3 if change == SAME else _best_with(varied(self.problem, change)).step_us / 1e3

    def gains_elsewhere(self) -> Sequence[float]:
        """The gains with changed inputs but the same plans, because a user would run these plans without knowing of the change."""
        gains = []
        corners = product((0.9, 1.1), (1.0, 1.1), (1 / self.spread, self.spread))
        changes = [Change(link=link, backward=backward, codec=codec) for link, backward, codec in corners]
        if self.problem.cluster.host is not None:
            changes += [Change(host=0.9), Change(host=1.1)]
        for change in changes:
            sync = simulate(varied(self.peer, change), self.plans[0].buckets).step_us
            gains.append(share_saved(simulate(varied(self.problem, change), self.plans[1].buckets).step_us, sync))
        return gains

    def crossover_gbps(self) -> float:
        """Bandwidth below which the codec saves more than the least margin: 0 if it never does, infinity if it always does."""
        low, high = GBPS_RANGE
        if self._saves(self._at(high)):
            return math.inf
        if not self._saves(self._at(low)):
            return 0.0
        while high / low > FINE_ENOUGH:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._saves(self._at(middle)) else (low, middle)
        return low

    def _at(self, gbps: float) -> Change:
        return Change(link=gbps / self.gbps)

    def _saves(self, change: Change) -> bool:
        return gain(self, change) > LEAST_MARGIN

    def required_ratio(self) -> float:
        return needed_ratio(self.problem.profile, self.problem.cluster, self.peer.profile.narrowed(int(self.peer_bytes)).bytes_per_element)

    def encode_budget_ms(self) -> float:
        """The longest time that encoding and decoding may take with the codec's plan unchanged, all of it slower by one factor. If the codec loses even
        when they take no time, the result is negative: the time that it loses."""
        sync, plan = self.plans[0].step_us, self.plans[1].buckets

        def step_us(factor: float) -> float:
            return simulate(varied(self.problem, Change(codec=factor)), plan).step_us

        if step_us(0.0) >= sync or not self.codec_ms:  # no factor makes it slower
            return (sync - step_us(0.0)) / 1e3
        low, high = 0.0, 1.0
        while step_us(high) < sync:
            low, high = high, 2 * high
        while high - low > (FINE_ENOUGH - 1) / 10 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if step_us(middle) < sync else (low, middle)
        return low * self.codec_ms

    @property
    def over_bf16(self) -> TimelineTimes | None:
        """The same question with bf16 gradients as the uncompressed side; None if the codec itself is only a cast."""
        if self.peer_bytes == BF16_BYTES or max(self.problem.profile.itemsizes) <= BF16_BYTES or is_cast(self.problem.codec.name):
            return None
        half = replace(self, measured_ms=None, peer_bytes=BF16_BYTES)
        half.__dict__["plans"] = (_best_without(half.peer), self.plans[1])  # the codec's plan is searched for once
        return half

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


def _best_without(problem: Problem) -> Found:
    return search(replace(problem, constraints=replace(problem.constraints, most_encodes=0)))


def _best_with(problem: Problem) -> Found:
    found = search(problem)
    if any(encodes(bucket.option) for bucket in found.buckets):
        return found
    return best_uniform(problem, compressed(problem))
