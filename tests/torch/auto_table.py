"""Times for ``auto`` from a table: what a step takes by each choice, and what codecs and copies cost. So its choices depend on no machine and no load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from psgc.plan.inputs.profile import CostCurve, Curves
from psgc.torch.auto import measuring

TIMES = {
    "none": 340.0,
    "bf16": 200.0,
    "int8": 120.0,
    "int4": 90.0,
    "onebit": 60.0,
    "topk": 40.0,
    "topk:k=0.02": 55.0,
    "topk:k=0.0625": 80.0,
    "plan": 50.0,
}  # milliseconds a step
READY_NS = 100_000  # each gradient becomes ready so much later than the one before
NS_PER_ELEMENT = {
    "none": 0.1,
    "bf16": 0.2,
    "int8": 0.4,
    "int4": 0.5,
    "onebit": 0.3,
    "topk": 1.0,
    "topk:k=0.02": 1.0,
    "topk:k=0.0625": 1.0,
}  # of encoding, and of decoding
SIZES = (1 << 12, 1 << 20)  # elements
WITHIN_GBPS, CORES = 20.0, 2


def choice_of(exchange: Any) -> str:
    choice = exchange.choice
    return "plan" if choice.plan is not None or choice.awaited else choice.codec


class Table(measuring.Measuring):
    """Its clocks stand still but for what ``passes``. own: the clocks, of this process, or each thread's where ranks are threads."""

    def __init__(self, own: Any = None) -> None:
        self._own = own or SimpleNamespace()

    def passes(self, ms: float) -> None:
        """So much of a step's time."""
        self._own.ns = self.now_ns() + int(1e6 * ms)

    def computes(self, ms: float) -> None:
        """So much of the time in which gradients become ready."""
        self._own.ready_ns = getattr(self._own, "ready_ns", 0) + int(1e6 * ms)

    def now_ns(self) -> int:
        return int(getattr(self._own, "ns", 0))

    def clock(self, sample: torch.Tensor) -> Callable[[], int]:
        def mark() -> int:
            self._own.ready_ns = getattr(self._own, "ready_ns", 0) + READY_NS
            return int(self._own.ready_ns)

        return mark

    def curves(self, codecs: Sequence[str]) -> Curves:
        def curve(codec: str) -> CostCurve:
            us = tuple(1e-3 * NS_PER_ELEMENT[codec] * numel for numel in SIZES)
            return CostCurve(tuple(map(float, SIZES)), us, us)

        return {codec: {"cpu": curve(codec), "server": curve(codec)} for codec in codecs}

    def within_node_gbps(self, ranks: int, cores: int) -> float:
        return WITHIN_GBPS

    def cores(self, launched: bool) -> int:
        return CORES

    def compute_threads(self) -> int:
        return 0  # communication has cores of its own: the table's steps know of no others


def used() -> Table:
    """A table that ``auto`` takes its times from, in this process."""
    table = Table()
    measuring.use(table)
    return table
