"""Base class of codecs that send some elements of each part exactly: encode, fold, finish and commit from a subclass's write, add and subtract.

Owns no layout and no selection. An element that is sent exactly leaves nothing in the residual. Elements are selected within a part, so cutting
a bucket differently selects other elements. Sums start from zero and add each payload's values in turn.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, Array, Bytes, Encoded, Stream
from psgc.codecs.common.feedback import CHUNK, NO_RESIDUAL, FeedbackCodec, mean_corrected_chunk
from psgc.codecs.jit.kernel import IN_F32, OUT_F32, SCALAR_F32, kernel

SLICE: Final = 16384  # elements that passes hold at once where only a few are touched: 64 KB stay in L2


def reference_scattered(places: Array, values: Array, numel: int) -> F32:
    """Elements of a payload."""
    out = np.zeros(numel, np.float32)
    out[places] += values
    return out


@kernel(types.void(IN_F32, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32))
def correct(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any) -> None:
    """p <- values / divisor + rescale * residual; p may be either of the two."""
    for start in range(0, values.size, CHUNK):
        chunk = slice(start, start + CHUNK)
        mean_corrected_chunk(values[chunk], divisor, residual[chunk], rescale, p[chunk])


class SparseCodec(FeedbackCodec):
    """See the module's text."""

    chunk = 0
    sparse = True

    @abstractmethod
    def write(self, values: F32, residual: F32, rescale: float, out: Bytes) -> Encoded:
        """Write the payload of ``values + rescale * residual``; an empty residual is none."""

    @abstractmethod
    def take(self, payload: Bytes, p: F32) -> None:
        """p -= the payload's elements."""

    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return self.write(grad, NO_RESIDUAL if residual is None else residual, rescale, out)

    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        self.fold([payload], numel, lo, hi, out, True)

    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        p = acc if residual_out is None else residual_out
        correct(acc, divisor, NO_RESIDUAL if residual is None else residual, rescale, p)
        return self.write_and_take(p, residual_out is not None, out)

    def write_and_take(self, p: F32, feedback: bool, out: Bytes) -> Encoded:
        """Write the payload of p; with feedback, p becomes what the payload leaves out."""
        encoded = self.write(p, NO_RESIDUAL, 1.0, out)
        if feedback:
            self.take(out[: encoded.payload_bytes], p)
        return encoded
