"""A worker that trains, saves in the middle, and goes on; or loads what was saved and goes on from there; prints the weights' digest.

Arguments: the folder, and save, load, or forget (load all but the residuals).
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

HALF = 5


def data(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * psgc.rank() + step))


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    psgc.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 400), nn.ReLU(), nn.Linear(400, 50))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    first = 0
    if how != "save":
        portable = torch.load(folder / "model.pt")
        model.load_state_dict(portable["model"])
        optimizer.load_state_dict(portable["optimizer"])
        schedule.load_state_dict(portable["schedule"])
        if how == "load":
            states = [torch.load(folder / f"residuals-{rank}.pt") for rank in range(2)]
            optimizer.load_residual_state_dict(states[psgc.rank()] if psgc.size() == 2 else states)
        first = HALF
    for step in range(first, 2 * HALF):
        if step == HALF and how == "save":
            torch.save(optimizer.residual_state_dict(), folder / f"residuals-{psgc.rank()}.pt")
            if psgc.rank() == 0:
                portable = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
                torch.save(portable, folder / "model.pt")
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    psgc.shutdown()
    print(f"weights {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
