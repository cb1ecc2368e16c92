"""The `onebit` codec: the sign of every element, and one scale, mean |p|, for each block of 4096.

| offset        | type                          | meaning                                                             |
|---------------|-------------------------------|---------------------------------------------------------------------|
| 0             | f32 [ceil(numel / 4096)]      | mean |p| of each block, finite, >= 0                                |
| 4 * blocks    | u8 [ceil(numel / 8)]          | signs, least significant bit first, 1 = p < 0; pad bits are zero    |

Owns these bytes. Zeros of either sign count as positive. The mean is summed in float32 in 64 lanes: lane j adds elements j,
j + 64, j + 128, ... in turn, then lanes j and j + 32, j and j + 16, ... are added until one is left, which is divided by the
block's length. Only if that sum of finite values overflows is it taken again over |p| / 8192. A block with NaN or infinity has scale 0.

With ``scale=unit`` no scales travel: the payload is that of `signs`, and the elements are -1 and +1 (codec id 16). It is refused with feedback:
an element below 1/2 leaves a residual larger than itself, so that residuals grow to 1 however small the gradient is, and the residual of an
element that is always above 1 grows without bound. With ``scale=block`` the squared error is 1 - ||p||_1^2 / (n ||p||_2^2) times the squared
norm of a block of n: 1 - 2/pi for Gaussian values, 1 - 1/n for one element among zeros.
Source: Karimireddy et al. 2019 (EF-SignSGD), Algorithm 2, with the scale ||p||_1 / n taken per block; Seide et al. 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.codec import BLOCK, F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import (
    add_signed_sum,
    borrowed,
    negative_mask,
    set_signed_sum,
    survey,
    survey_mean,
    view_f32,
    view_u32,
    view_u64,
)
from psgc.codecs.common.feedback import NO_RESIDUAL, FeedbackCodec, corrected_chunk, mean_corrected_chunk
from psgc.codecs.common.parameters import read_choice, read_switch, with_defaults
from psgc.codecs.common.payloads import MAX_PAYLOADS, check_scales, check_size, eight
from psgc.codecs.common.signs import SignsCodec, check_pads
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, helper, kernel
from psgc.errors import CodecError

LANES: Final = 64
MAX_F32: Final = np.finfo(np.float32).max
_SHRINK: Final = np.float32(2.0**-13)  # 4096 values of any finite size then add up without overflow
_GROW: Final = np.float32(2.0**13)
_WORDS: Final = BLOCK // 32


def reference_lane_sum(magnitudes: F32) -> np.float32:
    """Sum of at most 4096 values in the documented order."""
    padded = np.zeros(-(-magnitudes.size // LANES) * LANES, np.float32)
    padded[: magnitudes.size] = magnitudes
    lanes = np.zeros(LANES, np.float32)
    for row in padded.reshape(-1, LANES):
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float32(lanes[0])


def reference_scale(block: F32) -> np.float32:
    """mean |p| of one block; 0 if any element is NaN or infinite."""
    if not np.isfinite(block).all():
        return np.float32(0)
    with np.errstate(over="ignore"):
        total, count = reference_lane_sum(np.abs(block)), np.float32(block.size)
        if total <= MAX_F32:
            return np.float32(total / count)
        return min(reference_lane_sum(np.abs(block) * _SHRINK) / count * _GROW, MAX_F32)


def reference_encode(p: F32) -> bytes:
    """Payload of p."""
    scales = [reference_scale(p[start : start + BLOCK]) for start in range(0, p.size, BLOCK)]
    return np.array(scales, np.float32).tobytes() + np.packbits(p < 0, bitorder="little").tobytes()


def reference_decode(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    blocks = -(-numel // BLOCK)
    scales = np.repeat(np.frombuffer(payload, np.float32, blocks), BLOCK)[:numel]
    signs = np.unpackbits(np.frombuffer(payload, np.uint8, offset=4 * blocks), count=numel, bitorder="little")
    return np.where(signs == 1, -scales, scales)


@helper
def _fold_lanes(lanes: Any) -> Any:
    width = LANES // 2
    while width > 0:
        low, high = lanes[:width], lanes[width : 2 * width]
        for j in range(width):
            low[j] += high[j]
        width //= 2
    return lanes[0]


@helper
def _lane_sum(p: Any, size: Any, factor: Any, lanes: Any) -> Any:
    """Sum of factor * |p|; size is a multiple of LANES, p is zero beyond the block."""
    lanes[:] = np.float32(0)
    for start in range(0, size, LANES):
        row = p[start : start + LANES]
        for j in range(LANES):
            lanes[j] += abs(row[j]) * factor
    return _fold_lanes(lanes)


@helper
def _scale(total: Any, p: Any, count: Any, padded: Any, lanes: Any) -> Any:
    """mean |p| from its sum, or NaN if an element is not finite."""
    if total <= MAX_F32:
        return total / np.float32(count)
    for i in range(count):
        if not abs(p[i]) <= MAX_F32:
            return np.float32(np.nan)
    return min(_lane_sum(p, padded, _SHRINK, lanes) / np.float32(count) * _GROW, MAX_F32)


@helper
def _sum_and_sign(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any, lanes: Any, signs: Any) -> Any:
    """p <- values / divisor + rescale * residual, its signs, and the sum of |p|; p has room for BLOCK and is zero up to whole LANES."""
    count = values.size
    if count == BLOCK and residual.size == BLOCK:
        if divisor == 1:
            survey(values, divisor, residual, rescale, p, view_u64(signs, 0, BLOCK // 64), lanes)
        else:
            survey_mean(values, divisor, residual, rescale, p, view_u64(signs, 0, BLOCK // 64), lanes)
        return _fold_lanes(lanes)
    padded = -(-count // LANES) * LANES
    mean_corrected_chunk(values, divisor, residual, rescale, p[:count])
    p[count:padded] = np.float32(0)
    for first in range(0, padded, 64):
        mask = negative_mask(p, first)
        for i in range(first // 8, min(first // 8 + 8, -(-count // 8))):
            signs[i] = np.uint8(mask & np.uint64(0xFF))
            mask >>= np.uint64(8)
    return _lane_sum(p, padded, np.float32(1), lanes)


@helper
def _write_block(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any, lanes: Any, scale_out: Any, signs: Any) -> Any:
    """Write the scale and the sign bytes of a block, and p; returns whether all of p is finite."""
    total = _sum_and_sign(values, divisor, residual, rescale, p, lanes, signs)
    scale = _scale(total, p, values.size, -(-values.size // LANES) * LANES, lanes)
    finite = scale <= MAX_F32
    scale_out[0] = scale if finite else np.float32(0)
    return finite


@helper
def _signs_of(payload: Any, numel: Any, start: Any, count: Any) -> Any:
    """The sign bytes of ``count`` elements from ``start`` on, a multiple of 8."""
    first = 4 * (-(-numel // BLOCK)) + start // 8
    return payload[first : first + -(-count // 8)]


@helper
def _scale_of(payload: Any, start: Any) -> Any:
    return view_f32(payload, 4 * (start // BLOCK), 1)[0]


@helper
def _read_block(payload: Any, numel: Any, start: Any, out: Any) -> None:
    """out <- the elements from ``start`` on, at most a block of them."""
    scale, signs = _scale_of(payload, start), _signs_of(payload, numel, start, out.size)
    words = view_u32(signs, 0, out.size // 32)
    for i in range(words.size):
        set_signed_sum(out, 32 * i, out, (words[i],), (scale,))
    for i in range(32 * words.size, out.size):
        out[i] = -scale if (signs[i // 8] >> (i % 8)) & 1 else scale


@helper
def _add_block(payload: Any, numel: Any, start: Any, factor: Any, base: Any, total: Any) -> None:
    """total <- base + factor * one payload's elements from ``start`` on, at most a block of them; factor is 1 or -1."""
    scale, signs = factor * _scale_of(payload, start), _signs_of(payload, numel, start, total.size)
    words = view_u32(signs, 0, total.size // 32)
    for i in range(words.size):
        add_signed_sum(total, 32 * i, base, (words[i],), (scale,))
    for i in range(32 * words.size, total.size):
        total[i] = base[i] + (-scale if (signs[i // 8] >> (i % 8)) & 1 else scale)


@helper
def _fold_four(payloads: Any, numel: Any, start: Any, total: Any, fresh: Any) -> None:
    """total becomes, or grows by, four payloads' elements of one whole block, left to right in registers."""
    a, b, c, d = payloads
    wa, wb = view_u32(_signs_of(a, numel, start, BLOCK), 0, _WORDS), view_u32(_signs_of(b, numel, start, BLOCK), 0, _WORDS)
    wc, wd = view_u32(_signs_of(c, numel, start, BLOCK), 0, _WORDS), view_u32(_signs_of(d, numel, start, BLOCK), 0, _WORDS)
    scales = (_scale_of(a, start), _scale_of(b, start), _scale_of(c, start), _scale_of(d, start))
    if fresh:
        for i in range(_WORDS):
            set_signed_sum(total, 32 * i, total, (wa[i], wb[i], wc[i], wd[i]), scales)
    else:
        for i in range(_WORDS):
            add_signed_sum(total, 32 * i, total, (wa[i], wb[i], wc[i], wd[i]), scales)


@helper
def _fold_block(payloads: Any, count: Any, numel: Any, start: Any, total: Any) -> None:
    """total <- sum of the first ``count`` payloads' elements from ``start`` on, four at a time while there are four."""
    done = 0
    if total.size == BLOCK and count >= 4:  # constant indices: a switch over eight arrays costs more than their signs
        _fold_four((payloads[0], payloads[1], payloads[2], payloads[3]), numel, start, total, True)
        done = 4
        if count == 8:
            _fold_four((payloads[4], payloads[5], payloads[6], payloads[7]), numel, start, total, False)
            done = 8
    for k in range(done, count):
        if k == 0:
            _read_block(payloads[0], numel, start, total)
        else:
            _add_block(payloads[k], numel, start, np.float32(1), total, total)


@kernel(BOOL(IN_F32, IN_F32, SCALAR_F32, OUT_BYTES))
def _encode(grad: Any, residual: Any, rescale: Any, out: Any) -> bool:
    p, lanes = np.empty(BLOCK, np.float32), np.empty(LANES, np.float32)
    scales = view_f32(out, 0, -(-grad.size // BLOCK))
    finite = True
    for block in range(scales.size):
        start = block * BLOCK
        g = grad[start : start + BLOCK]
        old, signs = residual[start : start + BLOCK], _signs_of(out, grad.size, start, g.size)
        finite &= _write_block(g, np.float32(1), old, rescale, p, lanes, scales[block : block + 1], signs)
    return finite


@kernel(BOOL(IN_F32, I64, I64, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, OUT_BYTES))
def _finish(acc: Any, numel: Any, lo: Any, divisor: Any, residual: Any, residual_out: Any, rescale: Any, out: Any) -> bool:
    p, lanes = np.empty(BLOCK, np.float32), np.empty(LANES, np.float32)
    scales = view_f32(out, 0, -(-numel // BLOCK))
    finite = True
    for start in range(0, acc.size, BLOCK):
        a, block = acc[start : start + BLOCK], (lo + start) // BLOCK
        old, signs = residual[start : start + BLOCK], _signs_of(out, numel, lo + start, a.size)
        finite &= _write_block(a, divisor, old, rescale, p, lanes, scales[block : block + 1], signs)
        kept = residual_out[start : start + BLOCK]
        if kept.size:
            _add_block(out, numel, lo + start, np.float32(-1), p[: a.size], kept)
    return finite


@kernel(BOOL(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, OUT_BYTES))
def _serve(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, divisor: Any, residual: Any,
    residual_out: Any, rescale: Any, out: Any,
) -> bool:  # fmt: skip
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    sums, p, lanes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(LANES, np.float32)
    scales, finite = view_f32(out, 0, -(-numel // BLOCK)), True
    for block in range(scales.size):
        start = block * BLOCK
        total, kept = sums[: min(BLOCK, numel - start)], residual_out[start : start + BLOCK]
        _fold_block(payloads, count, numel, start, total)
        old, signs = residual[start : start + BLOCK], _signs_of(out, numel, start, total.size)
        finite &= _write_block(total, divisor, old, rescale, p, lanes, scales[block : block + 1], signs)
        if kept.size:
            _add_block(out, numel, start, np.float32(-1), p[: total.size], kept)
    return finite


@kernel(types.void(IN_BYTES, I64, I64, OUT_F32))
def _decode(payload: Any, numel: Any, lo: Any, out: Any) -> None:
    for start in range(0, out.size, BLOCK):
        _read_block(payload, numel, lo + start, out[start : start + BLOCK])


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, I64, OUT_F32, BOOL))
def _fold(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, lo: Any, acc: Any, fresh: Any
) -> None:  # fmt: skip
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, acc.size, BLOCK):
        block = acc[start : start + BLOCK]
        total = block if fresh else scratch[: block.size]
        _fold_block(payloads, count, numel, lo + start, total)
        if not fresh:
            for i in range(block.size):
                block[i] += total[i]


@kernel(types.void(IN_BYTES, I64, I64, IN_F32, OUT_F32, SCALAR_F32))
def _commit(payload: Any, numel: Any, lo: Any, grad: Any, residual: Any, rescale: Any) -> None:
    p = np.empty(BLOCK, np.float32)
    for start in range(0, grad.size, BLOCK):
        g, r = grad[start : start + BLOCK], residual[start : start + BLOCK]
        corrected_chunk(g, r, rescale, p[: g.size])
        _add_block(payload, numel, lo + start, np.float32(-1), p[: g.size], r)


class OneBitCodec(FeedbackCodec):
    """1.008 bits an element."""

    name = "onebit"
    codec_id = 4
    fixed_size = True
    advice = "links of 1 Gbit/s and less, under SGD with momentum or OneBitAdam; costs quality under plain Adam"
    defaults: ClassVar[dict[str, str]] = {"scale": "block", "ef": "1"}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        ef = read_switch(cls, "ef", given["ef"])
        if read_choice(cls, "scale", given["scale"], ("block", "unit")) == "block":
            return cls(dtype, ef=ef)
        if ef:
            raise CodecError(
                f"codec {cls.name}: scale=unit is refused with ef=1, the default: -1 and +1 are no contraction (of elements below 1/2 more is "
                f"left over than there was, and those above 1 are never caught up with); write scale=unit,ef=0, or use scale=block"
            )
        return UnitOneBitCodec(dtype)

    def contraction(self, numel: int) -> float | None:
        return 1 / min(numel, BLOCK) if self.feedback else None

    def payload_bound(self, numel: int) -> int:
        return 4 * -(-numel // BLOCK) + -(-numel // 8)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_scales(self.name, payload[: 4 * -(-numel // BLOCK)])
        check_pads(self.name, payload, numel)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        finite = _encode(grad, NO_RESIDUAL if residual is None else residual, rescale, out)
        return Encoded(self.payload_bound(grad.size), not finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        _decode(payload, numel, lo, out)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _fold(*eight(payloads), len(payloads), numel, lo, acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        finite = _finish(acc, numel, lo, divisor, old, new, rescale, out)
        return Encoded(self.payload_bound(numel), not finite)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return reference_encode(p)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_decode(payload, numel)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded | None:  # fmt: skip
        if not payloads or len(payloads) > MAX_PAYLOADS or not isinstance(push, OneBitCodec):
            return None
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        finite = _serve(*eight(payloads), len(payloads), numel, divisor, old, new, rescale, out)
        return Encoded(self.payload_bound(numel), not finite)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(payload, numel, lo, grad, residual, rescale)


class UnitOneBitCodec(SignsCodec):
    """The codec of ``onebit:scale=unit,ef=0``: 1 bit per element."""

    name = "onebit"
    codec_id = 16
    defaults: ClassVar[dict[str, str]] = OneBitCodec.defaults

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        return OneBitCodec.from_parameters(parameters, dtype)

    @property
    def parameters(self) -> dict[str, str]:
        return {"ef": "0", "scale": "unit"}
