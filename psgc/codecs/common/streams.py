"""Counter-based random streams: element i of a bucket draws the i-th number, whatever the cuts, threads or device.

Owns the hash and its keys. Two 32-bit keys come from (seed, step, rank, layout and bucket) by splitmix64; an element's number is a 32-bit
finaliser over its index, keyed before and between its two multiplications, so that two streams are not shifts of one another.
Indices count modulo 2**32: a bucket of 16 GiB of fp32 would see its numbers a second time.

Source: Steele, Lea and Flood 2014 (splitmix64); C. Wellons, "Prospecting for hash functions", 2018 (multipliers of lowbias32);
Salmon et al. 2011 for counter-based streams.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Stream
from psgc.codecs.jit.kernel import helper

_WORD: Final = 0xFFFFFFFF
_LONG: Final = 0xFFFFFFFFFFFFFFFF
_UNIT: Final = np.float32(2.0**-24)


def keys(stream: Stream) -> tuple[int, int]:
    """The stream's two 32-bit keys."""
    state = 0
    for part in (stream.seed, stream.step, stream.rank, stream.layout << 32 | stream.bucket):
        state = splitmix((state ^ part) & _LONG)
    return state & _WORD, state >> 32


def stream_position(stream: Stream, lo: int) -> tuple[int, int, int]:
    """What kernels draw from: the index of the part's element ``lo`` in the stream, modulo 2**32, and the stream's two keys."""
    return ((stream.first + lo) & _WORD, *keys(stream))


def splitmix(state: int) -> int:
    """The next 64-bit number after this one."""
    state = (state + 0x9E3779B97F4A7C15) & _LONG
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _LONG
    return state ^ (state >> 31)


def reference_words(stream: Stream, lo: int, count: int) -> NDArray[np.uint32]:
    """32 random bits for each of ``count`` elements of the part, from element ``lo`` on."""
    first = (stream.first + lo) & _WORD
    indices = np.arange(first, first + count, dtype=np.uint64) & np.uint64(_WORD)
    return reference_hash(indices.astype(np.uint32), *keys(stream))


def reference_hash(indices: NDArray[np.uint32], before: int, between: int) -> NDArray[np.uint32]:
    """32 random bits for each index of the stream that has these keys."""
    h = indices + np.uint32(before)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ np.uint32(between) ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(h ^ (h >> np.uint32(16)), np.uint32)


def reference_uniform(stream: Stream, lo: int, count: int) -> F32:
    """Uniform multiples of 2**-24 in [0, 1), one an element."""
    return np.asarray((reference_words(stream, lo, count) >> np.uint32(8)).astype(np.float32) * _UNIT, np.float32)


@helper
def word(index: Any, before: Any, between: Any) -> Any:
    """The same 32 random bits in kernels; all three are uint32."""
    h = np.uint32(index + before)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ between ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@helper
def uniform(index: Any, before: Any, between: Any) -> Any:
    """The same uniform number in kernels; all three are uint32."""
    return np.float32(np.int32(word(index, before, between) >> np.uint32(8))) * _UNIT
