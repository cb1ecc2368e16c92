"""Mixed precision: ``GradScaler`` must look at aggregated gradients, and residuals must know the loss scale they are in.

Wraps two methods of ``torch.amp.GradScaler`` once: ``unscale_`` first waits for a psgc optimizer's gradients, so that every rank finds the
same infinities and skips alike; ``scale`` notes the scale in use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_loss_scale = 1.0
_wrapped = False


def loss_scale() -> float:
    """The scale that losses are multiplied by now; 1 without a GradScaler."""
    return _loss_scale


def wrap_grad_scaler() -> None:
    """Make ``torch.amp.GradScaler`` aware of psgc optimizers. Once; no effect on other optimizers."""
    global _wrapped  # noqa: PLW0603 - torch's class is global, too
    if _wrapped:
        return
    _wrapped = True
    scaler: Any = torch.amp.GradScaler
    unscale, scale = scaler.unscale_, scaler.scale

    @functools.wraps(unscale)
    def synchronized_unscale(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        synchronizer = getattr(optimizer, "_psgc", None)
        if synchronizer is not None and self.is_enabled():
            synchronizer.synchronize()
        return unscale(self, optimizer)

    @functools.wraps(scale)
    def noted_scale(self: Any, outputs: Any) -> Any:
        global _loss_scale  # noqa: PLW0603
        scaled = scale(self, outputs)  # makes the scale, the first time
        _loss_scale = float(self.get_scale()) if self.is_enabled() else 1.0
        return scaled

    scaler.unscale_, scaler.scale = synchronized_unscale, noted_scale
