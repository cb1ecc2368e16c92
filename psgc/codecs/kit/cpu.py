"""The kit's operators on the CPU: kernels where NumPy is slow, for the same results.

Owns the kernels. Each is compiled, or loaded from the cache, when it is first called: a codec waits only for those that it uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, Bytes, Stream
from psgc.codecs.common.bits import bits_of_f32, f32_of_bits, trailing_zeros, view_u64
from psgc.codecs.common.feedback import NO_RESIDUAL, mean_corrected_chunk
from psgc.codecs.common.streams import stream_position, uniform
from psgc.codecs.jit.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, U32, helper, kernel
from psgc.codecs.kit.dct import matrix
from psgc.codecs.kit.ops import How, Ops, Vector, packed_bytes

_INFINITY_BITS: Final = np.uint32(0x7F800000)
_OUT_I64: Final = types.Array(types.int64, 1, "C")
_LANES: Final = 64  # blocks that are transformed together: 16 KiB of blocks of 64 elements


def _at_first_call(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A kernel that is compiled when it is first called."""

    def put_off(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: kernel(signature)(function))

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            return compiled()(*arguments)

        return run

    return put_off


@helper
def _is_finite(x: Any) -> Any:
    """Whether all of x is finite. Magnitudes are compared as signed integers, because LLVM vectorises only that comparison."""
    top = np.int32(0)
    for i in range(x.size):
        top = max(top, np.int32(bits_of_f32(x[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top) < _INFINITY_BITS


@_at_first_call(BOOL(IN_F32, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32))
def _correct(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any) -> Any:
    """p <- values / divisor + rescale * residual, with zeros for what is not finite; returns whether all of it is."""
    mean_corrected_chunk(values, divisor, residual, rescale, p)
    if _is_finite(p):
        return True
    for i in range(p.size):
        if not np.isfinite(p[i]):
            p[i] = np.float32(0)
    return False


def correct(values: F32, divisor: int, residual: F32 | None, rescale: float) -> tuple[F32, bool]:
    """p = values / divisor + rescale * residual, with zeros for what is not finite, and whether all of it is."""
    p = np.empty(values.size, np.float32)
    finite = _correct(values, divisor, NO_RESIDUAL if residual is None else residual, rescale, p)
    return p, bool(finite)


@_at_first_call(types.void(U32, U32, U32, OUT_F32))
def _uniform(first: Any, before: Any, between: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = uniform(np.uint32(first + np.uint32(i)), before, between)


@_at_first_call(types.void(IN_F32, I64, OUT_F32))
def _block_tops(x: Any, block: Any, out: Any) -> None:
    """out <- max|x| of each block."""
    for number in range(out.size):
        values, top = x[number * block : (number + 1) * block], np.int32(0)
        for i in range(values.size):
            top = max(top, np.int32(bits_of_f32(values[i]) & np.uint32(0x7FFFFFFF)))
        out[number] = f32_of_bits(np.uint32(top))


@_at_first_call(types.void(IN_F32, I64, OUT_F32))
def _block_sums(x: Any, block: Any, out: Any) -> None:
    """out <- the sum of each block, whose halves are added until one element is left."""
    sums = np.empty(block, np.float32)
    for number in range(out.size):
        values = x[number * block : (number + 1) * block]
        for i in range(values.size):
            sums[i] = values[i]
        for i in range(values.size, block):
            sums[i] = np.float32(0)
        half = block >> 1
        while half:
            for i in range(half):
                sums[i] += sums[half + i]
            half >>= 1
        out[number] = sums[0]


@helper
def _times(factors: Any, x: Any, block: Any, lanes: Any, terms: Any, out: Any) -> None:
    """out [block, lanes] <- factors [block, block] times x [block, lanes], whose products are added in halves. All lanes take each step of a sum together, so
    that the loops are as wide as vectors. terms: scratch, half as large as x. Two halvings at a time spare half of the memory's traffic."""
    half, quarter = block >> 1, block >> 2
    for k in range(block):
        row = factors[k * block : (k + 1) * block]
        for n in range(quarter):
            a, b, c, d = row[n], row[half + n], row[quarter + n], row[half + quarter + n]
            first, second = x[n * lanes : (n + 1) * lanes], x[(half + n) * lanes : (half + n + 1) * lanes]
            third = x[(quarter + n) * lanes : (quarter + n + 1) * lanes]
            fourth = x[(half + quarter + n) * lanes : (half + quarter + n + 1) * lanes]
            made = terms[n * lanes : (n + 1) * lanes]
            for lane in range(lanes):
                made[lane] = (first[lane] * a + second[lane] * b) + (third[lane] * c + fourth[lane] * d)
        left = quarter * lanes
        while left > 2 * lanes:
            left >>= 2
            for i in range(left):
                terms[i] = (terms[i] + terms[2 * left + i]) + (terms[left + i] + terms[3 * left + i])
        made = out[k * lanes : (k + 1) * lanes]
        if quarter == 0:
            for lane in range(lanes):
                made[lane] = x[lane] * row[0] + x[lanes + lane] * row[1]
        elif left > lanes:
            for lane in range(lanes):
                made[lane] = terms[lane] + terms[lanes + lane]
        else:
            for lane in range(lanes):
                made[lane] = terms[lane]


@helper
def _transpose(x: Any, rows: Any, columns: Any, out: Any) -> None:
    for row in range(rows):
        for column in range(columns):
            out[column * rows + row] = x[row * columns + column]


@_at_first_call(types.void(IN_F32, IN_F32, I64, OUT_F32))
def _dct(x: Any, factors: Any, block: Any, out: Any) -> None:
    """out <- each whole block of x times the matrix ``factors``, as ``_times`` does it, _LANES blocks at a time; what is left of x stays as it is."""
    across, made, terms = (
        np.empty(block * _LANES, np.float32),
        np.empty(block * _LANES, np.float32),
        np.empty(block * _LANES // 2, np.float32),
    )
    blocks = x.size // block
    for first in range(0, blocks, _LANES):
        lanes = min(_LANES, blocks - first)
        some = slice(first * block, (first + lanes) * block)
        _transpose(x[some], lanes, block, across)
        _times(factors, across, block, lanes, terms, made)
        _transpose(made, block, lanes, out[some])
    for n in range(blocks * block, x.size):
        out[n] = x[n]


@_at_first_call(types.void(IN_F32, IN_F32, I64, BOOL, OUT_F32))
def _dct2(x: Any, factors: Any, side: Any, columns_first: Any, out: Any) -> None:
    """out <- each whole square of x times the matrix ``factors``, in both directions; what is left of x stays as it is."""
    size = side * side
    one, two, terms = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size // 2, np.float32)
    for first in range(0, x.size // size * size, size):
        if columns_first:
            _times(factors, x[first : first + size], side, side, terms, one)
            _transpose(one, side, side, two)
            _times(factors, two, side, side, terms, one)
            _transpose(one, side, side, out[first : first + size])
        else:
            _transpose(x[first : first + size], side, side, one)
            _times(factors, one, side, side, terms, two)
            _transpose(two, side, side, one)
            _times(factors, one, side, side, terms, out[first : first + size])
    for n in range(x.size // size * size, x.size):
        out[n] = x[n]


@_at_first_call(types.void(IN_F32, I64, I64, _OUT_I64))
def _block_largest(x: Any, block: Any, k: Any, out: Any) -> None:
    """out <- the indices of the k largest magnitudes of each block, all of a last one that has fewer; of equal ones the first. A magnitude's bits are
    chosen from the top down: three histograms of those that agree in the bits chosen so far."""
    counts, sent = np.empty(2048, np.int32), 0
    for first in range(0, x.size, block):
        end = min(first + block, x.size)
        wanted = min(k, end - first)
        chosen, left, bits = np.int64(0), wanted, 31
        for width in (11, 11, 9):
            counts[:] = 0
            below = bits - width
            for i in range(first, end):
                magnitude = np.int64(bits_of_f32(x[i]) & np.uint32(0x7FFFFFFF))
                if magnitude >> bits == chosen:
                    counts[(magnitude >> below) & ((1 << width) - 1)] += 1
            digit = (1 << width) - 1
            while counts[digit] < left:
                left -= counts[digit]
                digit -= 1
            chosen, bits = (chosen << width) | digit, below
        for i in range(first, end):  # those above the k-th magnitude, and as many that equal it as are left
            magnitude = np.int64(bits_of_f32(x[i]) & np.uint32(0x7FFFFFFF))
            if magnitude > chosen or (magnitude == chosen and left > 0):
                left -= magnitude == chosen
                out[sent] = i
                sent += 1


@_at_first_call(types.void(IN_F32, IN_F32, OUT_F32))
def _divide(x: Any, y: Any, out: Any) -> None:
    for i in range(out.size):
        divisor = y[i]
        out[i] = x[i] / divisor if divisor != 0 else np.float32(0)


@_at_first_call(types.void(IN_F32, IN_F32, OUT_F32))
def _round_at_random(x: Any, uniform_: Any, out: Any) -> None:
    for i in range(out.size):
        below = np.floor(x[i])
        out[i] = below + np.float32(1) if uniform_[i] < x[i] - below else below


@_at_first_call(types.void(IN_BYTES, _OUT_I64))
def _select(mask: Any, out: Any) -> None:
    """out <- places of the bytes that are not zero, of which there are as many as ``out`` has room for."""
    words, count = view_u64(mask, 0, mask.size // 8), 0
    for number in range(words.size):
        word = words[number]
        while word:
            place = trailing_zeros(word)
            out[count] = 8 * number + (place >> 3)
            count += 1
            word &= word - np.uint64(1)
    for i in range(mask.size // 8 * 8, mask.size):
        if mask[i]:
            out[count] = i
            count += 1


@helper
def _lower(bits: Any, unit: Any) -> Any:
    """A word of units of 16, 32 or 64 bits, whose lowest ``bits`` bits are set."""
    every = np.uint64(1) if unit == 64 else np.uint64(0x0000000100000001) if unit == 32 else np.uint64(0x0001000100010001)
    return ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)) * every


@helper
def _squeezed(word: Any, bits: Any) -> Any:
    """Eight codes, a byte each, as the word's lowest bits: in each 16, each 32 and all 64 bits the upper half is pushed down to the lower."""
    low16, low32, low64 = _lower(bits, 16), _lower(2 * bits, 32), _lower(4 * bits, 64)
    word = (word & low16) | ((word >> np.uint64(8 - bits)) & (low16 << np.uint64(bits)))
    word = (word & low32) | ((word >> np.uint64(16 - 2 * bits)) & (low32 << np.uint64(2 * bits)))
    return (word & low64) | ((word >> np.uint64(32 - 4 * bits)) & (low64 << np.uint64(4 * bits)))


@helper
def _stretched(word: Any, bits: Any) -> Any:
    """The inverse of `_squeezed`."""
    low16, low32, low64 = _lower(bits, 16), _lower(2 * bits, 32), _lower(4 * bits, 64)
    word = (word & low64) | ((word << np.uint64(32 - 4 * bits)) & (low64 << np.uint64(32)))
    word = (word & low32) | ((word << np.uint64(16 - 2 * bits)) & (low32 << np.uint64(16)))
    return (word & low16) | ((word << np.uint64(8 - bits)) & (low16 << np.uint64(8)))


@helper
def _read_end(data: Any, place: Any) -> Any:
    """The bytes of ``data`` from ``place`` on, at most eight, as a word."""
    word = np.uint64(0)
    for j in range(min(8, data.size - place)):
        word |= np.uint64(data[place + j]) << np.uint64(8 * j)
    return word


@helper
def _write_end(word: Any, data: Any, place: Any) -> None:
    for j in range(min(8, data.size - place)):
        data[place + j] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(0xFF))


@_at_first_call(types.void(IN_BYTES, I64, OUT_BYTES))
def _pack(codes: Any, bits: Any, out: Any) -> None:
    """Pack eight codes at a time: they end at a byte boundary at any width. Each word also writes bytes behind them, which the next one overwrites."""
    words = codes.size // 8 if bits == 8 else max(0, out.size - 8 + bits) // bits
    for number in range(words):
        view_u64(out, number * bits, 1)[0] = _squeezed(view_u64(codes, 8 * number, 1)[0], bits)
    for number in range(words, -(-codes.size // 8)):
        _write_end(_squeezed(_read_end(codes, 8 * number), bits), out, number * bits)


@_at_first_call(types.void(IN_BYTES, I64, OUT_BYTES))
def _unpack(packed: Any, bits: Any, out: Any) -> None:
    words = out.size // 8 if bits == 8 else max(0, packed.size - 8 + bits) // bits
    for number in range(words):
        view_u64(out, 8 * number, 1)[0] = _stretched(view_u64(packed, number * bits, 1)[0], bits)
    for number in range(words, -(-out.size // 8)):
        _write_end(_stretched(_read_end(packed, number * bits), bits), out, 8 * number)


def indices_well_formed(packed: Bytes, count: int, numel: int) -> bool:
    """Whether ``packed`` is exactly the bytes of ``count`` indices below ``numel``."""
    from psgc.codecs.sparsify.gaps import well_formed

    return bool(well_formed(packed, count, numel))


@_at_first_call(BOOL(IN_F32))
def _all_finite(x: Any) -> Any:
    return _is_finite(x)


@functools.cache
def _factors(block: int, inverse: bool) -> F32:
    """The matrix of the DCT, or of its inverse, row by row."""
    made = matrix(block)
    return np.ascontiguousarray(made.T if inverse else made).reshape(-1)


class CpuOps(Ops):
    """``Ops`` with kernels for what NumPy does slowly."""

    def uniform(self, stream: Stream, lo: int, count: int) -> Vector:
        out = np.empty(count, np.float32)
        _uniform(*stream_position(stream, lo), out)
        return out

    def divide(self, x: Vector, y: Vector) -> Vector:
        if not x.dtype == y.dtype == np.float32:
            return super().divide(x, y)
        x, y = map(np.ascontiguousarray, np.broadcast_arrays(x, y))
        out = np.empty(x.size, np.float32)
        _divide(x, y, out)
        return out

    def round_at_random(self, x: Vector, uniform: Vector) -> Vector:
        out = np.empty(x.size, np.float32)
        _round_at_random(np.ascontiguousarray(x), uniform, out)
        return out

    def select(self, mask: Vector) -> Vector:
        out = np.empty(np.count_nonzero(mask), np.int64)
        _select(np.ascontiguousarray(mask).view(np.uint8), out)
        return out

    def reduce(self, x: Vector, how: How) -> Vector:
        if how == "magnitude" and x.size:
            return self.block_reduce(x, x.size, how)
        return super().reduce(x, how)

    def block_reduce(self, x: Vector, block: int, how: How) -> Vector:
        if how in ("max", "min"):
            return super().block_reduce(x, block, how)
        out = np.empty(-(-x.size // block), np.float32)
        (_block_sums if how == "sum" else _block_tops)(np.ascontiguousarray(x), block, out)
        return out

    def dct(self, x: Vector, block: int) -> Vector:
        out = np.empty(x.size, np.float32)
        _dct(np.ascontiguousarray(x, np.float32), _factors(block, False), block, out)
        return out

    def idct(self, coefficients: Vector, block: int) -> Vector:
        out = np.empty(coefficients.size, np.float32)
        _dct(np.ascontiguousarray(coefficients, np.float32), _factors(block, True), block, out)
        return out

    def dct2(self, x: Vector, side: int) -> Vector:
        out = np.empty(x.size, np.float32)
        _dct2(np.ascontiguousarray(x, np.float32), _factors(side, False), side, False, out)
        return out

    def idct2(self, coefficients: Vector, side: int) -> Vector:
        out = np.empty(coefficients.size, np.float32)
        _dct2(np.ascontiguousarray(coefficients, np.float32), _factors(side, True), side, True, out)
        return out

    def block_largest(self, x: Vector, block: int, k: int) -> Vector:
        whole, rest = divmod(x.size, block)
        out = np.empty(whole * min(k, block) + min(k, rest), np.int64)
        _block_largest(np.ascontiguousarray(x, np.float32), block, k, out)
        return out

    def pack(self, codes: Vector, bits: int) -> Vector:
        out = np.empty(packed_bytes(codes.size, bits), np.uint8)
        _pack(np.ascontiguousarray(codes), bits, out)
        return out

    def unpack(self, packed: Vector, bits: int, count: int) -> Vector:
        out = np.empty(count, np.uint8)
        _unpack(packed, bits, out)
        return out

    # Importing `gaps` and `largest` compiles their kernels.

    def pack_indices(self, indices: Vector) -> Vector:
        from psgc.codecs.sparsify.gaps import GAPS, MAX_WIDTH, pack

        out = np.empty(-(-indices.size // GAPS) * (1 + GAPS * MAX_WIDTH // 8), np.uint8)
        return out[: pack(indices.astype(np.uint32), out)]

    def unpack_indices(self, packed: Vector, count: int) -> Vector:
        from psgc.codecs.sparsify.gaps import unpack

        indices = np.empty(count, np.uint32)
        unpack(packed, indices)
        return indices.astype(np.int64)

    def largest(self, x: Vector, k: int) -> Vector:
        from psgc.codecs.sparsify.largest import largest

        return largest(np.ascontiguousarray(x), NO_RESIDUAL, 1.0, k)[0].astype(np.int64)

    def saturate(self, x: Vector) -> Vector:
        return x if x.dtype == np.float32 and _all_finite(np.ascontiguousarray(x)) else super().saturate(x)
