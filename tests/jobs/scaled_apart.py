"""A worker whose gradients overflow under a loss scaler in a step of rank 0 alone, by the optimizer of its first argument. Run by tests.

Prints a digest of the parameters, and of the mean of the gradients' signs that DeMo takes.
"""

from __future__ import annotations

import hashlib
import sys

import torch

import psgc.torch as psgc

STEPS, OVERFLOWS = 7, 2


def main() -> None:
    psgc.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    psgc.broadcast_parameters(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if sys.argv[1] == "demo":
        optimizer, rarely = psgc.DeMo(model.named_parameters(), lr=1e-3, decay=0.0, k=4096), None
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rarely = psgc.DiLoCo(model, inner, every=3)
        optimizer = inner if sys.argv[1] == "diloco" else rarely
    for step in range(STEPS):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        x = torch.full((2, 64), 1.0 if psgc.rank() else -3.0)
        loss = model(x).sum() * (float("inf") if step == OVERFLOWS and psgc.rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} moved {(model.weight - before).mean().item():+.4f}", flush=True)
    if rarely is not None:
        rarely.finish()
    print("parameters", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
