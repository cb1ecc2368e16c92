"""The engine of each device, made when the first tensor on it is met."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from psgc.torch.device.engine import Engine

_engines: dict[torch.device, Engine] = {}
_lock: Final = threading.Lock()


def engine_of(tensor: torch.Tensor) -> Engine | None:
    """The engine of the device that the tensor lies on; None for the CPU."""
    if not _is_on_device(tensor):
        return None
    with _lock:
        found = _engines.get(tensor.device)
        if found is None:
            found = _engines[tensor.device] = _make(tensor.device)
        return found


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _make_cuda(device: torch.device) -> Engine:
    from psgc.torch.device.cuda import CudaRuntime

    return Engine(CudaRuntime(device))


_is_on_device: Callable[[torch.Tensor], bool] = _is_cuda
_make: Callable[[torch.device], Engine] = _make_cuda


def use(is_on_device: Callable[[torch.Tensor], bool] = _is_cuda, make: Callable[[torch.device], Engine] = _make_cuda) -> None:
    """Have tensors count as on a device by another rule, with other engines: for tests on machines without one. Without arguments: CUDA's again."""
    global _is_on_device, _make
    with _lock:
        _engines.clear()
        _is_on_device, _make = is_on_device, make
