"""The `int8` codec: one byte an element, and one scale, max|p| / 127, for each block of 256.

| offset        | type                         | meaning                                                   |
|---------------|------------------------------|-----------------------------------------------------------|
| 0             | f32 [ceil(numel / 256)]      | max|p| / 127 of each block, finite, >= 0                  |
| 4 * blocks    | i8 [numel]                   | codes in -127..127; the element is code * scale           |

Owns these bytes. With feedback (``ef=1``) a code is p * (127 / max|p|) rounded to nearest even; without, it is rounded up with the
probability of its fraction, by the counter-based stream, so that the decoded mean is p. A block whose scale would be below the
smallest normal float (max|p| < 1.5e-36), and one with NaN or infinity, has scale 0 and codes 0. The scale is at most the largest
float whose 127-fold is finite. ``rotate=1`` is `rotation`'s, with bytes of the same layout.
Source: Alistarh et al. 2017 (QSGD) for stochastic rounding, with max-norm blocks; Dettmers et al. 2022 for block scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import bits_of_f32, borrowed, f32_of_bits, view_f32, view_i8
from psgc.codecs.common.feedback import NO_RESIDUAL, SCRATCH, FeedbackCodec, corrected_block, mean_corrected_block, rounding_contraction
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.payloads import MAX_PAYLOADS, check_scales, check_size, eight
from psgc.codecs.common.rotation import RotatedInt8Codec
from psgc.codecs.common.streams import keys, reference_uniform, uniform
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, U32, helper, kernel

GROUP: Final = 256  # elements that share a scale
_TOP: Final = np.float32(127)
_LEAST_SCALE: Final = np.finfo(np.float32).tiny
_MOST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / _TOP, np.float32(0))  # one step down: 127 times it stays finite
_INFINITY_BITS: Final = np.uint32(0x7F800000)
_ROUNDER: Final = np.float32(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22


def reference_group_scale(group: F32) -> np.float32:
    """max|p| / 127 of one group; 0 if it would not be normal or an element is not finite."""
    top = np.abs(group).max()
    if not np.isfinite(top) or top / _TOP < _LEAST_SCALE:
        return np.float32(0)
    return min(top / _TOP, _MOST_SCALE)


def reference_codes(group: F32, random: F32 | None) -> Array:
    """Codes of one group; rounded stochastically where there are random numbers, else to nearest even."""
    if reference_group_scale(group) == 0:
        return np.zeros(group.size, np.int8)
    scaled = group * (_TOP / np.abs(group).max())
    if random is None:
        return np.asarray(np.rint(scaled), np.int8)
    scaled = np.clip(scaled, -_TOP, _TOP)
    below = np.floor(scaled)
    return np.asarray(below + (random < scaled - below), np.int8)


def reference_encode(p: F32, stream: Stream | None, lo: int = 0) -> bytes:
    """Payload of p; with a stream, elements of the part from ``lo`` on, rounded stochastically."""
    groups = [p[start : start + GROUP] for start in range(0, p.size, GROUP)]
    random = None if stream is None else reference_uniform(stream, lo, p.size)
    codes = [reference_codes(g, None if random is None else random[i * GROUP :][: g.size]) for i, g in enumerate(groups)]
    return np.array([reference_group_scale(g) for g in groups], np.float32).tobytes() + np.concatenate(codes).tobytes()


def reference_decode(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    groups = -(-numel // GROUP)
    scales = np.repeat(np.frombuffer(payload, np.float32, groups), GROUP)[:numel]
    with np.errstate(over="ignore"):
        return np.asarray(np.frombuffer(payload, np.int8, offset=4 * groups).astype(np.float32) * scales, np.float32)


@helper
def _top_bits(p: Any) -> Any:
    """Bits of max|p|. As signed integers they order like the values, NaN above infinity, and only so does LLVM vectorise this."""
    top = np.int32(0)
    for i in range(p.size):
        top = max(top, np.int32(bits_of_f32(p[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top)


@helper
def write_nearest(p: Any, factor: Any, codes: Any) -> None:
    for i in range(p.size):
        codes[i] = np.int8(bits_of_f32(p[i] * factor + _ROUNDER))


@helper
def write_stochastic(p: Any, factor: Any, codes: Any, index: Any, before: Any, between: Any) -> None:
    for i in range(p.size):
        scaled = p[i] * factor
        scaled = _TOP if scaled > _TOP else scaled
        scaled = -_TOP if scaled < -_TOP else scaled
        below = np.floor(scaled)
        up = np.float32(1) if uniform(np.uint32(index + np.uint32(i)), before, between) < scaled - below else np.float32(0)
        codes[i] = np.int8(bits_of_f32(below + up + _ROUNDER))


@helper
def _write_groups(p: Any, scales: Any, codes: Any, random: Any, index: Any, before: Any, between: Any) -> Any:
    """Write scales and codes of p, whose first element begins a group; returns the bits of the largest magnitude."""
    top = np.uint32(0)
    for group in range(scales.size):
        values, target = p[group * GROUP : (group + 1) * GROUP], codes[group * GROUP : (group + 1) * GROUP]
        bits = _top_bits(values)
        top = max(top, bits)
        scale = f32_of_bits(bits) / _TOP
        if bits >= _INFINITY_BITS or scale < _LEAST_SCALE:
            scales[group] = np.float32(0)
            target[:] = np.int8(0)
            continue
        scales[group] = min(scale, _MOST_SCALE)
        factor = _TOP / f32_of_bits(bits)
        if random:
            write_stochastic(values, factor, target, np.uint32(index + np.uint32(group * GROUP)), before, between)
        else:
            write_nearest(values, factor, target)
    return top


@helper
def _scales_at(payload: Any, start: Any, count: Any) -> Any:
    return view_f32(payload, 4 * (start // GROUP), -(-count // GROUP))


@helper
def _codes_at(payload: Any, numel: Any, start: Any, count: Any) -> Any:
    return view_i8(payload, 4 * (-(-numel // GROUP)) + start, count)


@helper
def _read(payload: Any, numel: Any, start: Any, out: Any) -> None:
    """out <- the elements from ``start`` on, which begins a group."""
    scales, codes = _scales_at(payload, start, out.size), _codes_at(payload, numel, start, out.size)
    for group in range(scales.size):
        scale, source = scales[group], codes[group * GROUP : (group + 1) * GROUP]
        target = out[group * GROUP : (group + 1) * GROUP]
        for i in range(target.size):
            target[i] = np.float32(source[i]) * scale


@helper
def _add(payload: Any, numel: Any, start: Any, total: Any) -> None:
    """total += the elements from ``start`` on, which begins a group."""
    scales, codes = _scales_at(payload, start, total.size), _codes_at(payload, numel, start, total.size)
    for group in range(scales.size):
        scale, source = scales[group], codes[group * GROUP : (group + 1) * GROUP]
        target = total[group * GROUP : (group + 1) * GROUP]
        for i in range(target.size):
            target[i] += np.float32(source[i]) * scale


@helper
def _fold_four(payloads: Any, numel: Any, start: Any, total: Any, first: Any) -> None:
    """total becomes, or (not first) grows by, four payloads' elements from ``start`` on, left to right: a store for four loads."""
    n = total.size
    a, b, c, d = payloads
    ca, cb, cc, cd = (
        _codes_at(a, numel, start, n),
        _codes_at(b, numel, start, n),
        _codes_at(c, numel, start, n),
        _codes_at(d, numel, start, n),
    )
    sa, sb, sc, sd = _scales_at(a, start, n), _scales_at(b, start, n), _scales_at(c, start, n), _scales_at(d, start, n)
    for group in range(sa.size):
        low, high = group * GROUP, (group + 1) * GROUP
        target, wa, wb, wc, wd = total[low:high], ca[low:high], cb[low:high], cc[low:high], cd[low:high]
        fa, fb, fc, fd = sa[group], sb[group], sc[group], sd[group]
        if first:
            for i in range(target.size):
                two = np.float32(wa[i]) * fa + np.float32(wb[i]) * fb
                target[i] = (two + np.float32(wc[i]) * fc) + np.float32(wd[i]) * fd
        else:
            for i in range(target.size):
                two = (target[i] + np.float32(wa[i]) * fa) + np.float32(wb[i]) * fb
                target[i] = (two + np.float32(wc[i]) * fc) + np.float32(wd[i]) * fd


@helper
def _fold_block(payloads: Any, count: Any, numel: Any, start: Any, total: Any) -> None:
    """total <- the sum of the first ``count`` payloads' elements from ``start`` on."""
    done = 1
    if count >= 4:  # constant indices: a switch over eight arrays is slow
        _fold_four((payloads[0], payloads[1], payloads[2], payloads[3]), numel, start, total, True)
        done = 4
        if count == 8:
            _fold_four((payloads[4], payloads[5], payloads[6], payloads[7]), numel, start, total, False)
            done = 8
    else:
        _read(payloads[0], numel, start, total)
    for k in range(done, count):
        _add(payloads[k], numel, start, total)


@helper
def _take_away(payload: Any, numel: Any, start: Any, p: Any, kept: Any) -> None:
    """kept <- p - the elements from ``start`` on, which begins a group."""
    scales, codes = _scales_at(payload, start, p.size), _codes_at(payload, numel, start, p.size)
    for group in range(scales.size):
        scale, source = scales[group], codes[group * GROUP : (group + 1) * GROUP]
        values, target = p[group * GROUP : (group + 1) * GROUP], kept[group * GROUP : (group + 1) * GROUP]
        for i in range(target.size):
            target[i] = values[i] - np.float32(source[i]) * scale


@kernel(BOOL(IN_F32, IN_F32, SCALAR_F32, BOOL, U32, U32, U32, OUT_BYTES))
def _encode(grad: Any, residual: Any, rescale: Any, random: Any, first: Any, before: Any, between: Any, out: Any) -> bool:
    p, top = np.empty(SCRATCH, np.float32), np.uint32(0)
    for start in range(0, grad.size, SCRATCH):
        g = grad[start : start + SCRATCH]
        block = p[: g.size]
        corrected_block(g, residual[start : start + SCRATCH], rescale, block)
        scales, codes = _scales_at(out, start, g.size), _codes_at(out, grad.size, start, g.size)
        top = max(top, _write_groups(block, scales, codes, random, np.uint32(first + np.uint32(start)), before, between))
    return bool(top < _INFINITY_BITS)


@kernel(BOOL(IN_F32, I64, I64, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, BOOL, U32, U32, U32, OUT_BYTES))
def _finish(
    acc: Any, numel: Any, lo: Any, divisor: Any, residual: Any, residual_out: Any, rescale: Any,
    random: Any, first: Any, before: Any, between: Any, out: Any,
) -> bool:  # fmt: skip
    p, top = np.empty(SCRATCH, np.float32), np.uint32(0)
    for start in range(0, acc.size, SCRATCH):
        a = acc[start : start + SCRATCH]
        block = p[: a.size]
        mean_corrected_block(a, divisor, residual[start : start + SCRATCH], rescale, block)
        scales, codes = _scales_at(out, lo + start, a.size), _codes_at(out, numel, lo + start, a.size)
        top = max(top, _write_groups(block, scales, codes, random, np.uint32(first + np.uint32(start)), before, between))
        kept = residual_out[start : start + SCRATCH]
        if kept.size:
            _take_away(out, numel, lo + start, block, kept)
    return bool(top < _INFINITY_BITS)


@kernel(types.void(IN_BYTES, I64, I64, OUT_F32))
def _decode(payload: Any, numel: Any, lo: Any, out: Any) -> None:
    _read(payload, numel, lo, out)


@kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, I64, OUT_F32, BOOL))
def _fold(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, lo: Any, acc: Any, fresh: Any
) -> None:  # fmt: skip
    payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
    scratch = np.empty(SCRATCH, np.float32)
    for start in range(0, acc.size, SCRATCH):
        block = acc[start : start + SCRATCH]
        total = block if fresh else scratch[: block.size]
        _fold_block(payloads, count, numel, lo + start, total)
        if not fresh:
            for i in range(block.size):
                block[i] += total[i]


@kernel(types.void(IN_BYTES, I64, I64, IN_F32, OUT_F32, SCALAR_F32))
def _commit(payload: Any, numel: Any, lo: Any, grad: Any, residual: Any, rescale: Any) -> None:
    p = np.empty(SCRATCH, np.float32)
    for start in range(0, grad.size, SCRATCH):
        g, r = grad[start : start + SCRATCH], residual[start : start + SCRATCH]
        corrected_block(g, r, rescale, p[: g.size])
        _take_away(payload, numel, lo + start, p[: g.size], r)


class Int8Codec(FeedbackCodec):
    """8.125 bits an element; unbiased without feedback."""

    name = "int8"
    codec_id = 3
    defaults: ClassVar[dict[str, str]] = {"ef": "1", "rotate": "0"}
    advice = "the safe choice below 16 bits: an error far under a gradient's own noise, sound with Adam too"

    def __init__(self, dtype: str = "float32", *, ef: bool = True) -> None:
        super().__init__(dtype, ef=ef)
        self.unbiased = not ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        if read_switch(cls, "rotate", given["rotate"]):
            return RotatedInt8Codec.from_parameters(given, dtype)
        return cls(dtype, ef=read_switch(cls, "ef", given["ef"]))

    def contraction(self, numel: int) -> float | None:
        return rounding_contraction(float(_TOP), min(numel, GROUP)) if self.feedback else None

    def payload_bound(self, numel: int) -> int:
        return 4 * -(-numel // GROUP) + numel

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_scales(self.name, payload[: 4 * -(-numel // GROUP)])

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        finite = _encode(grad, NO_RESIDUAL if residual is None else residual, rescale, *self._rounding(stream, 0), out)
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
        finite = _finish(acc, numel, lo, divisor, old, new, rescale, *self._rounding(stream, lo), out)
        return Encoded(self.payload_bound(numel), not finite)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return reference_encode(p, None if self.feedback else stream)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_decode(payload, numel)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(payload, numel, lo, grad, residual, rescale)

    def _rounding(self, stream: Stream, lo: int) -> tuple[bool, int, int, int]:
        """Whether to round stochastically, the first element's index modulo 2**32, and the stream's keys."""
        return (False, 0, 0, 0) if self._ef else (True, (stream.first + lo) & 0xFFFFFFFF, *keys(stream))
