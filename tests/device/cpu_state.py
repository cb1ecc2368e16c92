"""A scheme's CPU state in the form of a device state, which runs in place of the kernels on a recorded device; see psgc/device/state.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from psgc.codecs.codec import Stream
from psgc.codecs.scheme import Scheme
from psgc.device.state import DeviceState


class CpuState(DeviceState):
    """Elements are widened to float32."""

    def __init__(self, scheme: Scheme, numel: int) -> None:
        self._state = scheme.new_state(numel)
        self.rounds = self._state.rounds

    def scratch_bytes(self) -> int:
        return 32

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor,
    ) -> None:  # fmt: skip
        scratch.fill_(0x55)
        found = self._state.encode(index, grad.float().numpy(), _array(residual), rescale, stream, out.numpy())
        status[0], status[1] = int(found.nonfinite), found.payload_bytes

    def take(self, index: int, payload: torch.Tensor) -> None:
        self._state.take(index, payload.numpy().copy())

    def pieces(self, answer: Any) -> Sequence[Any]:
        return [answer]

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        wide = target.float()
        self._state.apply(pieces[0].numpy(), [each.numpy() for each in sent], wide.numpy(), _array(residual), rescale)
        if wide is not target:
            target.copy_(wide)

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        self._state.add_back([each.numpy() for each in sent], residual.numpy())

    @property
    def saved(self) -> torch.Tensor | None:
        saved = self._state.saved
        return None if saved is None else torch.from_numpy(np.array(saved))

    def restore(self, saved: torch.Tensor) -> None:
        self._state.restore(saved.numpy().copy())

    @property
    def factors(self) -> Mapping[int, torch.Tensor]:
        return {first: torch.from_numpy(values.copy()) for first, values in self._state.factors.items()}

    def restore_factors(self, factors: Mapping[int, torch.Tensor]) -> None:
        self._state.restore_factors({first: values.numpy().copy() for first, values in factors.items()})


def _array(residual: torch.Tensor | None) -> Any:
    return None if residual is None else residual.numpy()
