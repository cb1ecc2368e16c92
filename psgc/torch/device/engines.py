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
    found = _engines.get(tensor.device)
    if found is None:
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


def _captures_cuda(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


_is_on_device: Callable[[torch.Tensor], bool] = _is_cuda
_make: Callable[[torch.device], Engine] = _make_cuda
_captures: Callable[[torch.device], bool] = _captures_cuda


def captured(tensor: torch.Tensor) -> bool:
    """Whether what this thread enqueues on the tensor's device is captured in a graph, rather than run."""
    return _is_on_device(tensor) and _captures(tensor.device)


def use(
    is_on_device: Callable[[torch.Tensor], bool] = _is_cuda, make: Callable[[torch.device], Engine] = _make_cuda,
    captures: Callable[[torch.device], bool] = _captures_cuda,
) -> None:  # fmt: skip
    """Have tensors count as on a device by another rule, with other engines: for tests on machines without one. Without arguments: CUDA's again."""
    global _is_on_device, _make, _captures
    with _lock:
        _engines.clear()
        _is_on_device, _make, _captures = is_on_device, make, captures
