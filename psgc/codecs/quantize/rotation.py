"""Randomised Hadamard rotation: `int8` and `int4` of rotated values (``rotate=1``).

Each whole group of 1024 elements of a part is replaced by q = H (s * p) / 32, where H is the Walsh-Hadamard matrix of order 1024 in
natural order and s are fixed signs; q is then encoded by the codec, and decoding computes p = s * (H q / 32). Elements after the last
whole group of the part are not rotated. The rotation spreads a few large elements over their group, so that heavy-tailed values
have the error of Gaussian ones.

Owns the transform. H is ten stages of sums and differences of pairs, at distances 1, 2, 4, ... 512, each rounded to float32. The sign
of an element is + where bit 0 of the lowbias32 hash of its index in its chunk of 4096 is clear: the same on all ranks, in all steps, and
wherever a bucket is cut. A rotated value that overflows counts as an infinity in the block of codes that it falls in.
Source: Suresh et al. 2017 (rotated quantisation), section 3; Hadamard rotation in SDP4Bit, Jia et al. 2024.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from psgc.codecs.codec import BLOCK, F32
from psgc.codecs.common.bits import top_bits, view_f32
from psgc.codecs.common.chunks import ChunkFormat
from psgc.codecs.jit.kernel import helper

GROUP: Final = 1024  # elements that are rotated together
_STAGES: Final = 10
_SCALE: Final = np.float32(2.0**-5)  # 1 / sqrt(1024), which makes H orthonormal; exact
_INFINITY_BITS: Final = np.uint32(0x7F800000)
_QUARTER: Final = GROUP // 4


def _signs() -> F32:
    """The signs of a chunk's elements."""
    h = np.arange(BLOCK, dtype=np.uint32)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.where((h ^ (h >> np.uint32(16))) & np.uint32(1), np.float32(-1), np.float32(1))


SIGNS: Final = _signs()


def reference_hadamard(groups: F32) -> F32:
    """H times each row of float32 [rows, 1024]."""
    x = groups
    for stage in range(_STAGES):
        pairs = x.reshape(len(groups), -1, 2, 1 << stage)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(groups.shape)
    return x


def reference_rotated(p: F32, inverse: bool) -> F32:
    """The part's elements, rotated or rotated back."""
    whole = p.size - p.size % GROUP
    if not whole:
        return p
    signs = np.resize(SIGNS, whole).reshape(-1, GROUP)
    groups = p[:whole].reshape(-1, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        turned = reference_hadamard(groups * _SCALE) * signs if inverse else reference_hadamard(groups * (signs * _SCALE))
    return np.concatenate([turned.reshape(-1), p[whole:]])


@helper
def _two_stages(x: Any, y: Any) -> None:
    """Two stages of H in one pass. Neighbours are combined and dealt out to the four quarters, which brings the next pairs together."""
    for i in range(_QUARTER):
        a, b, c, d = x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]
        up, down, upper, lower = a + b, a - b, c + d, c - d
        y[i], y[i + _QUARTER] = up + upper, down + lower
        y[i + 2 * _QUARTER], y[i + 3 * _QUARTER] = up - upper, down - lower


@helper
def _hadamard(x: Any, y: Any) -> None:
    """y <- H x for one group, both views; overwrites x."""
    for _ in range(_STAGES // 2):  # an odd number of passes; a loop, for each copy of the pass is compiled anew
        _two_stages(x, y)
        x, y = y, x


@functools.cache
def rotated_format(inner: ChunkFormat) -> ChunkFormat:
    """The format that writes rotated chunks as ``inner`` writes chunks."""
    inner_write, inner_read = inner.write, inner.read

    @helper
    def write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, draws: Any) -> Any:
        turned, memory = np.empty(BLOCK, np.float32), np.empty(GROUP, np.float32)
        scratch = view_f32(memory, 0, GROUP)
        whole = p.size - p.size % GROUP
        for low in range(0, whole, GROUP):
            source, target = view_f32(p, low, GROUP), view_f32(turned, low, GROUP)
            for i in range(GROUP):
                scratch[i] = source[i] * (SIGNS[low + i] * _SCALE)
            _hadamard(scratch, target)
        for i in range(whole, p.size):
            turned[i] = p[i]
        inner_write(turned[: p.size], payload, numel, start, settings, draws)
        return top_bits(p) < _INFINITY_BITS

    @helper
    def read(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
        memory = np.empty(GROUP, np.float32)
        scratch = view_f32(memory, 0, GROUP)
        inner_read(payload, numel, start, settings, out)
        for low in range(0, out.size - out.size % GROUP, GROUP):
            target = view_f32(out, low, GROUP)
            for i in range(GROUP):
                scratch[i] = target[i] * _SCALE
            _hadamard(scratch, target)
            for i in range(GROUP):
                target[i] *= SIGNS[low + i]

    return ChunkFormat(write, read)
