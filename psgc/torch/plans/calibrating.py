"""What codecs cost on this machine, measured beside a running training: a few passes over small parts, on one thread, in CPU time.

``psgc profile`` measures the same more carefully. Owns the sizes and how often each pass is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from psgc.codecs import parse_codec
from psgc.codecs.codec import Codec
from psgc.codecs.common.one_part import WORKERS, Part
from psgc.plan.inputs.profile import CostCurve, Curves

SIZES: Final = (1 << 12, 1 << 16, 1 << 20)  # elements
SUMMED: Final = 1 << 22  # elements: more than caches hold
REPEATS: Final = 3  # the least of them counts: what interrupts a pass only adds


def measured_curves(codecs: Sequence[str]) -> Curves:
    """Curves by codec, as ``psgc.plan.inputs.profile`` describes them. Some 50 ms of CPU time for each codec."""
    return {text: _curves(parse_codec(text)) for text in codecs}


def within_node_gbps(ranks: int, cores: int) -> float:
    """The rate at which a node's ranks sum in the host's memory, as the planner counts a reduce_scatter's bytes: each copies its gradient to where others see
    it, and adds up its share of all of theirs. Derived from what copies and sums of memory take here, on one thread; ranks beyond the cores wait."""
    mine, others = np.ones(SUMMED, np.float32), np.ones(SUMMED, np.float32)
    us = _least_us(lambda: np.copyto(mine, others)) + _least_us(lambda: np.add(mine, others, out=mine))
    travels = mine.nbytes * (ranks - 1) / ranks
    return 8e-3 * travels / (us * max(1.0, ranks / cores))


def _curves(codec: Codec) -> dict[str, CostCurve]:
    encode, decode, finish, fold = zip(*(_times_us(codec, numel) for numel in SIZES), strict=True)
    sizes = tuple(map(float, SIZES))
    return {"cpu": CostCurve(sizes, encode, decode), "server": CostCurve(sizes, finish, fold)}


def _times_us(codec: Codec, numel: int) -> tuple[float, float, float, float]:
    """Encode, decode, finish a sum, add a payload."""
    part = Part.filled(codec, numel)
    payloads, acc = [part.payload.copy() for _ in range(WORKERS)], np.zeros(codec.chunk or numel, np.float32)
    one, many = _least_us(lambda: part.serve(payloads[:1], acc)), _least_us(lambda: part.serve(payloads, acc))
    fold = min(max(0.0, (many - one) / (WORKERS - 1)), one)
    return _least_us(part.encode), _least_us(part.decode), one - fold, fold


def _least_us(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return max(1, min(times)) * 1e-3
