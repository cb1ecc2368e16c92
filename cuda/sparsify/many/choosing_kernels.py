"""How one program chooses among a part's keys, and packs the places of what it chose: `selection` and `gaps`, without other programs to wait for.

What a program has written, it reads again only behind a barrier: another of its threads may have written it.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import magnitude_bits
from psgc.cuda.sparsify.gap_kernels import packed_bytes, widths_of
from psgc.cuda.sparsify.loads import p_at, p_of_tile
from psgc.cuda.sparsify.select_kernels import sample_places

# What keys are of.
PART = tl.constexpr(0)  # the part's elements
SAMPLE = tl.constexpr(1)  # a sample of these
KEYS = tl.constexpr(2)  # keys that lie in memory, int64

GROUPS = tl.constexpr(8)  # groups of gaps that a program packs at once


@triton.jit
def keys_from(values, residual, rescale, first, count, numel, log_size, OF: tl.constexpr, TILE: tl.constexpr):
    """The keys (int64) from number ``first`` on; the last may be beyond the ``count`` that there are."""
    at = first + tl.arange(0, TILE)
    if OF == KEYS:
        return tl.load(values + at, mask=at < count, other=0)
    elif OF == SAMPLE:
        place = sample_places(at.to(tl.int64), count, log_size, numel)
        return magnitude_bits(p_at(values, residual, place, at < count, 1, None, rescale, False)).to(tl.int64)
    else:
        return magnitude_bits(p_of_tile(values, residual, first, numel, 1, None, rescale, False, TILE)).to(tl.int64)


@triton.jit
def key_of_rank(
    values, residual, rescale, count, numel, log_size, rank, OF: tl.constexpr, KEY_BITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """(the key of this rank among ``count`` keys, 1 being the largest; how many keys equal to it are among the ``rank`` largest), int64."""
    prefix = tl.zeros((), tl.int64)
    rank = rank.to(tl.int64)
    for level in tl.static_range((KEY_BITS + 7) // 8):
        below = KEY_BITS - 8 * level  # bits of the key from this digit on
        width = 8 if below > 8 else below
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, count, TILE):
            at = first + tl.arange(0, TILE)
            key = keys_from(values, residual, rescale, first, count, numel, log_size, OF, TILE)
            digit = ((key >> (below - width)) & ((1 << width) - 1)).to(tl.int32)
            counts += tl.histogram(digit, 256, mask=(at < count) & ((key >> below) == prefix))
        reached = tl.cumsum(counts, 0, reverse=True).to(tl.int64)  # keys whose digit is this one or a larger one
        chosen = tl.sum((reached >= rank).to(tl.int32), 0) - 1
        rank = rank - tl.max(tl.where(reached < rank, reached, 0), 0)
        prefix = (prefix << width) | tl.maximum(chosen, 0).to(tl.int64)
    return prefix, rank


@triton.jit
def chosen_of(key, live, limit, least, rest):
    """(which keys are chosen: those above the limit, and the first ``rest`` others that are ``least`` or more; how many of the others there are)."""
    others = (live & (key <= limit) & (key >= least)).to(tl.int32)
    return live & ((key > limit) | ((others > 0) & (tl.cumsum(others, 0) <= rest))), tl.sum(others, 0)


@triton.jit
def bytes_of_groups(indices, group, count):
    """(each group's width, its gaps, its bytes)."""
    width = widths_of(indices, group, count)
    size = tl.maximum(tl.minimum(count - group * 128, 128), 0).to(tl.int32)
    return width, size, (size * width + 7) // 8


@triton.jit
def packed_end(indices, count):
    """Bytes that the packed indices take. What wrote them is behind a barrier."""
    groups = tl.cdiv(count, 128)
    end = groups.to(tl.int64)
    for first in range(0, groups, GROUPS):
        _width, _size, nbytes = bytes_of_groups(indices, first + tl.arange(0, GROUPS), count)
        end += tl.sum(nbytes, 0).to(tl.int64)
    return end


@triton.jit
def pack_indices(indices, count, packed, BYTES: tl.constexpr):
    """Write the packed indices."""
    groups = tl.cdiv(count, 128)
    place = groups.to(tl.int64)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        width, size, nbytes = bytes_of_groups(indices, group, count)
        tl.store(packed + group, width.to(tl.uint8), mask=group < groups)
        start = place + (tl.cumsum(nbytes, 0) - nbytes).to(tl.int64)
        divisor = tl.maximum(width, 1)
        steps = tl.max((divisor + 6) // divisor + 1, 0)
        for begin in range(0, tl.max(nbytes, 0), BYTES):
            byte = begin + tl.arange(0, BYTES)[None, :]
            found = packed_bytes(indices, group[:, None], byte, divisor[:, None], size[:, None], steps)
            tl.store(packed + start[:, None] + byte, found, mask=byte < nbytes[:, None])
        place += tl.sum(nbytes, 0).to(tl.int64)
