"""The reference of a whole part's encode, decode, fold, finish and commit, in plain NumPy: tests and benchmarks hold kernels against it.

Owns how they follow from a codec's own two references, ``reference_payload`` and ``reference_elements``. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.common.feedback import reference_corrected, reference_mean
from psgc.codecs.common.payloads import reference_sum
from psgc.codecs.none import NoneCodec, reference_finish_uncompressed


def reference_encode(codec: Codec, grad: Array, residual: F32 | None, rescale: float, stream: Stream) -> bytes:
    """The payload that ``codec.encode`` writes."""
    return codec.reference_payload(reference_corrected(grad, residual, rescale), stream)


def reference_decode(codec: Codec, payload: bytes, numel: int) -> Array:
    """The elements that ``codec.decode`` writes, in the accumulator's dtype."""
    return reference_fold(codec, [payload], numel, None)


def reference_fold(codec: Codec, payloads: Sequence[bytes], numel: int, acc: Array | None) -> Array:
    """The accumulator after ``codec.fold``, which began as ``acc`` or fresh."""
    with np.errstate(over="ignore"):
        return reference_sum([codec.reference_elements(payload, numel) for payload in payloads], acc)


def reference_finish(
    codec: Codec, acc: Array, divisor: int, residual: F32 | None, rescale: float, stream: Stream
) -> tuple[bytes, F32 | None]:  # fmt: skip
    """The payload and the new residual of ``codec.finish``."""
    if isinstance(codec, NoneCodec):
        return reference_finish_uncompressed(codec.dtype, acc, divisor), None
    p = reference_corrected(reference_mean(acc, divisor), residual, rescale)
    payload = codec.reference_payload(p, stream)
    return payload, reference_left_over(codec, p, payload) if codec.feedback else None


def reference_commit(codec: Codec, payload: bytes, grad: F32, residual: F32, rescale: float) -> F32:
    """The residual after ``codec.commit``."""
    return reference_left_over(codec, reference_corrected(grad, residual, rescale), payload)


def reference_left_over(codec: Codec, p: F32, payload: bytes) -> F32:
    """The residual of p after sending the payload."""
    return np.asarray(p - reference_decode(codec, payload, p.size), np.float32)
