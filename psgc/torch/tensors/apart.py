"""Containers with tensors, taken apart: what they hold, and the tensors, which travel on their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgc.torch.tensors.buffers import TORCH_DTYPES
from psgc.torch.tensors.plain import TensorPlace


def take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with a TensorPlace for each tensor that psgc carries; these go to ``tensors``."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.dtype not in TORCH_DTYPES.values():
            return leaf
        tensors.append(leaf)
        return TensorPlace(len(tensors) - 1, tuple(leaf.shape), leaf.dtype)

    return mapped(value, take)


def put_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of ``take_tensors``: an empty tensor for each TensorPlace, also appended to ``tensors`` in the same order."""

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, TensorPlace):
            return leaf
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype))
        assert len(tensors) - 1 == leaf.index
        return tensors[-1]

    return mapped(value, put)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` made to what its dicts, lists and tuples hold."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return change(value)
