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
_INTEGERS = ["numel", "size", "log_size", "rank", "need", "room", "blocks", "wanted", "divisor", "least"]


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
    values, residual, divisor, factor, rescale, keys, histograms, numel, size, log_size,
    KEY_BITS: tl.constexpr, DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """keys (int64 [size]) <- magnitudes of the sample; add their first digits to the first histogram."""
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = j < size
    place = sample_places(j, size, log_size, numel)
    key = magnitude_bits(p_at(values, residual, place, live, divisor, factor, rescale, DIVIDES))
    tl.store(keys + j, key.to(tl.int64), mask=live)
    counts = tl.histogram(key >> (KEY_BITS - 8), 256, mask=live)
    tl.atomic_add(histograms + tl.arange(0, 256), counts, mask=counts > 0)


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
def mark_kernel(
    values, residual, divisor, factor, rescale, state, status, marks, sizes, p_out, numel,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the block's elements that reach the floor, a bit each, and count them; flag NaN and infinity; p_out <- p, unless it is None. marks: None if no
    candidates are looked for."""
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < numel - block * BLOCK
    p = p_of_tile(values, residual, block * BLOCK, numel, divisor, factor, rescale, DIVIDES, BLOCK)
    if p_out is not None:
        tl.store(p_out + block * BLOCK + at, p, mask=live)
    key = magnitude_bits(p)
    tl.store(status, tl.full((), 1, tl.int64), mask=tl.max(key, 0) >= INFINITY_BITS)
    if marks is not None:
        reaches = (live & (key >= tl.load(state + FLOOR).to(tl.int32))).to(tl.int32)
        bits = tl.sum(tl.reshape(reaches, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], 1)
        tl.store(marks + block * (BLOCK // 8) + tl.arange(0, BLOCK // 8), bits.to(tl.uint8))
        tl.store(sizes + block, tl.sum(reaches, 0))


@triton.jit(do_not_specialize=_INTEGERS)
def place_kernel(sizes, state, blocks, CHUNK: tl.constexpr):
    """sizes <- where each block's candidates begin among all."""
    total = tl.zeros((), tl.int32)
    for first in range(0, blocks, CHUNK):
        number = first + tl.arange(0, CHUNK)
        size = tl.load(sizes + number, mask=number < blocks, other=0)
        tl.store(sizes + number, total + tl.cumsum(size, 0) - size, mask=number < blocks)
        total += tl.sum(size, 0)
    tl.store(state + FOUND, total.to(tl.int64))


@triton.jit
def ones_in(byte):
    """How many bits of each number of eight bits are 1."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 15


@triton.jit(do_not_specialize=_INTEGERS)
def gather_kernel(
    values, residual, divisor, factor, rescale, state, marks, starts, places, found, need, room,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append the block's marked elements to the candidates, in order, if these are of use."""
    if reads_whole(state, need, room) == 0:
        block = tl.program_id(0).to(tl.int64)
        start = block * BLOCK
        old = residual if residual is None else residual + start
        byte = tl.arange(0, BLOCK // 8)
        left = tl.load(marks + block * (BLOCK // 8) + byte).to(tl.int32)
        size = ones_in(left)
        to = tl.load(starts + block) + tl.cumsum(size, 0) - size
        for _ in range(tl.max(size, 0)):
            live = left != 0
            at = byte * 8 + ones_in((left & -left) - 1)
            tl.store(places + to, (start + at).to(tl.int32), mask=live)
            tl.store(found + to, p_at(values + start, old, at, live, divisor, factor, rescale, DIVIDES), mask=live)
            left = left & (left - 1)
            to += 1


@triton.jit
def span(state, numel, whole, TILE: tl.constexpr):
    """Of the whole part or the candidates: the first that this program looks at, and the one after its last."""
    count = tl.where(whole, numel.to(tl.int64), tl.load(state + FOUND))
    tiles = tl.cdiv(count, TILE)
    step = tl.cdiv(tiles, tl.num_programs(0)) * TILE
    start = tl.program_id(0).to(tl.int64) * step
    return start, tl.minimum(start + step, count)


@triton.jit(do_not_specialize=_INTEGERS)
def tally_kernel(
    values, residual, divisor, factor, rescale, found, state, histograms, above, level, numel, rank, need, room,
    RANKS: tl.constexpr, SAMPLED: tl.constexpr, KEY_BITS: tl.constexpr, KEYED: tl.constexpr, DIVIDES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many of the program's keys are above the limit, and how many others reach the level.

    RANKS: what is chosen are the keys down to that of this rank, or (SAMPLED) all candidates, unless there were too many; else the state says it."""
    whole = reads_whole(state, need, room)
    if RANKS:
        limit, _ignored = descend(histograms, rank, (KEY_BITS + 7) // 8, KEY_BITS)
        least = limit
        if SAMPLED:
            floor = tl.load(state + FLOOR)
            least = tl.where(whole, limit, floor)
            limit = tl.where(whole, limit, floor - 1)
        tl.store(state + LIMIT, limit, mask=tl.program_id(0) == 0)
        tl.store(state + LEVEL, least, mask=tl.program_id(0) == 0)
    else:
        limit, least = tl.load(state + LIMIT), tl.load(state + LEVEL)
    start, end = span(state, numel, whole, TILE)
    over, equal = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE).to(tl.int64)
        live = at < end
        key, _values = keys_at(values, residual, found, at, live, whole, divisor, factor, rescale, KEYED, DIVIDES)
        over += (live & (key > limit)).to(tl.int32)
        equal += (live & (key <= limit) & (key >= least)).to(tl.int32)
    tl.store(above + tl.program_id(0), tl.sum(over, 0))
    tl.store(level + tl.program_id(0), tl.sum(equal, 0))


@triton.jit(do_not_specialize=_INTEGERS)
def emit_kernel(
    values, residual, divisor, factor, rescale, places, found, state, above, level, indices, sent, kept, numel, wanted, need, room,
    KEYED: tl.constexpr, DIVIDES: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the program's chosen places to ``indices`` and their values to ``sent``, in order: all that are above the limit, and of those that reach the level
    the first, up to ``wanted``. kept: None, or p, which loses them. PROGRAMS: more than there are."""
    program, number = tl.program_id(0), tl.arange(0, PROGRAMS)
    over = tl.load(above + number, mask=number < tl.num_programs(0), other=0)
    others = tl.load(level + number, mask=number < tl.num_programs(0), other=0)
    most = tl.maximum(wanted - tl.sum(over, 0), 0)  # that may be sent of those that reach the level
    before = tl.sum(tl.where(number < program, others, 0), 0)
    target = (tl.sum(tl.where(number < program, over, 0), 0) + tl.minimum(before, most)).to(tl.int64)
    rest = most - before
    chosen_in_all = tl.sum(over, 0) + tl.minimum(tl.sum(others, 0), most)
    tl.store(state + CHOSEN, chosen_in_all.to(tl.int64), mask=program == 0)
    whole = reads_whole(state, need, room)
    start, end = span(state, numel, whole, TILE)
    limit, least = tl.load(state + LIMIT), tl.load(state + LEVEL)
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
