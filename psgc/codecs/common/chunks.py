"""Makes a codec from two helpers: one writes a chunk of elements to the payload, the other reads it back.

Owns the passes over a part that every such codec needs (encode, decode, sum, mean, residual), a chunk at a time, so that
intermediate values stay in the L1 cache. A chunk is at most 4096 elements that begin at a multiple of 4096 of the part; the elements that
share a scale, a codec's *block*, lie within one chunk. Does not know payload layouts. A codec gives a ``ChunkFormat`` of helpers:

    write(p, payload, numel, start, settings, draws) -> bool
        Write elements ``[start, start + p.size)`` to the whole part's ``payload``; returns whether all of p is finite. Leaves p as it is.
    read(payload, numel, start, settings, out) -> None
        out <- the elements from ``start`` on.
    fold_four(payloads, numel, start, settings, total, first) -> None
        total becomes, or (not first) grows by, the elements of four payloads from ``start`` on, left to right.
    take_away(payload, numel, start, settings, p, kept) -> None
        kept <- p - the elements from ``start`` on; may be the same memory.

By default, the last two are made from ``read``; a format may have faster ones. ``settings`` is the codec's float32 array of parameters.
``draws`` are three uint32: the index of the chunk's first element in its random stream, and the stream's two keys, as
``streams.uniform`` takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import borrowed
from psgc.codecs.common.feedback import CHUNK, NO_RESIDUAL, FeedbackCodec, corrected_chunk, mean_corrected_chunk
from psgc.codecs.common.payloads import MAX_PAYLOADS, eight
from psgc.codecs.common.streams import stream_position
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, helper, kernel

NO_SETTINGS: Final[F32] = np.empty(0, np.float32)
NO_DRAWS: Final = np.zeros(3, np.uint32)
IN_DRAWS: Final = types.Array(types.uint32, 1, "C", readonly=True)


class ChunkKernels(NamedTuple):
    """Compiled for one format. ``write`` encodes what is given, or the mean of a sum; ``serve`` folds and writes a whole part."""

    write: Any
    decode: Any
    fold: Any
    commit: Any


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """A layout's helpers (see the module's text)."""

    write: Callable[..., Any]
    read: Callable[..., Any]
    fold_four: Callable[..., Any] | None = None
    take_away: Callable[..., Any] | None = None


def _four_by_reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @helper
    def fold_four(payloads: Any, numel: Any, start: Any, settings: Any, total: Any, first: Any) -> None:
        term = np.empty(total.size, np.float32)
        for k in range(4):
            if first and k == 0:
                read(payloads[0], numel, start, settings, total)
            else:
                read(payloads[k], numel, start, settings, term)
                for i in range(total.size):
                    total[i] += term[i]

    return fold_four


def _left_by_reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @helper
    def take_away(payload: Any, numel: Any, start: Any, settings: Any, p: Any, kept: Any) -> None:
        sent = np.empty(p.size, np.float32)
        read(payload, numel, start, settings, sent)
        for i in range(p.size):
            kept[i] = p[i] - sent[i]

    return take_away


@functools.cache
def _adder(format_: ChunkFormat) -> Callable[..., Any]:
    read, fold_four = format_.read, format_.fold_four or _four_by_reading(format_.read)

    @helper
    def add_up(payloads: Any, count: Any, numel: Any, start: Any, settings: Any, total: Any, term: Any) -> None:
        """total <- the sum of the first ``count`` payloads' elements from ``start`` on."""
        done = 1
        if count >= 4:  # constant indices: a switch over eight arrays is slow
            fold_four((payloads[0], payloads[1], payloads[2], payloads[3]), numel, start, settings, total, True)
            done = 4
            if count == 8:
                fold_four((payloads[4], payloads[5], payloads[6], payloads[7]), numel, start, settings, total, False)
                done = 8
        else:
            read(payloads[0], numel, start, settings, total)
        for k in range(done, count):
            read(payloads[k], numel, start, settings, term)
            for i in range(total.size):
                total[i] += term[i]

    return add_up


@functools.cache
def _chunk_writer(format_: ChunkFormat) -> Callable[..., Any]:
    write, take_away = format_.write, format_.take_away or _left_by_reading(format_.read)

    @helper
    def write_chunk(
        values: Any, divisor: Any, residual: Any, rescale: Any, p: Any, kept: Any, out: Any, numel: Any, start: Any, settings: Any, draws: Any
    ) -> Any:  # fmt: skip
        """p <- values / divisor + rescale * residual, written to its place in ``out``; kept <- what that leaves out."""
        mean_corrected_chunk(values, divisor, residual, rescale, p)
        finite = write(p, out, numel, start, settings, draws)
        if kept.size:
            take_away(out, numel, start, settings, p, kept)
        return finite

    return write_chunk


@functools.cache
def chunk_kernels(format_: ChunkFormat) -> ChunkKernels:
    """Compile the format's kernels, or load them from the cache."""
    read, take_away = format_.read, format_.take_away or _left_by_reading(format_.read)
    add_up, write_chunk = _adder(format_), _chunk_writer(format_)

    @kernel(BOOL(IN_F32, I64, I64, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32, IN_F32, IN_DRAWS, OUT_BYTES))
    def write(
        values: Any, numel: Any, lo: Any, divisor: Any, residual: Any, rescale: Any, kept: Any, settings: Any, draws: Any, out: Any
    ) -> bool:  # fmt: skip
        p, finite = np.empty(CHUNK, np.float32), True
        for start in range(0, values.size, CHUNK):
            v, old, new = values[start : start + CHUNK], residual[start : start + CHUNK], kept[start : start + CHUNK]
            here = (np.uint32(draws[0] + np.uint32(start)), draws[1], draws[2])
            finite &= write_chunk(v, divisor, old, rescale, p[: v.size], new, out, numel, lo + start, settings, here)
        return finite

    @kernel(types.void(IN_BYTES, I64, I64, IN_F32, OUT_F32))
    def decode(payload: Any, numel: Any, lo: Any, settings: Any, out: Any) -> None:
        for start in range(0, out.size, CHUNK):
            read(payload, numel, lo + start, settings, out[start : start + CHUNK])

    @kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, I64, IN_F32, OUT_F32, BOOL))
    def fold(
        a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, lo: Any, settings: Any, acc: Any,
        fresh: Any,
    ) -> None:  # fmt: skip
        payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
        scratch, sent = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
        for start in range(0, acc.size, CHUNK):
            chunk = acc[start : start + CHUNK]
            total = chunk if fresh else scratch[: chunk.size]
            add_up(payloads, count, numel, lo + start, settings, total, sent[: chunk.size])
            if not fresh:
                for i in range(chunk.size):
                    chunk[i] += total[i]

    @kernel(types.void(IN_BYTES, I64, I64, IN_F32, IN_F32, OUT_F32, SCALAR_F32))
    def commit(payload: Any, numel: Any, lo: Any, settings: Any, grad: Any, residual: Any, rescale: Any) -> None:
        p = np.empty(CHUNK, np.float32)
        for start in range(0, grad.size, CHUNK):
            g, r = grad[start : start + CHUNK], residual[start : start + CHUNK]
            corrected_chunk(g, r, rescale, p[: g.size])
            take_away(payload, numel, lo + start, settings, p[: g.size], r)

    return ChunkKernels(write, decode, fold, commit)


@functools.cache
def serving_kernel(format_: ChunkFormat) -> Any:
    """Fold and finish of a whole part in one pass, with sums that stay in cache."""
    add_up, write_chunk = _adder(format_), _chunk_writer(format_)

    @kernel(BOOL(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32, IN_F32, IN_DRAWS, OUT_BYTES))
    def serve(
        a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any,
        divisor: Any, residual: Any, rescale: Any, kept: Any, settings: Any, draws: Any, out: Any,
    ) -> bool:  # fmt: skip
        payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
        sums, p, sent, finite = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), True
        for start in range(0, numel, CHUNK):
            size = min(CHUNK, numel - start)
            old, new = residual[start : start + CHUNK], kept[start : start + CHUNK]
            here = (np.uint32(draws[0] + np.uint32(start)), draws[1], draws[2])
            add_up(payloads, count, numel, start, settings, sums[:size], sent[:size])
            finite &= write_chunk(sums[:size], divisor, old, rescale, p[:size], new, out, numel, start, settings, here)
        return finite

    return serve


class ChunkCodec(FeedbackCodec):
    """A codec made of a ``ChunkFormat``. Subclasses give the payload's size, its checks, its reference and the format."""

    settings: F32 = NO_SETTINGS

    @property
    def chunk_format(self) -> ChunkFormat:
        raise NotImplementedError

    def draws(self, stream: Stream, lo: int) -> NDArray[np.uint32]:
        """What ``write`` gets for a slice that begins at the part's element ``lo``."""
        return np.array(stream_position(stream, lo), np.uint32)

    @functools.cached_property
    def _kernels(self) -> ChunkKernels:
        return chunk_kernels(self.chunk_format)

    def warm(self) -> None:
        _ = self._kernels, serving_kernel(self.chunk_format)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        old, numel = NO_RESIDUAL if residual is None else residual, grad.size
        finite = self._kernels.write(grad, numel, 0, 1.0, old, rescale, NO_RESIDUAL, self.settings, self.draws(stream, 0), out)
        return Encoded(self.payload_bound(numel), not finite)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        finite = self._kernels.write(acc, numel, lo, divisor, old, rescale, new, self.settings, self.draws(stream, lo), out)
        return Encoded(self.payload_bound(numel), not finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        self._kernels.decode(payload, numel, lo, self.settings, out)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        self._kernels.fold(*eight(payloads), len(payloads), numel, lo, self.settings, acc, fresh)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded | None:  # fmt: skip
        if not payloads or len(payloads) > MAX_PAYLOADS or push.canonical != self.canonical:
            return None
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        serve = serving_kernel(self.chunk_format)
        finite = serve(
            *eight(payloads), len(payloads), numel, divisor, old, rescale, new, self.settings, self.draws(stream, 0), out
        )  # fmt: skip
        return Encoded(self.payload_bound(numel), not finite)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        self._kernels.commit(payload, numel, lo, self.settings, grad, residual, rescale)
