"""The loss scaler that was used last. In the first step after loading a state, backward may send gradients before GradScaler has met the optimizer,
and their scale must be known by then."""

from __future__ import annotations

import weakref

import torch

from psgc.torch.session.uncompiled import uncompiled

_latest: list[weakref.ref[torch.amp.GradScaler]] = []  # one, or none yet


@uncompiled
def note(scaler: torch.amp.GradScaler) -> None:
    """The scaler has scaled a loss."""
    if scaler.is_enabled():
        _latest[:] = [weakref.ref(scaler)]


def latest(default: float) -> float:
    """The scale of the scaler that scaled a loss last; the default if none has."""
    scaler = _latest[0]() if _latest else None
    return default if scaler is None else float(scaler.get_scale())
