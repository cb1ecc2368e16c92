"""CrossBarrier beside DistributedOptimizer: the same model in one job of 2 workers and 2 servers, in blocks of steps that take turns.

    python benchmarks/cross_barrier.py [--mbit 100] [--layers 8] [--width 256] [--forward-ms 10] [--blocks 6] [--steps 10]      --mbit 0: unlimited

Each layer is a matrix, with its computation on an accelerator stood in for by sleeping: forward-ms in forward, twice as long in backward; so both cores
are free for communication, as they are beside a GPU. Each matrix is a bucket of its own under both. Links are psgc's own simulated ones. Prints the
median of the blocks' mean step times with both quartiles, and the ratios of neighbouring blocks. Both must end with the same weights, bit for
bit, or it refuses to print.
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
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

WARM_UP = 2  # blocks that do not count: layouts, connections, kernels
KINDS = ("DistributedOptimizer", "CrossBarrier")


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


def show(options: argparse.Namespace) -> int:
    """Run the job and print its table."""
    link = ["--link-mbit", str(options.mbit)] if options.mbit else []
    own = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if name not in ("mbit", "work")]
    command = [
        sys.executable,
        "-m",
        "psgc.launch",
        "run",
        "--workers",
        "2",
        "--servers",
        "2",
        *link,
        "--",
        sys.executable,
        __file__,
        "--work",
        *own,
    ]
    env = {
        **os.environ,
        "PSGC_FUSE_BYTES": str(64 << 10),
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).resolve().parents[1])),
    }
    done = subprocess.run(command, check=False, env=env, stdout=subprocess.PIPE, text=True)
    line = next(
        (text[text.rindex("[", 0, text.index('{"D')) :] for text in done.stdout.splitlines() if '{"DistributedOptimizer"' in text), ""
    )
    if done.returncode or not line:
        print(done.stdout, file=sys.stderr)
        return done.returncode or 1
    nbytes, times = json.loads(line)
    print(f"{nbytes / 1e6:.1f} MB of gradients, {options.layers} layers of {options.forward_ms:g} + {2 * options.forward_ms:g} ms, links of "
          f"{options.mbit or 'unlimited'} Mbit/s, torch {torch.__version__}, {os.cpu_count()} cores")  # fmt: skip
    for kind in KINDS:
        low, middle, high = (1e3 * q for q in statistics.quantiles(times[kind], n=4))
        print(f"  {kind:22} {middle:8.1f} ms a step (quartiles {low:.1f} to {high:.1f})")
    ratios = [crossing / waiting for waiting, crossing in zip(times[KINDS[0]], times[KINDS[1]], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"  CrossBarrier takes {middle:.3f} of the time (quartiles {low:.3f} to {high:.3f})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    return show(options)


if __name__ == "__main__":
    sys.exit(main())
