"""Codes for levels that are powers of two, for `dithering` with ``partition=natural``.

Code c, from -k to k, stands for sign(c) * 2**(|c| - k), and 0 for 0. With y = |p| / norm, at most 1, the code is that of one of the two levels
around y: of the upper one with the probability (y - lower) / (upper - lower), or, to nearest, if that is at least 1/2. As the levels are those of
float32 itself, this is addition: to y's bits are added 23 random ones, or half of a mantissa, and the exponent tells the level. Below the
lowest level, 2**(1 - k), the same is done with y + 2**(1 - k), whose level is one more.

Owns the codes; knows nothing of how they are packed.
Source: Horvath et al. 2019 (Natural compression), definitions 2 and 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from psgc.codecs.codec import F32, Array
from psgc.codecs.common.bits import bits_of_f32, f32_of_bits
from psgc.codecs.common.feedback import rounding_contraction
from psgc.codecs.common.streams import word
from psgc.codecs.jit.kernel import helper

_MANTISSA: Final = np.uint32(23)  # bits of it in float32
_HALF: Final = np.uint32(1 << 22)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


def reference_levels(scaled: F32, random: F32 | None, k: int) -> Array:
    """Codes of p / norm; ``random``: uniform multiples of 2**-24 in [0, 1), of which the uppermost 23 bits count."""
    y = np.minimum(np.abs(scaled), np.float32(1))
    least = np.float32(2.0 ** (1 - k))
    steps = np.full(y.size, 1 << 22) if random is None else np.floor(random * np.float32(2.0**23)).astype(np.int64)
    below = y < least
    exponent = (np.where(below, y + least, y).astype(np.float32).view(np.uint32) + steps >> 23) - 127
    level = exponent + k - below
    return np.asarray(np.where(np.signbit(scaled), -level, level))


def reference_powers(codes: Array, k: int) -> F32:
    """The values of codes, before the scale."""
    code = codes.astype(np.int32)
    return np.asarray(np.where(code == 0, 0, np.sign(code) * np.ldexp(1.0, np.abs(code) - k)), np.float32)


@functools.cache
def level_of(random: bool) -> Callable[..., Any]:
    """The code of value * factor, as `blocks.planar_codes` takes it; the second limit is the lowest level."""

    @helper
    def code_of(value: Any, factor: Any, limits: Any, draws: Any) -> Any:
        top, least = limits
        bits = bits_of_f32(value * factor)
        y = min(f32_of_bits(bits & _MAGNITUDE), top)
        none = np.int32(bits_of_f32(least) >> _MANTISSA) - np.int32(1)  # the exponent that stands for code 0
        none += np.int32(1) if y < least else np.int32(0)
        y += least if y < least else np.float32(0)
        steps = word(draws[0], draws[1], draws[2]) >> np.uint32(9) if random else _HALF
        level = np.int32(np.uint32(bits_of_f32(y) + steps) >> _MANTISSA) - none
        sign = np.int32(bits) >> np.int32(31)
        return np.uint32((level ^ sign) - sign)

    return code_of


@helper
def power_of(code: Any, limits: Any) -> Any:
    """The value of a code, in the form that `blocks.planar_codes` takes."""
    least = limits[1]
    sign = code >> np.int32(31)
    level = (code ^ sign) - sign
    none = np.int32(bits_of_f32(least) >> _MANTISSA) - np.int32(1)
    power = np.uint32(level + none) << _MANTISSA
    return f32_of_bits((power if level > 0 else np.uint32(0)) | (np.uint32(sign) & ~_MAGNITUDE))


def nearest_contraction(k: int, count: int) -> float:
    """The contraction of rounding to the nearest level, for ``count`` elements or fewer.

    Above the lowest level the error is at most a third of an element, in the middle between two levels. Below it is that of rounding to multiples.
    """
    return min(8 / 9, rounding_contraction(2.0 ** (k - 1), count))
