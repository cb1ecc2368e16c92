"""The `topk` codec: the k elements of largest magnitude of each part, exactly, and where they are.

| offset        | type                 | meaning                                                       |
|---------------|----------------------|---------------------------------------------------------------|
| 0             | u32                  | count, which is k, or ceil(k * numel) for a fraction          |
| 4             | f32 [count]          | the values, by ascending index                                |
| 4 + 4 * count | packed indices       | see `gaps`: widths, then gaps bit-packed in blocks of 128     |

Owns these bytes and the parameter k. Values are sent as they are, so that what is sent leaves nothing in the residual. The choice
is made within a part: cutting a bucket differently chooses differently. Sums start from zero and add each payload's values in turn.
Source: Aji and Heafield 2017; Stich et al. 2018 (error feedback for top-k).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.bits import bits_of_f32, borrowed, view_f32, view_u32
from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.feedback import NO_RESIDUAL, SCRATCH, FeedbackCodec, mean_corrected_block
from psgc.codecs.gaps import GAPS, define_packed, define_unpacked, pack, packed_bound, unpack_block, well_formed
from psgc.codecs.kernel import BOOL, I64, I64_PAIR, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, helper, kernel
from psgc.codecs.largest import define_largest, largest
from psgc.codecs.parameters import read_switch, with_defaults
from psgc.codecs.payloads import MAX_PAYLOADS, eight
from psgc.errors import CodecError, PayloadError

_LEAST_K: Final = Decimal("1e-9")  # below, no part is long enough for a second element
_INFINITY_BITS: Final = np.uint32(0x7F800000)


def define_encode(p: F32, k: int) -> bytes:
    """Payload of p."""
    indices = define_largest(p, k)
    return np.uint32(k).tobytes() + p[indices].tobytes() + define_packed(indices)


def define_decode(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    count = int(np.frombuffer(payload, np.uint32, 1)[0])
    out = np.zeros(numel, np.float32)
    out[define_unpacked(payload[4 + 4 * count :], count)] += np.frombuffer(payload, np.float32, count, 4)
    return out


@helper
def _count_of(payload: Any) -> Any:
    return np.int64(view_u32(payload, 0, 1)[0])


@helper
def _write(grad: Any, residual: Any, rescale: Any, k: Any, out: Any) -> Any:
    """Write the payload; returns its length and whether p is finite: what is not finite is always among the largest."""
    indices, values = largest(grad, residual, rescale, k)
    view_u32(out, 0, 1)[0] = np.uint32(k)
    target, top = view_f32(out, 4, k), np.uint32(0)
    for i in range(k):
        target[i] = values[i]
        top = max(top, bits_of_f32(values[i]) & np.uint32(0x7FFFFFFF))
    return 4 + 4 * k + pack(indices, out[4 + 4 * k :]), np.int64(top < _INFINITY_BITS)


@helper
def _scatter(payload: Any, out: Any, sign: Any) -> None:
    """out += sign * the payload's elements, at their places only."""
    count = _count_of(payload)
    values, packed, indices = view_f32(payload, 4, count), payload[4 + 4 * count :], np.empty(GAPS, np.int64)
    place, previous = -(-count // GAPS), np.int64(-1)
    for block in range(-(-count // GAPS)):
        source = values[block * GAPS : (block + 1) * GAPS]
        places = indices[: source.size]
        place = unpack_block(packed, place, np.int64(packed[block]), previous, places)
        previous = places[source.size - 1]
        for i in range(source.size):
            out[places[i]] += sign * source[i]


@kernel(I64_PAIR(IN_F32, IN_F32, SCALAR_F32, I64, OUT_BYTES))
def _encode(grad: Any, residual: Any, rescale: Any, k: Any, out: Any) -> Any:
    return _write(grad, residual, rescale, k, out)


@kernel(I64_PAIR(OUT_F32, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, I64, OUT_BYTES))
def _finish(acc: Any, divisor: Any, residual: Any, residual_out: Any, rescale: Any, k: Any, out: Any) -> Any:
    p = residual_out if residual_out.size else acc
    for start in range(0, acc.size, SCRATCH):
        block = p[start : start + SCRATCH]
        mean_corrected_block(acc[start : start + SCRATCH], divisor, residual[start : start + SCRATCH], rescale, block)
    written, finite = _write(p, p[:0], rescale, k, out)
    if residual_out.size:
        _scatter(out[:written], residual_out, np.float32(-1))
    return written, finite


@kernel(types.void(IN_BYTES, OUT_F32))
def _decode(payload: Any, out: Any) -> None:
    out[:] = np.float32(0)
    _scatter(payload, out, np.float32(1))


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, OUT_F32, BOOL))
def _fold(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, acc: Any, fresh: Any) -> None:
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    total = acc if fresh else np.empty(acc.size, np.float32)
    total[:] = np.float32(0)
    for k in range(count):
        _scatter(payloads[k], total, np.float32(1))
    if not fresh:
        for i in range(acc.size):
            acc[i] += total[i]


@kernel(types.void(IN_BYTES, IN_F32, OUT_F32, SCALAR_F32))
def _commit(payload: Any, grad: Any, residual: Any, rescale: Any) -> None:
    for i in range(grad.size):
        residual[i] = grad[i] + rescale * residual[i]
    _scatter(payload, residual, np.float32(-1))


@kernel(BOOL(IN_BYTES, I64, I64))
def _well_formed(payload: Any, count: Any, numel: Any) -> Any:
    """Whether a payload long enough for ``count`` values holds as many, and indices below numel, and nothing else."""
    return _count_of(payload) == count and well_formed(payload[4 + 4 * count :], count, numel, np.empty(GAPS, np.int64))


class TopKCodec(FeedbackCodec):
    """About 42 bits for each element that is sent, at 1 %; nothing for the others."""

    name = "topk"
    codec_id = 5
    advice = "the slowest links, and gradients with few large elements, under SGD with momentum; costs quality under plain Adam"
    chunk = 0
    defaults: ClassVar[dict[str, str]] = {"k": "0.01", "ef": "1"}

    def __init__(self, dtype: str = "float32", *, k: Fraction | int = Fraction(1, 100), ef: bool = True) -> None:
        super().__init__(dtype, ef=ef)
        self._k = k

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        return cls(dtype, k=read_k(given["k"]), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        text = write_k(self._k)
        return super().parameters | ({} if text == self.defaults["k"] else {"k": text})

    def count(self, numel: int) -> int:
        """How many elements of a part are sent."""
        if isinstance(self._k, int):
            return min(self._k, numel)
        return math.ceil(self._k * numel)

    def payload_bound(self, numel: int) -> int:
        count = self.count(numel)
        return 4 + 4 * count + packed_bound(count, numel)

    def validate(self, payload: Bytes, numel: int) -> None:
        count = self.count(numel)
        if payload.size < 4 + 4 * count or not _well_formed(payload, count, numel):
            raise PayloadError(f"topk payload of {numel} elements: its {payload.size} bytes are not {count} values and their indices")

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        old = NO_RESIDUAL if residual is None else residual
        written, finite = _encode(grad, old, rescale, self.count(grad.size), out)
        return Encoded(written, not finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        _decode(payload, out)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _fold(*eight(payloads), len(payloads), acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        written, finite = _finish(acc, divisor, old, new, rescale, self.count(numel), out)
        return Encoded(written, not finite)

    def define_payload(self, p: Array, stream: Stream) -> bytes:
        return define_encode(p, self.count(p.size))

    def define_elements(self, payload: bytes, numel: int) -> Array:
        return define_decode(payload, numel)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(payload, grad, residual, rescale)


def read_k(text: str) -> Fraction | int:
    """k from its text: a count of at least 1 if written as an integer, else a fraction strictly between 0 and 1."""
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    try:
        k = +Decimal(text)  # to 28 digits, so that the canonical text says all of it
    except ArithmeticError:
        k = Decimal(0)
    if not (k.is_finite() and _LEAST_K <= k < 1):
        raise CodecError(f"codec topk: parameter k is a fraction from {_LEAST_K} to below 1 or a whole count from 1 on, not {text!r}")
    return Fraction(k)


def write_k(k: Fraction | int) -> str:
    """Canonical text of k."""
    if isinstance(k, int):
        return str(k)
    return format((Decimal(k.numerator) / Decimal(k.denominator)).normalize(), "f")
