"""A worker of a real job in which backward raises on rank 1 after some of its gradients have left, as where memory runs out, and whose script goes on.

job_raising.py alone|together: the other ranks apply that step; or all ranks drop it, and the training goes on. Run by test_raising.py.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import psgc.torch as psgc

STEPS, FAILING = 6, 3


def main(together: bool) -> None:
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    layers = [nn.Linear(32, 300), nn.Linear(300, 70)]
    model = nn.Sequential(*layers)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    for step in range(STEPS):
        middle = layers[0](torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + psgc.rank())))
        if (step, psgc.rank()) == (FAILING, 1):
            middle.register_hook(fail)
        failed = torch.zeros(1)
        optimizer.zero_grad()
        try:
            layers[1](middle).square().mean().backward()
        except RuntimeError:
            print("goes on", flush=True)
            failed.fill_(1)
            optimizer.zero_grad()
            if not together:
                continue
        if together and psgc.push_pull(failed, average=False, name="failed"):
            optimizer.zero_grad()
            continue
        optimizer.step()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    assert psgc.broadcast_object(digest) == digest, f"rank {psgc.rank()} has other weights than rank 0"
    print("the same weights", flush=True)
    psgc.shutdown()


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("CUDA out of memory")


if __name__ == "__main__":
    main(sys.argv[1] == "together")
