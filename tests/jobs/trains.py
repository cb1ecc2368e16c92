"""A worker that trains one layer of 256 x 256, where told slowly or only up to an error. Run by tests."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch import nn

import psgc.torch as psgc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slow-rank", type=int, default=-1, help="sleeps 50 ms in every step")
    parser.add_argument("--stall-rank", type=int, default=-1, help="never comes to step 3")
    parser.add_argument("--fail-at", type=int, default=0, help="rank 0 raises an error in that step")
    parser.add_argument("--until", type=Path, help="trains until this file is there, in place of --steps")
    parser.add_argument("--compression", help="of the optimizer, in place of PSGC_CODEC")
    options = parser.parse_args()
    torch.set_num_threads(1)
    psgc.init()
    model = nn.Linear(256, 256)
    psgc.broadcast_parameters(model.state_dict())
    optimizer = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=options.compression
    )
    for step in itertools.count(1):
        if (psgc.broadcast_object(options.until.exists(), 0)) if options.until else step > options.steps:
            return
        if psgc.rank() == options.slow_rank:
            time.sleep(0.05)
        if step == 3 and psgc.rank() == options.stall_rank:
            time.sleep(1000)
        if step == options.fail_at and psgc.rank() == 0:
            raise ValueError("as the test wants it")
        optimizer.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
