"""Whether parameters were written since their last averaged gradients came: then these gradients were applied.

Version counters of torch tell of writes, at no cost on a GPU. Writes through ``p.data``, as in older scripts and in some optimizers, are not counted; so, as
long as no counted write has come, some elements are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

ELEMENTS: Final = 16  # of each parameter that is compared: the first, the middle, the last, and the largest one


class Written:
    """parameters: that the gradients are of, as they are now."""

    def __init__(self, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._versions = 0
        self._elements: list[torch.Tensor] | None = None
        self._counted = False  # whether a counted write has ever come
        self._uncounted = False  # whether an optimizer has stepped without

    def note(self) -> None:
        """Averaged gradients are there."""
        parameters = self._parameters()
        self._versions = _versions(parameters)
        self._elements = None if self._counted or self._uncounted else _elements(parameters)

    def since(self) -> bool:
        """Whether parameters have been written since ``note``."""
        parameters = self._parameters()
        if self._count(parameters):
            return True
        before = self._elements
        return before is not None and not all(map(torch.equal, before, _elements(parameters)))

    def by_step(self) -> bool:
        """Whether an optimizer that has just run its step has applied the gradients. One whose writes are not counted always has."""
        if self._count(self._parameters()):
            return True
        self._uncounted = not self._counted
        return self._uncounted

    def _count(self, parameters: Sequence[torch.Tensor]) -> bool:
        counted = _versions(parameters) != self._versions
        self._counted = self._counted or counted
        return counted


def _versions(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter._version for parameter in parameters)


def _elements(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of some elements."""
    plain = [parameter for parameter in parameters if type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.numel()]
    if not plain:
        return []
    chosen = (plain[0], plain[len(plain) // 2], plain[-1], max(plain, key=torch.Tensor.numel))
    return [_spread(parameter.detach()) for parameter in chosen]


def _spread(parameter: torch.Tensor) -> torch.Tensor:
    """Elements at equal distances in its memory."""
    taken = min(ELEMENTS, parameter.numel())
    return parameter.as_strided((taken,), (parameter.numel() // taken,), parameter.storage_offset()).clone()
