"""The parameters of a model under DDP, and what the model's next backward does with the result of the last one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.last_step import LastStep
from psgc.torch.session.uncompiled import uncompiled


class ModelParameters:
    """Held weakly: the model may be gone before the job is. by: the exchange's name. names: in the model's order."""

    def __init__(self, by: str, names: Mapping[torch.Tensor, str]) -> None:
        self.by, self.names = by, list(names.values())
        self._parameters = [weakref.ref(parameter) for parameter in names]
        self._indices = {id(parameter): index for index, parameter in enumerate(names)}
        self._trained = self._parameters  # those that required a gradient when the last result came

    def knows(self, parameter: torch.Tensor) -> bool:
        index = self._indices.get(id(parameter))
        return index is not None and self._parameters[index]() is parameter

    def are(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these are exactly the model's."""
        given = list(parameters)
        return len(given) == len(self._parameters) and all(map(self.knows, given))

    def present(self) -> list[torch.Tensor]:
        """Those that are still there."""
        return [parameter for reference in self._parameters if (parameter := reference()) is not None]

    def clear(self) -> None:
        """Let go of their gradients."""
        for parameter in self.present():
            parameter.grad = None

    def note_trained(self) -> None:
        """A result is there."""
        self._trained = [reference for reference in self._parameters if (parameter := reference()) is not None and parameter.requires_grad]

    @property
    def hold_gradients(self) -> bool:
        """Whether any p.grad that the last result was of holds something other than zeros. What an earlier one left in a parameter that was frozen since is no
        part of it."""
        trained = (parameter for reference in self._trained if (parameter := reference()) is not None)
        return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in trained)

    def index(self, parameter: torch.Tensor) -> int:
        """Raises UsageError for one that was not there when DDP wrapped the model."""
        if not self.knows(parameter):
            raise UsageError(
                f"{self.by}: DDP reduces a parameter of shape {list(parameter.shape)} that was not there in the first step; "
                f"wrap the model again after parameters were added"
            )
        return self._indices[id(parameter)]


class NextBackward:
    """adds_up: whether the backward after the last result adds to it, in any gradient: it may begin with one that the last backward did not reach. None: not
    known yet. came: whether there was a backward; false where DDP hands over zeros
    for a rank that has run out of batches (join)."""

    def __init__(self, last: LastStep, model: ModelParameters) -> None:
        self.adds_up: bool | None = None
        self.came = True
        self._last, self._model = last, model
        self._watched: set[int] = set()  # indices of parameters whose hook finds it out

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """From the next backward on, see before it adds to these whether it adds to the last result."""
        if len(self._watched) == len(self._model.names):
            return
        for parameter in parameters:
            index = self._model.index(parameter)
            if index not in self._watched and parameter.requires_grad:
                self._watched.add(index)
                parameter.register_hook(functools.partial(_coming, weakref.ref(self)))  # type: ignore[no-untyped-call]

    def coming(self) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""
        self.came = True
        if self._last.waits and self.adds_up is None:
            self.adds_up = self._model.hold_gradients

    def result_came(self) -> None:
        """A result is there: where no backward was, this rank has run out of batches, and the others step."""
        if not self.came:
            self._last.end(applied=True)
        self._model.note_trained()
        self.adds_up, self.came = None, not self._watched


@uncompiled
def _coming(backward: weakref.ref[NextBackward], _gradient: torch.Tensor) -> None:
    found = backward()
    if found is not None:
        found.coming()


def takes_part(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether this rank has a gradient. For a parameter that it did not use, DDP's bucket has zeros, but p.grad is None."""
    return parameter.grad is not None or bool(gradient.any())


def laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient's elements in the parameter's order. DDP keeps those of a dense parameter in its order in memory, whatever that is
    (channels_last), but shows them as if they were contiguous."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a contiguous range of memory, each element once."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True
