"""An optimizer's step for some of its parameters at a time, with options as they were at one moment.

Owns the check that this is the same as one step for all of them: an optimizer that counts steps by itself, or changes its groups' options, is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psgc.errors import UsageError

Options = tuple[dict[str, Any], ...]


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """A copy of each group's options (learning rates, momenta) as they are now."""
    return tuple(
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    )


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The class's step without torch's wrapper, which runs the hooks that users have registered."""
    step: Any = kind.step
    bare: Callable[[torch.optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


class PartialSteps:
    """Steps of an optimizer, which is held weakly, for some of its parameters at a time. ``keep_options`` is called first. why: what updates parameters by
    parts, and instead of what, for a refusal."""

    def __init__(self, optimizer: torch.optim.Optimizer, why: str, instead: str) -> None:
        self._optimizer, self._step = weakref.ref(optimizer), bare_step(type(optimizer))
        self._why, self._instead = why, instead
        self._groups: dict[torch.Tensor, int] = {}  # each parameter's
        self._options: Options = ()

    def keep_options(self) -> None:
        """From now on steps are taken with the optimizer's options as they are now."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._options = options_of(optimizer)
        self._groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def apply(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Apply these gradients to these parameters, unless the optimizer is gone. On return its groups are what they were, and p.grad, too. Raises UsageError
        for an optimizer whose step is more than a step of each parameter."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        everything, options = optimizer.param_groups, self._options
        before = [dict(group) for group in everything]
        grads = [parameter.grad for parameter in parameters]
        counters = _counters(optimizer)
        members: dict[int, list[torch.Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            members.setdefault(self._groups[parameter], []).append(parameter)
            parameter.grad = gradient
        try:
            for number, some in members.items():
                everything[number].update(options[number], params=some)
            optimizer.param_groups = [everything[number] for number in sorted(members)]
            self._step(optimizer)
            if wider := _wider(optimizer, everything, members, options, counters):
                raise UsageError(
                    f"{self._why}, but a step of {type(optimizer).__name__} changes {wider}, which all parameters share; use {self._instead}"
                )
        finally:
            optimizer.param_groups = everything
            for group, old in zip(everything, before, strict=True):
                group.clear()
                group.update(old)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad


def _counters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float) and not name.startswith("_psgc")}


def _wider(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], members: Mapping[int, Sequence[torch.Tensor]], options: Options,
    counters: Mapping[str, Any],
) -> str | None:  # fmt: skip
    """What a step has changed beside its parameters and their state."""
    changed = [
        f"the option {name!r} of its groups" for number in members for name, value in groups[number].items()
        if name != "params" and value is not options[number].get(name) and not _equal(value, options[number].get(name))
    ]  # fmt: skip
    changed += [f"its attribute {name!r}" for name, value in _counters(optimizer).items() if counters.get(name) != value]
    return changed[0] if changed else None


def _equal(one: Any, other: Any) -> bool:
    return not isinstance(one, torch.Tensor) and bool(one == other)
