"""How tensors are fused and cut into buckets: runs of tensors in order of readiness, each cut into equal parts.

Owns the families of bucketings that the search tries. A part is to be large enough to bear the latencies of its messages, and small enough
that links, codecs and backward work at once; towards the end of backward buckets get smaller, for nothing hides the last one's way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from psgc.codecs.codec import BLOCK, MAX_PART
from psgc.plan.profile import F64, TensorProfile
from psgc.plan.timeline import Ints

MOST_PARTS: Final = 64
FINEST: Final = 256  # the smallest bucket, of a part


@dataclass(frozen=True)
class Bucketing:
    """Bucket b has the tensors first[b] to first[b + 1], in order of readiness, and is cut into parts[b] parts."""

    first: Ints
    parts: Ints
    numel: F64
    ready_us: F64

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.first.tobytes(), self.parts.tobytes()

    def at_blocks(self) -> Bucketing:
        """Cut as a job can: parts end at multiples of BLOCK elements, so a bucket has at most as many as blocks, and none over MAX_PART."""
        parts = np.clip(self.parts, np.ceil(self.numel / MAX_PART), np.ceil(self.numel / BLOCK))
        return replace(self, parts=parts.astype(np.int64))


def of_runs(tensors: Sequence[TensorProfile], first: Sequence[int], parts: Sequence[int]) -> Bucketing:
    """The bucketing of these runs. first: where each begins, and the number of tensors."""
    begins = np.asarray(first, np.int64)
    sizes = np.array([tensor.numel for tensor in tensors], np.float64)
    ready = np.array([tensor.ready_us for tensor in tensors])
    return Bucketing(begins, np.asarray(parts, np.int64), np.add.reduceat(sizes, begins[:-1]), ready[begins[1:] - 1])


def fused(tensors: Sequence[TensorProfile], part: float, taper: float) -> Bucketing:
    """Fuse until a bucket has ``part`` elements, but not more than ``taper`` times what is still to come after it; cut what has more."""
    left = float(sum(tensor.numel for tensor in tensors))
    first, parts, size = [0], [], 0.0
    for index, tensor in enumerate(tensors):
        size += tensor.numel
        left -= tensor.numel
        if size >= min(part, max(taper * left, part / FINEST)) or index == len(tensors) - 1:
            first.append(index + 1)
            parts.append(min(max(1, round(size / part)), MOST_PARTS))
            size = 0.0
    return of_runs(tensors, first, parts)


def each_alone(tensors: Sequence[TensorProfile], part: float) -> Bucketing:
    """Every tensor by itself, cut at ``part`` elements."""
    return of_runs(tensors, range(len(tensors) + 1), [min(max(1, round(t.numel / part)), MOST_PARTS) for t in tensors])


def every_fusion(tensors: Sequence[TensorProfile], parts: Sequence[int]) -> Iterator[Bucketing]:
    """All ways of making runs of few tensors, with each of these cuts alike for all."""
    count = len(tensors)
    for mask in range(1 << (count - 1)):
        first = [0, *(index + 1 for index in range(count - 1) if mask >> index & 1), count]
        for cut in parts:
            yield of_runs(tensors, first, [cut] * (len(first) - 1))
