"""A worker that trains two layers, and whose rank is slow where told: in computing, or in encoding. Run by tests."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch import nn

import psgc.torch as psgc

LOOK_STEPS = 5  # all ranks end after the same step


def compress(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (gradient,)


def compress_slowly(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    time.sleep(0.2)
    return (gradient,)


def decompress(items: tuple[torch.Tensor, ...], numel: int) -> torch.Tensor:
    return items[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("until", type=Path, help="trains until this file is there")
    parser.add_argument("--computes", type=int, default=-1, help="this rank computes for 0.3 s longer in each step")
    parser.add_argument("--encodes", type=int, default=-1, help="this rank takes 0.2 s to encode each part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    psgc.init()
    codec = None
    if options.encodes >= 0:
        slow = psgc.rank() == options.encodes
        psgc.register_functions("slowly", compress_slowly if slow else compress, decompress)
        codec = "slowly/relay"
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters(), compression=codec)
    for step in itertools.count():
        if step % LOOK_STEPS == 0 and psgc.broadcast_object(options.until.exists(), 0):
            return
        if psgc.rank() == options.computes:
            time.sleep(0.3)
        optimizer.zero_grad()
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
