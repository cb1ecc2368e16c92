"""Gradients that are views of their bucket's memory, as under torch's DistributedDataParallel with ``gradient_as_bucket_view``.

Just before a bucket leaves, each p.grad that is not its view is copied there, and replaced by it; the mean comes there. So a gradient that backward makes
anew, since zero_grad() has set p.grad to None, is copied once. A bucket of one tensor is that gradient itself, and has no view, unless servers are to read it
in memory that they share. Invariant: what is in a view is its parameter's latest gradient or mean, so a mean that is set aside is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from psgc.torch.gradients.last_mean import LastMean
from psgc.torch.tensors.buffers import is_like


class Viewed(Protocol):
    """A gradient. mean: has its view."""

    parameter: torch.Tensor
    mean: LastMean

    def replace(self, grad: torch.Tensor) -> None:
        """Have p.grad be ``grad``, to which it has been copied."""


def move_into_views(gradients: Sequence[Viewed]) -> None:
    """The gradients are about to leave. One that is part of a graph (create_graph) stays as it is."""
    moved = []
    for gradient in gradients:
        grad, view = gradient.parameter.grad, gradient.mean.view
        if view is None or grad is None or grad is view or grad.requires_grad or not is_like(view, gradient.parameter):
            continue
        moved.append((gradient, grad, view))
    if moved:
        torch._foreach_copy_([view for _, _, view in moved], [grad for _, grad, _ in moved])
    for gradient, _, view in moved:
        gradient.replace(view)


def move_out(gradients: Sequence[Viewed]) -> None:
    """The bucket's memory is given up."""
    for gradient in gradients:
        view, gradient.mean.view = gradient.mean.view, None
        if view is not None and gradient.parameter.grad is view:
            gradient.replace(view.clone())
