"""The GPU side of `shared` on a worker: the layouts of both rounds are those of `psgc.codecs.shared`. Each operation is one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from psgc.codecs.codec import Stream
from psgc.codecs.scheme import Scheme, check_part
from psgc.codecs.shared import LEAST_TOP, SharedScheme
from psgc.cuda.common.launching import draws, launch
from psgc.cuda.shared.kernels import BLOCK, add_kernel, apply_kernel, codes_kernel, maxima_kernel
from psgc.device.state import DeviceState

ROWS: Final = 8  # blocks a program
_LEAST: Final = float(LEAST_TOP)


class SharedDeviceState(DeviceState):
    """Keeps a step's shared maxima from round 0 on, until the next step's come."""

    def __init__(self, scheme: Scheme, numel: int, device: torch.device) -> None:
        assert isinstance(scheme, SharedScheme)
        check_part(scheme.canonical, numel)
        self.rounds = scheme.rounds(numel)
        self._numel, self._random = numel, not scheme.feedback
        self._divisor = scheme.context.workers if scheme.context.mean else 1
        self._sums = torch.int16 if scheme.narrow else torch.int32
        self._maxima = torch.zeros(self.rounds[0].numel, device=device)
        self._programs = -(-numel // (ROWS * int(BLOCK)))

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if index == 0:
            maxima, size = _viewed(out, self._maxima.numel(), torch.float32), 4 * self._maxima.numel()
            launch(maxima_kernel, self._programs, grad, residual, float(rescale), maxima, status, self._numel, size, ROWS=ROWS)
        else:
            launch(
                codes_kernel, self._programs, grad, residual, float(rescale), self._maxima, *draws(stream if self._random else None), out, status,
                self._numel, _LEAST, RANDOM=self._random, ROWS=ROWS,
            )  # fmt: skip

    def take(self, index: int, payload: torch.Tensor) -> None:
        self._maxima.copy_(_viewed(payload, self._maxima.numel(), torch.float32))

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        codes = None if residual is None else _viewed(sent[1], self._numel, torch.int8)
        launch(
            apply_kernel, self._programs, _viewed(pieces[0], self._numel, self._sums), self._maxima, codes, target, residual, float(rescale),
            float(self._divisor), self._numel, _LEAST, DIVIDES=self._divisor != 1, ROWS=ROWS,
        )  # fmt: skip

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        codes = _viewed(sent[1], self._numel, torch.int8)
        launch(add_kernel, self._programs, codes, self._maxima, residual, self._numel, _LEAST, ROWS=ROWS)


def _viewed(payload: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return payload[: count * dtype.itemsize].view(dtype)
