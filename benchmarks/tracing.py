"""What tracing costs: a worker's step with its recorder and without, in turns of a few steps in one job.

    PSGC_TRACE=/tmp/trace PSGC_TRACE_START_STEP=1 PSGC_TRACE_END_STEP=1000000 psgc run --workers 2 -- python benchmarks/tracing.py [--turns 40] [--steps 10]

The server records in all turns. Prints rank 0's median step with and without, the median of the pairs' ratios with a 95 % interval (of the median, by
order statistics), the same of the process's CPU time, which other work on the machine disturbs less, and the cost of one span, measured by itself, times
the spans of a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.observe.lanes import ENCODE, Line
from psgc.observe.recorder import Recorder
from psgc.torch.session.api import current_session

SPANS = 200_000


def span_us() -> float:
    """What recording one span takes."""
    recorder = Recorder(1, 1, SPANS)
    began = time.perf_counter()
    for _ in range(SPANS):
        recorder.add(Line.CPU, recorder.thread(), ENCODE, 1 << 48, 1, time.monotonic_ns(), time.monotonic_ns(), 4096)
    return 1e6 * (time.perf_counter() - began) / SPANS


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by the sign test."""
    ordered, n = sorted(ratios), len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))
    return ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="of one turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    session: Any = current_session()
    trace = session.trace
    assert trace is not None, "run it with PSGC_TRACE, as its text says"
    x = torch.randn(64, 784)

    def turn(traced: bool) -> tuple[float, float]:
        """The median step, and the process's CPU time a step. What is switched is what the hooks ask for."""
        psgc.barrier()
        session.trace = session._network.trace = trace if traced else None
        took, cpu = [], time.process_time()
        for _ in range(arguments.steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
        return statistics.median(took), (time.process_time() - cpu) / arguments.steps

    turn(True)
    before, pairs = len(trace.recorder), []
    for number in range(arguments.turns):
        first = bool(number % 2)
        took = {traced: turn(traced) for traced in (first, not first)}
        pairs.append((took[True], took[False]))
    spans = (len(trace.recorder) - before) / (arguments.turns * arguments.steps)
    if psgc.rank() == 0:
        each = span_us()
        for number, what in enumerate(("step", "CPU time a step")):
            on, off = (1e3 * statistics.median(took[number] for took in column) for column in zip(*pairs, strict=True))
            ratios = [with_[number] / without[number] for with_, without in pairs]
            low, high = interval(ratios)
            print(
                f"{what}: {off:.2f} ms without tracing, {on:.2f} ms with; ratio {statistics.median(ratios):.4f}, 95 % {low:.4f} to {high:.4f}"
            )
        print(f"{spans:.0f} spans a step at {each:.2f} us each: {spans * each / off / 10:.2f} % of a step's CPU time")


if __name__ == "__main__":
    main()
