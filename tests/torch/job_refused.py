"""A worker whose job without servers cannot go on. job_refused.py CASE: "fewer" batches on rank 1, or the codec of its gradients."""

from __future__ import annotations

import sys

import torch

import psgc.torch as psgc

case = sys.argv[1]
psgc.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 300))
optimizer = psgc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=None if case in ("fewer", "none") else case
)
for _ in range(4 - 2 * (case == "fewer" and psgc.rank())):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
