"""Kernels over one bit an element, with one scale for each block of 4096 (``psgc.codecs.onebit``) or none (UNIT, ``psgc.codecs.common.signs``).

The mean |p| of a block is summed in 64 lanes, row after row: a program takes the rows of BLOCKS blocks in turn, keeps the lanes in registers, and writes each
row's bits at once, so that nothing is read twice. What the server's answer leaves out needs the scale, which comes after the last row: the rows are
then computed again, from what the L2 cache still holds. So is the sum of a block whose finite magnitudes overflow.
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
    flag_nonfinite,
    load_f32,
    magnitude_bits,
    mean,
    read_rescale,
    report_bytes,
    store_f32,
)
from psgc.cuda.common.many_kernels import address, grad_of, part_of, reading_of

BLOCK = tl.constexpr(4096)
LANES = tl.constexpr(64)
ROWS = tl.constexpr(64)
UNROLLED = tl.constexpr(8)  # rows whose loads are under way together
SHRINK = tl.constexpr(2.0**-13)  # 4096 values of any finite size then add up without overflow
GROW = tl.constexpr(2.0**13)


@triton.jit
def _scale_bytes(numel, UNIT: tl.constexpr):
    """Bytes in front of the signs."""
    if UNIT:
        return numel.to(tl.int64) * 0
    else:
        return 4 * ((numel.to(tl.int64) + (BLOCK - 1)) // BLOCK)


@triton.jit
def _payload_row(payload, numel, start, row, rest, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    """One payload's elements in a row of each block, [BLOCKS, 64]; anything beyond the part."""
    blocks = tl.arange(0, BLOCKS)
    scales = tl.load(
        payload.to(tl.pointer_type(tl.float32), bitcast=True) + start // BLOCK + blocks, mask=blocks * BLOCK < rest, other=0.0
    )  # fmt: skip
    byte = blocks[:, None] * (BLOCK // 8) + row * 8 + tl.arange(0, 8)[None, :]
    signs = payload + _scale_bytes(numel, False) + start // 8
    if WHOLE:
        packed = tl.load(signs + byte)
    else:
        packed = tl.load(signs + byte, mask=byte * 8 < rest, other=0)
    negative = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    spread = tl.broadcast_to(scales[:, None, None], (BLOCKS, 8, 8))
    return tl.reshape(tl.where(negative != 0, -spread, spread), (BLOCKS, LANES))


@triton.jit
def _p_row(
    sources, divisor, residual, rescale, numel, start, row, rest,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(p, offsets, mask) of a row of each block, [BLOCKS, 64]; pointers but payloads are moved to the tile."""
    offsets = tl.arange(0, BLOCKS)[:, None] * BLOCK + row * LANES + tl.arange(0, LANES)[None, :]
    mask = offsets < rest
    if COUNT:
        values = _payload_row(sources[0], numel, start, row, rest, BLOCKS, WHOLE)
        for k in tl.static_range(1, COUNT):
            values += _payload_row(sources[k], numel, start, row, rest, BLOCKS, WHOLE)
        if not WHOLE:
            values = tl.where(mask, values, 0.0)
    else:
        values = load_f32(sources[0] + start, offsets, mask, WHOLE)
    return corrected(mean(values, divisor, DIVIDES), residual, rescale, offsets, mask, WHOLE), offsets, mask


@triton.jit
def _total(lanes):
    """[blocks, 64] -> [blocks]: lanes j and j + 32 are added, then j and j + 16, ..."""
    blocks: tl.constexpr = lanes.shape[0]
    for halving in tl.static_range(5):
        low, high = tl.split(tl.permute(tl.reshape(lanes, (blocks, 2, 32 >> halving)), (0, 2, 1)))
        lanes = low + high
    low, high = tl.split(lanes)
    return low + high


@triton.jit
def write_blocks(
    sources, divisor, residual, rescale, kept, out, status, numel, start,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode BLOCKS blocks from ``start`` on. COUNT: payloads that are added first; 0: ``sources[0]`` are the elements. kept: None, or gets what is
    left out."""
    rest = numel - start
    old = residual if residual is None else residual + start
    signs = out + _scale_bytes(numel, False) + start // 8
    blocks = tl.arange(0, BLOCKS)
    lanes = tl.zeros((BLOCKS, LANES), tl.float32)
    for first in range(0, ROWS, UNROLLED):
        rows = ()
        for i in tl.static_range(UNROLLED):
            p, _offsets, _mask = _p_row(sources, divisor, old, rescale, numel, start, first + i, rest, COUNT, DIVIDES, BLOCKS, WHOLE)
            rows = rows + (p,)
        for i in tl.static_range(UNROLLED):
            lanes += tl.abs(rows[i])
            negative = tl.reshape((rows[i] < 0).to(tl.int32), (BLOCKS, 8, 8))
            packed = tl.sum(negative << tl.arange(0, 8)[None, None, :], axis=2).to(tl.uint8)
            byte = blocks[:, None] * (BLOCK // 8) + (first + i) * 8 + tl.arange(0, 8)[None, :]
            if WHOLE:
                tl.store(signs + byte, packed)
            else:
                tl.store(signs + byte, packed, mask=byte * 8 < rest)
    count = tl.minimum(tl.maximum(rest - blocks * BLOCK, 1), BLOCK).to(tl.float32)
    total = _total(lanes)
    ordinary = total <= MAX_F32
    scale = tl.div_rn(total, count)
    if tl.min(ordinary.to(tl.int32), axis=0) == 0:  # NaN, infinity, or finite magnitudes whose sum overflows
        small = tl.zeros((BLOCKS, LANES), tl.float32)
        top = tl.zeros((BLOCKS,), tl.int32)
        for row in range(ROWS):
            p, _offsets, _mask = _p_row(sources, divisor, old, rescale, numel, start, row, rest, COUNT, DIVIDES, BLOCKS, WHOLE)
            small += tl.abs(p) * SHRINK
            top = tl.maximum(top, tl.max(magnitude_bits(p), axis=1))
        finite = top < INFINITY_BITS
        large = tl.div_rn(_total(small), count) * GROW
        large = tl.where(large > MAX_F32, MAX_F32, large)
        scale = tl.where(ordinary, scale, tl.where(finite, large, 0.0))
        flag_nonfinite(status, tl.max(top, axis=0) >= INFINITY_BITS)
    tl.store(out.to(tl.pointer_type(tl.float32), bitcast=True) + start // BLOCK + blocks, scale, mask=blocks * BLOCK < rest)
    if kept is not None:
        for row in range(ROWS):
            p, offsets, mask = _p_row(sources, divisor, old, rescale, numel, start, row, rest, COUNT, DIVIDES, BLOCKS, WHOLE)
            spread = tl.broadcast_to(scale[:, None], (BLOCKS, LANES))
            store_f32(kept + start, offsets, p - tl.where(p < 0, -spread, spread), mask, WHOLE)


@triton.jit(do_not_specialize=["numel", "payload_bytes"])
def write_kernel(
    sources, divisor, residual, at, rescale, kept, out, status, numel, payload_bytes,
    COUNT: tl.constexpr, DIVIDES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encode a part: a program for each BLOCKS blocks."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCKS * BLOCK)
    factor = read_rescale(at, rescale)
    report_bytes(status, payload_bytes, program)
    if start + BLOCKS * BLOCK <= numel:
        write_blocks(sources, divisor, residual, factor, kept, out, status, numel, start, COUNT, DIVIDES, BLOCKS, True)
    else:
        write_blocks(sources, divisor, residual, factor, kept, out, status, numel, start, COUNT, DIVIDES, BLOCKS, False)


@triton.jit
def _write_either(source, residual, rescale, out, status, numel, start):
    """Encode a block of elements, wherever in its part it is."""
    if start + BLOCK <= numel:
        write_blocks((source,), 1.0, residual, rescale, None, out, status, numel, start, 0, False, 1, True)
    else:
        write_blocks((source,), 1.0, residual, rescale, None, out, status, numel, start, 0, False, 1, False)


@triton.jit
def write_many_kernel(table, owners, at, rescale, DTYPE: tl.constexpr, FEEDBACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Encode many parts of elements of DTYPE, a program for each block: see `many`."""
    _part, row, numel, start, out, status = part_of(table, owners, BLOCK)
    factor = read_rescale(at, rescale)
    source = address(row, 0, DTYPE, ALIGNED)
    if FEEDBACK:
        _write_either(source, address(row, 1, tl.float32, ALIGNED), factor, out, status, numel, start)
    else:
        _write_either(source, None, factor, out, status, numel, start)


@triton.jit
def _sum_of(payloads, numel, start, rest, COUNT: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr):
    """The left-to-right sum of a block's elements, [512, 8]."""
    byte = tl.arange(0, BLOCK // 8)
    total = tl.zeros((BLOCK // 8, 8), tl.float32)
    for k in tl.static_range(COUNT):
        signs = payloads[k] + _scale_bytes(numel, UNIT) + start // 8
        if WHOLE:
            packed = tl.load(signs + byte)
        else:
            packed = tl.load(signs + byte, mask=byte * 8 < rest, other=0)
        negative = (packed.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
        if UNIT:
            values = tl.where(negative != 0, -1.0, 1.0)
        else:
            scale = tl.load(payloads[k].to(tl.pointer_type(tl.float32), bitcast=True) + start // BLOCK)
            values = tl.where(negative != 0, -scale, scale)
        if k == 0:
            total = values
        else:
            total += values
    return total


@triton.jit
def _read_block(
    payloads, target, grad, rescale, numel, start, USE: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    rest = numel - start
    offsets = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = offsets < rest
    values = _sum_of(payloads, numel, start, rest, COUNT, UNIT, WHOLE)
    source = grad if grad is None else grad + start
    use_decoded(values, target + start, source, rescale, offsets, mask, USE, WHOLE)


@triton.jit
def _read_either(payloads, target, grad, factor, numel, start, USE: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Use the payloads' elements of a block, wherever in its part it is."""
    if start + BLOCK <= numel:
        _read_block(payloads, target, grad, factor, numel, start, USE, COUNT, UNIT, True)
    else:
        _read_block(payloads, target, grad, factor, numel, start, USE, COUNT, UNIT, False)


@triton.jit(do_not_specialize=["numel"])
def read_kernel(payloads, target, grad, at, rescale, numel, USE: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """DECODES: target <- the sum of the payloads' elements. ADDS: target <- target + that. COMMITS: target <- grad + rescale * target - that.
    A program for each 4096 elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    _read_either(payloads, target, grad, read_rescale(at, rescale), numel, start, USE, COUNT, UNIT)


@triton.jit
def read_many_kernel(
    table, owners, at, rescale,
    TARGET: tl.constexpr, GRAD: tl.constexpr, USE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """What `read_kernel` does, for many parts: see `many`."""
    row, numel, start, payloads = reading_of(table, owners, BLOCK, COUNT)
    target = address(row, 0, TARGET, ALIGNED)
    grad = grad_of(row, target, GRAD, ALIGNED, USE)
    _read_either(payloads, target, grad, read_rescale(at, rescale), numel, start, USE, COUNT, UNIT)


@triton.jit
def write_signs(sources, divisor, out, status, numel, start, COUNT: tl.constexpr, DIVIDES: tl.constexpr, WHOLE: tl.constexpr):
    """Write the signs of 4096 elements, or of the mean of payloads of signs."""
    rest = numel - start
    byte = tl.arange(0, BLOCK // 8)
    offsets = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = offsets < rest
    if COUNT:
        values = _sum_of(sources, numel, start, rest, COUNT, True, WHOLE)
    else:
        values = load_f32(sources[0] + start, offsets, mask, WHOLE)
    p = tl.where(mask, mean(values, divisor, DIVIDES), 0.0)
    flag_nonfinite(status, tl.max(tl.max(magnitude_bits(p), axis=1), axis=0) >= INFINITY_BITS)
    packed = tl.sum((p < 0).to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)
    if WHOLE:
        tl.store(out + start // 8 + byte, packed)
    else:
        tl.store(out + start // 8 + byte, packed, mask=byte * 8 < rest)


@triton.jit(do_not_specialize=["numel", "payload_bytes"])
def signs_kernel(sources, divisor, out, status, numel, payload_bytes, COUNT: tl.constexpr, DIVIDES: tl.constexpr):
    """Encode a part as signs alone: a program for each 4096 elements."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * BLOCK
    report_bytes(status, payload_bytes, program)
    if start + BLOCK <= numel:
        write_signs(sources, divisor, out, status, numel, start, COUNT, DIVIDES, True)
    else:
        write_signs(sources, divisor, out, status, numel, start, COUNT, DIVIDES, False)


@triton.jit
def signs_many_kernel(table, owners, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Encode many parts of elements of DTYPE as signs alone, a program for each 4096 elements: see `many`."""
    _part, row, numel, start, out, status = part_of(table, owners, BLOCK)
    source = address(row, 0, DTYPE, ALIGNED)
    if start + BLOCK <= numel:
        write_signs((source,), 1.0, out, status, numel, start, 0, False, True)
    else:
        write_signs((source,), 1.0, out, status, numel, start, 0, False, False)
