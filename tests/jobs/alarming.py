"""A worker of a job that has something to alarm about: rank 1 is slower, and gradients vanish while what the codec has left out stays. Run by tests."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psgc.torch as psgc

VANISHES_S = 4.0  # in which gradients become e times smaller


def main() -> None:
    enough = Path(sys.argv[1])
    torch.set_num_threads(1)
    psgc.init()
    model = nn.Linear(256, 256)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
    began = time.monotonic()
    last = 0.0  # every rank ends at the same step: the first one whose mean says so
    while last == 0.0:
        if psgc.rank() == 1:
            time.sleep(0.02)
        optimizer.zero_grad()
        scale = math.exp(-(time.monotonic() - began) / VANISHES_S)
        (model(torch.ones(4, 256)).square().mean() * scale).backward()
        optimizer.step()
        last = float(psgc.push_pull(torch.tensor([float(enough.exists())]), name="enough")[0])


if __name__ == "__main__":
    main()
