"""Passes over payloads that hold some elements and their places: sums, means, feedback.

Owns no layout and no choice: a codec says what it sends (``write``) and where that belongs (``read``). What is sent is sent as it is, so
that it leaves nothing in the residual. The choice is made within a part: cutting a bucket differently chooses differently. Sums start
from zero and add each payload's values in turn. Every pass goes through memory once, a block that stays in cache at a time: places
ascend, so a block's are next to one another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32, Array, Bytes, Encoded, Stream
from psgc.codecs.feedback import NO_RESIDUAL, FeedbackCodec, mean_corrected_block
from psgc.codecs.gaps import IN_U32
from psgc.codecs.kernel import BOOL, IN_F32, OUT_F32, SCALAR_F32, kernel

_BLOCK: Final = 16384  # elements that passes hold at once: 64 KB, of which a few elements are touched, stay in L2
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)


class Sent(NamedTuple):
    """What a payload holds, by ascending place; of a zero, the sign is lost in the sum."""

    places: NDArray[np.uint32]
    values: F32


def define_scattered(places: Array, values: Array, numel: int) -> F32:
    """Elements of a payload."""
    out = np.zeros(numel, np.float32)
    out[places] += values
    return out


def decoded_values(stored: Bytes) -> F32:
    """Values, from where a payload stores them."""
    with np.errstate(invalid="ignore"):  # a peer may send a signalling NaN
        return np.asarray(stored.copy().view(np.float32) + np.float32(0), np.float32)


@kernel(types.void(IN_U32, IN_F32, _IN_I64, OUT_F32, BOOL))
def _sum(places: Any, values: Any, ends: Any, acc: Any, fresh: Any) -> None:
    """acc becomes, or is added, the sum of payloads of which one ends where the next begins."""
    scratch, cursors = np.empty(_BLOCK, np.float32), np.zeros(ends.size, np.int64)
    cursors[1:] = ends[:-1]
    for start in range(0, acc.size, _BLOCK):
        block = acc[start : start + _BLOCK]
        total, end = block if fresh else scratch[: block.size], start + block.size
        total[:] = np.float32(0)
        for k in range(ends.size):
            at = cursors[k]
            while at < ends[k] and places[at] < end:
                total[places[at] - start] += values[at]
                at += 1
            cursors[k] = at
        if not fresh:
            for i in range(block.size):
                block[i] += total[i]


@kernel(types.void(IN_U32, IN_F32, IN_F32, OUT_F32, SCALAR_F32))
def _commit(places: Any, values: Any, grad: Any, residual: Any, rescale: Any) -> None:
    """residual <- grad + rescale * residual, less the values at their places."""
    at = 0
    for start in range(0, grad.size, _BLOCK):
        g, r = grad[start : start + _BLOCK], residual[start : start + _BLOCK]
        for i in range(g.size):
            r[i] = g[i] + rescale * r[i]
        end = start + g.size
        while at < places.size and places[at] < end:
            r[places[at] - start] -= values[at]
            at += 1


@kernel(types.void(IN_F32, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32))
def correct(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any) -> None:
    """p <- values / divisor + rescale * residual; p may be either of the two."""
    for start in range(0, values.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        mean_corrected_block(values[block], divisor, residual[block], rescale, p[block])


@kernel(types.void(IN_U32, IN_F32, OUT_F32))
def _subtract(places: Any, values: Any, p: Any) -> None:
    for at in range(places.size):
        p[places[at]] -= values[at]


class SparseCodec(FeedbackCodec):
    """A codec that sends some elements as they are."""

    chunk = 0

    @abstractmethod
    def write(self, values: F32, residual: F32, rescale: float, out: Bytes) -> Encoded:
        """Write the payload of ``values + rescale * residual``; an empty residual is none."""

    @abstractmethod
    def read(self, payload: Bytes, numel: int) -> Sent:
        """What a payload holds."""

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return self.write(grad, NO_RESIDUAL if residual is None else residual, rescale, out)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        self.fold([payload], numel, lo, hi, out, True)

    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        sent = [self.read(payload, numel) for payload in payloads]
        places, values = sent[0] if len(sent) == 1 else (np.concatenate(arrays) for arrays in zip(*sent, strict=True))
        _sum(places, values, np.cumsum([one.places.size for one in sent]), acc, fresh)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        p = acc if residual_out is None else residual_out
        correct(acc, divisor, NO_RESIDUAL if residual is None else residual, rescale, p)
        encoded = self.write(p, NO_RESIDUAL, 1.0, out)
        if residual_out is not None:
            _subtract(*self.read(out[: encoded.payload_bytes], numel), residual_out)
        return encoded

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        _commit(*self.read(payload, numel), grad, residual, rescale)
