"""A training script that ends in the way that its argument names, after three steps. Run by tests."""

from __future__ import annotations

import signal
import sys
import time

import torch

import psgc.torch as psgc


def main(how: str) -> None:
    psgc.init()
    model = torch.nn.Linear(4, 2)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    psgc.broadcast_parameters(model.state_dict())
    for step in range(3):
        model(torch.ones(3, 4) * (float("nan") if how == "nan" and step == 2 and psgc.rank() == 1 else 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if (
        how == "deaf" and psgc.rank() == 0
    ):  # as where the signal comes just before the sleep: a thread takes it, and nothing wakes the main thread
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("trained", flush=True)
    if how == "exit" and psgc.rank() == 0:
        sys.exit(3)
    elif how in ("wait", "deaf"):
        time.sleep(1000)


if __name__ == "__main__":
    main(sys.argv[1])
