"""A part of a model that ranks exchange at once: how far its parameters have come since the last exchange, and the outer optimizer's step on the mean of that.

Owns the *outer* parameters: what all ranks had after the last exchange, alike on all of them, since every rank takes the same steps on the same means.
Parameters of lower precision are held as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.plans.choice import Choice
from psgc.torch.tensors.declaring import spec_of
from psgc.torch.tensors.held import held_dtype, rounded
from psgc.torch.tensors.sent import FilledBucket
from psgc.worker.session import Session

Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Fragment:
    """parameters: by name, of this rank; outer: makes the outer optimizer."""

    def __init__(
        self, session: Session, name: str, turn: int, choice: Choice, parameters: Mapping[str, torch.Tensor], outer: Outer
    ) -> None:
        self.exchange: GradientExchange[FilledBucket] = GradientExchange(session, name, choice, whole=True, turn=turn, scaled=False)
        self.names, self._parameters = list(parameters), list(parameters.values())
        self.outer = [
            torch.nn.Parameter(parameter.detach().to(held_dtype(parameter, name)).clone(), requires_grad=True)
            for name, parameter in parameters.items()
        ]
        self.optimizer = outer(self.outer)
        self.exchange.specs = tuple(
            spec_of(tensor, name, f"parameter {name!r}") for name, tensor in zip(self.names, self.outer, strict=True)
        )
        self.under_way = False

    def leave(self) -> None:
        """Send how far the parameters have come, as a gradient of the outer ones: what they were, minus what they are. Where parameters are of lower
        precision, they were the outer ones rounded: what the rounding took is no progress."""
        exchange, everything = self.exchange, tuple(range(len(self.outer)))
        exchange.begin()
        if not exchange.declared:
            exchange.declare(lambda made: FilledBucket.all_of(made.layout, made.on_gpu), exchange.specs, self.outer, everything, everything)
        for bucket in exchange.buckets:
            for index in bucket.bucket.tensors:
                outer = self.outer[index]
                own = self._parameters[index].detach()
                outer.grad = torch.sub(rounded(outer.detach(), own.dtype), own.to(outer.dtype))
                bucket.put(index, outer.grad)
            exchange.submit(bucket)
        self.under_way = True

    @torch.no_grad()
    def take(self, mix: float) -> None:
        """Wait for the mean, take the outer step on it, and go on from there: from the outer parameters, with ``mix`` times what this rank has beyond them."""
        exchange = self.exchange
        exchange.wait()
        for bucket in exchange.buckets:
            bucket.arrive()
            bucket.take()
        exchange.deliver()
        self.optimizer.step()
        exchange.end_step()
        self.optimizer.zero_grad()
        for parameter, outer in zip(self._parameters, self.outer, strict=True):
            now = outer.to(parameter.dtype)
            parameter.copy_(torch.lerp(now, parameter, mix) if mix else now)
        self.under_way = False

    def state(self) -> dict[str, Any]:
        """The outer parameters by name, and the outer optimizer's state."""
        return {
            "outer": {name: tensor.detach().clone() for name, tensor in zip(self.names, self.outer, strict=True)},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def go_on(self, state: Mapping[str, Any]) -> None:
        for name, tensor in zip(self.names, self.outer, strict=True):
            tensor.copy_(state["outer"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def parts_of(model: torch.nn.Module, fragments: int | Sequence[torch.nn.Module], by: str) -> list[dict[str, torch.Tensor]]:
    """The trained parameters of each fragment. by: whose they are, for errors. Raises UsageError."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UsageError(f"{by}: the model has no parameters that require a gradient")
    if isinstance(fragments, int):
        if fragments > len(named):
            raise UsageError(f"{by}: {fragments} fragments of {len(named)} parameters; choose at most as many")
        return divided(named, max(fragments, 1)) if fragments else []
    left: dict[str, torch.Tensor] = dict(named)
    parts: list[dict[str, torch.Tensor]] = []
    for place, module in enumerate(fragments):
        own = {id(parameter) for parameter in module.parameters()}
        part = {name: parameter for name, parameter in left.items() if id(parameter) in own}
        if not part:
            raise UsageError(
                f"{by}: fragment {place}, a {type(module).__name__}, has no trained parameters of the model that are in no fragment before it"
            )
        parts.append(part)
        left = {name: parameter for name, parameter in left.items() if name not in part}
    return [*parts, left] if left else parts


def divided(named: Sequence[tuple[str, torch.Tensor]], fragments: int) -> list[dict[str, torch.Tensor]]:
    """The parameters in this many runs of neighbours, nearly as large as each other; none is empty."""
    total, runs, so_far = sum(parameter.numel() for _, parameter in named), list[dict[str, torch.Tensor]](), 0
    for place, (name, parameter) in enumerate(named):
        left = len(named) - place
        full = runs and so_far + parameter.numel() // 2 >= total * len(runs) / fragments
        if not runs or (len(runs) < fragments and (full or left <= fragments - len(runs))):
            runs.append({})
        runs[-1][name] = parameter
        so_far += parameter.numel()
    return runs
