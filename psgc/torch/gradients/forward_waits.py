"""Which layer's forward waits for which parameters, and the hooks that make it wait. For training without a barrier at the end of a step.

The first forward and backward show it: a parameter is awaited by the module that owns it, if that module's own forward ran, else by the nearest
module around it whose forward ran (attention reads its output layer's weight without calling the layer). Owns the hooks; what is awaited, and
how, is the caller's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.session.uncompiled import uncompiled

Parameters = Sequence[torch.Tensor]


class ForwardWaits:
    """wait: called before the forward of a module with the parameters that it needs, in training and under ``no_grad``, and with None, for all of them, before
    a state_dict is read or loaded, of the model or of a part of it; from the thread that runs the model.

    Raises UsageError for a parameter that two modules own.
    """

    def __init__(self, model: torch.nn.Module, wait: Callable[[Parameters | None], None]) -> None:
        self.wait = wait
        self._fired: dict[torch.nn.Module, None] = {}  # in the order of the first forward
        self._needs: dict[torch.nn.Module, Parameters] | None = None  # once it is learnt
        self._owner: dict[torch.Tensor, torch.nn.Module] = {}
        self._around: dict[torch.nn.Module, torch.nn.Module] = {}
        names = {module: name or "the model" for name, module in model.named_modules()}
        for module, place in names.items():
            for child in module.children():
                self._around.setdefault(child, module)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter in self._owner:
                    raise UsageError(
                        f"CrossBarrier: parameter {name!r} of {place} is that of {names[self._owner[parameter]]}, too: two layers that share a "
                        f"parameter would update it apart; use DistributedOptimizer for this model"
                    )
                self._owner[parameter] = module
        reference = _Waiting(self)
        for module in names:
            module.register_forward_pre_hook(functools.partial(_before_forward, reference), prepend=True)
            module.register_state_dict_pre_hook(functools.partial(_before_state, reference))
            module.register_load_state_dict_pre_hook(functools.partial(_before_state, reference))

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a module of the model owns the parameter."""
        return parameter in self._owner

    def before(self, module: torch.nn.Module) -> None:
        """A module's forward is about to run."""
        if self._needs is None:
            self._fired.setdefault(module)
        elif parameters := self._needs.get(module):
            self.wait(parameters)

    def learn(self, parameters: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """From now on modules wait, as the forwards so far have shown. Returns the parameters in the order in which forwards needed them, and those of
        them that no forward of a module waits for."""
        needs: dict[torch.nn.Module, list[torch.Tensor]] = {module: [] for module in self._fired}
        left = []
        for parameter in parameters:
            module = self._waiting_for(parameter)
            if module is None:
                left.append(parameter)
            else:
                needs[module].append(parameter)
        self._needs = {module: tuple(found) for module, found in needs.items()}
        return [parameter for found in needs.values() for parameter in found] + left, left

    def _waiting_for(self, parameter: torch.Tensor) -> torch.nn.Module | None:
        module: torch.nn.Module | None = self._owner[parameter]
        while module is not None and module not in self._fired:
            module = self._around.get(module)
        return module


class _Waiting:
    """What a model's hooks call, as long as it lives. Those of a copy of the model, and of one that was saved, call nothing."""

    def __init__(self, waits: ForwardWaits | None = None) -> None:
        self._waits = None if waits is None else weakref.ref(waits)

    def __call__(self) -> ForwardWaits | None:
        return None if self._waits is None else self._waits()

    def __reduce__(self) -> tuple[type[_Waiting], tuple[()]]:
        return _Waiting, ()


@uncompiled
def _before_forward(waits: _Waiting, module: torch.nn.Module, _inputs: Any) -> None:
    found = waits()
    if found is not None:
        found.before(module)


@uncompiled
def _before_state(waits: _Waiting, *_: Any) -> None:
    found = waits()
    if found is not None:
        found.wait(None)
