"""A worker of a job whose rank 0 has a device that runs out of memory in its third step."""

from __future__ import annotations

import torch

import psgc.torch as psgc
from tests.device.recording import RecordingRuntime
from tests.device.steps import use_recorded

psgc.init()
runtime = RecordingRuntime()
use_recorded(runtime, slot_bytes=1 << 16)
model = torch.nn.Sequential(torch.nn.Linear(64, 300))
optimizer = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression="onebit")
for step in range(6):
    if psgc.rank() == 0 and step == 2:
        runtime.fault = lambda name: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB") if name == "compute" else None
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
