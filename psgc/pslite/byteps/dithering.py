"""BytePS's dithering: elements rounded at random to a few levels, those above zero sent with the gaps between them, in Elias's delta code.

A payload is a stream of bits in words of 32, the first bit of each highest; then a word with the number of bits, and a float32 scale. For each element that
is not zero the stream holds the distance from the last one, a sign (1: negative) and the level. The scale is max |x| or the l2 norm. Linear levels are
0, 1/s, ..., 1 times the scale; natural ones 0 and the powers of two from 2^(1 - s) to 1.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import BOOL, I64, OUT_F32, SCALAR_F32, helper, kernel
from psgc.errors import CodecError, PayloadError
from psgc.pslite.byteps.compressor import F32, Compressor
from psgc.pslite.byteps.random import STATE_TYPE, draw, new_state

_U32S: Final = types.Array(types.uint32, 1, "C")
_IN_U32S: Final = types.Array(types.uint32, 1, "C", readonly=True)
_IN_F32: Final = types.Array(types.float32, 1, "C", readonly=True)
_RANGE: Final = 18446744073709551616.0  # of a draw
MAX_LINEAR: Final = 1 << 20
MAX_NATURAL: Final = 24


@helper
def _put(words: Any, at: Any, bit: Any) -> Any:
    """Write one bit; returns where the next one goes. Words are zero before. Beyond the end only the count goes on."""
    word = at >> 5
    if bit and word < words.size:
        words[word] |= np.uint32(1) << np.uint32(31 - (at & 31))
    return at + 1


@helper
def _put_delta(words: Any, at: Any, x: Any) -> Any:
    """Elias's delta code of x >= 1."""
    length, rest = 0, x
    while rest:
        length, rest = length + 1, rest >> 1
    width, rest = -1, length
    while rest:
        width, rest = width + 1, rest >> 1
    at += width
    for i in range(width, -1, -1):
        at = _put(words, at, length >> i & 1)
    for i in range(length - 2, -1, -1):
        at = _put(words, at, x >> i & 1)
    return at


@helper
def _power_below(ceiling: Any) -> Any:
    """Half of the power of two that is not below ``ceiling``, rounded down."""
    power = 1
    while power < ceiling:
        power *= 2
    return power >> 1 if ceiling > 0 else 0


@kernel(I64(_IN_F32, types.float64, I64, BOOL, STATE_TYPE, _U32S))
def _encode(values: Any, scale: Any, levels: Any, natural: Any, state: Any, words: Any) -> Any:
    at: Any = 0
    last: Any = -1
    for i in range(values.size):
        magnitude = np.float64(abs(values[i]))
        if natural:
            normalized = magnitude / scale * levels
            lower = _power_below(math.ceil(normalized))
            step = lower if lower else 1
            share = (normalized - lower) / step
        else:
            rounded = np.float32(magnitude / scale * levels)
            lower, step = math.floor(rounded), 1
            share = np.float64(rounded - np.float32(lower))
        level = lower + (step if np.float64(draw(state)) < share * _RANGE else 0)
        if level:
            at = _put_delta(words, at, i - last)
            at = _put(words, at, np.signbit(values[i]))
            at = _put_delta(words, at, level)
            last = i
    return at


@helper
def _bit(words: Any, at: Any) -> Any:
    return words[at >> 5] >> np.uint32(31 - (at & 31)) & np.uint32(1)


@helper
def _get_delta(words: Any, at: Any, end: Any) -> Any:
    """A number, and where the next one begins; 0 for none. end: where the bits end."""
    width = 0
    while at < end and not _bit(words, at):
        width, at = width + 1, at + 1
    if width > 5 or at + width + 1 > end:
        return 0, end
    at += 1
    length: Any = 1
    for _ in range(width):
        length, at = length << 1 | np.int64(_bit(words, at)), at + 1
    if length > 40 or at + length - 1 > end:
        return 0, end
    number: Any = 1
    for _ in range(length - 1):
        number, at = number << 1 | np.int64(_bit(words, at)), at + 1
    return number, at


@kernel(BOOL(_IN_U32S, I64, SCALAR_F32, I64, OUT_F32))
def _decode(words: Any, bits: Any, scale: Any, levels: Any, out: Any) -> Any:
    """False for a stream that ends early, or goes beyond the part."""
    at: Any = 0
    last: Any = -1
    while at < bits:
        gap, at = _get_delta(words, at, bits)
        last += gap
        if not gap or last >= out.size or at >= bits:
            return False
        negative = _bit(words, at)
        level, at = _get_delta(words, at + 1, bits)
        if not level:
            return False
        value = np.float32(level) * scale / np.float32(levels)
        out[last] = -value if negative else value
    return True


class Dithering(Compressor):
    """s: levels. natural, l2: see the module's text. seed: 0 for none."""

    def __init__(self, numel: int, s: int, natural: bool, l2: bool, seed: int) -> None:
        super().__init__(numel)
        most = MAX_NATURAL if natural else MAX_LINEAR
        if not 1 <= s <= most:
            raise CodecError(f"compressor_k={s} of dithering: expected 1 to {most} levels")
        self._levels = 1 << s - 1 if natural else s
        self._natural, self._l2 = natural, l2
        self._state = new_state(seed)

    def encode(self, values: F32) -> bytes:
        scale = math.sqrt((values * values).sum(dtype=np.float64)) if self._l2 else float(np.abs(values).max(initial=0))
        words = np.zeros(max(self.numel - 2, 0), np.uint32)
        bits = 0
        if scale > 0 and math.isfinite(scale):
            bits = _encode(values, scale, self._levels, self._natural, self._state, words)
        else:
            draws = np.empty(0, np.uint32)  # BytePS divides by zero here; nothing is sent, and as much is drawn
            _encode(np.zeros_like(values), 1.0, self._levels, self._natural, self._state, draws)
        count = math.ceil(np.float32(bits) / np.float32(32))  # as BytePS has it
        if bits > 32 * words.size or 32 * count < bits:
            raise CodecError(
                f"dithering of {self.numel} elements takes {bits} bits: more than the elements themselves, or than BytePS can count; use fewer "
                f"levels, or smaller parts (BYTEPS_PARTITION_BYTES)"
            )
        return words[:count].tobytes() + np.uint32(bits).tobytes() + np.float32(scale).tobytes()

    def decode(self, payload: bytes | memoryview) -> F32:
        out = np.zeros(self.numel, np.float32)
        words = len(payload) // 4 - 2
        if len(payload) % 4 or words < 0:
            raise PayloadError(f"a dithering payload of {len(payload)} bytes; expected words of 4, a count of bits and a scale")
        bits = int(np.frombuffer(payload, "<u4", 1, 4 * words)[0])
        scale = np.frombuffer(payload, "<f4", 1, 4 * words + 4)[0]
        if bits > 32 * words or not _decode(np.frombuffer(payload, "<u4", words), bits, scale, self._levels, out):
            raise PayloadError(f"a dithering payload of {bits} bits in {words} words goes beyond its part of {self.numel} elements")
        return out
