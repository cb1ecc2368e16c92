"""A worker that trains small models, one a way of training, saves in the middle, and goes on; or takes up what was saved and goes on from
there. Writes each one's weights at the end and prints their digest.

resume.py FOLDER HOW,... [STEPS] WAY...     HOW: save, rollback (in the same processes, after save), load, forget (load all but what codecs keep)
                                            STEPS: of the whole training, 24 unless given; it saves after half of them

A way is a codec's text, for SGD with momentum, or OneBitAdam, ZeroOneAdam, with ":CODEC" behind it for another than onebit. "scaled " before
it: under a loss scale, with an overflow on rank 0 in the step before saving. "skipping " before it: rank 1 leaves that step's batch out. "leaving "
before it: each step has a backward before its own, whose gradients are looked at and thrown away.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.codecs import parse_scheme, registered_codecs, registered_schemes
from psgc.layout import collective

STEPS = 24
LR = 0.02
ADAM = {"lr": 1e-2, "warmup_steps": 3}  # less than half of the steps of the shortest training


def ways() -> list[str]:
    """Every codec both ways and one way, and what keeps more between steps than a residual on each side."""
    codecs = list(registered_codecs())
    return [
        *codecs, *registered_schemes(), *(f"{codec}/none" for codec in codecs if codec != "none"),
        "none/topk", "onebit/int8", "onebit/relay", "topk/relay", "int8:ef=0", "int4:ef=0", "randomk:ef=0", "shared:ef=0", "powersgd:ef=0",
        "int8:rotate=1", "topk:warmup=20", "topk:select=sampled", "int4:residual=int8", "topk:k=0.05,momentum=dgc,clip=1",
        "onebit:momentum=nesterov,residual=int8", "scaled onebit", "scaled topk/none", "scaled int4:residual=int8", "scaled powersgd",
        "skipping topk", "leaving topk", "leaving onebit", "OneBitAdam", "OneBitAdam:dithering", "scaled OneBitAdam", "ZeroOneAdam", "ZeroOneAdam:topk",
    ]  # fmt: skip


def needs_servers(way: str) -> bool:
    kind, _, codec = way.rpartition(" ")[2].partition(":")
    return collective.needs_servers(parse_scheme((codec or "onebit") if kind.endswith("Adam") else way.rpartition(" ")[2]))


def make(way: str, model: nn.Module) -> Any:
    kind, _, codec = way.partition(":")
    if kind == "OneBitAdam":
        return psgc.OneBitAdam(model.named_parameters(), **ADAM, codec=codec or "onebit")
    if kind == "ZeroOneAdam":
        schedule = {"local_growth": 3, "max_local_steps": 4, "variance_updates": 2}
        return psgc.ZeroOneAdam(model.named_parameters(), **ADAM, **schedule, codec=codec or "onebit")
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0 if "momentum=" in way else 0.9)
    return psgc.DistributedOptimizer(sgd, model.named_parameters(), compression=way)


class Training:
    """One model, its optimizer, schedule and loss scaler."""

    def __init__(self, way: str, steps: int) -> None:
        self.steps, self.half = steps, steps // 2
        word, _, rest = way.rpartition(" ")
        self.skips, self.leaves = word == "skipping" and psgc.rank() == 1, word == "leaving"
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 320), nn.ReLU(), nn.Linear(320, 230), nn.ReLU(), nn.Linear(230, 7))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=word == "scaled")
        self.optimizer = make(rest, self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        if self.leaves:
            self.loss(number + 500).backward()
            self.optimizer.zero_grad()
        before_saving = number == self.half - 1
        if not (self.skips and before_saving):
            loss = self.loss(number)
            if self.scaler.is_enabled() and before_saving and psgc.rank() == 0:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def loss(self, number: int) -> torch.Tensor:
        """Of this rank's batch of this number."""
        inputs = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * psgc.rank() + number))
        return torch.as_tensor((self.model(inputs) - inputs[:, :7]).square().mean())

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        torch.save(self.optimizer.residual_state_dict(), folder / f"residuals-{psgc.rank()}.pt")
        if psgc.rank() == 0:
            torch.save({name: what.state_dict() for name, what in self._portable()}, folder / "portable.pt")

    def load(self, folder: Path, residuals: bool = True) -> None:
        portable = torch.load(folder / "portable.pt")
        for name, what in self._portable():
            what.load_state_dict(portable[name])
        if residuals:
            saved = len(list(folder.glob("residuals-*.pt")))
            ranks = [psgc.rank()] if saved == psgc.size() else list(range(saved))
            states = [torch.load(folder / f"residuals-{rank}.pt") for rank in ranks]
            self.optimizer.load_residual_state_dict(states[0] if len(states) == 1 else states)

    def _portable(self) -> list[tuple[str, Any]]:
        return [("model", self.model), ("optimizer", self.optimizer), ("schedule", self.schedule), ("scaler", self.scaler)]

    def weights(self) -> torch.Tensor:
        if isinstance(self.optimizer, psgc.ZeroOneAdam):
            self.optimizer.synchronize_parameters()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def run(how: str, training: Training, folder: Path) -> torch.Tensor:
    if how == "save":
        for step in range(training.steps):
            if step == training.half:
                training.save(folder)
                psgc.push_pull(torch.zeros(1), name="saved")  # so that every rank may load
            training.step(step)
        return training.weights()
    training.load(folder, residuals=how != "forget")
    for step in range(training.half, training.steps):
        training.step(step)
    return training.weights()


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    steps, chosen = (int(sys.argv[3]), sys.argv[4:]) if sys.argv[3].isdigit() else (STEPS, sys.argv[3:])
    for number, way in enumerate(chosen):
        folder, training = Path(sys.argv[1]) / way.replace("/", " to "), None
        for how in sys.argv[2].split(","):
            if how != "rollback" or training is None:
                training = Training(way, steps)
            weights = run(how, training, folder)
            if psgc.rank() == 0:
                torch.save(weights, folder / f"{how}.pt")
            print(f"weights {how} {number} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
