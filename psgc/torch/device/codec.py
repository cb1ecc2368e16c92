"""The side of device codecs and of schemes' device states that streams use; ``cuda/common`` has the interfaces in full, and what implements them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from psgc.codecs.codec import Bytes, Codec, Stream
from psgc.codecs.scheme import Round


@dataclass(frozen=True, slots=True)
class Encoding:
    """One ``encode`` among many, as ``psgc.cuda.common.device_codec`` has it, which machines without CUDA never import."""

    grad: torch.Tensor
    residual: torch.Tensor | None
    rescale: float
    stream: Stream
    out: torch.Tensor
    status: torch.Tensor
    scratch: torch.Tensor


@dataclass(frozen=True, slots=True)
class Decoding:
    """What becomes of a part's payloads, one use among many, as ``psgc.cuda.common.device_codec`` has it."""

    payloads: Sequence[torch.Tensor]
    numel: int
    target: torch.Tensor
    use: Literal["decode", "add", "commit"] = "decode"
    grad: torch.Tensor | None = None
    rescale: float = 1.0


class DeviceCodec(Protocol):
    """Kernels of one codec. All methods enqueue on torch's current stream. ``status``: int64 [2] on the device: whether an input was NaN or infinite, and the
    payload's bytes."""

    codec: Codec

    def scratch_bytes(self, numel: int) -> int: ...

    def encode(
        self, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor, status: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None: ...  # fmt: skip

    def encode_many(self, items: Sequence[Encoding]) -> None: ...

    def decode(self, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None: ...

    def decode_many(self, items: Sequence[Decoding]) -> None: ...

    def commit(self, payload: torch.Tensor, numel: int, grad: torch.Tensor, residual: torch.Tensor, rescale: float) -> None: ...

    def fold(self, payloads: Sequence[torch.Tensor], numel: int, acc: torch.Tensor, fresh: bool) -> None: ...

    def finish(
        self, acc: torch.Tensor, numel: int, divisor: int, residual: torch.Tensor | None, residual_out: torch.Tensor | None, rescale: float,
        stream: Stream, out: torch.Tensor, status: torch.Tensor, scratch: torch.Tensor,
    ) -> None: ...  # fmt: skip


class DeviceState(Protocol):
    """Kernels of a scheme, with its state of one part. Methods but ``pieces`` enqueue on torch's current stream, which is the same one for all of them."""

    @property
    def rounds(self) -> tuple[Round, ...]: ...

    def scratch_bytes(self) -> int: ...

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor,
    ) -> None: ...  # fmt: skip

    def take(self, index: int, payload: torch.Tensor) -> None: ...

    def pieces(self, answer: Bytes) -> Sequence[Bytes]:
        """The last round's answer, checked, as what goes to the device. Raises PayloadError."""

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None: ...  # fmt: skip

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None: ...

    @property
    def saved(self) -> torch.Tensor | None: ...

    def restore(self, saved: torch.Tensor) -> None: ...

    @property
    def factors(self) -> Mapping[int, torch.Tensor]: ...

    def restore_factors(self, factors: Mapping[int, torch.Tensor]) -> None: ...
