"""What a codec loses of given values: one payload, without feedback."""

from __future__ import annotations

import numpy as np

from psgc.codecs.codec import F32, Codec, Stream
from psgc.codecs.scheme import slices


def decoded(codec: Codec, values: F32, stream: Stream) -> F32:
    """What a receiver has of these values: shape (numel,), float32. Nothing is kept as a residual."""
    numel = values.size
    residual = np.zeros(numel, np.float32) if codec.feedback else None
    out = np.zeros(codec.payload_bound(numel), np.uint8)
    payload = out[: codec.encode(values, residual, 1.0, stream, out).payload_bytes]
    found = np.zeros(numel, np.float32)
    for lo, hi in slices(codec, numel):
        codec.decode(payload, numel, lo, hi, found[lo:hi])
    return found


def relative_error(codec: Codec, values: F32, stream: Stream) -> float:
    """||decoded - values|| / ||values||; 0 where all values are 0."""
    norm = float(np.linalg.norm(values))
    return float(np.linalg.norm(decoded(codec, values, stream) - values)) / norm if norm else 0.0
