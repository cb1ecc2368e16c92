"""BytePS's onebit: a word of 32 signs at a time, the first element in the highest bit, 1 for negative; then one float32 scale.

The scale is the mean of |x|, or 1. BytePS reads the signs beyond a part's end from whatever lies there; here they are 0.
"""

from __future__ import annotations

import numpy as np

from psgc.errors import PayloadError
from psgc.pslite.byteps.compressor import F32, Compressor


class Onebit(Compressor):
    def __init__(self, numel: int, scaled: bool) -> None:
        super().__init__(numel)
        self._scaled = scaled
        self._words = -(-numel // 32)

    def encode(self, values: F32) -> bytes:
        scale = np.abs(values).sum(dtype=np.float64) / values.size if self._scaled else 1.0
        signs = np.zeros(32 * self._words, np.bool_)
        np.less(values, 0, out=signs[: values.size])
        return np.packbits(signs).view(">u4").astype("<u4").tobytes() + np.float32(scale).tobytes()

    def decode(self, payload: bytes | memoryview) -> F32:
        if len(payload) != 4 * self._words + 4:
            raise PayloadError(f"a onebit payload of {len(payload)} bytes; expected {4 * self._words + 4} for {self.numel} elements")
        words = np.frombuffer(payload, "<u4", self._words)
        (scale,) = np.frombuffer(payload, "<f4", 1, 4 * self._words)
        signs = np.unpackbits(words.astype(">u4").view(np.uint8), count=self.numel)
        return np.asarray(np.where(signs, -scale, scale), np.float32)
