"""A worker of a real job in which memory runs out on rank 1, in backward after some of its gradients have left, or in forward, and whose script goes on.

job_raising.py alone|steps|together: rank 1 goes on with the next batch, or calls step() with no gradients, while other ranks apply their mean; or all ranks
drop the step, and the training goes on. Run by test_raising.py.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import psgc.torch as psgc

STEPS = 9
FAILING = {2: "backward", 4: "forward", 5: "forward", 6: "backward"}  # by step


def main(how: str) -> None:
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    layers = [nn.Linear(32, 300), nn.Linear(300, 70)]
    model = nn.Sequential(*layers)
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    dropped = 0
    for step in range(STEPS):
        failing = FAILING.get(step, "") if psgc.rank() == 1 else ""
        if how != "together" and failing == "forward":
            failing = ""
        failed = torch.zeros(1)
        optimizer.zero_grad()
        try:
            middle = layers[0](torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + psgc.rank())))
            if failing == "forward":
                fail(middle)
            if failing == "backward":
                middle.register_hook(fail)
            layers[1](middle).square().mean().backward()
        except RuntimeError:
            print("goes on", flush=True)
            optimizer.zero_grad()
            if how == "alone":
                continue
            if how == "together":
                optimizer.synchronize()
            failed.fill_(1)
        if how == "together" and psgc.push_pull(failed, average=False, name="failed"):
            dropped += 1
            optimizer.put_back()
            continue
        optimizer.step()
    assert dropped == len(FAILING), dropped
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    assert psgc.broadcast_object(digest) == digest, f"rank {psgc.rank()} has other weights than rank 0"
    print("the same weights", flush=True)
    psgc.shutdown()


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("CUDA out of memory")


if __name__ == "__main__":
    main(sys.argv[1])
