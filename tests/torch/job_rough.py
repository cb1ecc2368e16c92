"""A worker of a real job whose training is uneven: accumulation, a NaN on one rank, branches that not all ranks use, a rank without a batch.

job_rough.py ENDING PLAN...: trains by each plan file. A plan that loses nothing is held against a training in this process alone, of all ranks'
gradients; of the others all ranks have to have the same weights, and a training that goes back to what it saved in the middle has to end with the
same weights again. Then ENDING: rank 1 has "fewer" batches than the others, which go on when it has left and the file ROUGH_LEFT is there, or is "killed" in
a step, or nothing ("well"). Run by test_rough_jobs.py.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.plan.planfile.reading import load_plan

# Of 8 steps: one with an overflow on rank 1, one in which rank 2 has no batch; and those before which a training is saved: right after one in which all
# ranks skip a bucket, and after the overflow.
STEPS, OVERFLOW, ALONE, SAVED = 8, 3, 5, (3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(32, 300), nn.Linear(300, 70), nn.Linear(300, 70)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.left(x) + self.right(x) if branch == "both" else getattr(self, branch)(x)


class Training:
    def __init__(self, wrap: Callable[[nn.Module, Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = wrap(self.model, torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    def loss(self, step: int, rank: int, number: int) -> torch.Tensor:
        """Of one of two micro-batches. In two of four steps one branch is used by rank 0 alone, the other by all others."""
        branch = "both" if step % 4 < 2 else "left" if step % 4 == 2 or rank else "right"
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + number))
        return self.scaler.scale(self.model(x * (float("inf") if (step, rank) == (OVERFLOW, 1) else 1.0), branch).square().mean())

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def state(self) -> bytes:
        own = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}
        file = io.BytesIO()
        torch.save((own, self.optimizer.residual_state_dict()), file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        own, residuals = torch.load(io.BytesIO(state))
        for name, values in own.items():
            getattr(self, name).load_state_dict(values)
        self.optimizer.load_residual_state_dict(residuals)


def alone() -> torch.Tensor:
    """The weights of a training whose gradients are the means of all ranks', added in their order."""
    training = Training(lambda _, optimizer: optimizer)
    for step in range(STEPS):
        of_ranks: list[list[torch.Tensor | None]] = []
        for rank in range(psgc.size()):
            for number in range(2 * ((step, rank) != (ALONE, 2))):
                training.loss(step, rank, number).backward()
            of_ranks.append([p.grad for p in training.model.parameters()])
            training.optimizer.zero_grad()
        for parameter, grads in zip(training.model.parameters(), zip(*of_ranks, strict=True), strict=True):
            there = [grad for grad in grads if grad is not None]
            parameter.grad = sum(there[1:], there[0]) / psgc.size() if there else None
        training.step()
    return training.weights


def spread(training: Training, steps: range) -> None:
    """The same, each rank with its own gradients."""
    rank, optimizer = psgc.rank(), training.optimizer
    for step in steps:
        if (step, rank) == (ALONE, 2):
            optimizer.synchronize()
        else:
            with optimizer.no_sync():
                training.loss(step, rank, 0).backward()
            training.loss(step, rank, 1).backward()
        training.step()


def train(path: str) -> None:
    def wrap(model: nn.Module, optimizer: Any) -> Any:
        return psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=path)

    training, saved = Training(wrap), []
    for number in range(STEPS):
        if number in SAVED:
            saved.append((number, training.state()))
        spread(training, range(number, number + 1))
    digest = hashlib.sha256(training.weights.numpy().tobytes()).hexdigest()
    assert psgc.broadcast_object(digest) == digest, f"rank {psgc.rank()} has other weights than rank 0"
    if {bucket.codec for bucket in load_plan(path).buckets} == {"none"}:
        torch.testing.assert_close(training.weights, alone(), rtol=1e-5, atol=1e-7)
        print("right", flush=True)
        return
    for number, state in saved:
        training.load(state)
        spread(training, range(number, STEPS))
        again = hashlib.sha256(training.weights.numpy().tobytes()).hexdigest()
        assert again == digest, f"a training that went back to step {number} ends elsewhere"
    print("the same again", flush=True)


def end(ending: str, path: str) -> None:
    training = Training(lambda model, optimizer: psgc.DistributedOptimizer(optimizer, model.named_parameters(), compression=path))
    spread(training, range(2))
    if psgc.rank() == 1 and ending == "killed":
        training.loss(2, 1, 0).backward()  # in whose step nothing of a gradient of the second backward has left
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "fewer":
        left = Path(os.environ["ROUGH_LEFT"])
        if psgc.rank() == 1:
            psgc.shutdown()
            left.touch()
            return
        while not left.exists():
            time.sleep(0.01)
    spread(training, range(2, 4))


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for path in sys.argv[2:]:
        train(path)
    if sys.argv[1] != "well":
        end(sys.argv[1], sys.argv[2])
    psgc.shutdown()


if __name__ == "__main__":
    main()
