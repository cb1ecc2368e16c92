"""How an element becomes a code, and which value a code has: one pair of Triton helpers for each kind of code.

    code(p, factor, top, least, index, before, between, RANDOM) -> uint32, the code in the low bits
        p: elements; factor: of each block, broadcast; top, least: the values of the largest code and of code 1, before the scale;
        index: of each element in the random stream that has the two keys; RANDOM: rounded at random instead of to nearest.
    value(code, top, least) -> float32
        What an int32 code stands for, before the scale.

The same numbers, operation by operation, as ``psgc.codecs.quantize.integers``, ``psgc.codecs.quantize.natural``, ``psgc.codecs.fp8`` and ``psgc.codecs.tbq``.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.randoms import random_uniform, random_word, uniform_of

ROUNDER = tl.constexpr(1.5 * 2**23)  # x + this has x, rounded to nearest even, in its low bits for |x| < 2**22
WHOLE = tl.constexpr(2.0**23)  # the same for 0 <= x < 2**23
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def integer_code(p, factor, top, least, index, before, between, RANDOM: tl.constexpr):
    x = p * factor
    if RANDOM:
        x = tl.minimum(x, top, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -top, propagate_nan=tl.PropagateNan.ALL)
        below = tl.floor(x)
        x = below + tl.where(random_uniform(index, before, between) < x - below, 1.0, 0.0)
    return (x + ROUNDER).to(tl.uint32, bitcast=True)


@triton.jit
def integer_value(code, top, least):
    return code.to(tl.float32)


@triton.jit
def threshold_code(p, factor, top, least, index, before, between, RANDOM: tl.constexpr):
    """1 or -1 from the threshold on, which is the block's factor."""
    return ((p >= factor).to(tl.int32) - (p <= -factor).to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def _least_exponent(least, shape: tl.constexpr):
    """The exponent of float32 that stands for code 0: one below the lowest level's."""
    return ((tl.full(shape, 0.0, tl.float32) + least).to(tl.int32, bitcast=True) >> 23) - 1


@triton.jit
def natural_code(p, factor, top, least, index, before, between, RANDOM: tl.constexpr):
    bits = (p * factor).to(tl.uint32, bitcast=True)
    y = (bits & MAGNITUDE).to(tl.float32, bitcast=True)
    y = tl.where(y > top, top, y)
    below = y < least
    none = _least_exponent(least, p.shape) + below.to(tl.int32)
    y = tl.where(below, y + least, y)
    steps = tl.full(p.shape, 1 << 22, tl.uint32)
    if RANDOM:
        steps = random_word(index, before, between) >> 9
    level = ((y.to(tl.uint32, bitcast=True) + steps) >> 23).to(tl.int32) - none
    sign = bits.to(tl.int32, bitcast=True) >> 31
    return ((level ^ sign) - sign).to(tl.uint32, bitcast=True)


@triton.jit
def natural_value(code, top, least):
    sign = code >> 31
    level = (code ^ sign) - sign
    power = tl.where(level > 0, (level + _least_exponent(least, code.shape)) << 23, 0)
    return (power | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _float8_code(
    p, factor, index, before, between, RANDOM: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr
):
    drop: tl.constexpr = 23 - MANTISSA  # mantissa bits of float32 that are rounded away
    least: tl.constexpr = 2.0 ** (1 - BIAS)  # below it, codes are multiples of a fixed step
    steps: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)
    bits = (p * factor).to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = (bits & MAGNITUDE).to(tl.float32, bitcast=True)
    size = tl.where(size > LARGEST, LARGEST, size)
    whole = size.to(tl.uint32, bitcast=True)
    counted = tl.where(size < least, size * steps, 0.0)
    if RANDOM:
        word = random_word(index, before, between)
        raised = whole + (word >> (32 - drop))
        low = tl.floor(counted)
        counted = low + tl.where(uniform_of(word) < counted - low, 1.0, 0.0)
    else:
        raised = whole + ((1 << (drop - 1)) - 1) + ((whole >> drop) & 1)
    small = (counted + WHOLE).to(tl.uint32, bitcast=True)
    normal = (raised >> drop) - ((127 - BIAS) << MANTISSA)
    return (tl.where(size < least, small, normal) & 0x7F) | sign


@triton.jit
def _float8_value(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    size = code & 0x7F
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    value = tl.where(size < (1 << MANTISSA), small, normal)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(p, factor, top, least, index, before, between, RANDOM: tl.constexpr):
    return _float8_code(p, factor, index, before, between, RANDOM, 3, 7, 448.0)


@triton.jit
def e4m3_value(code, top, least):
    return _float8_value(code, 3, 7)


@triton.jit
def e5m2_code(p, factor, top, least, index, before, between, RANDOM: tl.constexpr):
    return _float8_code(p, factor, index, before, between, RANDOM, 2, 15, 57344.0)


@triton.jit
def e5m2_value(code, top, least):
    return _float8_value(code, 2, 15)
