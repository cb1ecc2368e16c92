"""A worker of a real job that trains in every way that must agree between ranks, and joins twice. Prints what test_job.py looks at."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import psgc.torch as psgc
from psgc.errors import UsageError

STEPS = 6


class Branching(nn.Module):
    """Two branches, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(64, 300), nn.Linear(300, 200), nn.Linear(300, 200)

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        x = self.stem(x).relu()
        return sum((getattr(self, branch)(x) for branch in branches.split()), torch.zeros(()))


def train(codec: Any, how: str) -> str:
    """Digest of the weights after STEPS steps."""
    torch.manual_seed(psgc.rank())  # ranks start apart: the broadcast must bring them together
    model = Branching()
    psgc.broadcast_parameters(model.state_dict())
    optimizer: Any = psgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), compression=codec
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how == "amp")
    for step in range(STEPS):
        branches = "left" if how == "branches" and psgc.rank() == 1 and step else "left right"
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        x = torch.randn(8, 64) * (float("inf") if how == "amp" and (psgc.rank(), step) == (1, 2) else 1.0)
        scaler.scale(model(x, branches).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.isfinite(flat).all()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train_without_clipping(crossing: bool) -> str:
    """Digest of the losses and the weights, with a barrier at the end of each step or without one."""
    torch.manual_seed(psgc.rank())
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 8))
    psgc.broadcast_parameters(model.state_dict())
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = psgc.CrossBarrier(model, plain) if crossing else psgc.DistributedOptimizer(plain, model.named_parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([value.reshape(-1) for value in model.state_dict().values()])  # which waits for the last updates
    optimizer.synchronize()
    of_all = psgc.push_pull(torch.tensor(losses), name=f"losses {crossing}")
    return hashlib.sha256(weights.numpy().tobytes() + of_all.numpy().tobytes()).hexdigest()


def said(call: Callable[[], object]) -> str:
    try:
        return repr(call())
    except UsageError as error:
        return str(error)


def in_a_forked_child(call: Callable[[], object]) -> str:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, said(call).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


def tell(what: str, text: str) -> None:
    print(what, text, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for case in sys.argv[1:]:
        codec, _, how = case.partition("+")
        digest = train_without_clipping(how == "crossing") if how in ("barrier", "crossing") else train(codec, how)
        print(f"{case} {digest}", flush=True)
    psgc.init()  # again: does nothing
    tell("forked init:", in_a_forked_child(psgc.init))
    tell("forked rank:", in_a_forked_child(psgc.rank))
    psgc.barrier()
    psgc.shutdown()
    tell("rank after shutdown:", said(psgc.rank))


if __name__ == "__main__":
    main()
