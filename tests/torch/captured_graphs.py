"""What CUDA graphs do to gradients, on the CPU: memory that replays write anew, of which neither autograd nor a tensor's version tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Graph:
    """Captures one backward; each replay writes the gradients of its input to where p.grad was then."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.capturing = False
        self._model, self._loss = model, loss
        self._places: list[tuple[nn.Parameter, torch.Tensor]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As ``torch.cuda.graph``: what is done inside is computed in replays only."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            self._places = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
            for _, place in self._places:
                overwrite(place, torch.full_like(place, torch.nan))

    @property
    def places(self) -> list[torch.Tensor]:
        return [place for _, place in self._places]

    def replay(self, x: torch.Tensor) -> None:
        made = torch.autograd.grad(self._loss(self._model, x), [p for p, _ in self._places])
        for (_, place), grad in zip(self._places, made, strict=True):
            overwrite(place, grad)


def overwrite(place: torch.Tensor, values: torch.Tensor) -> None:
    """Without a new version."""
    place.detach().numpy()[...] = values.resolve_conj().numpy()


class Graphed(nn.Module):
    """As ``torch.cuda.make_graphed_callables``: a function of autograd whose backward returns the same memory in each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = tuple(model.parameters())
        static = [torch.empty_like(p) for p in parameters]

        class Replays(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, *_parameters: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    ctx.out = model(x)
                return ctx.out.detach()  # type: ignore[no-any-return]

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
                for place, made in zip(static, torch.autograd.grad(ctx.out, parameters, grad), strict=True):
                    overwrite(place, made)
                return None, *(place.detach() for place in static)

        self._run = lambda x: Replays.apply(x, *parameters)

    def forward(self, x: torch.Tensor) -> Any:
        return self._run(x)
