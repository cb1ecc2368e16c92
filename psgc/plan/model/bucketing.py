"""How tensors are fused into buckets: runs of tensors of one codec in order of readiness, each cut into equal parts.

Owns the families of bucketings that the search tries. A part should be large enough that the latencies of its messages matter little, and
small enough that links, codecs and backward work at the same time. Buckets get smaller towards the end of backward, because nothing hides the
last one's communication. If tensors have different codecs, a run skips the tensors of other codecs, which are in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.codec import BLOCK, MAX_PART
from psgc.codecs.jit.kernel import I64, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.model.timeline import Ints

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_OUT_I64: Final = types.Array(types.int64, 1, "C")
MAX_PARTS: Final = 64
MIN_BUCKET_SHARE: Final = 256  # tapering stops at a part's size divided by this


class Tensors(NamedTuple):
    """Tensors in order of readiness: the elements of each, when backward has computed it, and the index of its codec."""

    numel: F64
    ready_us: F64
    codec: Ints


@dataclass(frozen=True)
class Bucketing:
    """Buckets in order of readiness. of: each tensor's bucket; parts: number of each bucket's parts, which have at least one element; codec:
    index of each bucket's codec."""

    of: Ints
    parts: Ints
    numel: F64
    ready_us: F64
    codec: Ints

    @cached_property
    def last(self) -> Ints:
        """Each bucket's last tensor; the bucket is ready when that tensor is."""
        return _last(self.of, len(self.parts))

    def cut(self, parts: Ints | F64) -> Bucketing:
        """The same buckets cut into these numbers of parts, at most as many as a bucket has elements."""
        return replace(self, parts=np.minimum(parts, self.numel).astype(np.int64))

    def at_blocks(self) -> Bucketing:
        """The same buckets with parts that a job can have. Jobs cut at multiples of BLOCK elements, so a bucket has at most as many parts as
        blocks; and no part is longer than MAX_PART."""
        return self.cut(np.clip(self.parts, np.ceil(self.numel / MAX_PART), np.ceil(self.numel / BLOCK)))


def _last(of: Ints, buckets: int) -> Ints:
    last = np.zeros(buckets, np.int64)
    last[of] = np.arange(len(of))  # NumPy keeps the last of several values for an index
    return last


class Kinds(NamedTuple):
    """The distinct kinds of parts, ascending in size. sizes: elements of each kind; codec: index of each kind's codec; of: each bucket's kind."""

    sizes: F64
    codec: Ints
    of: Ints


@kernel(I64(_IN_F64, _IN_I64, _OUT_I64, _OUT_I64))
def _kinds(size: Any, codec: Any, first: Any, of: Any) -> Any:
    """Find the kinds. first: set to each kind's first bucket; of: set to each bucket's kind. Returns the number of kinds."""
    kinds = 0
    for bucket in range(size.size):
        place, end = 0, kinds
        while place < end:
            middle = (place + end) // 2
            other = first[middle]
            if size[other] < size[bucket] or (size[other] == size[bucket] and codec[other] < codec[bucket]):
                place = middle + 1
            else:
                end = middle
        if place == kinds or size[first[place]] != size[bucket] or codec[first[place]] != codec[bucket]:
            for later in range(kinds, place, -1):
                first[later] = first[later - 1]
            for before in range(bucket):
                of[before] += 1 if of[before] >= place else 0
            first[place] = bucket
            kinds += 1
        of[bucket] = place
    return kinds


def kinds_of(made: Bucketing) -> Kinds:
    """The distinct pairs of part size and codec. Compiled, like everything that the search does between simulations."""
    size, first, of = made.numel / made.parts, np.empty(len(made.parts), np.int64), np.empty(len(made.parts), np.int64)
    first = first[: _kinds(size, made.codec, first, of)]
    return Kinds(size[first], made.codec[first], of)


def bucketing(tensors: Tensors, of: Sequence[int] | Ints, parts: Sequence[int] | Ints | F64) -> Bucketing:
    """The bucketing in which tensor i is in bucket ``of[i]``. Buckets are numbered in the order of their last tensors."""
    numbers = np.asarray(of, np.int64)
    last = _last(numbers, len(parts))
    numel: F64 = np.bincount(numbers, tensors.numel).astype(np.float64)
    uncut = np.ones(len(parts), np.int64)
    return Bucketing(numbers, uncut, numel, tensors.ready_us[last], tensors.codec[last]).cut(np.asarray(parts))


def fused(tensors: Tensors, part: float, taper: float) -> Bucketing:
    """Fuse tensors until a bucket has ``part`` elements, or ``taper`` times the elements that come after it. Larger buckets are cut."""
    of = np.empty(len(tensors.numel), np.int64)
    buckets = _fuse(tensors.numel, tensors.codec, part, taper, of)
    sizes = np.bincount(of, tensors.numel, buckets)
    return bucketing(tensors, of, np.clip(np.round(sizes / part), 1, MAX_PARTS))


class Parts(NamedTuple):
    """The parts of all buckets. ready_us: when each part is ready; first: index of each bucket's first part, then the number of parts;
    together: for each bucket, the first part that is ready at the same moment."""

    ready_us: F64
    first: Ints
    together: Ints


@kernel(types.void(_IN_F64, _IN_I64, types.Array(types.float64, 1, "C"), _OUT_I64, _OUT_I64))
def _parts(ready: Any, parts: Any, part_ready: Any, first: Any, together: Any) -> None:
    first[0] = 0
    for bucket in range(ready.size):
        same = bucket > 0 and ready[bucket] == ready[bucket - 1]
        together[bucket] = together[bucket - 1] if same else first[bucket]
        first[bucket + 1] = first[bucket] + parts[bucket]
        part_ready[first[bucket] : first[bucket + 1]] = ready[bucket]


def parts_of(made: Bucketing) -> Parts:
    """The bucketing's parts, in order of readiness."""
    count = len(made.parts)
    found = Parts(np.empty(int(made.parts.sum())), np.empty(count + 1, np.int64), np.empty(count, np.int64))
    _parts(made.ready_us, made.parts, *found)
    return found


@kernel(I64(_IN_F64, _IN_I64, types.float64, types.float64, _OUT_I64))
def _fuse(numel: Any, codec: Any, part: Any, taper: Any, of: Any) -> Any:
    """Fuse as ``fused`` says. of: set to each tensor's bucket, numbered in the order in which buckets are closed. Returns their number."""
    codecs, left, buckets = codec.max() + 1, numel.sum(), 0
    size, last, begins = np.zeros(codecs), np.zeros(codecs, np.int64), np.full(codecs, -1)
    for tensor in range(numel.size):
        last[codec[tensor]] = tensor
    for tensor in range(numel.size):
        own = codec[tensor]
        begins[own] = tensor if begins[own] < 0 else begins[own]
        size[own] += numel[tensor]
        left -= numel[tensor]
        if size[own] >= min(part, max(taper * left, part / MIN_BUCKET_SHARE)) or tensor == last[own]:
            for member in range(begins[own], tensor + 1):
                if codec[member] == own:
                    of[member] = buckets
            buckets += 1
            size[own], begins[own] = 0.0, -1
    return buckets


def each_alone(tensors: Tensors, part: float = np.inf) -> Bucketing:
    """Every tensor in a bucket of its own, cut at about ``part`` elements."""
    parts = np.clip(np.round(tensors.numel / part), 1, MAX_PARTS)
    return bucketing(tensors, np.arange(len(tensors.numel)), parts)


def renumbered(tensors: Tensors, of: Ints, parts: Sequence[int]) -> tuple[Bucketing, Ints]:
    """The bucketing in which tensor i is in group ``of[i]``, and the bucket number of each group."""
    order = np.argsort(_last(of, len(parts)), kind="stable")
    number = np.empty(len(parts), np.int64)
    number[order] = np.arange(len(parts))
    return bucketing(tensors, number[of], [parts[group] for group in order.tolist()]), number


def merged(tensors: Tensors, made: Bucketing, bucket: int) -> tuple[Bucketing, Ints] | None:
    """The bucketing in which a bucket is merged with the next one of its codec, and the merged bucket's number. It has as many parts as the one
    of both that has more. None if the bucket is the last of its codec."""
    later = np.flatnonzero(made.codec[bucket + 1 :] == made.codec[bucket])
    if not len(later):
        return None
    other = bucket + 1 + int(later[0])
    of = np.where(made.of == bucket, other, made.of)
    parts = made.parts.tolist()
    parts[other] = max(parts[other], parts[bucket])
    of[of > bucket] -= 1
    del parts[bucket]
    return bucketing(tensors, of, parts), np.array([other - 1])


def split(tensors: Tensors, made: Bucketing, bucket: int, at: int | None = None) -> tuple[Bucketing, Ints] | None:
    """The bucketing in which a bucket is split in two, each with half as many parts, and the two numbers. at: how many tensors the first one
    gets; by default about half of the elements. None if the bucket is a single tensor."""
    members = np.flatnonzero(made.of == bucket)
    if len(members) < 2:
        return None
    if at is None:
        at = min(1 + int(np.searchsorted(np.cumsum(tensors.numel[members]), made.numel[bucket] / 2)), len(members) - 1)
    of, group = made.of.copy(), len(made.parts)
    of[members[at:]] = group
    half = max(1, int(made.parts[bucket]) // 2)
    parts = [*made.parts.tolist(), half]
    parts[bucket] = half
    found, number = renumbered(tensors, of, parts)
    return found, np.sort(number[[bucket, group]])


def every_fusion(tensors: Tensors, parts: Iterable[int]) -> Iterator[Bucketing]:
    """Every bucketing of few tensors into runs, with each of these numbers of parts, the same for all buckets."""
    runs = [np.nonzero(tensors.codec == codec)[0].tolist() for codec in dict.fromkeys(tensors.codec.tolist())]
    pairs = [pair for run in runs for pair in pairwise(run)]
    for mask in range(1 << len(pairs)):
        begins = list(range(len(tensors.numel)))  # the first tensor of each tensor's run
        for number, (one, next_one) in enumerate(pairs):
            if not mask >> number & 1:
                begins[next_one] = begins[one]
        last = {begin: index for index, begin in enumerate(begins)}
        number_of = {begin: number for number, begin in enumerate(sorted(last, key=last.__getitem__))}
        for cut in parts:
            yield bucketing(tensors, [number_of[begin] for begin in begins], [cut] * len(number_of))
