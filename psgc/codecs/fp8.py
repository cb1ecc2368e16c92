"""The `fp8` codec: an 8-bit float an element, and one scale for each block of 256.

Payload: as `blocks` says; a code is the byte of an OCP 8-bit float, sign in the highest bit. Owns the two formats:

| format | bits (exponent, mantissa) | largest | smallest normal | error of a normal value |
|--------|---------------------------|---------|-----------------|-------------------------|
| e4m3   | 4, 3                      | 448     | 2**-6           | 2**-4                   |
| e5m2   | 5, 2                      | 57344   | 2**-14          | 2**-3                   |

The scale is max|p| over the largest value. With feedback (``ef=1``) values are rounded to nearest, ties to the even code; without, at
random between the two neighbours, so that the decoded mean is p. Codes of NaN or infinity are never written; in a payload from
another member they are read as finite numbers of the next exponent.
Source: Micikevicius et al. 2022 (FP8 formats for deep learning); OCP 8-bit floating point specification 1.0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from psgc.codecs.codec import F32, Array, Codec
from psgc.codecs.common.bits import bits_of_f32, f32_of_bits
from psgc.codecs.common.feedback import rounding_contraction
from psgc.codecs.common.parameters import read_choice, read_switch, with_defaults
from psgc.codecs.common.streams import uniform
from psgc.codecs.jit.kernel import helper
from psgc.codecs.quantize.blocks import BlockCodec, CodeHelpers
from psgc.codecs.quantize.rows import CodeWords

FORMATS: dict[str, tuple[int, int, float]] = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}  # mantissa bits, bias, largest


def reference_table(format_: str) -> F32:
    """The values of codes 0..127."""
    mantissa, bias, _ = FORMATS[format_]
    code = np.arange(128)
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    normal = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias - mantissa), normal).astype(np.float32)


@functools.cache
def _codes(format_: str, random: bool) -> CodeHelpers:
    mantissa, bias, top = FORMATS[format_]
    drop = np.uint32(23 - mantissa)  # mantissa bits of float32 that are rounded away
    half, one = np.uint32((1 << int(drop) - 1) - 1), np.uint32(1)
    rebias = np.uint32((127 - bias) << mantissa)
    least = np.float32(2.0 ** (1 - bias))  # below it, codes are multiples of a fixed step
    steps, step = np.float32(2.0 ** (bias + mantissa - 1)), np.float32(2.0 ** (1 - bias - mantissa))
    rounder = np.float32(2.0**23)
    random_bits = np.float32(2.0 ** int(drop))
    largest, first_normal = np.float32(top), np.uint32(1 << mantissa)
    up = np.uint32((127 - bias) << 23)

    @helper
    def write_codes(values: Any, factor: Any, codes: Any, scratch: Any, settings: Any, draws: Any) -> None:
        for i in range(values.size):
            scaled = values[i] * factor
            bits = bits_of_f32(scaled)
            sign = (bits >> np.uint32(24)) & np.uint32(0x80)
            size = min(f32_of_bits(bits & np.uint32(0x7FFFFFFF)), largest)
            whole = bits_of_f32(size)
            if random:
                chance = uniform(np.uint32(draws[0] + np.uint32(i)), draws[1], draws[2])
                raised = np.uint32(whole + np.uint32(np.int32(chance * random_bits)))
                low = np.floor(size * steps)
                small = np.uint32(np.int32(low + (np.float32(1) if chance < size * steps - low else np.float32(0))))
            else:
                odd = np.uint32(np.uint32(whole >> drop) & one)
                raised = np.uint32(np.uint32(whole + half) + odd)  # Numba adds two uint32 in 64 bits, and then SIMD sets hold half as many
                small = bits_of_f32(size * steps + rounder)
            normal = np.uint32(np.uint32(raised >> drop) - rebias)
            codes[i] = np.uint8(np.uint32(np.uint32(small if size < least else normal) & np.uint32(0x7F)) | sign)

    @helper
    def read_codes(codes: Any, scale: Any, settings: Any, out: Any) -> None:
        for i in range(out.size):
            code = np.uint32(codes[i])
            size = code & np.uint32(0x7F)
            normal = f32_of_bits((size << drop) + up)
            small = np.float32(np.int32(size)) * step
            value = small if size < first_normal else normal
            out[i] = f32_of_bits(bits_of_f32(value) | ((code & np.uint32(0x80)) << np.uint32(24))) * scale

    return CodeHelpers(write_codes, read_codes, _words(format_))


def _words(format_: str) -> CodeWords:
    """A code's bits, moved to float32's fields, are a float whose exponent is too low by the difference of the biases."""
    mantissa, bias, _ = FORMATS[format_]
    shift = 23 - mantissa
    return CodeWords(8, shift, 0x80000000 | 0x7F << shift, 2.0 ** (127 - bias))


class Fp8Codec(BlockCodec):
    """8.125 bits an element; unbiased without feedback."""

    name = "fp8"
    codec_id = 6
    advice = "gradients whose magnitudes differ by decades within 256 elements; int8 is closer on others, in as many bytes"
    bits = 8
    block = 256
    defaults: ClassVar[dict[str, str]] = {"format": "e4m3", "ef": "1"}

    def __init__(self, dtype: str = "float32", *, format_: str = "e4m3", ef: bool = True) -> None:
        super().__init__(dtype, ef=ef)
        self._format = format_
        self.top_code = FORMATS[format_][2]
        self.unbiased = not ef
        if format_ == "e5m2":
            self.codec_id = 10

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        given = with_defaults(cls, parameters)
        format_ = read_choice(cls, "format", given["format"], tuple(FORMATS))
        return cls(dtype, format_=format_, ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        return ({} if self._format == "e4m3" else {"format": self._format}) | super().parameters

    def contraction(self, numel: int) -> float | None:
        """Normal values are rounded by at most 2**-(mantissa bits + 1) of themselves, the others as multiples of the smallest one are."""
        if not self.feedback:
            return None
        mantissa, bias, top = FORMATS[self._format]
        return min(1 - 4.0 ** -(mantissa + 1), rounding_contraction(top * 2.0 ** (bias + mantissa - 1), min(numel, self.block)))

    def code_helpers(self) -> CodeHelpers:
        return _codes(self._format, random=not self.feedback)

    def reference_codes(self, scaled: F32, random: F32 | None) -> Array:
        table = reference_table(self._format)
        size = np.minimum(np.abs(scaled), np.float32(self.top_code))
        above = np.minimum(np.searchsorted(table, size, side="right"), 127)
        below = above - 1
        gap = table[above] - table[below]
        share = (size - table[below]) / gap
        if random is None:
            up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))
        else:
            parts = np.float64(2.0 ** (23 - FORMATS[self._format][0]))  # of a gap, that float32 tells apart among normal values
            normal = below >= 1 << FORMATS[self._format][0]
            up = np.where(normal, np.floor(random * parts) / parts + share >= 1, random < share)
        codes = np.where(size == table[below], below, below + up)
        return np.where(np.signbit(scaled), codes - 128, codes)

    def reference_values(self, codes: Array) -> F32:
        unsigned = codes.astype(np.int16) & 0x7F
        return np.asarray(np.where(codes < 0, -1, 1).astype(np.float32) * reference_table(self._format)[unsigned], np.float32)
