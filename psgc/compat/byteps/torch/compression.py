"""Names of codecs: ``Compression.none``, ``Compression.fp16``, and psgc's others; and BytePS's classes, from which scripts derive compressors of their own."""

from __future__ import annotations

from typing import Any

import torch

from psgc.torch import Compression


class Compressor:
    """What a script's own compressor derives from. A class that overrides both is a codec of its own (psgc/torch/tensors/compressors.py)."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as it is to be sent, and what ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was before ``compress``."""
        return tensor


class NoneCompressor(Compressor):
    """The codec ``none``."""

    canonical = "none"


class FP16Compressor(Compressor):
    """The codec ``fp16``."""

    canonical = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return Compression.fp16.compress(tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return Compression.fp16.decompress(tensor, ctx)


__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
