"""A worker that solves a least-squares problem with each optimizer it is told; prints the digest of the weights, and the loss at the end.

``late-token`` is another problem: an embedding, one row of which has its first gradients when the variance is frozen; the figure is the
largest weight.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

import psgc.torch as psgc

STEPS, WIDTH, OUTPUTS = 300, 64, 150
LR, WARM_UP = 0.1, 100


def make(name: str, weight: torch.nn.Parameter) -> Any:
    options: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0}
    if name == "onebit":
        return psgc.OneBitAdam([("weight", weight)], **options, warmup_steps=WARM_UP)
    if name == "zero-one":
        schedule = {"variance_updates": 64, "local_growth": 50, "max_local_steps": 4}
        return psgc.ZeroOneAdam([("weight", weight)], **options, **schedule, warmup_steps=WARM_UP)
    return psgc.DistributedOptimizer(torch.optim.AdamW([weight], **options))


def solve(name: str) -> str:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-1, 0.5, WIDTH)[:, None]  # some weights have gradients 30 times as large as others
    truth = torch.randn(WIDTH, OUTPUTS, generator=generator)
    inputs = torch.randn(2, 512, WIDTH, generator=generator)
    targets = inputs @ (scales * truth) + 0.5 * torch.randn(2, 512, OUTPUTS, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(WIDTH, OUTPUTS))
    optimizer = make(name, weight)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    rows = torch.Generator().manual_seed(1 + psgc.rank())
    for _ in range(STEPS):
        mine = torch.randint(512, (64,), generator=rows)
        optimizer.zero_grad()
        (inputs[psgc.rank()][mine] @ (scales * weight) - targets[psgc.rank()][mine]).square().mean().backward()
        optimizer.step()
        schedule.step()
    if isinstance(optimizer, psgc.ZeroOneAdam):
        optimizer.synchronize_parameters()
    with torch.no_grad():
        loss = float((inputs @ (scales * weight) - targets).square().mean())
    return f"{hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()} {loss:.5f}"


def see_a_token_late() -> str:
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(100, 50), torch.nn.Linear(50, 100)
    named = [*embedding.named_parameters(prefix="embedding"), *head.named_parameters(prefix="head")]
    optimizer = psgc.OneBitAdam(named, lr=1e-3, weight_decay=0.0, warmup_steps=20)
    rows = torch.Generator().manual_seed(psgc.rank())
    for step in range(60):
        tokens = torch.randint(99 if step < 30 else 100, (64,), generator=rows)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(embedding(tokens)), tokens).backward()
        optimizer.step()
    return f"{hashlib.sha256(embedding.weight.detach().numpy().tobytes()).hexdigest()} {float(embedding.weight.detach().abs().max()):.5f}"


def main() -> None:
    torch.set_num_threads(1)
    psgc.init()
    for name in sys.argv[1:]:
        print(f"{name} {see_a_token_late() if name == 'late-token' else solve(name)}", flush=True)
    psgc.shutdown()


if __name__ == "__main__":
    main()
