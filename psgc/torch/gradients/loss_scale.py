"""The loss scaler at work, before it has told an optimizer of itself: in the first step after a state was loaded, backward may send gradients
whose scale must be known, while GradScaler meets the optimizer only after that."""

from __future__ import annotations

import weakref

import torch

_latest: list[weakref.ref[torch.amp.GradScaler]] = []  # one, or none yet


def note(scaler: torch.amp.GradScaler) -> None:
    """It has scaled a loss."""
    if scaler.is_enabled():
        _latest[:] = [weakref.ref(scaler)]


def latest(default: float) -> float:
    """The scale of the scaler that scaled a loss last; the default if none has."""
    scaler = _latest[0]() if _latest else None
    return default if scaler is None else float(scaler.get_scale())
