"""Exchanges of gradients that optimizers of the user's own may apply: they are told of loss scalers and of steps.

A DistributedOptimizer tells its own exchange itself; of its exchange's parameters another optimizer may step, too, such as the one that SAM wraps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Told(Protocol):
    def knows(self, parameter: torch.Tensor) -> bool: ...

    def scale_with(self, scale: Callable[[], float]) -> None: ...

    def end_step(self, applied: bool) -> None: ...


_models: weakref.WeakSet[Told] = weakref.WeakSet()
_optimizers: weakref.WeakSet[Told] = weakref.WeakSet()
_made = 0


def add_model(exchange: Told) -> None:
    """A wrapped model's exchange: have it told from now on. It is held weakly."""
    global _made  # noqa: PLW0603 - one count a process
    _models.add(exchange)
    _made += 1


def add_optimizer(exchange: Told) -> None:
    """A DistributedOptimizer's exchange: have it told from now on. It is held weakly."""
    _optimizers.add(exchange)


@functools.cache
def watch_optimizers() -> None:
    """Once a process: have optimizers tell the exchanges of their steps."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    own = own_exchange(optimizer)
    for exchange in exchanges_of(optimizer):
        if exchange is not own:
            exchange.end_step(has_applied(optimizer))


def own_exchange(optimizer: torch.optim.Optimizer) -> Told | None:
    """A DistributedOptimizer's."""
    found: Told | None = getattr(optimizer, "_psgc_gradients", None)
    return found


def models_made() -> int:
    """How many models' exchanges there have been so far."""
    return _made


def models_of(optimizer: torch.optim.Optimizer) -> list[Told]:
    """The exchanges of models that carry gradients of the optimizer's parameters."""
    return [exchange for exchange in _models if _carries(exchange, optimizer)]


def exchanges_of(optimizer: torch.optim.Optimizer) -> list[Told]:
    """All exchanges that carry gradients of the optimizer's parameters."""
    return [exchange for exchange in (*_models, *_optimizers) if _carries(exchange, optimizer)]


def _carries(exchange: Told, optimizer: torch.optim.Optimizer) -> bool:
    return any(exchange.knows(parameter) for group in optimizer.param_groups for parameter in group["params"])


def has_applied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that the optimizer has just run was applied: a fused optimizer under a loss scaler is always called, and looks for itself."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is None or not overflow.item()
