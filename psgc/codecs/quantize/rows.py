"""Codes of 2, 4 or 8 bits as vectors: 32 bytes of them at once, decoded, scaled and summed in registers.

A block's codes lie in planes (see `blocks`): byte i holds the codes of elements i, i + w, ... of the block, w being the block's bytes. Owns
the instructions for a row: 32 consecutive bytes of up to four payloads. As loops over a block of 128 they would take three times
as long, because LLVM checks before each short loop whether arrays overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import llvmlite.ir
import numpy as np
from numba import types

from psgc.codecs.common.bits import pointer, splat, view_f32, view_u8
from psgc.codecs.jit.kernel import helper, primitive

ir: Any = llvmlite.ir  # untyped
ROW: Final = 32  # bytes, and elements of a plane
_FLOAT: Final = ir.FloatType()
_WORD: Final = ir.IntType(32)


class CodeWords(NamedTuple):
    """The value of a code. For an 8-bit float, its bits, shifted left by ``shift`` and masked with ``mask``, are a float32 that has to be
    multiplied by ``factor``. shift 0: an integer, stored with half its range added if it has fewer than 8 bits."""

    bits: int
    shift: int = 0
    mask: int = 0
    factor: float = 1.0


def _values(builder: Any, loaded: Any, words: CodeWords, place: int) -> Any:
    """float32 of the codes at ``place`` in each byte."""
    wide = ir.VectorType(_WORD, ROW)

    def constant(value: int, vector: Any) -> Any:
        return ir.Constant(vector, [value] * ROW)

    if words.shift:
        moved = builder.shl(builder.sext(loaded, wide), constant(words.shift, wide))
        small = builder.bitcast(builder.and_(moved, constant(words.mask, wide)), ir.VectorType(_FLOAT, ROW))
        return builder.fmul(small, ir.Constant(small.type, [words.factor] * ROW))
    if words.bits == 8:
        return builder.sitofp(builder.sext(loaded, wide), ir.VectorType(_FLOAT, ROW))
    bytes_ = loaded.type
    code = builder.and_(builder.lshr(loaded, constant(words.bits * place, bytes_)), constant((1 << words.bits) - 1, bytes_))
    signed = builder.sub(builder.zext(code, wide), constant(1 << (words.bits - 1), wide))
    return builder.sitofp(signed, ir.VectorType(_FLOAT, ROW))


@functools.cache
def row_sum(words: CodeWords, plane: int, from_base: bool) -> Any:
    """The instruction (target, first, base, codes, byte, scales) for blocks of ``plane`` bytes:

    for each plane k, the 32 float32 elements of ``target`` from ``first + k * plane`` on become (``from_base``: what ``base`` holds there, plus)
    the left-to-right sum over payloads of the codes in their 32 bytes from ``byte`` on, times the payload's scale."""
    per = 8 // words.bits

    @primitive
    def sum_row(_typing: Any, target: Any, _first: Any, base: Any, codes: Any, _byte: Any, scales: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            vector, stored = ir.VectorType(_FLOAT, ROW), ir.VectorType(ir.IntType(8), ROW)
            target_value, first, base_value, sources, byte, factors = arguments
            loaded = []
            for k, array in enumerate(codes):
                place = pointer(context, builder, array, builder.extract_value(sources, k), byte, stored)
                loaded.append(builder.load(place, align=1))
            spread = [splat(builder, builder.extract_value(factors, k), vector) for k in range(len(codes))]
            for place in range(per):
                index = builder.add(first, ir.Constant(ir.IntType(64), place * plane))
                total = builder.load(pointer(context, builder, base, base_value, index, vector), align=4) if from_base else None
                for row, factor in zip(loaded, spread, strict=True):
                    term = builder.fmul(_values(builder, row, words, place), factor)
                    total = term if total is None else builder.fadd(total, term)
                builder.store(total, pointer(context, builder, target, target_value, index, vector), align=4)
            return context.get_dummy_value()

        return types.void(target, types.intp, base, codes, types.intp, scales), generate

    return sum_row


@functools.cache
def row_codes(bits: int, rounder: float) -> Any:
    """The instruction (values, first, plane, factor, codes, byte) that writes the integer codes of 32 bytes of a block of ``plane`` bytes: of
    ``values * factor``, float32 from ``first`` on, rounded to nearest by adding ``rounder``."""
    per, bias = 8 // bits, 1 << (bits - 1) if bits < 8 else 0

    @primitive
    def write_row(_typing: Any, values: Any, _first: Any, _plane: Any, _factor: Any, codes: Any, _byte: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values_value, first, plane, factor, codes_value, byte = arguments
            vector, wide, stored = ir.VectorType(_FLOAT, ROW), ir.VectorType(_WORD, ROW), ir.VectorType(ir.IntType(8), ROW)
            spread, packed = splat(builder, factor, vector), None
            for place in range(per):
                index = builder.add(first, builder.mul(plane, ir.Constant(ir.IntType(64), place)))
                loaded = builder.load(pointer(context, builder, values, values_value, index, vector), align=4)
                rounded = builder.fadd(builder.fmul(loaded, spread), ir.Constant(vector, [rounder] * ROW))
                code = builder.add(builder.bitcast(rounded, wide), ir.Constant(wide, [bias] * ROW))
                code = builder.and_(code, ir.Constant(wide, [(1 << bits) - 1] * ROW))
                code = builder.shl(code, ir.Constant(wide, [bits * place] * ROW))
                packed = code if packed is None else builder.or_(packed, code)
            target = pointer(context, builder, codes, codes_value, byte, stored)
            builder.store(builder.trunc(packed, stored), target, align=1)
            return context.get_dummy_value()

        return types.void(values, types.intp, types.intp, types.float32, codes, types.intp), generate

    return write_row


class RowReaders(NamedTuple):
    """A chunk format's helpers that read, for codes that can be read as rows."""

    read: Callable[..., Any]
    fold_four: Callable[..., Any]
    take_away: Callable[..., Any]


@functools.cache
def row_readers(block: int, read: Callable[..., Any], words: CodeWords) -> RowReaders:
    """How a chunk format reads whole blocks as rows; what follows the last whole block is read by ``read``."""
    block_bytes = block * words.bits // 8
    set_one, add_one, set_four, add_four = (row_sum(words, block_bytes, from_base) for from_base in (False, True, False, True))

    @helper
    def scales_of(payload: Any, start: Any, count: Any) -> Any:
        return view_f32(payload, 4 * (start // block), count)

    @helper
    def codes_of(payload: Any, numel: Any, start: Any, count: Any) -> Any:
        return view_u8(payload, 4 * (-(-numel // block)) + start // block * block_bytes, count * block_bytes)

    @helper
    def read_rest(payload: Any, numel: Any, start: Any, settings: Any, out: Any, low: Any) -> None:
        if low < out.size:
            read(payload, numel, start + low, settings, view_f32(out, low, out.size - low))

    @helper
    def read_rows(payload: Any, numel: Any, start: Any, settings: Any, out: Any) -> None:
        whole = out.size // block
        scales, codes = scales_of(payload, start, whole), codes_of(payload, numel, start, whole)
        for number in range(whole):
            for byte in range(0, block_bytes, ROW):
                set_one(out, number * block + byte, out, (codes,), number * block_bytes + byte, (scales[number],))
        read_rest(payload, numel, start, settings, out, whole * block)

    @helper
    def fold_four(payloads: Any, numel: Any, start: Any, settings: Any, total: Any, first: Any) -> None:
        a, b, c, d = payloads
        whole = total.size // block
        sa, sb, sc, sd = scales_of(a, start, whole), scales_of(b, start, whole), scales_of(c, start, whole), scales_of(d, start, whole)
        ca, cb = codes_of(a, numel, start, whole), codes_of(b, numel, start, whole)
        cc, cd = codes_of(c, numel, start, whole), codes_of(d, numel, start, whole)
        for number in range(whole):
            scales = (sa[number], sb[number], sc[number], sd[number])
            for byte in range(0, block_bytes, ROW):
                low, place = number * block + byte, number * block_bytes + byte
                if first:
                    set_four(total, low, total, (ca, cb, cc, cd), place, scales)
                else:
                    add_four(total, low, total, (ca, cb, cc, cd), place, scales)
        if whole * block < total.size:
            rest, term = view_f32(total, whole * block, total.size - whole * block), np.empty(block, np.float32)
            for k in range(4):
                if first and k == 0:
                    read(a, numel, start + whole * block, settings, rest)
                else:
                    read(payloads[k], numel, start + whole * block, settings, view_f32(term, 0, rest.size))
                    for i in range(rest.size):
                        rest[i] += term[i]

    @helper
    def take_away(payload: Any, numel: Any, start: Any, settings: Any, p: Any, kept: Any) -> None:
        whole = p.size // block
        scales, codes = scales_of(payload, start, whole), codes_of(payload, numel, start, whole)
        for number in range(whole):
            for byte in range(0, block_bytes, ROW):
                add_one(kept, number * block + byte, p, (codes,), number * block_bytes + byte, (-scales[number],))
        if whole * block < p.size:
            sent = np.empty(block, np.float32)
            read(payload, numel, start + whole * block, settings, view_f32(sent, 0, p.size - whole * block))
            for i in range(whole * block, p.size):
                kept[i] = p[i] - sent[i - whole * block]

    return RowReaders(read_rows, fold_four, take_away)
