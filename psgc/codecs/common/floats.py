"""Sums and casts of 32- and 16-bit floats that travel element by element: what `none`, `bf16` and `fp16` have in common.

Owns the roundings to bfloat16 and float16, as NumPy definitions and as kernels. Payloads here are plain little-endian arrays.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Bytes
from psgc.codecs.common.bits import bits_of_f32, f16_of_f32, f32_of_bits, f32_of_f16, view_f32, view_i16, view_u16
from psgc.codecs.common.feedback import CHUNK
from psgc.codecs.common.payloads import MAX_PAYLOADS
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, chosen_by_type, helper, kernel

U16 = NDArray[np.uint16]
QUIET_BF16: Final = 0x7FC0  # the one NaN that narrowing makes
QUIET_F16: Final = 0x7E00


def reference_narrow_bf16(values: F32) -> U16:
    """float32 to the bits of bfloat16: nearest, ties to even; every NaN becomes 0x7fc0."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), QUIET_BF16, rounded).astype(np.uint16)


def reference_widen_bf16(bits: U16) -> F32:
    """The bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def reference_narrow_f16(values: F32) -> U16:
    """float32 to the bits of float16: nearest, ties to even; overflow becomes infinity, every NaN 0x7e00."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), QUIET_F16, rounded).astype(np.uint16)


def reference_widen_f16(bits: U16) -> F32:
    """The bits of float16 to float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


@helper
def _narrow_bf16(value: Any) -> Any:
    bits = bits_of_f32(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(QUIET_BF16) if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint16(rounded)


@helper
def _narrow_f16(value: Any) -> Any:
    rounded = f16_of_f32(value)
    return rounded if value == value else np.int16(QUIET_F16)  # noqa: PLR0124


def _widen(item: Any) -> Any:
    """In kernels: the float32 that a payload's item stands for. Items are float32, or bits: uint16 bfloat16, int16 float16."""
    raise NotImplementedError(item)


@chosen_by_type(_widen)
def _choose_widen(item: Any) -> Any:
    def widen_bf16(item: Any) -> Any:
        return f32_of_bits(np.uint32(item) << np.uint32(16))

    def widen_f16(item: Any) -> Any:
        return f32_of_f16(item)

    def widen_f32(item: Any) -> Any:
        return item

    return {types.uint16: widen_bf16, types.int16: widen_f16, types.float32: widen_f32}[item]


def _put(target: Any, i: Any, value: Any) -> None:
    """In kernels: round a float32 to the items of ``target`` and store it at i."""
    raise NotImplementedError(target, i, value)


@chosen_by_type(_put)
def _choose_put(target: Any, i: Any, value: Any) -> Any:
    def put_bf16(target: Any, i: Any, value: Any) -> None:
        target[i] = _narrow_bf16(value)

    def put_f16(target: Any, i: Any, value: Any) -> None:
        target[i] = _narrow_f16(value)

    def put_f32(target: Any, i: Any, value: Any) -> None:
        target[i] = value

    return {types.uint16: put_bf16, types.int16: put_f16, types.float32: put_f32}[target.dtype]


@helper
def _fold_four(a: Any, b: Any, c: Any, d: Any, total: Any, first: Any) -> None:
    """total becomes, or (not first) grows by, four sources left to right: a store for four loads."""
    if first:
        for i in range(total.size):
            total[i] = ((_widen(a[i]) + _widen(b[i])) + _widen(c[i])) + _widen(d[i])
    else:
        for i in range(total.size):
            total[i] = (((total[i] + _widen(a[i])) + _widen(b[i])) + _widen(c[i])) + _widen(d[i])


@helper
def _fold_one(source: Any, total: Any, first: Any) -> None:
    if first:
        for i in range(total.size):
            total[i] = _widen(source[i])
    else:
        for i in range(total.size):
            total[i] += _widen(source[i])


@helper
def _fold_chunk(sources: Any, count: Any, start: Any, total: Any) -> None:
    """total <- the sum of the first ``count`` sources from ``start`` on."""
    end, done = start + total.size, 0
    if count >= 4:  # constant indices: a switch over eight arrays is slow
        _fold_four(sources[0][start:end], sources[1][start:end], sources[2][start:end], sources[3][start:end], total, True)
        done = 4
        if count == 8:
            _fold_four(sources[4][start:end], sources[5][start:end], sources[6][start:end], sources[7][start:end], total, False)
            done = 8
    for k in range(done, count):
        _fold_one(sources[k][start:end], total, k == 0)


@helper
def _fold(sources: Any, count: Any, acc: Any, fresh: Any) -> None:
    """acc becomes, or (not fresh) grows by, the sum of the first ``count`` sources, a chunk at a time so that it stays in L1."""
    scratch = np.empty(CHUNK, np.float32)
    for start in range(0, acc.size, CHUNK):
        chunk = acc[start : start + CHUNK]
        total = chunk if fresh else scratch[: chunk.size]
        _fold_chunk(sources, count, start, total)
        if not fresh:
            for i in range(chunk.size):
                chunk[i] += total[i]


@helper
def _finish(acc: Any, divisor: Any, target: Any) -> None:
    if divisor == 1:
        for i in range(acc.size):
            _put(target, i, acc[i])
    else:
        for i in range(acc.size):
            _put(target, i, acc[i] / divisor)


@helper
def _decode(source: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = _widen(source[i])


_FOLD: Final = types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, OUT_F32, BOOL)
_FINISH: Final = types.void(IN_F32, I64, SCALAR_F32, OUT_BYTES)
_DECODE: Final = types.void(IN_BYTES, I64, OUT_F32)


@kernel(_FOLD)
def _fold_f32(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: int, lo: int, acc: F32, fresh: bool) -> None:
    n, at = acc.size, 4 * lo
    first = view_f32(a, at, n), view_f32(b, at, n), view_f32(c, at, n), view_f32(d, at, n)
    _fold((*first, view_f32(e, at, n), view_f32(f, at, n), view_f32(g, at, n), view_f32(h, at, n)), count, acc, fresh)


@kernel(_FOLD)
def _fold_bf16(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: int, lo: int, acc: F32, fresh: bool) -> None:
    n, at = acc.size, 2 * lo
    first = view_u16(a, at, n), view_u16(b, at, n), view_u16(c, at, n), view_u16(d, at, n)
    _fold((*first, view_u16(e, at, n), view_u16(f, at, n), view_u16(g, at, n), view_u16(h, at, n)), count, acc, fresh)


@kernel(_FOLD)
def _fold_f16(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: int, lo: int, acc: F32, fresh: bool) -> None:
    n, at = acc.size, 2 * lo
    first = view_i16(a, at, n), view_i16(b, at, n), view_i16(c, at, n), view_i16(d, at, n)
    _fold((*first, view_i16(e, at, n), view_i16(f, at, n), view_i16(g, at, n), view_i16(h, at, n)), count, acc, fresh)


@kernel(_FINISH)
def _finish_f32(acc: F32, lo: int, divisor: float, out: Bytes) -> None:
    _finish(acc, divisor, view_f32(out, 4 * lo, acc.size))


@kernel(_FINISH)
def _finish_bf16(acc: F32, lo: int, divisor: float, out: Bytes) -> None:
    _finish(acc, divisor, view_u16(out, 2 * lo, acc.size))


@kernel(_FINISH)
def _finish_f16(acc: F32, lo: int, divisor: float, out: Bytes) -> None:
    _finish(acc, divisor, view_i16(out, 2 * lo, acc.size))


@kernel(_DECODE)
def _decode_bf16(payload: Bytes, lo: int, out: F32) -> None:
    _decode(view_u16(payload, 2 * lo, out.size), out)


@kernel(_DECODE)
def _decode_f16(payload: Bytes, lo: int, out: F32) -> None:
    _decode(view_i16(payload, 2 * lo, out.size), out)


class FloatKernels(NamedTuple):
    """Kernels of one float format: ``fold(8 payloads, count, lo, acc, fresh)``, ``finish(acc, lo, divisor, out)`` and
    ``decode(payload, lo, out)``. To encode is to finish from 0 with divisor 1."""

    fold: Any
    finish: Any
    decode: Any


FLOAT_KERNELS: Final = {
    "float32": FloatKernels(_fold_f32, _finish_f32, None),  # a float32 payload is its own decoding
    "bfloat16": FloatKernels(_fold_bf16, _finish_bf16, _decode_bf16),
    "float16": FloatKernels(_fold_f16, _finish_f16, _decode_f16),
}
