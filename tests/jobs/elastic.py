"""A worker that trains in jobs of 2, 3 and 1 workers, one after the other, without ending in between: python elastic.py RANK PORT2 PORT3 [fp16]

Rank 2 joins the second job, ranks 1 and 2 end after it. Each prints the sum of its weights after each job; the test makes the jobs' schedulers and servers.
"""

from __future__ import annotations

import os
import sys

import torch

import psgc.torch as psgc

STEPS = 3


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def main() -> None:
    rank, ports, codec = int(sys.argv[1]), sys.argv[2:4], sys.argv[4]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    if rank < 2:
        psgc.init()
    else:
        os.environ |= {"DMLC_NUM_WORKER": "3", "DMLC_PS_ROOT_PORT": ports[1]}
        psgc.init()
    optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=codec)

    def train(phase: int) -> None:
        psgc.broadcast_parameters(model.state_dict())
        for step in range(phase * STEPS, (phase + 1) * STEPS):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        print(f"size {psgc.size()} weights {sum(p.double().sum().item() for p in model.parameters()):.5f}", flush=True)

    if rank < 2:
        train(0)
        psgc.suspend()
        psgc.resume(3, 1, rank, root_port=int(ports[1]))
    train(1)
    psgc.suspend()
    if rank:
        return
    psgc.resume(1, 0, 0)
    train(2)
    psgc.shutdown()


main()
