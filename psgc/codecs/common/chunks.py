"""All five kernels of a block codec from the two functions that make it: write a block, read a block.

Owns the passes: feedback, means, sums and what is left over, a cache-sized block at a time, with the arithmetic of ``feedback``. Knows
no payload layout. A block here is at most 4096 elements that begin at a multiple of 4096 of the part; a codec's own groups (the
elements that share a scale) lie within it.

    write(p, payload, numel, start, settings, index, before, between) -> bool
        Write elements ``[start, start + p.size)`` of the whole part's ``payload``; returns whether all of p is finite. Leaves p as it is.
    read(payload, numel, start, settings, out) -> None
        out <- the elements from ``start`` on.
    fold_four(payloads, numel, start, settings, total, first) -> None
        total becomes, or (not first) grows by, the elements of four payloads from ``start`` on, left to right.
    take_away(payload, numel, start, settings, p, kept) -> None
        kept <- p - the elements from ``start`` on; may be the same memory.

The last two follow from ``read``; a format has its own where that is faster.

``settings`` is the codec's float32 array of parameters; ``index``, ``before`` and ``between`` (uint32) are what ``streams.uniform``
takes: the index of the block's first element in its stream, and the stream's two keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.codec import BLOCK, F32, Array, Bytes, Codec, Encoded, Stream
from psgc.codecs.common.bits import borrowed
from psgc.codecs.common.feedback import NO_RESIDUAL, FeedbackCodec, corrected_block, mean_corrected_block
from psgc.codecs.common.payloads import MAX_PAYLOADS, eight
from psgc.codecs.common.streams import keys
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, U32, helper, kernel

NO_SETTINGS: Final[F32] = np.empty(0, np.float32)


class BlockKernels(NamedTuple):
    """Compiled for one format."""

    encode: Any
    finish: Any
    decode: Any
    fold: Any
    commit: Any


@dataclass(frozen=True, slots=True)
class BlockFormat:
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
def _adder(format_: BlockFormat) -> Callable[..., Any]:
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
def block_kernels(format_: BlockFormat) -> BlockKernels:
    """Compile the format's kernels, or load them from the cache."""
    write, read = format_.write, format_.read
    take_away = format_.take_away or _left_by_reading(read)
    add_up = _adder(format_)

    @kernel(BOOL(IN_F32, IN_F32, SCALAR_F32, IN_F32, U32, U32, U32, OUT_BYTES))
    def encode(grad: Any, residual: Any, rescale: Any, settings: Any, index: Any, before: Any, between: Any, out: Any) -> bool:
        p, finite = np.empty(BLOCK, np.float32), True
        for start in range(0, grad.size, BLOCK):
            g = grad[start : start + BLOCK]
            block = p[: g.size]
            corrected_block(g, residual[start : start + BLOCK], rescale, block)
            finite &= write(block, out, grad.size, start, settings, np.uint32(index + np.uint32(start)), before, between)
        return finite

    @kernel(BOOL(IN_F32, I64, I64, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, IN_F32, U32, U32, U32, OUT_BYTES))
    def finish(
        acc: Any, numel: Any, lo: Any, divisor: Any, residual: Any, residual_out: Any, rescale: Any, settings: Any,
        index: Any, before: Any, between: Any, out: Any,
    ) -> bool:  # fmt: skip
        p, finite = np.empty(BLOCK, np.float32), True
        for start in range(0, acc.size, BLOCK):
            a, kept = acc[start : start + BLOCK], residual_out[start : start + BLOCK]
            block = p[: a.size]
            mean_corrected_block(a, divisor, residual[start : start + BLOCK], rescale, block)
            finite &= write(block, out, numel, lo + start, settings, np.uint32(index + np.uint32(start)), before, between)
            if kept.size:
                take_away(out, numel, lo + start, settings, block, kept)
        return finite

    @kernel(types.void(IN_BYTES, I64, I64, IN_F32, OUT_F32))
    def decode(payload: Any, numel: Any, lo: Any, settings: Any, out: Any) -> None:
        for start in range(0, out.size, BLOCK):
            read(payload, numel, lo + start, settings, out[start : start + BLOCK])

    @kernel(types.void(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, I64, IN_F32, OUT_F32, BOOL))
    def fold(
        a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, lo: Any, settings: Any, acc: Any,
        fresh: Any,
    ) -> None:  # fmt: skip
        payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
        scratch, sent = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for start in range(0, acc.size, BLOCK):
            block = acc[start : start + BLOCK]
            total = block if fresh else scratch[: block.size]
            add_up(payloads, count, numel, lo + start, settings, total, sent[: block.size])
            if not fresh:
                for i in range(block.size):
                    block[i] += total[i]

    @kernel(types.void(IN_BYTES, I64, I64, IN_F32, IN_F32, OUT_F32, SCALAR_F32))
    def commit(payload: Any, numel: Any, lo: Any, settings: Any, grad: Any, residual: Any, rescale: Any) -> None:
        p = np.empty(BLOCK, np.float32)
        for start in range(0, grad.size, BLOCK):
            g, r = grad[start : start + BLOCK], residual[start : start + BLOCK]
            block = p[: g.size]
            corrected_block(g, r, rescale, block)
            take_away(payload, numel, lo + start, settings, block, r)

    return BlockKernels(encode, finish, decode, fold, commit)


@functools.cache
def serving_kernel(format_: BlockFormat) -> Any:
    """Fold and finish of a whole part in one pass, with sums that stay in cache."""
    write, take_away, add_up = format_.write, format_.take_away or _left_by_reading(format_.read), _adder(format_)

    @kernel(
        BOOL(*[IN_BYTES] * MAX_PAYLOADS, I64, I64, SCALAR_F32, IN_F32, OUT_F32, SCALAR_F32, IN_F32, U32, U32, U32, OUT_BYTES)
    )  # fmt: skip
    def serve(
        a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, count: Any, numel: Any, divisor: Any, residual: Any,
        residual_out: Any, rescale: Any, settings: Any, index: Any, before: Any, between: Any, out: Any,
    ) -> bool:  # fmt: skip
        payloads = (*borrowed(a, b, c, d), *borrowed(e, f, g, h))
        sums, p, sent, finite = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), True
        for start in range(0, numel, BLOCK):
            size = min(BLOCK, numel - start)
            total, block, kept = sums[:size], p[:size], residual_out[start : start + BLOCK]
            add_up(payloads, count, numel, start, settings, total, sent[:size])
            mean_corrected_block(total, divisor, residual[start : start + BLOCK], rescale, block)
            finite &= write(block, out, numel, start, settings, np.uint32(index + np.uint32(start)), before, between)
            if kept.size:
                take_away(out, numel, start, settings, block, kept)
        return finite

    return serve


class BlockCodec(FeedbackCodec):
    """A codec made of a ``BlockFormat``. Subclasses give the payload's size, its checks, its definition and the format.

    With feedback codes are rounded to nearest and need no random numbers; without, ``write`` gets the stream's.
    """

    settings: F32 = NO_SETTINGS

    @property
    def block_format(self) -> BlockFormat:
        raise NotImplementedError

    @functools.cached_property
    def _kernels(self) -> BlockKernels:
        return block_kernels(self.block_format)

    def warm(self) -> None:
        _ = self._kernels, serving_kernel(self.block_format)

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        old = NO_RESIDUAL if residual is None else residual
        finite = self._kernels.encode(grad, old, rescale, self.settings, *random_arguments(stream, 0), out)
        return Encoded(self.payload_bound(grad.size), not finite)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        self._kernels.decode(payload, numel, lo, self.settings, out)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        self._kernels.fold(*eight(payloads), len(payloads), numel, lo, self.settings, acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        random = random_arguments(stream, lo)
        finite = self._kernels.finish(acc, numel, lo, divisor, old, new, rescale, self.settings, *random, out)
        return Encoded(self.payload_bound(numel), not finite)

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded | None:  # fmt: skip
        if not payloads or len(payloads) > MAX_PAYLOADS or push.canonical != self.canonical:
            return None
        old, new = NO_RESIDUAL if residual is None else residual, NO_RESIDUAL if residual_out is None else residual_out
        random = random_arguments(stream, 0)
        finite = serving_kernel(self.block_format)(
            *eight(payloads), len(payloads), numel, divisor, old, new, rescale, self.settings, *random, out
        )  # fmt: skip
        return Encoded(self.payload_bound(numel), not finite)

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        self._kernels.commit(payload, numel, lo, self.settings, grad, residual, rescale)


def random_arguments(stream: Stream, lo: int) -> tuple[int, int, int]:
    """Index of the part's element ``lo`` in its stream, modulo 2**32, and the stream's two keys."""
    return ((stream.first + lo) & 0xFFFFFFFF, *keys(stream))
