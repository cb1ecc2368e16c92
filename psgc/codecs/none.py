"""The `none` codec: the part's own bytes, for every dtype.

| offset | type            | meaning                                   |
|--------|-----------------|-------------------------------------------|
| 0      | dtype [numel]   | the elements, little-endian, as they are  |

Owns the sums of uncompressed parts: 32- and 16-bit floats add in float32, float64 in float64, integers and bool in int64. A mean
divides in the accumulator (floats truly, integers by floor) before the cast back, which rounds floats to nearest even, wraps
integers and makes bool of "not zero".

A payload may lie where its elements do: then neither encoding nor decoding touches them.

A lossy codec of 16-bit parts takes and gives float32. In a pair with one (``int8/none``), so does this codec: what it is given came from 16 bits, and
what it gives fits into them, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from psgc.codecs.codec import DTYPES, F32, FLOATS, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.floats import FLOAT_KERNELS, reference_narrow_bf16, reference_widen_bf16
from psgc.codecs.common.parameters import with_defaults
from psgc.codecs.common.payloads import check_size, eight


def accumulator(dtype: str) -> Any:
    """NumPy dtype that parts of ``dtype`` are summed in."""
    if dtype in FLOATS:
        return np.float32
    return np.float64 if dtype == "float64" else np.int64


def same_memory(one: Array, other: Array) -> bool:
    """Whether two contiguous arrays begin at the same address."""
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])


def reference_decode(dtype: str, payload: bytes) -> Array:
    """Elements of a payload, in the accumulator's dtype."""
    items = np.frombuffer(payload, DTYPES[dtype])
    return reference_widen_bf16(items) if dtype == "bfloat16" else items.astype(accumulator(dtype))


def reference_finish_uncompressed(dtype: str, acc: Array, divisor: int) -> bytes:
    """Payload of the sum over the divisor."""
    if divisor != 1:
        acc = acc // divisor if acc.dtype == np.int64 else acc / acc.dtype.type(divisor)
    if dtype == "bfloat16":
        return reference_narrow_bf16(acc).tobytes()
    with np.errstate(over="ignore"):
        return acc.astype(DTYPES[dtype]).tobytes()


class NoneCodec(Codec):
    """Lossless; sums are exact up to the accumulator's rounding, in the published order."""

    name = "none"
    codec_id = 0
    advice = "links that keep up with the gradients, and whatever must be exact: integers, fp64, small tensors"
    dtypes = tuple(DTYPES)
    unbiased = True
    additive = True
    flags_nonfinite = False
    fixed_size = True

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(dtype)
        self._items: np.dtype[Any] = np.dtype(DTYPES[dtype])
        self._kernels = FLOAT_KERNELS.get(dtype)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        with_defaults(cls, parameters)
        return cls(dtype)

    @property
    def parameters(self) -> dict[str, str]:
        return {}

    @property
    def array_dtype(self) -> Any:
        return self._items

    @property
    def acc_dtype(self) -> Any:
        return accumulator(self.dtype)

    def payload_bound(self, numel: int) -> int:
        return int(self._items.itemsize) * numel

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(f"none ({self.dtype})", payload, numel, self.payload_bound(numel))

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        if self._kernels is not None and grad.dtype != self._items:  # float32, as the other codec of the pair takes it
            self._kernels.finish(grad, 0, 1, out)
            return Encoded(self.payload_bound(grad.size), nonfinite=False)
        if not same_memory(grad, out):
            out[: grad.nbytes] = grad.view(np.uint8)
        return Encoded(grad.nbytes, nonfinite=False)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        if self._kernels is not None and out.dtype != self._items:
            self._kernels.decode(payload, lo, out)
            return
        item = self._items.itemsize
        elements = payload[lo * item : hi * item]
        if not same_memory(elements, out):
            out.view(np.uint8)[:] = elements

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        if self._kernels is not None:
            self._kernels.fold(*eight(payloads), len(payloads), lo, acc, fresh)
            return
        total = acc if fresh else np.empty_like(acc)
        np.copyto(total, self._slice(payloads[0], lo, hi))
        for payload in payloads[1:]:
            np.add(total, self._slice(payload, lo, hi), out=total)
        if not fresh:
            np.add(acc, total, out=acc)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        if self._kernels is not None:
            self._kernels.finish(acc, lo, divisor, out)
        else:
            if divisor != 1:
                (np.floor_divide if acc.dtype == np.int64 else np.true_divide)(acc, divisor, out=acc)
            np.copyto(self._slice(out, lo, hi), acc, casting="unsafe")
        return Encoded(self.payload_bound(numel), nonfinite=False)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return p.tobytes()

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_decode(self.dtype, payload)

    def _slice(self, payload: Bytes, lo: int, hi: int) -> Array:
        item = self._items.itemsize
        return cast("Array", payload[lo * item : hi * item].view(self._items))
