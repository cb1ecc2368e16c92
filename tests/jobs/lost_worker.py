"""A worker that trains under Elastic, says each step, and at the end its losses and parameters to the bit. Run by tests that kill workers meanwhile."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from pace import wait_for_readers
from torch import nn

import psgc.torch as psgc


def main() -> None:
    steps, codec, pause_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    psgc.init()
    rank = psgc.rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(32, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1)
    )
    optimizer = psgc.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), compression=codec)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 11], gamma=0.5)
    elastic = psgc.Elastic(model=model, optimizer=optimizer, scheduler=scheduler, seed=7)
    for step in elastic.steps(steps):
        wait_for_readers(step + 1)
        inputs = torch.randn(16, 32)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        mean = psgc.push_pull(loss.detach())  # unnamed: a process that takes the place goes on counting
        if not mean.isfinite():
            sys.exit(f"the loss of step {step} is {mean.item()}: nothing that comes after it shows anything")
        optimizer.step()
        scheduler.step()
        print(f"rank {rank} step {step} loss {mean.item():.9g} pid {os.getpid()}", flush=True)
        time.sleep(pause_s)
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    print(f"rank {rank} found {found.hexdigest()} replaced {elastic.replaced}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
