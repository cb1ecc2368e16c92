"""A worker of a real job that trains a small model and prints digests: of all weights, and of each tensor's first averaged gradient.
Run by test_planned_job.py."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

STEPS = 4


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    torch.manual_seed(1 + psgc.rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.synchronize()
        if step == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                print(f"gradient {name} {digest(parameter.grad)}", flush=True)
        optimizer.step()
    print(f"weights {digest(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))}", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
