"""Gradients of backwards that were captured in CUDA graphs.

A captured backward computes nothing yet, and is in no step. Each replay writes p.grad anew, in the graph's own memory, and no version tells of it. So the
trainer has to, and where it has not, what looks like the mean of the last step may be a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from psgc.errors import UsageError
from psgc.torch.device.engines import captured
from psgc.torch.gradients.buckets import Gradient


class Replays:
    """Of the gradients that one front end follows."""

    def __init__(self) -> None:
        self._captured: dict[Gradient, torch.Tensor] = {}  # p.grad as the captured backward made it, to which each replay writes

    def captures(self, gradient: Gradient) -> bool:
        """Whether the backward that the hook runs in is being captured. Asked before it adds to the gradient, and again once it has."""
        if not captured(gradient.parameter):
            return False
        grad = gradient.resolve()
        if grad is not None:
            self._captured[gradient] = grad
        return True

    def written(self, under_way: str | None) -> None:
        """The graphs have been replayed: what was captured takes part in the coming step. under_way: a gradient that a step under way has. Raises UsageError if
        there is one, and where nothing was captured."""
        if not self._captured:
            raise UsageError(
                "replayed(): no backward of these parameters was captured; capture it inside `with optimizer.no_sync(), torch.cuda.graph(graph):`"
            )
        if under_way is not None:
            raise UsageError(
                f"replayed() while the gradient of {under_way!r} is under way; call it after step(), right after graph.replay()"
            )
        for gradient, made in self._captured.items():
            gradient.parameter.grad, gradient.zero = made, None
            gradient.mean.forget()

    def check_told(self, gradients: Iterable[Gradient]) -> None:
        """Raise UsageError, naming the first of these gradients, where what was set aside as the mean of the last step may be that of a replay."""
        for gradient in gradients if self._captured else ():
            made = self._captured.get(gradient)
            if made is not None and gradient.mean.aside is made and gradient.seen is None:
                raise UsageError(
                    f"gradient of {gradient.spec.name!r} was captured in a CUDA graph, and nothing tells whether it was computed again; call "
                    "optimizer.replayed() after each graph.replay()"
                )
