"""Whether parameters were swapped for others, and back, around the moment at which another rank was given them.

So it is where a moving average's weights are swapped in for an evaluation whose loss is averaged: this rank rests there. Parameters may change beside the
optimizer's updates where that comes to the same if it is done twice, as clipping does: so before they are given, or after, not both. Seen by an element of a
few parameters each, for a copy of all at each update would cost as much memory as they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from psgc.errors import UsageError
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.wrapping import named_parameters_of

SAMPLED: Final = 16  # parameters, of all that are trained


@dataclass(frozen=True, slots=True)
class _Sample:
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def differs(self, other: _Sample) -> str | None:
        """The name of one that is not as in the other, which is of the same parameters."""
        pairs = zip(self.names, self.values, other.values, strict=True)
        return next((name for name, mine, theirs in pairs if _bits(mine) != _bits(theirs)), None)

    def again(self) -> _Sample:
        return _Sample(self.names, self.parameters, tuple(map(_value, self.parameters)))


class Beside:
    """Of an optimizer's parameters. ``given`` is called while nobody updates them, by any thread."""

    def __init__(self, optimizer: Distributed) -> None:
        self._optimizer = optimizer
        self._noted: _Sample | None = None
        self._suspect: list[tuple[int, _Sample]] = []  # by rank, what it was given and what was not so after the last update

    def note(self) -> None:
        """They are as a step begins with, or as an update has left them."""
        gradients = self._optimizer._psgc_gradients
        trained = [
            (name, parameter)
            for _, name, parameter in named_parameters_of(self._optimizer, self._optimizer._psgc_names)
            if parameter.numel() and (parameter.requires_grad or gradients.knows(parameter))
        ]
        few = trained[:: -(-len(trained) // SAMPLED) or 1]
        self._noted = _Sample(tuple(name for name, _ in few), tuple(parameter for _, parameter in few), ()).again()

    def given(self, rank: int) -> None:
        """This rank has been given them."""
        if self._noted is not None and (now := self._noted.again()).differs(self._noted):
            self._suspect.append((rank, now))

    def check(self) -> None:
        """Before an update, and before a step. Raises UsageError where they were given as something else than what the training goes on with."""
        suspect, self._suspect = self._suspect, []
        for rank, then in suspect:
            if name := then.again().differs(then):
                raise UsageError(
                    f"Elastic: parameter {name!r} was changed beside optimizer.step(), and again after rank {rank}'s next process was given it, which so has "
                    f"another; for an evaluation with other weights use a copy of the model (an AveragedModel is one), or set PSGC_ON_WORKER_LOSS=stop"
                )


def _value(parameter: torch.Tensor) -> torch.Tensor:
    """One in the middle: a first row may be padding, which never changes."""
    return parameter.detach()[tuple(length // 2 for length in parameter.shape)].clone()


def _bits(value: torch.Tensor) -> list[int]:
    """Nan is itself."""
    return value.cpu().reshape(1).view(torch.uint8).tolist()
