"""Names for the codecs, so that ``compression=psgc.Compression.onebit`` reads as in BytePS and Horovod; each is plain codec text."""

from __future__ import annotations

from typing import Any

import torch


class Compressor(str):
    """Codec text that also compresses by hand, as BytePS's and Horovod's compressors do: ``compress``, send, ``decompress``."""

    __slots__ = ()
    dtype: torch.dtype | None = None  # what floating-point tensors are cast to

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as it is to be sent, and what ``decompress`` needs."""
        if self.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(self.dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the dtype that it had before ``compress``."""
        return tensor if ctx is None else tensor.to(ctx)


class _Half(Compressor):
    __slots__ = ()
    dtype = torch.float16


class _Brain(Compressor):
    __slots__ = ()
    dtype = torch.bfloat16


class Compression:
    """Codec texts at their defaults. Any other text works as well: ``"topk:k=0.001"``, ``"onebit/int8"`` (push / pull)."""

    none = Compressor("none")
    fp16 = _Half("fp16")
    bf16 = _Brain("bf16")
    int8 = "int8"
    onebit = "onebit"
    topk = "topk"
