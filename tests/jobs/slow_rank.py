"""A worker that trains; its job's last rank needs longer for every step. Run by tests; argument: steps."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import psgc.torch as psgc


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(2)))
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(int(sys.argv[1])):
        time.sleep(0.1 if psgc.rank() == psgc.size() - 1 else 0.002)
        optimizer.zero_grad()
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
    psgc.barrier()
    time.sleep(1.0)  # servers look once a heartbeat
    psgc.shutdown()


if __name__ == "__main__":
    main()
