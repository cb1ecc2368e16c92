"""What it costs that backward returns with the mean in p.grad: two models of one size in one job of 2 workers and 1 server, one of them under
late synchronization, stepped in turns.  python benchmarks/backward_end.py [--rounds 40] [--width 1024] [--between-ms 0]

between-ms: how long the trainer is busy with something else (here it sleeps) between backward and step; late synchronization overlaps
that time with communication. Prints, for each codec, medians of the step times and of the ratios of the steps next to each other, with the ratios' quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psgc.torch as psgc

CODECS = ("none", "onebit")
LAYERS = 12
WARM_UP = 3  # rounds that do not count: layouts, and kernels that compile


def work(rounds: int, width: int, between_s: float) -> None:
    """What a worker does; rank 0 prints a line of JSON for each codec."""
    torch.set_num_threads(1)
    psgc.init()
    for codec in CODECS:
        loops = {late: Loop(codec, width, late, between_s) for late in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(WARM_UP + rounds):
            for late in (False, True) if number % 2 else (True, False):
                psgc.barrier()
                seconds = loops[late].step(number)
                if number >= WARM_UP:
                    times[late].append(seconds)
        assert loops[False].weights_equal(loops[True]), "both must train alike"
        if psgc.rank() == 0:
            print(json.dumps([codec, loops[False].numel, times[False], times[True]]), flush=True)
    psgc.shutdown()


class Loop:
    """A model of equal layers and its optimizer."""

    def __init__(self, codec: str, width: int, late: bool, between_s: float) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        named = self._model.named_parameters()
        self._optimizer = psgc.DistributedOptimizer(optimizer, named, compression=codec, late_synchronization=late)
        self._width, self._between_s = width, between_s
        self.numel = sum(p.numel() for p in self._model.parameters())

    def step(self, number: int) -> float:
        """Seconds of one step."""
        x = torch.randn(64, self._width, generator=torch.Generator().manual_seed(2 * number + psgc.rank()))
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(x).square().mean().backward()
        time.sleep(self._between_s)
        self._optimizer.step()
        return time.perf_counter() - begin

    def weights_equal(self, other: Loop) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._model.parameters(), other._model.parameters(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--between-ms", type=float, default=0.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds, options.width, options.between_ms / 1e3)
        return
    command = [sys.executable, "-m", "psgc.launch", "run", "--no-prefix", "--workers", "2", "--servers", "1", "--",
               sys.executable, str(Path(__file__).resolve()), "--worker", *sys.argv[1:]]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{options.between_ms:g} ms between backward and step, {options.rounds} pairs, torch {torch.__version__}")
    print("| codec | parameters | mean after backward, ms | late, ms | ratio (quartiles) |\n|---|---|---|---|---|")
    for line in done.stdout.splitlines():
        if not line.startswith("["):
            continue
        codec, numel, ends, lates = json.loads(line)
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(ends, lates, strict=True)], n=4)
        print(
            f"| {codec} | {numel:,} | {1e3 * statistics.median(ends):.1f} | {1e3 * statistics.median(lates):.1f} "
            f"| {ratio:.3f} ({low:.3f}-{high:.3f}) |"
        )


if __name__ == "__main__":
    main()
