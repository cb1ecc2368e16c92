"""A worker that trains small models, one a way of training, saves in the middle, and goes on; or takes up what was saved and goes on from
there. Prints the digest of each one's weights at the end.

resume.py FOLDER save|load|forget [--steps N] [--at N] [--drop N] WAY...

A way is a codec's text for SGD with momentum, or OneBitAdam, ZeroOneAdam, with ":CODEC" behind it for another than onebit; "scaled " before
it: under a loss scale, with an overflow in step N (--drop). save: go on to the end after saving; forget: take up all but what codecs keep.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

LR = 0.05


def data(step: int) -> torch.Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * psgc.rank() + step))


def make(way: str, model: nn.Module) -> Any:
    kind, _, codec = way.partition(":")
    if kind == "OneBitAdam":
        return psgc.OneBitAdam(model.named_parameters(), lr=1e-2, warmup_steps=6, codec=codec or "onebit")
    if kind == "ZeroOneAdam":
        return psgc.ZeroOneAdam(
            model.named_parameters(),
            lr=1e-2,
            warmup_steps=6,
            local_growth=3,
            max_local_steps=4,
            variance_updates=2,
            codec=codec or "onebit",
        )
    momentum = 0.0 if "momentum=" in way else 0.9
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    return psgc.DistributedOptimizer(sgd, model.named_parameters(), compression=way)


class Training:
    """One model, its optimizer, schedule and loss scaler."""

    def __init__(self, way: str, drop: int) -> None:
        self.way, self.drop = way, drop
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 320), nn.ReLU(), nn.Linear(320, 230), nn.ReLU(), nn.Linear(230, 7))
        scaled = way.startswith("scaled ")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=scaled)
        self.optimizer = make(way.removeprefix("scaled "), self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        inputs = data(number)
        loss = 10 * (self.model(inputs) - inputs[:, :7]).square().mean()
        if self.scaler.is_enabled() and number == self.drop and psgc.rank() == 0:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(self.optimizer.residual_state_dict(), folder / f"residuals-{psgc.rank()}.pt")
        if psgc.rank() == 0:
            portable = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
            torch.save({name: what.state_dict() for name, what in portable.items()}, folder / "portable.pt")

    def load(self, folder: Path, residuals: bool) -> None:
        portable = torch.load(folder / "portable.pt")
        for name, what in (("model", self.model), ("optimizer", self.optimizer), ("schedule", self.schedule), ("scaler", self.scaler)):
            what.load_state_dict(portable[name])
        if residuals:
            files = sorted(folder.glob("residuals-*.pt"))
            own = len(files) == psgc.size()
            states = [torch.load(folder / f"residuals-{rank}.pt") for rank in ([psgc.rank()] if own else range(len(files)))]
            self.optimizer.load_residual_state_dict(states[0] if own else states)

    def digest(self) -> str:
        if isinstance(self.optimizer, psgc.ZeroOneAdam):
            self.optimizer.synchronize_parameters()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])
        return f"{hashlib.sha256(flat.numpy().tobytes()).hexdigest()} {float(flat.square().sum()):.6f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("how", choices=["save", "load", "forget"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--drop", type=int, default=-1)
    parser.add_argument("ways", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    psgc.init()
    for number, way in enumerate(options.ways):
        training, folder = Training(way, options.drop), options.folder / str(number)
        first = 0
        if options.how != "save":
            first = options.at
            training.load(folder, options.how == "load")
        for step in range(first, options.steps):
            if step == options.at and options.how == "save":
                training.save(folder)
            training.step(step)
        print(f"weights {number} {training.digest()}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
