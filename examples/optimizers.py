"""The optimizers and learning-rate schedules that trainings offer, by the names of their --optimizer and --schedule flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import psgc.torch as psgc

OPTIMIZERS = ("sgd", "adamw", "lion", "onebit-adam", "zero-one-adam")
SCHEDULES = ("linear", "cosine", "warm-restarts", "one-cycle")
BETAS = (0.9, 0.95)
VARIANCE_WARM_UP = 3  # a third of the steps; the papers take a fifth or less of trainings so long that the loss is flat by then


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum (Chen et al. 2023, Algorithm 2, without weight decay); stands for optimizers that psgc has never seen."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.add_(momentum.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                    momentum.lerp_(parameter.grad, 1 - beta2)


def make_optimizer(name: str, model: nn.Module, lr: float, codec: str, steps: int) -> Any:
    """An optimizer for ``steps`` steps on the job's mean: sgd and adamw compress gradients, the other two the momentum."""
    named, warmup = model.named_parameters(), max(1, steps // VARIANCE_WARM_UP)
    if name == "onebit-adam":
        return psgc.OneBitAdam(named, lr=lr, betas=BETAS, warmup_steps=warmup, codec=codec)
    if name == "zero-one-adam":
        growth = max(1, steps // 5)
        return psgc.ZeroOneAdam(named, lr=lr, betas=BETAS, warmup_steps=warmup, local_growth=growth, max_local_steps=4, codec=codec)
    return psgc.DistributedOptimizer(plain_optimizer(name, model, lr), named, compression=codec)


def plain_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """sgd, adamw or lion, which know of no other ranks."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS)
    if name == "lion":
        return Lion(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def make_schedule(name: str, optimizer: Any, lr: float, steps: int) -> lr_scheduler.LRScheduler:
    """A learning rate of ``lr`` at most over ``steps`` steps."""
    if name == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if name == "warm-restarts":
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, max(1, steps // 4))
    if name == "one-cycle":
        return lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / steps))


def end_training(optimizer: Any) -> None:
    """Before validation: bring the ranks together where the optimizer lets them part."""
    if isinstance(optimizer, psgc.ZeroOneAdam):
        optimizer.synchronize_parameters()
