"""Counter-based random numbers in Triton: the streams of ``psgc.codecs.common.streams``, number for number."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_draws(words, first, before, between):
    """The stream's position and two keys, uint32: from ``words``, int64 [3], unless it is None."""
    if words is None:
        return first.to(tl.uint32, bitcast=True), before.to(tl.uint32, bitcast=True), between.to(tl.uint32, bitcast=True)
    else:
        return tl.load(words).to(tl.uint32), tl.load(words + 1).to(tl.uint32), tl.load(words + 2).to(tl.uint32)


@triton.jit
def random_word(index, before, between):
    """32 random bits for each index; all are uint32."""
    h = index + before
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ between ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def random_uniform(index, before, between):
    """Uniform multiples of 2**-24 in [0, 1), float32."""
    return uniform_of(random_word(index, before, between))


@triton.jit
def uniform_of(word):
    """The number in [0, 1) that is drawn with these bits."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
