"""Models and batches of a few numbers, the same on every rank that asks for the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import psgc.torch as psgc

Module = TypeVar("Module", bound=nn.Module)
NORMS = (nn.LayerNorm, nn.modules.batchnorm._NormBase)  # their first weights are no random numbers


def seeded(make: Callable[[], Module], seed: int = 0) -> Module:
    """The same model on every rank. Its weights come from a generator of its own: ranks are threads, and torch's generator is theirs in common, which
    ``checkpoint`` sets back while another rank makes its model."""
    model, generator = make(), torch.Generator().manual_seed(seed)
    for module in model.modules():
        for parameter in () if isinstance(module, NORMS) else module.parameters(recurse=False):
            bound = (parameter.shape[-1] if parameter.ndim else 1) ** -0.5
            parameter.data.uniform_(-bound, bound, generator=generator)
    return model


def linear(seed: int = 0, width: int = 3) -> nn.Linear:
    return seeded(lambda: nn.Linear(width, 2), seed)


def batch(rank: int, step: int, width: int = 3) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    passes = {"backward_passes_per_step": options.pop("passes", 1), "compression": options.pop("compression", None)}
    return psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), model.named_parameters(), **passes)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
