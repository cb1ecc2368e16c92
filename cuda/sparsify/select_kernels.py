"""Kernels of `selection`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.elements import INFINITY_BITS, magnitude_bits
from psgc.cuda.sparsify.loads import p_at, p_of_tile

# Of ``state``: candidates found; the least key of a candidate; what is chosen: all keys above LIMIT, and the first that are at least LEVEL,
# until there are enough; how many that are.
FOUND: tl.constexpr = tl.constexpr(0)
FLOOR: tl.constexpr = tl.constexpr(1)
LIMIT: tl.constexpr = tl.constexpr(2)
LEVEL: tl.constexpr = tl.constexpr(3)
CHOSEN: tl.constexpr = tl.constexpr(4)
DENSE: tl.constexpr = tl.constexpr(5)
_INTEGERS = ["numel", "size", "log_size", "rank", "count", "need", "room", "blocks", "wanted", "divisor", "least"]


@triton.jit
def reads_whole(state, need, room):
    """Whether the candidates are of no use: fewer than needed, or more than there is room for."""
    found = tl.load(state + FOUND)
    return (found < need) | (found > room)


@triton.jit
def descend(histograms, rank, LEVELS: tl.constexpr, KEY_BITS: tl.constexpr):
    """The first ``LEVELS`` digits of the key of this rank (1 is the largest), and its rank among keys with these digits."""
    prefix = tl.zeros((), tl.int64)
    rank = rank.to(tl.int64)
    for level in tl.static_range(LEVELS):
        counts = tl.load(histograms + level * 256 + 255 - tl.arange(0, 256))
        reached = tl.cumsum(counts, 0)
        short = reached < rank
        digit = 255 - tl.sum(short.to(tl.int32), 0)
        rank = rank - tl.max(tl.where(short, reached, 0), 0).to(tl.int64)
        width = 8 if 8 * (level + 1) <= KEY_BITS else KEY_BITS - 8 * level
        prefix = (prefix << width) | tl.maximum(digit, 0).to(tl.int64)
    return prefix, rank


@triton.jit
def keys_at(
    values, residual, found, at, live, whole, divisor, factor, rescale,
    KEYED: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """Keys (int64) and values of the whole part's elements or of the candidates at these places."""
    if KEYED:
        key = tl.load(values + at, mask=live, other=0)
        p = key
    else:
        p = p_at(values, residual, at, live & whole, divisor, factor, rescale, DIVIDES)
        p = tl.where(whole, p, tl.load(found + at, mask=live & (whole == 0), other=0.0))
        key = magnitude_bits(p).to(tl.int64)
    return key, p


@triton.jit
def sample_places(j, size, log_size, numel):
    """The places of the sample's elements (int64), as `largest.reference_sample` defines them."""
    jitter = (((j * 0x9E3779B1) & 0xFFFFFFFF) * numel.to(tl.int64)) >> 32
    return tl.where(size == numel, j, (j * numel.to(tl.int64) + jitter) >> log_size.to(tl.int64))


@triton.jit(do_not_specialize=_INTEGERS)
def sample_kernel(
    values, residual, divisor, factor, rescale, keys, numel, size, log_size,
    DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """keys (int64 [size]) <- magnitudes of the sample."""
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = j < size
    place = sample_places(j, size, log_size, numel)
    p = p_at(values, residual, place, live, divisor, factor, rescale, DIVIDES)
    tl.store(keys + j, magnitude_bits(p).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=_INTEGERS)
def digits_kernel(
    values, residual, divisor, factor, rescale, found, state, histograms, numel, rank, need, room,
    LEVEL_OF: tl.constexpr, KEY_BITS: tl.constexpr, KEYED: tl.constexpr, ONLY_WHOLE: tl.constexpr,
    DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add, to the histogram of this level, the next digit of all keys that begin with the digits of the key of this rank."""
    whole = reads_whole(state, need, room)
    count = tl.where(whole, numel.to(tl.int64), tl.load(state + FOUND))
    if ONLY_WHOLE:
        count = tl.where(whole, count, 0)
    prefix, _ignored = descend(histograms, rank, LEVEL_OF, KEY_BITS)
    below: tl.constexpr = KEY_BITS - 8 * LEVEL_OF  # bits of the key from this digit on
    shift: tl.constexpr = below - 8 if below > 8 else 0
    mask: tl.constexpr = 255 if below > 8 else (1 << below) - 1
    counts = tl.zeros((256,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(count, TILE), tl.num_programs(0)):
        at = tl.arange(0, TILE).to(tl.int64) + tile * TILE
        live = at < count
        key, _values = keys_at(values, residual, found, at, live, whole, divisor, factor, rescale, KEYED, DIVIDES)
        live = live & ((key >> below) == prefix)
        counts += tl.histogram(((key >> shift) & mask).to(tl.int32), 256, mask=live)
    tl.atomic_add(histograms + LEVEL_OF * 256 + tl.arange(0, 256), counts, mask=counts > 0)


@triton.jit(do_not_specialize=_INTEGERS)
def floor_kernel(histograms, state, rank, least, LEVELS: tl.constexpr, KEY_BITS: tl.constexpr):
    """The floor: the least key with the digits that the sample's key of this rank has, at least ``least``."""
    prefix, _ = descend(histograms, rank, LEVELS, KEY_BITS)
    rest: tl.constexpr = KEY_BITS - 8 * LEVELS if KEY_BITS > 8 * LEVELS else 0
    tl.store(state + FLOOR, tl.maximum(prefix << rest, least.to(tl.int64)))


@triton.jit(do_not_specialize=_INTEGERS)
def collect_kernel(
    values, residual, divisor, factor, rescale, state, status, places, found, starts, sizes, p_out,
    numel, room,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append the block's elements that reach the floor to the candidates, where there is room; flag NaN and infinity; p_out <- p, unless it is None."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    live = at < numel
    p = p_of_tile(values, residual, block * BLOCK, numel, divisor, factor, rescale, DIVIDES, BLOCK)
    if p_out is not None:
        tl.store(p_out + at, p, mask=live)
    key = magnitude_bits(p)
    tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(key, 0) >= INFINITY_BITS)
    reaches = live & (key >= tl.load(state + FLOOR).to(tl.int32))
    selected = reaches.to(tl.int32)
    order = tl.cumsum(selected, 0)
    size = tl.sum(selected, 0)
    start = tl.atomic_add(state + FOUND, size.to(tl.int64))
    fits = reaches & (start + size <= room)
    tl.store(places + start + order - 1, at.to(tl.int32), mask=fits)
    tl.store(found + start + order - 1, p, mask=fits)
    tl.store(starts + block, start)
    tl.store(sizes + block, size)


@triton.jit(do_not_specialize=_INTEGERS)
def rank_kernel(histograms, state, rank, need, room, KEY_BITS: tl.constexpr, SAMPLED: tl.constexpr):
    """What is chosen: the keys down to that of this rank. SAMPLED: all candidates, unless there were too many."""
    key, _ = descend(histograms, rank, (KEY_BITS + 7) // 8, KEY_BITS)
    limit, level = key, key
    if SAMPLED:
        floor, whole = tl.load(state + FLOOR), reads_whole(state, need, room)
        limit, level = tl.where(whole, key, floor - 1), tl.where(whole, key, floor)
    tl.store(state + LIMIT, limit)
    tl.store(state + LEVEL, level)


@triton.jit(do_not_specialize=_INTEGERS)
def tally_kernel(
    values, residual, divisor, factor, rescale, found, state, starts, sizes, above, level,
    numel, need, room,
    KEYED: tl.constexpr, DIVIDES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many of the block's keys are above the limit, and how many others reach the level."""
    block = tl.program_id(0).to(tl.int64)
    whole = reads_whole(state, need, room)
    start, end = span(starts, sizes, block, numel, whole, BLOCK)
    limit, least = tl.load(state + LIMIT), tl.load(state + LEVEL)
    over, equal = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE).to(tl.int64)
        live = at < end
        key, _values = keys_at(values, residual, found, at, live, whole, divisor, factor, rescale, KEYED, DIVIDES)
        over += (live & (key > limit)).to(tl.int32)
        equal += (live & (key <= limit) & (key >= least)).to(tl.int32)
    tl.store(above + block, tl.sum(over, 0))
    tl.store(level + block, tl.sum(equal, 0))


@triton.jit
def span(starts, sizes, block, numel, whole, BLOCK: tl.constexpr):
    """Where the block's elements, or its candidates, begin and end."""
    first = tl.load(starts + block, mask=whole == 0, other=0)
    size = tl.load(sizes + block, mask=whole == 0, other=0).to(tl.int64)
    end = tl.minimum((block + 1) * BLOCK, numel.to(tl.int64))
    return tl.where(whole, block * BLOCK, first), tl.where(whole, end, first + size)


@triton.jit(do_not_specialize=_INTEGERS)
def arrange_kernel(above, level, starts_out, state, blocks, wanted, CHUNK: tl.constexpr):
    """Where each block's chosen elements begin among all, in ``starts_out``; ``level`` <- how many keys of the level it may send."""
    total = tl.zeros((CHUNK,), tl.int64)
    for first in range(0, blocks, CHUNK):
        number = first + tl.arange(0, CHUNK)
        total += tl.load(above + number, mask=number < blocks, other=0).to(tl.int64)
    rest = tl.maximum(wanted.to(tl.int64) - tl.sum(total, 0), 0)
    chosen = tl.zeros((), tl.int64)
    for first in range(0, blocks, CHUNK):
        number = first + tl.arange(0, CHUNK)
        live = number < blocks
        over = tl.load(above + number, mask=live, other=0).to(tl.int64)
        equal = tl.load(level + number, mask=live, other=0).to(tl.int64)
        before = tl.cumsum(equal, 0) - equal
        allowed = tl.minimum(tl.maximum(rest - before, 0), equal)
        tl.store(level + number, allowed.to(tl.int32), mask=live)
        sent = over + allowed
        tl.store(starts_out + number, chosen + tl.cumsum(sent, 0) - sent, mask=live)
        chosen += tl.sum(sent, 0)
        rest -= tl.sum(allowed, 0)
    tl.store(state + CHOSEN, chosen)


@triton.jit(do_not_specialize=_INTEGERS)
def emit_kernel(
    values, residual, divisor, factor, rescale, places, found, state, starts, sizes, allowed, targets,
    indices, sent, kept, numel, need, room,
    KEYED: tl.constexpr, DIVIDES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the block's chosen places to ``indices`` and their values to ``sent``, in order. kept: None, or p, which loses them."""
    block = tl.program_id(0).to(tl.int64)
    whole = reads_whole(state, need, room)
    start, end = span(starts, sizes, block, numel, whole, BLOCK)
    limit, least = tl.load(state + LIMIT), tl.load(state + LEVEL)
    target, rest = tl.load(targets + block), tl.load(allowed + block)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE).to(tl.int64)
        live = at < end
        key, p = keys_at(values, residual, found, at, live, whole, divisor, factor, rescale, KEYED, DIVIDES)
        equal = (live & (key <= limit) & (key >= least)).to(tl.int32)
        chosen = live & ((key > limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= rest)))
        selected = chosen.to(tl.int32)
        to = target + tl.cumsum(selected, 0) - 1
        place = tl.where(whole, at, tl.load(places + at, mask=live & (whole == 0), other=0).to(tl.int64))
        tl.store(indices + to, place.to(tl.int32), mask=chosen)
        if not KEYED:
            tl.store(sent + to, p, mask=chosen)
        if kept is not None:
            tl.store(kept + place, p - (p + 0.0), mask=chosen)
        target += tl.sum(selected, 0)
        rest -= tl.sum(equal, 0)
