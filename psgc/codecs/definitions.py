"""Every codec's NumPy definition behind one signature: what tests and benchmarks hold the kernels against.

Owns how a codec's own definition functions make up encode, decode, fold, finish and commit of a whole part. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from psgc.codecs import cast, int8, none, onebit, topk
from psgc.codecs.codec import F32, Array, Codec, Stream
from psgc.codecs.feedback import define_corrected, define_mean
from psgc.errors import CodecError

_FOLD = {"onebit": onebit.define_fold, "int8": int8.define_fold, "topk": topk.define_fold}


def define_encode(codec: Codec, grad: Array, residual: F32 | None, rescale: float, stream: Stream) -> bytes:
    """The payload that ``codec.encode`` writes."""
    if codec.name == "none":
        return grad.tobytes()
    return _encode_corrected(codec, define_corrected(grad, residual, rescale), stream)


def _encode_corrected(codec: Codec, p: F32, stream: Stream) -> bytes:
    if codec.name in ("bf16", "fp16"):
        return cast.define_encode(codec.name, p)
    if codec.name == "onebit":
        return onebit.define_encode(p)
    if codec.name == "int8":
        return int8.define_encode(p, None if codec.feedback else stream)
    if isinstance(codec, topk.TopKCodec):
        return topk.define_encode(p, codec.count(p.size))
    raise CodecError(f"codec {codec.name} has no definition here")


def define_decode(codec: Codec, payload: bytes, numel: int) -> Array:
    """The elements that ``codec.decode`` writes, for a `none` codec in its accumulator's dtype."""
    return define_fold(codec, [payload], numel, None)


def define_fold(codec: Codec, payloads: Sequence[bytes], numel: int, acc: Array | None) -> Array:
    """The accumulator after ``codec.fold``, which began as ``acc`` or fresh."""
    if codec.name == "none":
        return none.define_fold(codec.dtype, payloads, acc)
    if codec.name in ("bf16", "fp16"):
        return cast.define_fold(codec.name, payloads, acc)
    fold: Callable[[Sequence[bytes], int, F32 | None], F32] | None = _FOLD.get(codec.name)
    if fold is None:
        raise CodecError(f"codec {codec.name} has no definition here")
    return fold(payloads, numel, acc)


def define_finish(
    codec: Codec, acc: Array, divisor: int, residual: F32 | None, rescale: float, stream: Stream
) -> tuple[bytes, F32 | None]:  # fmt: skip
    """The payload and the new residual of ``codec.finish``."""
    if codec.name == "none":
        return none.define_finish(codec.dtype, acc, divisor), None
    p = define_corrected(define_mean(acc, divisor), residual, rescale)
    payload = _encode_corrected(codec, p, stream)
    return payload, define_left_over(codec, p, payload) if codec.feedback else None


def define_commit(codec: Codec, payload: bytes, grad: F32, residual: F32, rescale: float) -> F32:
    """The residual after ``codec.commit``."""
    return define_left_over(codec, define_corrected(grad, residual, rescale), payload)


def define_left_over(codec: Codec, p: F32, payload: bytes) -> F32:
    """What is kept of p after sending the payload."""
    return np.asarray(p - define_decode(codec, payload, p.size), np.float32)
