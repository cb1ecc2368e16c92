"""The side of a device codec that streams use; ``cuda/common`` has the interface in full, and what implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from psgc.codecs.codec import Codec, Stream


class DeviceCodec(Protocol):
    """Kernels of one codec. All methods enqueue on torch's current stream. ``status``: int64 [2] on the device: whether an input was NaN or infinite, and the
    payload's bytes."""

    codec: Codec

    def scratch_bytes(self, numel: int) -> int: ...

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None: ...  # fmt: skip

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None: ...

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float) -> None: ...

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None: ...

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None, rescale: float,
        stream: Stream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor,
    ) -> None: ...  # fmt: skip
