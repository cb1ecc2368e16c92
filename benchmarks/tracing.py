"""What tracing costs: a worker's step with its recorder and without, in turns of a few steps in one job.

    PSGC_TRACE=/tmp/trace PSGC_TRACE_START_STEP=1 PSGC_TRACE_END_STEP=1000000 psgc run --workers 2 -- python benchmarks/tracing.py [--turns 40] [--steps 10]

The server records in all turns. Prints rank 0's median step with and without, the median of the pairs' ratios with a 95 % interval (of the median, by
order statistics), and the same of the process's CPU time, which other work on the machine disturbs less. Such ratios decide nothing below a per cent or two. So
in a last turn each call of the hooks is timed, by its thread's CPU time: all calls of a step together, less what the clock itself takes, over a step.
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


class Timed:
    """A worker's trace each of whose calls is timed, by the CPU time of the thread that makes it."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self.ns: list[int] = []  # of each call; appending is safe in any thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._trace, name)
        if not callable(found):
            return found

        def timed(*args: Any) -> Any:
            began = time.thread_time_ns()
            answer = found(*args)
            self.ns.append(time.thread_time_ns() - began)
            return answer

        return timed


def clock_ns() -> float:
    """What ``Timed`` measures of a call that does nothing."""

    class Nothing:
        def call(self) -> None:
            """Does nothing."""

    timed = Timed(Nothing())
    for _ in range(SPANS):
        timed.call()
    return sum(timed.ns) / SPANS


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

    def turn(by: Any) -> tuple[float, float]:
        """The median step, and the process's CPU time a step. What is switched is what the hooks ask for."""
        psgc.barrier()
        session.trace = session._network.trace = by
        took, cpu = [], time.process_time()
        for _ in range(arguments.steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
        return statistics.median(took), (time.process_time() - cpu) / arguments.steps

    turn(trace)
    before, pairs = len(trace.recorder), []
    for number in range(arguments.turns):
        first = bool(number % 2)
        took = {traced: turn(trace if traced else None) for traced in (first, not first)}
        pairs.append((took[True], took[False]))
    spans = (len(trace.recorder) - before) / (arguments.turns * arguments.steps)
    timed, counted = Timed(trace), 0
    for _ in range(arguments.turns):
        turn(timed)
        counted += arguments.steps
    psgc.barrier()
    session.trace = session._network.trace = None
    if psgc.rank() == 0:
        each, empty = span_us(), clock_ns()
        for number, what in enumerate(("step", "CPU time a step")):
            on, off = (1e3 * statistics.median(took[number] for took in column) for column in zip(*pairs, strict=True))
            ratios = [with_[number] / without[number] for with_, without in pairs]
            low, high = interval(ratios)
            print(
                f"{what}: {off:.2f} ms without tracing, {on:.2f} ms with; ratio {statistics.median(ratios):.4f}, 95 % {low:.4f} to {high:.4f}"
            )
        step_ms, cpu_ms = (statistics.median(without[number] for _, without in pairs) * 1e3 for number in (0, 1))
        hooks_ms = sum(ns - empty for ns in timed.ns) / counted / 1e6
        print(f"{spans:.0f} spans a step, {each:.2f} us each if recorded by themselves")
        print(
            f"{len(timed.ns) / counted:.0f} calls of hooks a step take {1e3 * hooks_ms:.0f} us of CPU time: {100 * hooks_ms / step_ms:.2f} % of a step's time "
            f"({step_ms:.2f} ms), {100 * hooks_ms / cpu_ms:.2f} % of its CPU time ({cpu_ms:.2f} ms)"
        )


if __name__ == "__main__":
    main()
