"""What a whole part's encode, decode, fold, finish and commit mean, in plain NumPy: what tests and benchmarks hold kernels against.

Owns how they follow from a codec's own two definitions, ``define_payload`` and ``define_elements``. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.common.feedback import define_corrected, define_mean
from psgc.codecs.common.payloads import define_sum
from psgc.codecs.none import NoneCodec, define_finish_uncompressed


def define_encode(codec: Codec, grad: Array, residual: F32 | None, rescale: float, stream: Stream) -> bytes:
    """The payload that ``codec.encode`` writes."""
    return codec.define_payload(define_corrected(grad, residual, rescale), stream)


def define_decode(codec: Codec, payload: bytes, numel: int) -> Array:
    """The elements that ``codec.decode`` writes, in the accumulator's dtype."""
    return define_fold(codec, [payload], numel, None)


def define_fold(codec: Codec, payloads: Sequence[bytes], numel: int, acc: Array | None) -> Array:
    """The accumulator after ``codec.fold``, which began as ``acc`` or fresh."""
    with np.errstate(over="ignore"):
        return define_sum([codec.define_elements(payload, numel) for payload in payloads], acc)


def define_finish(
    codec: Codec, acc: Array, divisor: int, residual: F32 | None, rescale: float, stream: Stream
) -> tuple[bytes, F32 | None]:  # fmt: skip
    """The payload and the new residual of ``codec.finish``."""
    if isinstance(codec, NoneCodec):
        return define_finish_uncompressed(codec.dtype, acc, divisor), None
    p = define_corrected(define_mean(acc, divisor), residual, rescale)
    payload = codec.define_payload(p, stream)
    return payload, define_left_over(codec, p, payload) if codec.feedback else None


def define_commit(codec: Codec, payload: bytes, grad: F32, residual: F32, rescale: float) -> F32:
    """The residual after ``codec.commit``."""
    return define_left_over(codec, define_corrected(grad, residual, rescale), payload)


def define_left_over(codec: Codec, p: F32, payload: bytes) -> F32:
    """What is kept of p after sending the payload."""
    return np.asarray(p - define_decode(codec, payload, p.size), np.float32)
