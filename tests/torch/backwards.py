"""What the tests of backward's end share: gradients by hand, and how buckets are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch.small_models import batch, seeded

TINY: dict[str, Any] = {"fuse_bytes": 0}  # every tensor a bucket of its own
LATE: dict[str, Any] = {"late_synchronization": True}
BUCKETS = pytest.mark.parametrize("buckets", [TINY, {}], ids=["a bucket each", "one bucket"])


def grads(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients that are there."""
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(ours) == len(theirs) and all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(ours, theirs, strict=True))


def mean(terms: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """As the job makes it: summed in rank order, then divided."""
    return [sum(of[1:], of[0]) / len(of) for of in zip(*terms, strict=True)]


def local(make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a loss without any job."""
    model = make()
    loss(model).backward()
    return grads(model)


def squares(rank: int, step: int) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(batch(rank, step)).square().mean()


def two_layers() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
