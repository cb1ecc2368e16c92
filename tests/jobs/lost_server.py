"""A worker that trains by a lossy codec, says each step, and at the end its losses and parameters to the bit. Run by tests that kill servers meanwhile."""

from __future__ import annotations

import hashlib
import sys
import time

import torch
from pace import wait_for_readers
from torch import nn

import psgc.torch as psgc


def main() -> None:
    steps, codec, front, pause_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    inner = torch.optim.SGD(
        model.parameters(), lr=0.0002, momentum=0.9
    )  # by which no codec diverges: what is NaN everywhere is always equal
    trained: nn.Module = model
    optimizer: torch.optim.Optimizer = inner
    if front == "ddp":
        trained = psgc.DistributedDataParallel(model, compression=codec)
    else:
        optimizer = psgc.DistributedOptimizer(inner, model.named_parameters(), compression=codec)
    batches = torch.Generator().manual_seed(100 + psgc.rank())
    found = hashlib.sha256()
    for step in range(1, steps + 1):
        wait_for_readers(step)
        inputs = torch.randn(16, 32, generator=batches)
        optimizer.zero_grad()
        loss = (trained(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            sys.exit(f"the loss of step {step} is {loss.item()}: nothing that comes after it shows anything")
        found.update(loss.detach().numpy().tobytes())
        print(f"step {step}", flush=True)
        time.sleep(pause_s)
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    print(f"rank {psgc.rank()} found {found.hexdigest()}", flush=True)
    wait_for_readers(steps + 1)
    psgc.shutdown()


if __name__ == "__main__":
    main()
