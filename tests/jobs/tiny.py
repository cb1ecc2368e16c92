"""A worker that trains a tiny model for so many steps. Run by tests."""

from __future__ import annotations

import sys

import torch
from torch import nn

import psgc.torch as psgc

NUMEL = {"0.weight": 8 * 4000, "0.bias": 4000, "2.weight": 4000}


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    model = nn.Sequential(nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 1, bias=False))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
