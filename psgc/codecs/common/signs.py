"""Signs alone: every element as -1 or +1, one bit each, without a scale.

| offset | type                   | meaning                                                             |
|--------|------------------------|---------------------------------------------------------------------|
| 0      | u8 [ceil(numel / 8)]   | signs, least significant bit first, 1 = p < 0; pad bits are zero    |

Owns these bytes, which several codecs share, and how they are written and read. Zeros of either sign count as positive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, Array, Bytes, Stream
from psgc.codecs.common.bits import (
    INFINITY_BITS,
    add_signed_sum,
    borrowed,
    magnitude_mask,
    negative_mask,
    set_signed_sum,
    top_bits,
    view_f32,
    view_u8,
    view_u32,
    view_u64,
)
from psgc.codecs.common.chunks import ChunkCodec, ChunkFormat
from psgc.codecs.common.feedback import CHUNK
from psgc.codecs.common.payloads import MAX_PAYLOADS, check_size, eight
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, OUT_F32, helper, kernel
from psgc.errors import PayloadError

_ONE: Final = np.float32(1)


def reference_signs(p: F32) -> bytes:
    """The sign bits of p."""
    return np.packbits(p < 0, bitorder="little").tobytes()


def reference_elements(payload: bytes, numel: int) -> F32:
    """Elements of a payload."""
    negative = np.unpackbits(np.frombuffer(payload, np.uint8), count=numel, bitorder="little")
    return np.where(negative == 1, -_ONE, _ONE)


def check_pads(name: str, signs: Bytes, numel: int) -> None:
    """Raise PayloadError unless the pad bits after ``numel`` signs are zero."""
    if numel % 8 and signs[-1] >> numel % 8:
        raise PayloadError(f"{name} payload of {numel} elements has pad bits set in its last byte {signs[-1]:#04x}")


@helper
def _signs_at(payload: Any, start: Any, count: Any) -> Any:
    return view_u8(payload, start // 8, -(-count // 8))


@helper
def _sign(signs: Any, i: Any) -> Any:
    return -_ONE if (signs[i // 8] >> (i % 8)) & 1 else _ONE


@helper
def _write(p: Any, payload: Any, numel: Any, start: Any, settings: Any, draws: Any) -> Any:
    signs = _signs_at(payload, start, p.size)
    words, nonfinite = view_u64(signs, 0, p.size // 64), np.uint64(0)
    for i in range(words.size):
        negative = negative_mask(p, 64 * i)
        nonfinite |= magnitude_mask(p, 64 * i, INFINITY_BITS)
        words[i] = negative
    for i in range(8 * words.size, signs.size):
        signs[i] = np.uint8(0)
    for i in range(64 * words.size, p.size):
        if p[i] < 0:
            signs[i // 8] |= np.uint8(1 << (i % 8))
    return nonfinite == 0 and top_bits(view_f32(p, 64 * words.size, p.size % 64)) < INFINITY_BITS


@helper
def _read(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
    signs = _signs_at(payload, start, out.size)
    words = view_u32(signs, 0, out.size // 32)
    for i in range(words.size):
        set_signed_sum(out, 32 * i, out, (words[i],), (_ONE,))
    for i in range(32 * words.size, out.size):
        out[i] = _sign(signs, i)


_FORMAT: Final = ChunkFormat(_write, _read)


@helper
def _add_four(payloads: Any, count: Any, start: Any, total: Any, fresh: Any) -> None:
    """total becomes, or grows by, the signs of the first ``count`` of four payloads; the other payloads are ignored."""
    times = (np.float32(count > 0), np.float32(count > 1), np.float32(count > 2), np.float32(count > 3))
    a, b, c, d = payloads
    a, b = _signs_at(a, start, total.size), _signs_at(b, start, total.size)
    c, d = _signs_at(c, start, total.size), _signs_at(d, start, total.size)
    words = total.size // 32
    wa, wb, wc, wd = view_u32(a, 0, words), view_u32(b, 0, words), view_u32(c, 0, words), view_u32(d, 0, words)
    if fresh:
        for i in range(words):
            set_signed_sum(total, 32 * i, total, (wa[i], wb[i], wc[i], wd[i]), times)
    else:
        for i in range(words):
            add_signed_sum(total, 32 * i, total, (wa[i], wb[i], wc[i], wd[i]), times)
    for i in range(32 * words, total.size):
        votes = _sign(a, i) * times[0] + _sign(b, i) * times[1] + _sign(c, i) * times[2] + _sign(d, i) * times[3]
        total[i] = votes if fresh else total[i] + votes


@functools.cache
def _fold_kernel() -> Any:
    """The sum of signs, compiled or loaded from the cache. Four payloads at once in registers: small whole numbers add up in any order."""

    @kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, OUT_F32, BOOL))
    def fold(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, lo: Any, acc: Any, fresh: Any) -> None:
        first, second = borrowed(a, b, c, d), borrowed(e, f, g, h)
        scratch = np.empty(CHUNK, np.float32)
        for start in range(0, acc.size, CHUNK):
            chunk = acc[start : start + CHUNK]
            total = chunk if fresh else scratch[: chunk.size]
            _add_four(first, count, lo + start, total, True)
            if count > 4:
                _add_four(second, count - 4, lo + start, total, False)
            if not fresh:
                for i in range(chunk.size):
                    chunk[i] += total[i]

    return fold


class SignsCodec(ChunkCodec):
    """1 bit an element. No feedback: -1 and +1 may be further from an element than zero is, so the residual may grow in each step."""

    fixed_size = True

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__(dtype, ef=False)

    @property
    def chunk_format(self) -> ChunkFormat:
        return _FORMAT

    def warm(self) -> None:
        super().warm()
        _fold_kernel()

    def payload_bound(self, numel: int) -> int:
        return -(-numel // 8)

    def validate(self, payload: Bytes, numel: int) -> None:
        check_size(self.name, payload, numel, self.payload_bound(numel))
        check_pads(self.name, payload, numel)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        _fold_kernel()(*eight(payloads), len(payloads), lo, acc, fresh)

    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        return reference_signs(p)

    def reference_elements(self, payload: bytes, numel: int) -> Array:
        return reference_elements(payload, numel)
