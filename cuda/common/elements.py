"""Triton helpers for elements: loads and stores of 32- and 16-bit floats, the corrected gradient, NaN and infinity, the status.

Every operation is rounded to float32 on its own, as in ``psgc.codecs.common.feedback`` and ``psgc.codecs.common.floats``. Offsets within a program are
32-bit; a program adds its 64-bit start to pointers first.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)  # magnitudes whose bits are not below these are not finite
MAX_F32 = tl.constexpr(3.4028234663852886e38)
QUIET_BF16 = tl.constexpr(0x7FC0)
QUIET_F16 = tl.constexpr(0x7E00)
QUIET_F32 = tl.constexpr(0x7FC00000)


@triton.jit
def read_rescale(at, rescale):
    """The factor of residuals: what ``at`` points to, unless it is None."""
    if at is None:
        return rescale
    else:
        return tl.load(at)


@triton.jit
def load_bits(pointer, offsets, mask, WHOLE: tl.constexpr):
    """Elements as they are; 0 where the mask is false. WHOLE: the mask is true everywhere."""
    if WHOLE:
        return tl.load(pointer + offsets)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0)


@triton.jit
def widen(x):
    """float32 of elements of a tensor in float32, bfloat16 or float16, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def load_f32(pointer, offsets, mask, WHOLE: tl.constexpr):
    """float32 of elements in float32, bfloat16 or float16; 0 where the mask is false."""
    return widen(load_bits(pointer, offsets, mask, WHOLE))


@triton.jit
def narrow_bf16(x):
    """float32 to bfloat16: nearest, ties to even; every NaN becomes 0x7fc0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, QUIET_BF16, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrow_f16(x):
    """float32 to float16: nearest, ties to even; overflow becomes infinity, every NaN 0x7e00.

    By integers, so that it is the same under the interpreter and on every GPU."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # below 2**-14 float16 has steps of 2**-24, as float32 has from 0.5 on
    small = (size.to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True) - 0x3F000000
    normal = (
        size - 0x38000000 + 0xFFF + ((size >> 13) & 1)
    ) >> 13  # the exponent is less by 112; a carry of the mantissa, too, belongs there
    half = tl.where(size < 0x38800000, small, normal)
    half = tl.where(size >= 0x47800000, 0x7C00, half)
    half = tl.where(size > INFINITY_BITS, QUIET_F16, half | ((bits >> 16) & 0x8000))
    # psgc.codecs.common.floats: a NaN has no sign
    return half.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to float32, bfloat16 or float16."""
    if dtype == tl.bfloat16:
        return narrow_bf16(x)
    elif dtype == tl.float16:
        return narrow_f16(x)
    else:
        return x


@triton.jit
def store_f32(pointer, offsets, x, mask, WHOLE: tl.constexpr):
    """Store float32 values, rounded to the elements that the pointer is of."""
    y = narrow(x, pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + offsets, y)
    else:
        tl.store(pointer + offsets, y, mask=mask)


@triton.jit
def corrected(values, residual, rescale, offsets, mask, WHOLE: tl.constexpr):
    """values + rescale * residual, both operations rounded; the values themselves where ``residual`` is None."""
    if residual is None:
        return values
    else:
        return values + rescale * load_f32(residual, offsets, mask, WHOLE)


@triton.jit
def mean(values, divisor, DIVIDES: tl.constexpr):
    """values / divisor, correctly rounded."""
    if DIVIDES:
        return tl.div_rn(values, tl.full(values.shape, 0.0, tl.float32) + divisor)
    else:
        return values


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, int32: they order like the magnitudes, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def flag_nonfinite(status, nonfinite):
    """status[0] |= 1 where ``nonfinite``, one boolean."""
    tl.atomic_or(status, 1, mask=nonfinite)


@triton.jit
def report_bytes(status, payload_bytes, program):
    """The first program writes the payload's length to status[1]."""
    tl.store(status + 1, payload_bytes, mask=program == 0)
