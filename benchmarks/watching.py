"""What being watched costs: the CPU time of a process's thread that answers scrapes, and of a residual that is looked at, as shares of a step.

    PSGC_METRICS_PORT=9400 PSGC_CODEC=topk psgc run --workers 2 -- python benchmarks/watching.py [--steps 400] [--scrapes 200] [--every-s 1]

Steps with and without scrapes in turns cannot show so little on a machine that does other work as well (``benchmarks/tracing.py``). So CPU time is
measured: of the process while nothing but its exporter works, for a scrape, and of the thread that looks at a residual, which happens once in 100 steps of
a bucket. What a worker notes of its steps, so that slow members can be told, takes less in a call than a clock can measure: the calls are counted, and each is
timed in a loop of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import psgc.torch as psgc
from psgc.observe import exporter, scrapes
from psgc.observe.figures import Figures
from psgc.observe.lately import Busy
from psgc.worker.executor.bucket import RESIDUAL_EVERY
from psgc.worker.executor.executor import Executor
from psgc.worker.residuals.kept import Kept


def timed(ns: list[int], call: Any) -> Any:
    def measured(*arguments: Any) -> Any:
        began = time.thread_time_ns()
        answer = call(*arguments)
        ns.append(time.thread_time_ns() - began)
        return answer

    return measured


LOOPS: Final = 20_000
NOTES: Final = (
    (Executor, "_note_encoded"),
    (Executor, "_note_arrived"),
    (Busy, "begin"),
    (Busy, "end"),
    (Figures, "means_came"),
    (Figures, "step_over"),
)


def count_notes() -> tuple[Counter[str], dict[str, Callable[[], Any]]]:
    """Count the calls by which a worker notes how its steps go. Returns the counts, and the last call of each, to be made again."""
    counts, again = Counter[str](), dict[str, Callable[[], Any]]()

    def counting(name: str, call: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            again[name] = lambda: call(*arguments, **named)
            return call(*arguments, **named)

        return counted

    for owner, name in NOTES:
        setattr(owner, name, counting(name, getattr(owner, name)))
    return counts, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--every-s", type=float, default=1.0, help="as often as Prometheus is to scrape")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    looks: list[int] = []
    Kept.ratio = timed(looks, Kept.ratio)  # type: ignore[method-assign]
    counts, again = count_notes()
    psgc.init()
    config = psgc.current_session().config
    assert config.metrics_port, "run it with PSGC_METRICS_PORT, as its text says"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.randn(64, 784)
    took = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    psgc.barrier()
    if psgc.rank() == 0:
        step_ms = 1e3 * statistics.median(took)
        url = f"http://127.0.0.1:{config.metrics_port + exporter.OF_WORKERS + config.local_rank}/metrics"
        scrapes.NEW_S = 0.0  # type: ignore[misc]  # each scrape makes its text
        collecting = time.process_time_ns()
        for _ in range(arguments.scrapes):
            with urllib.request.urlopen(url, timeout=60) as answer:
                answer.read()
        both_ms = (time.process_time_ns() - collecting) / 1e6 / arguments.scrapes  # the client's share, in this process, is counted, too
        report: list[int] = []
        make = timed(report, psgc.current_session().report)
        for _ in range(arguments.scrapes):
            make()
        share = both_ms / 1e3 / arguments.every_s
        look_ms = sum(looks) / 1e6 / arguments.steps
        per_step = {name: counts[name] / arguments.steps for name in counts}
        notes_us = {name: min(timeit.repeat(call, number=LOOPS, repeat=5)) / LOOPS * 1e6 for name, call in list(again.items())}
        notes_ms = sum(per_step[name] * notes_us[name] for name in notes_us) / 1e3
        print(f"a step: {step_ms:.2f} ms")
        print(f"notes of steps: {sum(per_step.values()):.1f} calls a step, {1e3 * notes_ms:.1f} us, {100 * notes_ms / step_ms:.3f} % of it")
        print(f"a scrape: {both_ms:.2f} ms of CPU time, client included ({statistics.median(report) / 1e6:.3f} ms of it for the figures)")
        print(f"one every {arguments.every_s:g} s: {100 * share:.3f} % of the time, and of a step")
        print(
            f"residuals, looked at once in {RESIDUAL_EVERY} steps: {len(looks)} looks, {look_ms:.4f} ms a step, {100 * look_ms / step_ms:.3f} % of it"
        )
    psgc.barrier()


if __name__ == "__main__":
    main()
