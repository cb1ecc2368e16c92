"""Kernels over codes in blocks with a scale: ``psgc.codecs.quantize.blocks`` has the layout.

A program has a tile of consecutive whole blocks in registers: it reads each input once and writes each output once. The last tile of a part, which may
end within a block, takes another branch, block by block: there the places of codes depend on the block's length, and a whole tile of them would take
registers from all other programs.

Shapes of a tile: [PER, ROWS * WIDTH] as codes lie: place within the byte, byte of the tile. So one thread has all codes of a byte, and packs them without
asking others. Only rotations need it flat, [ROWS * BLOCK], in the part's order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from psgc.cuda.common.decoded_kernels import use_decoded
from psgc.cuda.common.elements import (
    INFINITY_BITS,
    MAX_F32,
    corrected,
    load_f32,
    magnitude_bits,
    mean,
    read_rescale,
    report_bytes,
)
from psgc.cuda.common.many_kernels import address, grad_of, part_of, reading_of
from psgc.cuda.common.randoms import read_draws
from psgc.cuda.quantize.rotation_kernels import rotated, rotated_back

LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)
LANES = tl.constexpr(16)
MAX_NORM = tl.constexpr(0)  # what a block is divided by
L2_NORM = tl.constexpr(1)
FIXED = tl.constexpr(2)  # nothing: every scale is the same number


@triton.jit
def _value_of(stored, VALUE: tl.constexpr, BITS: tl.constexpr, top, least):
    """The values of codes as they are stored, int32, before the scale."""
    if BITS == 8:
        return VALUE((stored << 24) >> 24, top, least)
    else:
        return VALUE(stored - (1 << (BITS - 1)), top, least)


@triton.jit
def _scale_pointer(payload, start, BLOCK: tl.constexpr):
    return payload.to(tl.pointer_type(tl.float32), bitcast=True) + start // BLOCK


@triton.jit
def _code_pointer(payload, numel, start, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Where the codes of the block that begins at element ``start`` are."""
    blocks = (numel.to(tl.int64) + (BLOCK - 1)) // BLOCK
    return payload + 4 * blocks + start * BITS // 8


@triton.jit
def offsets_of(BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The offsets of a tile's elements as their codes lie, where all of its blocks are whole."""
    per: tl.constexpr = 8 // BITS
    width: tl.constexpr = BLOCK // per
    place, byte = tl.arange(0, per)[:, None], tl.arange(0, ROWS * width)[None, :]
    return byte // width * BLOCK + place * width + byte % width


@triton.jit
def spread(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[1, ROWS * WIDTH] of what there is one of for each row."""
    return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, WIDTH)), (1, ROWS * WIDTH))


@triton.jit
def flat_of(x, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile in the part's order."""
    per: tl.constexpr = x.shape[0]
    if per == 1:
        return tl.reshape(x, (ROWS * BLOCK,))
    else:
        return tl.reshape(tl.permute(tl.reshape(x, (per, ROWS, BLOCK // per)), (1, 0, 2)), (ROWS * BLOCK,))


@triton.jit
def _read_whole(payload, numel, start, top, least, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The elements of a tile of whole blocks, as codes lie; of rotated blocks still rotated."""
    per: tl.constexpr = 8 // BITS
    width: tl.constexpr = BLOCK // per
    scales = tl.load(_scale_pointer(payload, start, BLOCK) + tl.arange(0, ROWS))
    codes = tl.load(_code_pointer(payload, numel, start, BLOCK, BITS) + tl.arange(0, ROWS * width)[None, :]).to(tl.int32)
    stored = (codes >> (tl.arange(0, per)[:, None] * BITS)) & ((1 << BITS) - 1)
    return _value_of(stored, VALUE, BITS, top, least) * spread(scales, ROWS, width)


@triton.jit
def _read_at(payload, numel, start, offsets, mask, top, least, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Elements at any offsets of the last tile; 0 where the mask is false."""
    per: tl.constexpr = 8 // BITS
    row = offsets // BLOCK
    element = offsets % BLOCK
    left = (numel - start).to(tl.int32) - row * BLOCK
    count = tl.where(left < BLOCK, left, BLOCK)
    width = (count + (per - 1)) // per
    width = tl.where(width < 1, 1, width)
    place = element // width
    byte = element - place * width
    scale = tl.load(_scale_pointer(payload, start, BLOCK) + row, mask=mask, other=0.0)
    codes = tl.load(_code_pointer(payload, numel, start, BLOCK, BITS) + row * (BLOCK // per) + byte, mask=mask, other=0).to(tl.int32)
    stored = (codes >> (place * BITS)) & ((1 << BITS) - 1)
    return _value_of(stored, VALUE, BITS, top, least) * scale


@triton.jit
def _sum_whole(
    payloads, numel, start, top, least, COUNT: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """The sum of payloads' elements of a tile of whole blocks: as codes lie, or, of rotated ones, flat and turned back."""
    total = _turned_back(_read_whole(payloads[0], numel, start, top, least, VALUE, BITS, BLOCK, ROWS), start, BLOCK, ROWS, ROTATE)
    for k in tl.static_range(1, COUNT):
        total += _turned_back(_read_whole(payloads[k], numel, start, top, least, VALUE, BITS, BLOCK, ROWS), start, BLOCK, ROWS, ROTATE)
    return total


@triton.jit
def _turned_back(values, start, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr):
    if ROTATE:
        return rotated_back(flat_of(values, BLOCK, ROWS), start + tl.arange(0, ROWS * BLOCK))
    else:
        return values


@triton.jit
def _sum_at(
    payloads, numel, start, offsets, mask, top, least, COUNT: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    total = _read_at(payloads[0], numel, start, offsets, mask, top, least, VALUE, BITS, BLOCK)
    for k in tl.static_range(1, COUNT):
        total += _read_at(payloads[k], numel, start, offsets, mask, top, least, VALUE, BITS, BLOCK)
    return total


@triton.jit
def _halved(lanes, COUNT: tl.constexpr):
    """[rows, COUNT] -> [rows, COUNT / 2]: the second half added to the first."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, (lanes.shape[0], 2, COUNT // 2)), (0, 2, 1)))
    return low + high


@triton.jit
def _l2_norm(
    top, sources, divisor, old, rescale, numel, start, code_top, least,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """||p||_2 of each block, in 16 lanes; top: max|p| of each, finite and above 0. The lanes' order is not that of the tile, so elements are read
    again, from the L1 cache."""
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for step in range(BLOCK // LANES):
        offsets = tl.arange(0, ROWS)[:, None] * BLOCK + step * LANES + tl.arange(0, LANES)[None, :]
        mask = offsets < numel - start
        if COUNT:
            values = _sum_at(sources, numel, start, offsets, mask, code_top, least, COUNT, VALUE, BITS, BLOCK)
        else:
            values = load_f32(sources[0] + start, offsets, mask, False)
        p = corrected(mean(values, divisor, DIVIDES), old, rescale, offsets, mask, False)
        x = tl.div_rn(p, tl.broadcast_to(top[:, None], (ROWS, LANES)))
        lanes += x * x
    lanes = _halved(_halved(_halved(lanes, 16), 8), 4)
    low, high = tl.split(lanes)
    return tl.sqrt_rn(low + high) * top


@triton.jit
def _scales_of(top_bits, length, top_code, fixed, NORM: tl.constexpr, ROWS: tl.constexpr):
    """(whether a block is sent, its scale, its factor), [ROWS] each. length: the blocks' norms."""
    if NORM == FIXED:
        sent = top_bits < INFINITY_BITS
        scale = tl.where(sent, fixed, 0.0)
        factor = scale
    else:
        top = tl.full((ROWS,), 0.0, tl.float32) + top_code
        scale = tl.div_rn(length, top)
        sent = (length <= MAX_F32) & (scale >= LEAST_SCALE)
        largest = tl.div_rn(tl.full((ROWS,), MAX_F32, tl.float32), top)
        scale = tl.where(scale >= largest, (largest.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), scale)
        scale = tl.where(sent, scale, 0.0)
        factor = tl.div_rn(top, tl.where(sent, length, 1.0))
    return sent, scale, factor


@triton.jit
def _p_whole(
    sources, divisor, old, rescale, numel, start, offsets, top, least,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """(p, what is encoded as codes lie, whether p has a NaN or infinity) of whole blocks. offsets: of p's elements."""
    if COUNT:
        values = _sum_whole(sources, numel, start, top, least, COUNT, VALUE, BITS, BLOCK, ROWS, ROTATE)
    else:
        values = load_f32(sources[0] + start, offsets, None, True)
    p = corrected(mean(values, divisor, DIVIDES), old, rescale, offsets, None, True)
    if ROTATE:
        per: tl.constexpr = 8 // BITS
        nonfinite = tl.max(magnitude_bits(p), axis=0) >= INFINITY_BITS
        turned = rotated(p, start + offsets)
        return p, tl.reshape(tl.permute(tl.reshape(turned, (ROWS, per, BLOCK // per)), (1, 0, 2)), (per, ROWS * BLOCK // per)), nonfinite
    else:
        return p, p, False


@triton.jit
def _p_last(
    sources, divisor, old, rescale, numel, start, offsets, valid, top, least,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p of one of the last blocks as codes lie, which is not rotated."""
    if COUNT:
        values = _sum_at(sources, numel, start, offsets, valid, top, least, COUNT, VALUE, BITS, BLOCK)
    else:
        values = load_f32(sources[0] + start, offsets, valid, False)
    return corrected(mean(values, divisor, DIVIDES), old, rescale, offsets, valid, False)


@triton.jit
def _places(rest, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block that may be short: (offsets of elements as their codes lie, which of them the part has, which bytes of codes it has)."""
    per: tl.constexpr = 8 // BITS
    place, byte = tl.arange(0, per)[:, None], tl.arange(0, BLOCK // per)[None, :]
    count = tl.minimum(rest, BLOCK)
    here = (count + (per - 1)) // per
    element = place * here + byte
    valid = (byte < here) & (element < count)
    return tl.where(valid, element, 0), valid, byte < here


@triton.jit
def _store_codes(
    out, numel, start, stored, scale, byte_mask, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr
):
    """Write a tile's scales and codes to the payload."""
    per: tl.constexpr = 8 // BITS
    width: tl.constexpr = BLOCK // per
    packed = tl.sum(stored << (tl.arange(0, per)[:, None] * BITS), axis=0).to(tl.uint8)
    place = _code_pointer(out, numel, start, BLOCK, BITS) + tl.arange(0, ROWS * width)
    tl.store(_scale_pointer(out, start, BLOCK) + tl.arange(0, ROWS), scale)
    if WHOLE:
        tl.store(place, packed)
    else:
        tl.store(place, packed, mask=tl.reshape(byte_mask, (width,)))


@triton.jit
def write_tile(
    sources, divisor, residual, rescale, kept, out, status, numel, start, first, before, between, top, least, fixed,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of whole blocks, or (not WHOLE: ROWS is 1) a block that may be short. COUNT: payloads that are added first; 0: ``sources[0]`` are the
    elements. kept: None, or gets what is left out."""
    old = residual if residual is None else residual + start
    width: tl.constexpr = BLOCK * BITS // 8
    if WHOLE:
        places = offsets_of(BITS, BLOCK, ROWS)
        valid, byte_mask = places >= 0, None
        offsets = tl.arange(0, ROWS * BLOCK) if ROTATE else places
        p, q, nonfinite = _p_whole(
            sources, divisor, old, rescale, numel, start, offsets, top, least, COUNT, DIVIDES, VALUE, BITS, BLOCK, ROWS, ROTATE
        )
    else:
        places, valid, byte_mask = _places((numel - start).to(tl.int32), BITS, BLOCK)
        offsets = places
        p = _p_last(sources, divisor, old, rescale, numel, start, offsets, valid, top, least, COUNT, DIVIDES, VALUE, BITS, BLOCK)
        q, nonfinite = p, False
    top_bits = tl.max(tl.reshape(tl.max(magnitude_bits(q), axis=0), (ROWS, width)), axis=1)
    if not (WHOLE and ROTATE):
        nonfinite = tl.max(top_bits, axis=0) >= INFINITY_BITS
    length = top_bits.to(tl.float32, bitcast=True)
    if NORM == L2_NORM:
        ordinary = (top_bits > 0) & (top_bits < INFINITY_BITS)
        norm = _l2_norm(
            tl.where(ordinary, length, 1.0), sources, divisor, old, rescale, numel, start, top, least,
            COUNT, DIVIDES, VALUE, BITS, BLOCK, ROWS,
        )  # fmt: skip
        length = tl.where(ordinary, norm, length)
    sent, scale, factor = _scales_of(top_bits, length, top, fixed, NORM, ROWS)
    index = first + start.to(tl.uint32) + places.to(tl.uint32)
    bias: tl.constexpr = (1 << (BITS - 1)) if BITS < 8 else 0
    code = CODE(q, spread(factor, ROWS, width), top, least, index, before, between, RANDOM)
    stored = (code + bias) & ((1 << BITS) - 1)
    stored = tl.where(spread(sent, ROWS, width) & valid, stored, bias).to(tl.int32)
    _store_codes(out, numel, start, stored, scale, byte_mask, BITS, BLOCK, ROWS, WHOLE)
    if kept is not None:
        values = _value_of(stored, VALUE, BITS, top, least) * spread(scale, ROWS, width)
        if WHOLE:
            tl.store(kept + start + offsets, p - _turned_back(values, start, BLOCK, ROWS, ROTATE))
        else:
            tl.store(kept + start + offsets, p - values, mask=valid)
    tl.store(status, tl.full((), 1, tl.int64), mask=nonfinite)


@triton.jit
def _write_last(
    sources, divisor, residual, rescale, kept, out, status, numel, start, first, before, between, top, least, fixed,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Encode the part's last tile, which is not rotated, block by block."""
    for row in range(tl.cdiv((numel - start).to(tl.int32), BLOCK)):
        write_tile(
            sources, divisor, residual, rescale, kept, out, status, numel, start + row * BLOCK, first, before, between, top, least, fixed,
            COUNT, DIVIDES, CODE, VALUE, RANDOM, BITS, BLOCK, 1, NORM, False, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "payload_bytes", "first", "before", "between"])
def write_kernel(
    sources, divisor, residual, at, rescale, kept, out, status, numel, payload_bytes, words, first, before, between, top, least, fixed,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Encode a part: a program for each ROWS blocks."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * (ROWS * BLOCK)
    factor = read_rescale(at, rescale)
    place, key, other = read_draws(words, first, before, between)
    report_bytes(status, payload_bytes, program)
    if start + ROWS * BLOCK <= numel:
        write_tile(
            sources, divisor, residual, factor, kept, out, status, numel, start, place, key, other, top, least, fixed,
            COUNT, DIVIDES, CODE, VALUE, RANDOM, BITS, BLOCK, ROWS, NORM, ROTATE, True,
        )  # fmt: skip
    else:
        _write_last(
            sources, divisor, residual, factor, kept, out, status, numel, start, place, key, other, top, least, fixed,
            COUNT, DIVIDES, CODE, VALUE, RANDOM, BITS, BLOCK, NORM,
        )  # fmt: skip


@triton.jit
def _write_either(
    source, residual, rescale, out, status, numel, start, first, before, between, top, least, fixed,
    CODE: tl.constexpr, VALUE: tl.constexpr, RANDOM: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Encode a tile of elements, wherever in its part it is."""
    if start + ROWS * BLOCK <= numel:
        write_tile(
            (source,), 1.0, residual, rescale, None, out, status, numel, start, first, before, between, top, least, fixed,
            0, False, CODE, VALUE, RANDOM, BITS, BLOCK, ROWS, NORM, ROTATE, True,
        )  # fmt: skip
    else:
        _write_last(
            (source,), 1.0, residual, rescale, None, out, status, numel, start, first, before, between, top, least, fixed,
            0, False, CODE, VALUE, RANDOM, BITS, BLOCK, NORM,
        )  # fmt: skip


@triton.jit
def write_many_kernel(
    table, owners, words, at, rescale, top, least, fixed,
    DTYPE: tl.constexpr, FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, RANDOM: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Encode many parts of elements of DTYPE: see `many`."""
    part, row, numel, start, out, status = part_of(table, owners, ROWS * BLOCK)
    factor = read_rescale(at, rescale)
    source = address(row, 0, DTYPE, ALIGNED)
    # without a stream any numbers will do: nothing is drawn
    first, before, between = read_draws(table if words is None else words + part * 3, 0, 0, 0)
    if FEEDBACK:
        _write_either(
            source, address(row, 1, tl.float32, ALIGNED), factor, out, status, numel, start, first, before, between, top, least, fixed,
            CODE, VALUE, RANDOM, BITS, BLOCK, ROWS, NORM, ROTATE,
        )  # fmt: skip
    else:
        _write_either(
            source, None, factor, out, status, numel, start, first, before, between, top, least, fixed,
            CODE, VALUE, RANDOM, BITS, BLOCK, ROWS, NORM, ROTATE,
        )  # fmt: skip


@triton.jit
def _read_tile(
    payloads, target, grad, factor, numel, start, top, least,
    USE: tl.constexpr, COUNT: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Use the payloads' elements of one tile."""
    source = grad if grad is None else grad + start
    if start + ROWS * BLOCK <= numel:
        places = tl.arange(0, ROWS * BLOCK) if ROTATE else offsets_of(BITS, BLOCK, ROWS)
        values = _sum_whole(payloads, numel, start, top, least, COUNT, VALUE, BITS, BLOCK, ROWS, ROTATE)
        use_decoded(values, target + start, source, factor, places, None, USE, True)
    else:
        flat = tl.arange(0, ROWS * BLOCK)
        mask = flat < (numel - start).to(tl.int32)
        rest = _sum_at(payloads, numel, start, flat, mask, top, least, COUNT, VALUE, BITS, BLOCK)
        use_decoded(rest, target + start, source, factor, flat, mask, USE, False)


@triton.jit(do_not_specialize=["numel"])
def read_kernel(
    payloads, target, grad, at, rescale, numel, top, least,
    USE: tl.constexpr, COUNT: tl.constexpr, VALUE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """DECODES: target <- the sum of the payloads' elements. ADDS: target <- target + that. COMMITS: target <- grad + rescale * target - that."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    _read_tile(payloads, target, grad, read_rescale(at, rescale), numel, start, top, least, USE, COUNT, VALUE, BITS, BLOCK, ROWS, ROTATE)


@triton.jit
def read_many_kernel(
    table, owners, at, rescale, top, least,
    TARGET: tl.constexpr, GRAD: tl.constexpr, USE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, VALUE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """What `read_kernel` does, for many parts: see `many`."""
    row, numel, start, payloads = reading_of(table, owners, ROWS * BLOCK, COUNT)
    target = address(row, 0, TARGET, ALIGNED)
    grad = grad_of(row, target, GRAD, ALIGNED, USE)
    _read_tile(payloads, target, grad, read_rescale(at, rescale), numel, start, top, least, USE, COUNT, VALUE, BITS, BLOCK, ROWS, ROTATE)
