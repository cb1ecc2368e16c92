"""A worker that trains, saves in the middle, and goes on; or loads what was saved and goes on from there; prints the weights' digests.

Arguments: the folder; save, load, or forget (load all but the residuals), or several of them with commas; the codecs, each of which trains
a model of its own.
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


def train(folder: Path, how: str, codec: str) -> str:
    """Digest of the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 400), nn.ReLU(), nn.Linear(400, 50))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer: Any = psgc.DistributedOptimizer(sgd, model.named_parameters(), compression=codec)
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
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for codec in sys.argv[3:]:
        folder = Path(sys.argv[1]) / codec.replace("/", " ")
        folder.mkdir(exist_ok=True)
        for how in sys.argv[2].split(","):
            print(f"weights {how} {codec} {train(folder, how, codec)}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
