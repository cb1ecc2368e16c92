"""Makes torch's loss scaler work with DistributedOptimizer and ddp_hook: gradients are averaged before they are unscaled, and skipped steps are reported,
as they are to whoever counts an optimizer's steps (DiLoCo).

Owns the two methods of ``torch.amp.GradScaler`` that it replaces, for every scaler, once; other optimizers pass through unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from psgc.torch.ddp.told import all_of, own_of, watch_optimizers
from psgc.torch.gradients import loss_scale
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.push_pull import push_pull_inplace

_unscale = torch.amp.GradScaler.unscale_
_step = torch.amp.GradScaler.step
_scale = torch.amp.GradScaler.scale


def install() -> None:
    """Make every GradScaler know DistributedOptimizer, and have optimizers tell of their steps. Further calls do nothing."""
    watch_optimizers()
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


@functools.wraps(_scale)
def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
    loss_scale.note(self)
    return _scale(self, outputs)


@functools.wraps(_unscale)
def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    _refuse(self, optimizer)
    _synchronize(self, optimizer)
    _unscale(self, optimizer)
    gradients = getattr(optimizer, "_psgc_gradients", None)
    if (
        gradients is not None and gradients.paused and self.is_enabled()
    ):  # each rank looks at gradients of its own, and all skip the step if any does
        for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            push_pull_inplace(flag, average=False, name=f"{gradients.exchange.name}.overflow")


@functools.wraps(_step)
def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
    _refuse(self, optimizer)
    _synchronize(self, optimizer)
    own = own_of(optimizer)
    wrapped = [each for each in all_of(optimizer) if each is not own]
    for each in wrapped:
        each.scale_with(_reader(weakref.ref(self)))
    result = _step(self, optimizer, *args, **kwargs)
    told = wrapped if own is None else [*wrapped, own]
    counts = None if getattr(optimizer, "_step_supports_amp_scaling", False) else getattr(optimizer, "_psgc_skipped", None)
    if (told or counts) and self.is_enabled():
        overflow = any(found.item() for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        for each in told:
            if overflow or each is not own:  # its own it has told itself, unless the scaler did not call it
                each.end_step(applied=not overflow)
        if overflow and counts is not None:
            counts()
    return result


@uncompiled
def _refuse(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Have an optimizer that cannot be scaled say so."""
    refuse = getattr(optimizer, "_psgc_refuse_scaler", None)
    if refuse is not None and scaler.is_enabled():
        refuse()


@uncompiled
def _synchronize(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    gradients = getattr(optimizer, "_psgc_gradients", None)
    if gradients is None:
        return
    if getattr(optimizer, "_psgc_scaler", None) != (reference := weakref.ref(scaler)):
        optimizer._psgc_scaler = reference
        gradients.scale_with(_reader(reference))
    gradients.synchronize()  # as step() without a scaler: what the script has put in place of the means is applied, and not averaged again


def _reader(reference: weakref.ref[torch.amp.GradScaler]) -> Callable[[], float]:
    def read() -> float:
        scaler = reference()
        return 1.0 if scaler is None else float(scaler.get_scale())

    return read
