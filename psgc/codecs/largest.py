"""The k elements of largest magnitude, exactly; of equal ones those at the lowest indices.

Owns the choice alone: no bytes, no parameters. Magnitudes are compared as the bits of |p|, which order like the values, with NaN
above infinity. A sample guesses a floor that about k elements reach; one pass collects those that do; the exact choice is made
among them. Where the guess was bad (or the part is small) a histogram over all elements finds the floor: the result is the same.
Source: radix selection as in Alabi et al. 2012; the sampled floor as in Lin et al. 2018 (DGC), here without its error.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.bits import bits_of_f32, magnitude_mask, trailing_zeros
from psgc.codecs.codec import F32
from psgc.codecs.feedback import SCRATCH, corrected_block
from psgc.codecs.kernel import helper

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_HIGH: Final = np.uint32(20)  # the 31 bits of a magnitude are looked at as 11, then 10, then 10
_MIDDLE: Final = np.uint32(10)
_LOW_MASK: Final = np.uint32(1023)
_SAMPLED_FROM: Final = 8192  # elements; below, a histogram of all is as fast as a sample
_LEAST_SAMPLE: Final = 1024
_MOST_SAMPLE: Final = 65536


def define_largest(p: F32, k: int) -> NDArray[np.int64]:
    """Indices, ascending, of the k elements of p."""
    magnitudes = (p.view(np.uint32) & _MAGNITUDE).astype(np.int64)
    return np.sort(np.argsort(-magnitudes, kind="stable")[:k])


@helper
def largest(grad: Any, residual: Any, rescale: Any, k: Any) -> Any:
    """Indices (uint32, ascending) and values (float32) of the k elements of p = grad + rescale * residual."""
    if grad.size >= _SAMPLED_FROM:
        floor, expected = _sampled_floor(grad, residual, rescale, k)
    else:
        floor, expected = _exact_floor(grad, residual, rescale, k)
    indices, values = np.empty(expected + SCRATCH, np.uint32), np.empty(expected + SCRATCH, np.float32)
    count = _collect(grad, residual, rescale, floor, indices, values)
    if count < k:
        floor, expected = _exact_floor(grad, residual, rescale, k)
        indices, values = np.empty(expected + SCRATCH, np.uint32), np.empty(expected + SCRATCH, np.float32)
        count = _collect(grad, residual, rescale, floor, indices, values)
    _keep_largest(indices, values, count, k)
    return indices[:k], values[:k]


@helper
def _rank(histogram: Any, k: Any) -> Any:
    """The bin that holds the k-th largest, and its rank (from 1) within that bin."""
    bin_ = histogram.size - 1
    while histogram[bin_] < k:
        k -= histogram[bin_]
        bin_ -= 1
    return bin_, k


@helper
def _kth_magnitude(values: Any, k: Any) -> Any:
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
    return np.uint32(prefix << _MIDDLE | np.uint32(third)), k


@helper
def _sampled_floor(grad: Any, residual: Any, rescale: Any, k: Any) -> Any:
    """A magnitude that very likely k elements reach, and room for those that do."""
    size = min(max(grad.size // 128, _LEAST_SAMPLE), _MOST_SAMPLE)
    stride = grad.size // size
    sample = np.empty(size, np.float32)
    for j in range(size):
        # the place within a stride wanders, lest a matrix whose rows are as long shows one column only
        i = j * stride + ((np.uint64(j) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) * np.uint64(stride) >> np.uint64(32))
        place = np.int64(i)
        corrected_block(grad[place : place + 1], residual[place : place + 1], rescale, sample[j : j + 1])
    share = k / grad.size
    mean = size * share
    rank = mean + 4 * np.sqrt(mean * (1 - share)) + 8  # four standard deviations to the safe side
    if rank > 0.9 * size:
        return np.uint32(0), grad.size
    floor, _ = _kth_magnitude(sample, np.int64(rank))
    return floor, min(grad.size, np.int64(grad.size / size * (rank + 5 * np.sqrt(rank))))


@helper
def _exact_floor(grad: Any, residual: Any, rescale: Any, k: Any) -> Any:
    """The lower edge of the histogram bin that holds the k-th largest magnitude, and how many elements reach it."""
    p, histogram = np.empty(SCRATCH, np.float32), np.zeros(2048, np.int64)
    for start in range(0, grad.size, SCRATCH):
        g = grad[start : start + SCRATCH]
        corrected_block(g, residual[start : start + SCRATCH], rescale, p[: g.size])
        for i in range(g.size):
            histogram[(bits_of_f32(p[i]) & _MAGNITUDE) >> _HIGH] += 1
    first, rank = _rank(histogram, k)
    return np.uint32(first) << _HIGH, k - rank + histogram[first]


@helper
def _collect(grad: Any, residual: Any, rescale: Any, floor: Any, indices: Any, values: Any) -> Any:
    """Elements whose magnitude reaches the floor, in order; returns how many, or -1 if there is no room for all."""
    p, count = np.empty(SCRATCH, np.float32), np.int64(0)
    for start in range(0, grad.size, SCRATCH):
        g = grad[start : start + SCRATCH]
        if count + g.size > indices.size:
            return np.int64(-1)
        corrected_block(g, residual[start : start + SCRATCH], rescale, p[: g.size])
        for first in range(0, g.size, 64):
            mask = magnitude_mask(p, first, floor)
            if g.size - first < 64:
                mask &= (np.uint64(1) << np.uint64(g.size - first)) - np.uint64(1)
            while mask:
                i = first + trailing_zeros(mask)
                indices[count], values[count] = np.uint32(start + i), p[i]
                count += 1
                mask &= mask - np.uint64(1)
    return count


@helper
def _keep_largest(indices: Any, values: Any, count: Any, k: Any) -> None:
    """Of the first ``count`` elements, move the k largest to the front, in order."""
    least, ties = _kth_magnitude(values[:count], k)
    kept = 0
    for i in range(count):
        bits = bits_of_f32(values[i]) & _MAGNITUDE
        if bits > least or (bits == least and ties > 0):
            ties -= bits == least
            indices[kept], values[kept] = indices[i], values[i]
            kept += 1
