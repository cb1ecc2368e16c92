"""What codecs have kept of gradients in one session, to be sent with the first gradients of the next, whatever its size.

A worker's residual e of W workers has the weight e / W in the mean, a server's residual f the weight f. So the rank that takes both along adds
e W' / W + f W' to its gradient among W' workers: the sum of all steps stays what it was. What a rank keeps that does not go on is lost, as an
error of one step is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from psgc.worker.residuals.residual import F32, TensorMemory


@dataclass(slots=True)
class CarriedResiduals:
    """By tensor, of a session of ``workers``: this rank's residuals, and its share of the servers'."""

    workers: int = 1
    own: dict[str, F32] = field(default_factory=dict)
    servers: dict[str, F32] = field(default_factory=dict)

    def take(self, tensors: Mapping[str, TensorMemory], servers: Mapping[str, F32], workers: int) -> None:
        """Take along these memories of a session of so many workers, after those of sessions before."""
        self.workers = workers
        for name, memory in tensors.items():
            if memory.residual is not None:
                self.own[name] = memory.residual.copy() + self.own.get(name, np.float32(0))
        for name, values in servers.items():
            self.servers[name] = values.copy() + self.servers.get(name, np.float32(0))

    def pop(self, name: str, workers: int, rescale: float) -> torch.Tensor | None:
        """Remove and return what is to be added to this tensor's gradient among so many workers, flat; None for nothing. rescale: of its unit since."""
        own, share = self.own.pop(name, None), self.servers.pop(name, None)
        total = np.float32(0) if own is None else own * np.float32(rescale * workers / self.workers)
        total = total if share is None else total + share * np.float32(rescale * workers)
        return torch.from_numpy(np.asarray(total, np.float32)) if np.any(total) else None

    def __bool__(self) -> bool:
        return bool(self.own or self.servers)


@torch.no_grad()
def add_carried(parameter: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    """Add it to p.grad. Returns that."""
    values = carried.reshape(parameter.shape).to(parameter.device, parameter.dtype)
    parameter.grad = grad = values if parameter.grad is None else parameter.grad.add_(values)
    return grad
