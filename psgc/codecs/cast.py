"""The `bf16` and `fp16` codecs: every element rounded to 16 bits, no residual.

| offset | type            | meaning                                              |
|--------|-----------------|------------------------------------------------------|
| 0      | u16 [numel]     | bits of bfloat16 / float16, rounded to nearest even  |

Owns these two payloads. A NaN travels in its element, always as the same quiet NaN; what overflows becomes infinity.
Source: IEEE 754-2019 section 4.3.1 (rounding); Intel, BFLOAT16 hardware numerics definition, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.floats import (
    FLOAT_KERNELS,
    U16,
    reference_narrow_bf16,
    reference_narrow_f16,
    reference_widen_bf16,
    reference_widen_f16,
)  # fmt: skip
from psgc.codecs.common.parameters import with_defaults
from psgc.codecs.common.payloads import check_size, eight


class _CastCodec(Codec):
    flags_nonfinite = False
    fixed_size = True
    _format: ClassVar[str]

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        with_defaults(cls, parameters)
        return cls(dtype)

    @property
    def parameters(self) -> dict[str, str]:
        return {}

    def payload_bound(self, numel: int) -> int:
        return 2 * numel

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, 2 * numel)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        FLOAT_KERNELS[self._format].finish(grad, 0, 1, out)
        return Encoded(2 * grad.size, nonfinite=False)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        FLOAT_KERNELS[self._format].decode(payload, lo, out)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        FLOAT_KERNELS[self._format].fold(*eight(payloads), len(payloads), lo, acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        FLOAT_KERNELS[self._format].finish(acc, lo, divisor, out)
        return Encoded(2 * numel, nonfinite=False)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return reference_encode(self.name, p)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_decode(self.name, payload)


class Bf16Codec(_CastCodec):
    """bfloat16: 8 exponent bits, so nothing that is finite in float32 is lost but the last 16 bits."""

    name = "bf16"
    codec_id = 1
    advice = "the first thing to try: half the bytes at the speed of a copy, no residual, sound with every optimizer"
    _format = "bfloat16"


class Fp16Codec(_CastCodec):
    """float16: 11 significant bits, but above 65504 is infinity and below 6e-8 is zero."""

    name = "fp16"
    codec_id = 2
    advice = "bf16 with three more bits, for gradients that stay between 6e-8 and 65504, as under a loss scaler"
    _format = "float16"


_NARROW: dict[str, Callable[[F32], U16]] = {"bf16": reference_narrow_bf16, "fp16": reference_narrow_f16}
_WIDEN: dict[str, Callable[[U16], F32]] = {"bf16": reference_widen_bf16, "fp16": reference_widen_f16}


def reference_encode(name: str, p: F32) -> bytes:
    """Payload of codec ``name`` for p."""
    return _NARROW[name](p).tobytes()


def reference_decode(name: str, payload: bytes) -> F32:
    """Elements of a payload of codec ``name``."""
    return _WIDEN[name](np.frombuffer(payload, np.uint16))
