"""What codecs cost on this machine, measured beside a running training: a few passes over small parts, on one thread, in CPU time.

``psgc profile`` measures the same more carefully. Owns the sizes and how often each pass is run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from psgc.codecs import parse_codec
from psgc.codecs.codec import Codec
from psgc.codecs.common.cold import Cold
from psgc.codecs.common.one_part import Part
from psgc.plan.inputs.passes import server_curve
from psgc.plan.inputs.profile import CostCurve, Curves

SIZES: Final = (1 << 12, 1 << 16, 1 << 20)  # elements
PAYLOADS: Final = (1, 2, 4)  # of a server's passes
SUMMED: Final = 1 << 22  # elements: more than caches hold
REPEATS: Final = 3  # of codecs' passes the median counts; of copies and sums the least, since what interrupts one only adds


def measured_curves(codecs: Sequence[str]) -> Curves:
    """Curves by codec, as ``psgc.plan.inputs.profile`` describes them. Some 0.1 s of CPU time for each codec."""
    return {text: _curves(parse_codec(text)) for text in codecs}


def within_node_gbps(ranks: int, cores: int) -> float:
    """The rate at which a node's ranks sum in the host's memory, as the planner counts a reduce_scatter's bytes: each copies its gradient to where others see
    it, and adds up its share of all of theirs. Derived from what copies and sums of memory take here, on one thread; ranks beyond the cores wait."""
    mine, others = np.ones(SUMMED, np.float32), np.ones(SUMMED, np.float32)
    us = _least_us(lambda: np.copyto(mine, others)) + _least_us(lambda: np.add(mine, others, out=mine))
    travels = mine.nbytes * (ranks - 1) / ranks
    return 8e-3 * travels / (us * max(1.0, ranks / cores))


def _curves(codec: Codec) -> dict[str, CostCurve]:
    encode, decode, passes = zip(*(_times_us(codec, numel) for numel in SIZES), strict=True)
    return {"cpu": CostCurve(tuple(map(float, SIZES)), encode, decode), "server": server_curve(SIZES, passes)}


def _times_us(codec: Codec, numel: int) -> tuple[float, float, dict[int, float]]:
    """Encode, decode, and a server's passes by the number of payloads."""
    part = Part.filled(codec, numel)
    payloads, acc = [part.payload.copy() for _ in range(PAYLOADS[-1])], np.zeros(codec.chunk or numel, np.float32)
    us = Cold(time.thread_time_ns, REPEATS).us
    passes = {count: us(functools.partial(part.serve, payloads[:count], acc)) for count in PAYLOADS}
    return us(part.encode), us(part.decode), passes


def _least_us(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return max(1, min(times)) * 1e-3
