"""Whether compression pays, in closed form: the performance model of "On the Utility of Gradient Compression in Distributed Training
Systems" (Agarwal et al., MLSys 2022), equation 1, sections 4.1 and 4.2 and appendices B and D.

Time is backward plus gradient synchronization, in milliseconds; no forward, no optimizer step. With p GPUs, n bytes and bandwidth BW:

    all-reduce (ring)   Tc(n) = 2 alpha (p - 1) + 2 n (p - 1) / (p BW)
    all-gather          Tg(n) = 2 alpha + n (p - 1) / BW
    sync                max(gamma T, (k - 1) Tc(b)) + Tc(b_last)       k buckets of b, the last b_last <= b, overlapped with backward
    sync_no_overlap     T + Tc(n)
    sync_compressed     sync of n / ratio bytes in as many buckets, all of a ratio-th of their size, encoded for free
    powersgd            T + E + Tc(P) + Tc(Q)
    mstopk              T + E + Tg(values) + Tg(indices)
    signsgd             T + E + (n / 32) (p - 1) / BW

Owns these equations and the questions asked of them. 1 Gbit/s is 1e9 bit/s, 1 MiB 2**20 bytes. On one GPU everything takes T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from psgc.errors import UsageError

GAMMA: Final = 1.07  # factor by which concurrent communication slows backward; 1.04 to 1.1 in the paper
BUCKET_MIB: Final = 25.0
CROSSOVER_RANGE_GBPS: Final = (1e-3, 1e5)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One method of synchronizing on one set-up. bandwidth_gbps: None if it is what is asked for; encode_ms: encode and decode together."""

    method: str
    backward_ms: float
    gpus: int
    bandwidth_gbps: float | None
    grad_bytes: float = 0.0
    encode_ms: float = 0.0
    alpha_us: float = 0.0
    gamma: float = GAMMA
    bucket_mib: float = BUCKET_MIB
    ratio: float = 1.0
    p_bytes: float = 0.0
    q_bytes: float = 0.0
    k_fraction: float = 0.01
    index_bytes: float = 4.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        for name, least in (("backward_ms", 0), ("encode_ms", 0), ("alpha_us", 0), ("grad_bytes", 0), ("p_bytes", 0), ("q_bytes", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise UsageError(f"{name} is {value!r}, expected a finite number of at least {least}")
        for name in ("gamma", "bucket_mib", "ratio", "k_fraction", "index_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value!r}, expected a finite number above 0")
        if self.gpus < 1:
            raise UsageError(f"gpus is {self.gpus!r}, expected a whole number of at least 1")
        if self.bandwidth_gbps is not None and not (math.isfinite(self.bandwidth_gbps) and self.bandwidth_gbps > 0):
            raise UsageError(f"bandwidth_gbps is {self.bandwidth_gbps!r}, expected a finite number above 0")

    def at(self, gbps: float) -> Scenario:
        return replace(self, bandwidth_gbps=gbps)

    def with_faster_compute(self, factor: float) -> Scenario:
        """The scenario with backward and encoding ``factor`` times as fast (appendix D)."""
        return replace(self, backward_ms=self.backward_ms / factor, encode_ms=self.encode_ms / factor)

    def with_faster_encode(self, factor: float, payload_factor: float) -> Scenario:
        """The scenario with encoding ``factor`` times as fast, and payloads ``payload_factor * factor`` times as large (appendix D)."""
        larger = factor * payload_factor
        return replace(
            self, encode_ms=self.encode_ms / factor, p_bytes=self.p_bytes * larger, q_bytes=self.q_bytes * larger,
            k_fraction=self.k_fraction * larger, ratio=self.ratio / larger,
        )  # fmt: skip


def bytes_per_ms(scenario: Scenario) -> float:
    if scenario.bandwidth_gbps is None:
        raise UsageError("bandwidth_gbps is missing")
    return scenario.bandwidth_gbps * 1e9 / 8 / 1e3


def all_reduce_ms(scenario: Scenario, nbytes: float) -> float:
    """Milliseconds of a ring all-reduce (equation 1)."""
    p = scenario.gpus
    return 2 * scenario.alpha_us / 1e3 * (p - 1) + 2 * nbytes * (p - 1) / (p * bytes_per_ms(scenario))


def all_gather_ms(scenario: Scenario, nbytes: float) -> float:
    """Milliseconds of an all-gather of ``nbytes`` from each GPU."""
    return 2 * scenario.alpha_us / 1e3 + nbytes * (scenario.gpus - 1) / bytes_per_ms(scenario)


def buckets(scenario: Scenario) -> list[float]:
    """Bytes of each bucket of the gradient."""
    size = scenario.bucket_mib * 2**20
    whole, rest = divmod(scenario.grad_bytes, size)
    return [size] * int(whole) + ([rest] if rest else [])


def _sync(scenario: Scenario) -> float:
    sizes = buckets(scenario)
    if not sizes:
        return scenario.backward_ms
    hidden = (len(sizes) - 1) * all_reduce_ms(scenario, sizes[0] / scenario.ratio)
    return max(scenario.gamma * scenario.backward_ms, hidden) + all_reduce_ms(scenario, sizes[-1] / scenario.ratio)


def _sync_no_overlap(scenario: Scenario) -> float:
    return scenario.backward_ms + all_reduce_ms(scenario, scenario.grad_bytes)


def _powersgd(scenario: Scenario) -> float:
    factors = all_reduce_ms(scenario, scenario.p_bytes) + all_reduce_ms(scenario, scenario.q_bytes)
    return scenario.backward_ms + scenario.encode_ms + factors


def _mstopk(scenario: Scenario) -> float:
    elements = scenario.grad_bytes / 4 * scenario.k_fraction
    payloads = all_gather_ms(scenario, 4 * elements) + all_gather_ms(scenario, scenario.index_bytes * elements)
    return scenario.backward_ms + scenario.encode_ms + payloads


def _signsgd(scenario: Scenario) -> float:
    payloads = scenario.grad_bytes / 32 * (scenario.gpus - 1) / bytes_per_ms(scenario)
    return scenario.backward_ms + scenario.encode_ms + payloads


METHODS: Final[dict[str, Callable[[Scenario], float]]] = {
    "sync": _sync, "sync_no_overlap": _sync_no_overlap, "sync_compressed": _sync, "powersgd": _powersgd, "mstopk": _mstopk,
    "signsgd": _signsgd,
}  # fmt: skip


def time_ms(scenario: Scenario) -> float:
    """Milliseconds of backward and synchronization."""
    return scenario.backward_ms if scenario.gpus == 1 else METHODS[scenario.method](scenario)


def speedup(sync: Scenario, method: Scenario) -> float:
    """How many times as fast as ``sync`` the method is; below 1 it does not pay."""
    return time_ms(sync) / time_ms(method)


def reduction_pct(sync: Scenario, method: Scenario) -> float:
    return 100 * (1 - time_ms(method) / time_ms(sync))


def crossover_gbps(sync: Scenario, method: Scenario) -> float:
    """Bandwidth below which ``method`` is faster than ``sync``: 0 if it never is, infinity if it always is."""
    low, high = CROSSOVER_RANGE_GBPS

    def gain(gbps: float) -> float:
        return time_ms(sync.at(gbps)) - time_ms(method.at(gbps))

    if gain(high) > 0:
        return math.inf
    if gain(low) <= 0:
        return 0.0
    for _ in range(200):  # the gain falls with the bandwidth
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def hide_ratio(scenario: Scenario) -> float:
    """The least ratio c at which all communication except the last bucket's hides behind backward: (k - 1) Tc(b / c) <= gamma T. At least 1; infinity
    if latency alone takes longer."""
    sizes = buckets(scenario)
    if scenario.gpus == 1 or len(sizes) < 2:
        return 1.0
    budget = scenario.gamma * scenario.backward_ms / (len(sizes) - 1)
    latency = all_reduce_ms(scenario, 0.0)
    if budget <= latency:
        return math.inf
    return max(1.0, (all_reduce_ms(scenario, sizes[0]) - latency) / (budget - latency))


def overhead_pct(scenario: Scenario) -> float:
    """By how many percent a step is longer than a backward with concurrent communication."""
    return 100 * (time_ms(scenario) / (scenario.gamma * scenario.backward_ms) - 1)


def encode_budget_ms(sync: Scenario, method: Scenario) -> float:
    """``method`` is faster than ``sync`` if encode and decode together take less than this; negative: it never is."""
    return time_ms(sync) - time_ms(replace(method, encode_ms=0.0))


def powersgd_bytes(shapes: list[tuple[int, ...]], rank: int) -> tuple[int, int, int]:
    """Bytes of all P, of all Q, and of vectors, which travel uncompressed, in float32. A tensor is a matrix [first dimension, the rest]."""
    p = q = plain = 0
    for shape in shapes:
        if len(shape) < 2:
            plain += 4 * math.prod(shape)
            continue
        rows, columns = shape[0], math.prod(shape[1:])
        r = min(rank, rows, columns)
        p, q = p + 4 * rows * r, q + 4 * columns * r
    return p, q, plain
