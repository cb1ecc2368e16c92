"""DistributedDataParallel over psgc, with gradient accumulation, clipping and torch.compile:
psgc run --workers 2 --servers 1 --codec int8 -- python examples/ddp_plain.py
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psgc.torch as psgc


def train(steps: int = 8, accumulate: int = 2, clip: float = 0.5, width: int = 128, compiler: str = "") -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's losses. compiler: of torch.compile; none: not compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=1 if compiler else 0.05)  # torch.compile wants 1 MB at least
    if compiler:
        wrapped = torch.compile(wrapped, backend=compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulate):
            x = torch.randn(16, 64, generator=data)
            with wrapped.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(wrapped(x), x[:, :10].argmax(1)) / accumulate
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return model, losses


if __name__ == "__main__":
    psgc.ddp_hook().install()  # the one line: before the model is wrapped
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: losses {[round(loss, 4) for loss in train()[1]]}")
    dist.destroy_process_group()
