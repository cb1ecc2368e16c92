"""Which elements of p = values + rescale * residual are sent: those of largest magnitude, or about as many.

Owns the choice alone: no bytes, no parameters. Magnitudes are compared as the bits of |p|, which order like the values, with NaN
above infinity; of equal ones those at the lowest indices are taken first. p is never written: one pass over its two terms collects
what reaches a floor, and the choice is made among that.

* ``largest``: exactly the k largest. A sample guesses a floor that a few more than k elements reach. Where the guess was bad (or the
  part is small) a histogram over all elements finds the floor: the result is the same.
* ``above_sample``: all elements whose magnitude reaches a threshold: the magnitude that a share k / n of a sample reaches. If more than
  ``MOST_OVER`` * k elements reach it, exactly the k largest. Elements that are zero are never selected.
* ``probed``: k elements: those above a threshold found by bisection between mean and largest magnitude, filled up to k with the
  first elements that reach the bisection's lower end. A probe is too low if more than k elements reach it, that is, if the magnitude of
  rank k + 1 does; so the bisection itself needs no pass over p.

Source: radix selection as in Alabi et al. 2012; Lin et al. 2018 (DGC), section 3.1, for the sample and the second, exact choice where it
let too many through; Shi et al. 2021 (MSTop-K), Algorithm 1, with the first of the candidates in place of random ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.codec import F32
from psgc.codecs.common.bits import bits_of_f32, corrected_mask, magnitude_mask, trailing_zeros
from psgc.codecs.common.feedback import CHUNK, corrected_chunk
from psgc.codecs.common.sums import reference_tree_sum, sum_magnitudes
from psgc.codecs.jit.kernel import I64, I64_PAIR, IN_F32, OUT_F32, SCALAR_F32, U32, helper, kernel
from psgc.codecs.sparsify.gaps import OUT_U32

MOST_OVER: Final = 2  # times k elements, at most, that a sampled threshold lets through
PROBES: Final = 24  # halvings; ratios then still fit a float32
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_ALL: Final = 1 << 32  # above the bits of every magnitude
_HIGH: Final = np.uint32(20)  # the 31 bits of a magnitude are looked at as 11, then 10, then 10
_MIDDLE: Final = np.uint32(10)
_LOW_MASK: Final = np.uint32(1023)
_LEAST_SAMPLE: Final = 1024
_MOST_SAMPLE: Final = 65536
_IN_SAMPLE: Final = 128  # of the elements wanted: then 4 standard deviations are a third of their number

Indices = NDArray[np.int64]


class Chosen(NamedTuple):
    """The elements to send, by ascending index, and the bits of the largest magnitude of all (infinity and NaN are the largest)."""

    indices: NDArray[np.uint32]
    values: F32
    top: int


def reference_magnitudes(p: F32) -> Indices:
    """Bits of |p|."""
    return (p.view(np.uint32) & _MAGNITUDE).astype(np.int64)


def reference_largest(p: F32, k: int) -> Indices:
    """Indices, ascending, of the k elements of largest magnitude."""
    return np.sort(np.argsort(-reference_magnitudes(p), kind="stable")[:k])


def reference_above_sample(p: F32, k: int) -> Indices:
    """Indices, ascending, of the elements that reach the sampled threshold."""
    magnitudes, places = reference_magnitudes(p), reference_sample(p.size, k)
    least = max(1, int(np.sort(magnitudes[places])[-sampled_rank(p.size, k)]))
    chosen = np.flatnonzero(magnitudes >= least)
    return reference_largest(p, k) if chosen.size > MOST_OVER * k else chosen


def reference_probed(p: F32, k: int) -> Indices:
    """Indices, ascending, of the k elements that bisection chooses."""
    magnitudes, mean, top = reference_magnitudes(p), reference_mean_magnitude(p), np.abs(p).max()
    below, above = _bisect(mean, top, lambda threshold: bool(np.count_nonzero(magnitudes >= threshold) > k))
    above_threshold = np.flatnonzero(magnitudes >= above)
    rest = np.flatnonzero((magnitudes >= below) & (magnitudes < above))
    return np.sort(np.concatenate([above_threshold, rest[: k - above_threshold.size]]))


def _bisect(mean: np.float32, top: np.float32, too_many: Callable[[int], bool]) -> tuple[int, int]:
    """Bits of the highest threshold tried that more than k elements reach (0: none), and of the lowest that at most k elements reach."""
    low, high, below, above = np.float32(0), np.float32(1), 0, _ALL
    for _ in range(PROBES):
        ratio = (low + high) / np.float32(2)
        with np.errstate(invalid="ignore"):
            threshold = int((mean + ratio * (top - mean)).view(np.uint32))
        if too_many(threshold):
            low, below = ratio, threshold
        else:
            high, above = ratio, threshold
    return below, above


def reference_mean_magnitude(p: F32) -> np.float32:
    """mean |p|, summed in float64 as `sums` says."""
    return np.float32(reference_tree_sum(np.abs(p).astype(np.float64))[0] / p.size)


def sample_size(numel: int, k: int) -> int:
    """Elements in the sample that goes with k of ``numel``: a power of two, or all of them."""
    size = _LEAST_SAMPLE
    while size < _MOST_SAMPLE and size * k < _IN_SAMPLE * numel:
        size *= 2
    return size if 2 * size < numel else numel


def sampled_rank(numel: int, k: int) -> int:
    """The rank in the sample of the magnitude that is the threshold."""
    return -(-k * sample_size(numel, k) // numel)


def reference_sample(numel: int, k: int) -> Indices:
    """Places of the sample. Within each stride they vary: else a matrix whose rows are as long as a stride would show one column only."""
    size = sample_size(numel, k)
    if size == numel:
        return np.arange(numel)
    j = np.arange(size)
    return np.asarray((j * numel + ((j * 0x9E3779B1 & 0xFFFFFFFF) * numel >> 32)) // size, np.int64)


@helper
def sample_place(j: Any, size: Any, numel: Any) -> Any:
    """The place of the sample's element j."""
    if size == numel:
        return np.int64(j)
    jitter = np.int64((np.uint64(j) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) * np.uint64(numel) >> np.uint64(32))
    return (np.int64(j) * numel + jitter) >> trailing_zeros(np.uint64(size))


@kernel(types.void(IN_F32, IN_F32, SCALAR_F32, OUT_F32))
def take_sample(values: Any, residual: Any, rescale: Any, sample: Any) -> None:
    """sample <- the elements of p at its places."""
    for j in range(sample.size):
        i = sample_place(j, sample.size, values.size)
        sample[j] = values[i] if residual.size == 0 else values[i] + rescale * residual[i]


@helper
def _rank(histogram: Any, k: Any) -> Any:
    """The bin that holds the k-th largest, and its rank (from 1) within that bin."""
    bin_ = histogram.size - 1
    while histogram[bin_] < k:
        k -= histogram[bin_]
        bin_ -= 1
    return bin_, k


@kernel(I64_PAIR(IN_F32, I64))
def kth_magnitude(values: Any, k: Any) -> Any:
    """Bits of the k-th largest magnitude, and how many elements of just that magnitude are among the k largest."""
    high, middle, low = np.zeros(2048, np.int64), np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    for i in range(values.size):
        high[(bits_of_f32(values[i]) & _MAGNITUDE) >> _HIGH] += 1
    first, k = _rank(high, k)
    for i in range(values.size):
        bits = bits_of_f32(values[i]) & _MAGNITUDE
        if bits >> _HIGH == first:
            middle[(bits >> _MIDDLE) & _LOW_MASK] += 1
    second, k = _rank(middle, k)
    prefix = np.uint32(first << 10 | second)
    for i in range(values.size):
        bits = bits_of_f32(values[i]) & _MAGNITUDE
        if bits >> _MIDDLE == prefix:
            low[bits & _LOW_MASK] += 1
    third, k = _rank(low, k)
    return np.int64(prefix << _MIDDLE | np.uint32(third)), np.int64(k)


@kernel(I64_PAIR(IN_F32, IN_F32, SCALAR_F32, I64))
def _exact_floor(values: Any, residual: Any, rescale: Any, k: Any) -> Any:
    """The lower edge of the histogram bin that holds the k-th largest magnitude, and how many elements reach it."""
    p, histogram = np.empty(CHUNK, np.float32), np.zeros(2048, np.int64)
    for start in range(0, values.size, CHUNK):
        g = values[start : start + CHUNK]
        corrected_chunk(g, residual[start : start + CHUNK], rescale, p[: g.size])
        for i in range(g.size):
            histogram[(bits_of_f32(p[i]) & _MAGNITUDE) >> _HIGH] += 1
    first, rank = _rank(histogram, k)
    return np.int64(first) << np.int64(_HIGH), np.int64(k - rank + histogram[first])


@helper
def collect_chunk(values: Any, residual: Any, rescale: Any, floor: Any, start: Any, count: Any, indices: Any, found: Any) -> Any:
    """Append those elements of a chunk that begins at ``start`` which reach the floor; returns how many there are now. There is room."""
    whole = values.size // 64 * 64
    for first in range(0, whole, 64):
        if residual.size == 0:
            mask = magnitude_mask(values, first, floor)
        else:
            mask = corrected_mask(values, residual, first, rescale, floor)
        while mask:
            i = first + trailing_zeros(mask)
            indices[count] = np.uint32(start + i)
            found[count] = values[i] if residual.size == 0 else values[i] + rescale * residual[i]
            count += 1
            mask &= mask - np.uint64(1)
    for i in range(whole, values.size):
        x = values[i] if residual.size == 0 else values[i] + rescale * residual[i]
        if bits_of_f32(x) & _MAGNITUDE >= floor:
            indices[count], found[count] = np.uint32(start + i), x
            count += 1
    return count


@kernel(I64(IN_F32, IN_F32, SCALAR_F32, U32, OUT_U32, OUT_F32))
def _collect(values: Any, residual: Any, rescale: Any, floor: Any, indices: Any, found: Any) -> Any:
    """Elements whose magnitude reaches the floor, in order; returns how many, or -1 if there is no room for all."""
    count = np.int64(0)
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        if count + chunk.size > indices.size:
            return np.int64(-1)
        count = collect_chunk(chunk, residual[start : start + CHUNK], rescale, floor, start, count, indices, found)
    return count


@kernel(I64(OUT_U32, OUT_F32, I64, I64, I64))
def _keep(indices: Any, values: Any, below: Any, above: Any, rest: Any) -> Any:
    """Move to the front, in order, the elements whose magnitude reaches ``above`` and the first ``rest`` of those that reach ``below``;
    returns how many."""
    kept = 0
    for i in range(indices.size):
        bits = np.int64(bits_of_f32(values[i]) & _MAGNITUDE)
        if bits >= above or (bits >= below and rest > 0):
            rest -= bits < above
            indices[kept], values[kept] = indices[i], values[i]
            kept += 1
    return kept


class Candidates(NamedTuple):
    """Everything that reaches a floor, by ascending index."""

    indices: NDArray[np.uint32]
    values: F32
    floor: int

    @property
    def top(self) -> int:
        """Bits of the largest magnitude."""
        return int((self.values.view(np.uint32) & _MAGNITUDE).max()) if self.values.size else 0

    def keep(self, below: int, above: int, rest: int) -> Chosen:
        """Those that reach ``above``, and the first ``rest`` of those that reach ``below``. Overwrites the candidates."""
        top = self.top
        kept = _keep(self.indices, self.values, below, above, rest)
        return Chosen(self.indices[:kept], self.values[:kept], top)


def _reach(values: F32, residual: F32, rescale: float, floor: int, room: int) -> Candidates | None:
    """All that reach the floor; None if they are more than ``room``."""
    indices, found = np.empty(room + CHUNK, np.uint32), np.empty(room + CHUNK, np.float32)
    count = _collect(values, residual, rescale, floor, indices, found)
    return Candidates(indices[:count], found[:count], floor) if 0 <= count <= room else None


def _sample(values: F32, residual: F32, rescale: float, size: int) -> F32:
    sample = np.empty(size, np.float32)
    take_sample(values, residual, rescale, sample)
    return sample


def _guess(values: F32, residual: F32, rescale: float, k: int) -> tuple[int, int]:
    """A floor that at least k elements very likely reach, and room for those that do."""
    numel, size, share = values.size, sample_size(values.size, k), k / values.size
    mean = size * share
    rank = mean + 4 * (mean * (1 - share)) ** 0.5 + 8  # four standard deviations to the safe side
    if size == numel:
        return _exact_floor(values, residual, rescale, k)  # type: ignore[no-any-return]
    if rank > 0.9 * size:
        return 0, numel
    floor, _ = kth_magnitude(_sample(values, residual, rescale, size), int(rank))
    return floor, min(numel, int(numel / size * (rank + 5 * rank**0.5)))


def _at_least(values: F32, residual: F32, rescale: float, k: int) -> Candidates:
    """Candidates of which there are at least k."""
    candidates = _reach(values, residual, rescale, *_guess(values, residual, rescale, k))
    if candidates is None or candidates.indices.size < k:
        candidates = _reach(values, residual, rescale, *_exact_floor(values, residual, rescale, k))
    assert candidates is not None
    return candidates


def largest(values: F32, residual: F32, rescale: float, k: int) -> Chosen:
    """The k elements of largest magnitude."""
    candidates = _at_least(values, residual, rescale, k)
    least, ties = kth_magnitude(candidates.values, k)
    return candidates.keep(least, least + 1, ties)


def above_sample(values: F32, residual: F32, rescale: float, k: int) -> Chosen:
    """The elements that reach the sampled threshold."""
    sample = _sample(values, residual, rescale, sample_size(values.size, k))
    threshold, _ = kth_magnitude(sample, sampled_rank(values.size, k))
    candidates = _reach(values, residual, rescale, max(1, threshold), min(values.size, MOST_OVER * k))
    return largest(values, residual, rescale, k) if candidates is None else Chosen(candidates.indices, candidates.values, candidates.top)


def probed(values: F32, residual: F32, rescale: float, k: int) -> Chosen:
    """The k elements that bisection chooses."""
    if k == values.size:
        return largest(values, residual, rescale, k)
    candidates = _at_least(values, residual, rescale, k + 1)
    mean = np.float32(sum_magnitudes(values, residual, rescale) / values.size)
    top = np.uint32(candidates.top).view(np.float32)
    next_largest, _ = kth_magnitude(candidates.values, k + 1)
    below, above = _bisect(mean, top, lambda threshold: bool(next_largest >= threshold))
    if below < candidates.floor:
        lower = _reach(values, residual, rescale, below, values.size)
        assert lower is not None
        candidates = lower
    above_threshold = int(np.count_nonzero((candidates.values.view(np.uint32) & _MAGNITUDE) >= above))
    return candidates.keep(below, above, k - above_threshold)
