"""CrossBarrier beside DistributedOptimizer: the same model in a job of 2 workers and 2 servers at each rate, in blocks of steps that take turns.

    python benchmarks/cross_barrier.py [--mbit 40 80 160 0] [--layers 16] [--width 192] [--forward-ms 5] [--blocks 6] [--steps 10]     0: unlimited

Each layer is a matrix, with its computation on an accelerator stood in for by sleeping: forward-ms in forward, twice as long in backward; so the cores
are free for communication, as they are beside a GPU. Each matrix is a bucket of its own under both. Links are psgc's own simulated ones, one for each
worker and each server. Prints for each rate the median of the blocks' mean step times with both quartiles, the median ratio of neighbouring blocks, and
what one link's bandwidth would allow at best (``least_step_s``). Both must end with the same weights, bit for bit, or it refuses to print.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

WARM_UP = 2  # blocks that do not count: layouts, connections, kernels
KINDS = ("DistributedOptimizer", "CrossBarrier")


LINK_BYTES = 1514 / 1448  # the link's bytes for each byte of a payload: headers


def least_step_s(layers: Sequence[tuple[float, float, float]], bytes_per_s: float, barrier: bool, steps: int = 20) -> float:
    """The time of a step if the means came back with no delay beyond a link's bandwidth. layers: (bytes, seconds of forward, of backward) in forward's
    order. With a barrier gradients travel in backward's order and all are awaited before forward; without one what forward needs first goes first."""
    left: dict[int, float] = {}  # seconds that the link still needs for a layer's gradient
    now, began = 0.0, list[float]()

    def let_pass(until: float) -> None:
        nonlocal now
        while left and now < until:
            layer = max(left) if barrier else min(left)
            spent = min(left[layer], until - now)
            now, left[layer] = now + spent, left[layer] - spent
            if left[layer] <= 1e-12:
                del left[layer]
        now = max(now, until) if until < math.inf else now

    for _ in range(steps):
        began.append(now)
        if barrier:
            let_pass(math.inf)
        for layer, (_, forward, _) in enumerate(layers):
            while layer in left:
                let_pass(now + left[max(left) if barrier else min(left)])
            let_pass(now + forward)
        for layer, (nbytes, _, backward) in reversed(list(enumerate(layers))):
            let_pass(now + backward)
            if bytes_per_s < math.inf:
                left[layer] = nbytes / bytes_per_s
    return (began[-1] - began[steps // 2]) / (steps - 1 - steps // 2)


class Busy(torch.autograd.Function):
    """Takes so long in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self._seconds = nn.Linear(width, width), seconds

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.linear(Busy.apply(x, self._seconds)))  # type: ignore[no-untyped-call]


class Loop:
    """A model and its optimizer of one kind."""

    def __init__(self, kind: str, layers: int, width: int, seconds: float) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(width, width), *(Layer(width, seconds) for _ in range(layers)))
        plain, named = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9), self._model.named_parameters()
        self._optimizer: Any = (
            psgc.CrossBarrier(self._model, plain, named) if kind == "CrossBarrier" else psgc.DistributedOptimizer(plain, named)
        )
        self._width = width
        self.nbytes = 4 * sum(p.numel() for p in self._model.parameters())

    def block(self, number: int, steps: int) -> float:
        """Mean step time of a block, whose updates have all been applied when it ends."""
        began = time.perf_counter()
        for step in range(steps):
            x = torch.randn(4, self._width, generator=torch.Generator().manual_seed((number * steps + step) * psgc.size() + psgc.rank()))
            self._optimizer.zero_grad()
            self._model(x).square().mean().backward()
            self._optimizer.step()
        self._optimizer.synchronize()
        return (time.perf_counter() - began) / steps

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._model.parameters()])


def work(options: argparse.Namespace) -> None:
    """What a worker does; rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    psgc.init()
    loops = {kind: Loop(kind, options.layers, options.width, options.forward_ms / 1e3) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(WARM_UP + options.blocks):
        for kind in KINDS if number % 2 else reversed(KINDS):
            psgc.barrier()
            seconds = loops[kind].block(number, options.steps)
            if number >= WARM_UP:
                times[kind].append(seconds)
    assert torch.equal(*(loop.weights() for loop in loops.values())), "both must train alike"
    if psgc.rank() == 0:
        print(json.dumps([loops[KINDS[0]].nbytes, times]), flush=True)
    psgc.shutdown()


def measured(options: argparse.Namespace, mbit: float) -> tuple[int, dict[str, list[float]]]:
    """Run the job at a rate. Returns the bytes of its gradients and each kind's step times. Raises CalledProcessError, having printed what it said."""
    link = ["--link-mbit", f"{mbit:g}"] if mbit else []
    own = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if name not in ("mbit", "work")]
    command = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--no-prefix",
        "--workers",
        "2",
        "--servers",
        "2",
        *link,
        "--",
        sys.executable,
        __file__,
    ]
    env = {
        **os.environ,
        "PSGC_TRANSPORT": "tcp",
        "PSGC_FUSE_BYTES": str(64 << 10),
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).resolve().parents[1])),
    }
    done = subprocess.run([*command, "--work", *own], check=False, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = next((text for text in done.stdout.splitlines() if text.startswith("[") and '{"DistributedOptimizer"' in text), "")
    if done.returncode or not line:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode or 1, command)
    nbytes, times = json.loads(line)
    return nbytes, times


def show(options: argparse.Namespace) -> None:
    """Run a job for each rate and print the table."""
    layer = 4.0 * (options.width**2 + options.width)
    layers = [(layer, 0.0, 0.0)] + [(layer, options.forward_ms / 1e3, 2 * options.forward_ms / 1e3)] * options.layers
    print(f"{layer * len(layers) / 1e6:.1f} MB of gradients, {options.layers} layers of {options.forward_ms:g} + {2 * options.forward_ms:g} ms, "
          f"torch {torch.__version__}, {os.cpu_count()} cores")  # fmt: skip
    print(f"{'Mbit/s':>9}{KINDS[0] + ', ms':>36}{KINDS[1] + ', ms':>36}{'ratio':>8}{'at best':>10}")
    for mbit in options.mbit:
        _, times = measured(options, mbit)
        cells = []
        for kind in KINDS:
            low, middle, high = (1e3 * q for q in statistics.quantiles(times[kind], n=4))
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
        ratio = statistics.median(crossing / waiting for waiting, crossing in zip(times[KINDS[0]], times[KINDS[1]], strict=True))
        rate = mbit * 1e6 / 8 / LINK_BYTES or math.inf
        best = least_step_s(layers, rate, False) / least_step_s(layers, rate, True)
        print(f"{f'{mbit:g}' if mbit else 'unlimited':>9}{cells[0]:>36}{cells[1]:>36}{ratio:8.3f}{best:10.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[40.0, 80.0, 160.0, 0.0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    try:
        show(options)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
