"""Autograd hooks that tell an exchange when its parameters' gradients are ready. The first file that a gradient passes through.

Hooks hold their exchange by a weak reference: parameters may outlive their optimizer, and its hooks then do nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

import torch

from psgc.torch.gradients.buckets import Gradient
from psgc.torch.session.uncompiled import uncompiled


class Follower(Protocol):
    """Receives the hooks' calls: the gradients' exchange."""

    def parameter(self, index: int) -> torch.Tensor: ...

    def coming(self, index: int) -> None:
        """Backward is about to add to a gradient. Runs in autograd's thread."""

    def ready(self, index: int) -> None:
        """Backward has added to a gradient. Runs in autograd's thread."""


# A parameter's latest follower, by the parameter's id. A script that rebuilds its optimizer may still hold the old one, whose hooks are then ignored.
_followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()


def follow(follower: Follower, gradient: Gradient, index: int) -> object:
    """Call ``follower`` for this gradient from now on, with ``index``; replaces an earlier follower of the parameter. Returns the node that adds to the
    gradient, with which the hook before it lives."""
    parameter, reference = gradient.parameter, weakref.ref(follower)
    _followers[id(parameter)] = follower
    parameter.register_post_accumulate_grad_hook(functools.partial(_on_ready, reference, index))  # type: ignore[no-untyped-call]
    accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    accumulator.register_prehook(functools.partial(_on_coming, reference, index))
    return accumulator


@uncompiled
def _on_ready(follower: weakref.ref[Follower], index: int, parameter: torch.Tensor) -> None:
    found = follower()
    if found is not None and _followers.get(id(parameter), found) is found:
        found.ready(index)


@uncompiled
def _on_coming(follower: weakref.ref[Follower], index: int, gradients: object) -> None:
    found = follower()
    if found is not None and _followers.get(id(found.parameter(index)), found) is found:
        found.coming(index)
