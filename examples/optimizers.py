"""The optimizers that both trainings offer, by the name of their --optimizer flag."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import psgc.torch as psgc

OPTIMIZERS = ("sgd", "adamw", "onebit-adam", "zero-one-adam")
BETAS = (0.9, 0.95)
VARIANCE_WARM_UP = 3  # a third of the steps; the papers take a fifth or less of trainings so long that the loss is flat by then


def make_optimizer(name: str, model: nn.Module, lr: float, codec: str, steps: int) -> Any:
    """An optimizer for ``steps`` steps on the job's mean: sgd and adamw compress gradients, the other two the momentum."""
    named, warmup = model.named_parameters(), max(1, steps // VARIANCE_WARM_UP)
    if name == "onebit-adam":
        return psgc.OneBitAdam(named, lr=lr, betas=BETAS, warmup_steps=warmup, codec=codec)
    if name == "zero-one-adam":
        growth = max(1, steps // 5)
        return psgc.ZeroOneAdam(named, lr=lr, betas=BETAS, warmup_steps=warmup, local_growth=growth, max_local_steps=4, codec=codec)
    plain: torch.optim.Optimizer
    if name == "adamw":
        plain = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return psgc.DistributedOptimizer(plain, named, compression=codec)


def end_training(optimizer: Any) -> None:
    """Before validation: bring the ranks together where the optimizer lets them part."""
    if isinstance(optimizer, psgc.ZeroOneAdam):
        optimizer.synchronize_parameters()
