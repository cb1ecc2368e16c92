"""Front ends whose gradients optimizers of the user's own may apply: they are told of loss scalers and of steps.

A DistributedOptimizer tells its own front end itself; of its parameters another optimizer may step, too, such as the one that SAM wraps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from psgc.torch.gradients.front_end import FrontEnd
from psgc.torch.session.uncompiled import uncompiled
from psgc.worker.session import Session

_models: weakref.WeakSet[FrontEnd[Any]] = weakref.WeakSet()
_optimizers: weakref.WeakSet[FrontEnd[Any]] = weakref.WeakSet()
_made = 0


def add_model(gradients: FrontEnd[Any]) -> None:
    """Of a wrapped model: have it told from now on. It is held weakly."""
    global _made  # noqa: PLW0603 - one count a process
    _models.add(gradients)
    _made += 1


def add_optimizer(gradients: FrontEnd[Any]) -> None:
    """Of a DistributedOptimizer: have it told from now on. It is held weakly."""
    _optimizers.add(gradients)


def optimizers_in(session: Session) -> list[FrontEnd[Any]]:
    """Those of the session's DistributedOptimizers."""
    return [each for each in _optimizers if each.session is session]


@functools.cache
def watch_optimizers() -> None:
    """Once a process: have optimizers tell of their steps."""
    register_optimizer_step_post_hook(_stepped)


@uncompiled
def _stepped(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    own = own_of(optimizer)
    for each in all_of(optimizer):
        if each is own or each in _models:
            each.advise(optimizer)
        if each is not own:
            each.end_step(has_applied(optimizer))


def own_of(optimizer: torch.optim.Optimizer) -> FrontEnd[Any] | None:
    """A DistributedOptimizer's."""
    found: FrontEnd[Any] | None = getattr(optimizer, "_psgc_gradients", None)
    return found


def models_made() -> int:
    """How many models' front ends there have been so far."""
    return _made


def models_of(optimizer: torch.optim.Optimizer) -> list[FrontEnd[Any]]:
    """Those of models that carry gradients of the optimizer's parameters."""
    return [each for each in _models if any(map(each.knows, _parameters_of(optimizer)))]


@uncompiled
def all_of(optimizer: torch.optim.Optimizer) -> list[FrontEnd[Any]]:
    """All that carry gradients of the optimizer's parameters."""
    return carrying(_parameters_of(optimizer))


def carrying(parameters: Iterable[torch.Tensor]) -> list[FrontEnd[Any]]:
    """All that carry gradients of some of the parameters."""
    found = list(parameters)
    return [each for each in (*_models, *_optimizers) if any(map(each.knows, found))]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_applied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that the optimizer has just run was applied: a fused optimizer under a loss scaler is always called, and looks for itself."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is None or not overflow.item()
