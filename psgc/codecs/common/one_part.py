"""One part for one step with all its buffers, to time what a worker and a server do to it.

The operations are those of a step: encode a gradient with its residual, decode the result and commit the residual, sum payloads and encode the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from psgc.codecs.codec import F32, Bytes, Codec, CodecPair, Stream
from psgc.codecs.scheme import slices

WORKERS: Final = 4
STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)
RESCALE: Final = 0.5


@functools.lru_cache(maxsize=8)
def gaussian(numel: int, seed: int) -> F32:
    """Input that every codec reads and none writes."""
    return np.random.default_rng([numel, seed]).standard_normal(numel, np.float32)


@dataclass
class Part:
    """The buffers of one part for one step: gradient, residual, payload, result."""

    codec: Codec
    grad: F32
    residual: F32 | None
    payload: Bytes
    out: Bytes
    elements: F32
    kept: F32 | None

    @classmethod
    def filled(cls, codec: Codec, numel: int) -> Part:
        grad = gaussian(numel, 0)
        residual = gaussian(numel, 1) if codec.feedback else None
        out = np.zeros(codec.payload_bound(numel), np.uint8)
        written = codec.encode(grad, residual, RESCALE, STREAM, out).payload_bytes
        kept = np.zeros(numel, np.float32) if codec.feedback else None
        return cls(codec, grad, residual, out[:written].copy(), out, np.zeros(numel, np.float32), kept)

    def slices(self) -> Iterator[slice]:
        """The slices in which callers work on the part: chunks that stay in cache, or the whole part."""
        return (slice(lo, hi) for lo, hi in slices(self.codec, self.grad.size))

    def encode(self) -> Bytes:
        return self.out[: self.codec.encode(self.grad, self.residual, RESCALE, STREAM, self.out).payload_bytes]

    def decode(self) -> None:
        """Decode, and commit the residual to ``kept``, so that encode's input stays as it is."""
        numel = self.grad.size
        for cut in self.slices():
            self.codec.decode(self.payload, numel, cut.start, cut.stop, self.elements[cut])
            if self.kept is not None:
                self.codec.commit(self.payload, numel, cut.start, cut.stop, self.grad[cut], self.kept[cut], RESCALE)

    def serve(self, payloads: Sequence[Bytes], acc: F32) -> Bytes:
        """The payload of the mean: by the codec's ``fold_and_finish`` or else slice by slice in ``acc``, which holds one slice."""
        numel, residual, kept = self.grad.size, self.residual, self.kept
        adder = CodecPair(self.codec, self.codec).adder
        if adder is not None:
            adder.add(payloads, numel, self.out, True)
            return self.out[: adder.divide(self.out, numel, WORKERS).payload_bytes]
        at_once = self.codec.fold_and_finish(self.codec, payloads, numel, WORKERS, residual, kept, RESCALE, STREAM, self.out)
        if at_once is not None:
            return self.out[: at_once.payload_bytes]
        for cut in self.slices():
            total = acc[: cut.stop - cut.start]
            self.codec.fold(payloads, numel, cut.start, cut.stop, total, True)
            old, new = None if residual is None else residual[cut], None if kept is None else kept[cut]
            encoded = self.codec.finish(total, numel, cut.start, cut.stop, WORKERS, old, new, RESCALE, STREAM, self.out)
        return self.out[: encoded.payload_bytes]
