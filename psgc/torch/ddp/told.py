"""Exchanges whose optimizers are the user's own: they are told of loss scalers and of steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch


class Told(Protocol):
    def knows(self, parameter: torch.Tensor) -> bool: ...

    def scale_with(self, scale: Callable[[], float]) -> None: ...

    def end_step(self, applied: bool) -> None: ...


_exchanges: weakref.WeakSet[Told] = weakref.WeakSet()
_made = 0


def add_exchange(exchange: Told) -> None:
    """Have it told from now on. It is held weakly."""
    global _made  # noqa: PLW0603 - one count a process
    _exchanges.add(exchange)
    _made += 1


def exchanges_made() -> int:
    """How many there have been so far."""
    return _made


def exchanges_of(optimizer: torch.optim.Optimizer) -> list[Told]:
    """The exchanges that carry gradients of the optimizer's parameters."""
    return [
        exchange for exchange in _exchanges
        if any(exchange.knows(parameter) for group in optimizer.param_groups for parameter in group["params"])
    ]  # fmt: skip


def has_applied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that the optimizer has just run was applied: a fused optimizer under a loss scaler is always called, and looks for itself."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is None or not overflow.item()
