"""Codes of 2, 4 or 8 bits as vectors: 32 bytes of them at once, decoded, scaled and summed in registers.

A group's codes lie in planes (see `grouped`): byte i holds the codes of elements i, i + w, ... of the group, w being the group's bytes. Owns
the instructions for a row, the 32 bytes from some byte on of up to four payloads. Written as loops over a group of 128 they take three times
as long: LLVM asks before each short loop whether arrays overlap.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import llvmlite.ir
from numba import types

from psgc.codecs.common.bits import pointer, splat
from psgc.codecs.jit.kernel import primitive

ir: Any = llvmlite.ir  # untyped
ROW: Final = 32  # bytes, and elements of a plane
_FLOAT: Final = ir.FloatType()
_WORD: Final = ir.IntType(32)


class CodeWords(NamedTuple):
    """What a code stands for. shift, mask, factor: of an 8-bit float, whose bits, moved up by ``shift`` and masked, are a float32 that is
    ``factor`` times too small; shift 0 is an integer, stored plus half its range if it has fewer than 8 bits."""

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
    """The instruction (target, first, base, codes, byte, scales) for groups of ``plane`` bytes:

    for each plane k, the 32 float32 elements of ``target`` from ``first + k * plane`` on become (``from_base``: what ``base`` holds there, plus)
    the left-to-right sum over payloads of the codes in their 32 bytes from ``byte`` on, times the payload's scale."""
    per = 8 // words.bits

    @primitive
    def sum_row(_typing: Any, target: Any, _first: Any, base: Any, codes: Any, _byte: Any, scales: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            vector, stored = ir.VectorType(_FLOAT, ROW), ir.VectorType(ir.IntType(8), ROW)
            to, first, of, sources, byte, factors = arguments
            loaded = []
            for k, array in enumerate(codes):
                place = pointer(context, builder, array, builder.extract_value(sources, k), byte, stored)
                loaded.append(builder.load(place, align=1))
            spread = [splat(builder, builder.extract_value(factors, k), vector) for k in range(len(codes))]
            for place in range(per):
                index = builder.add(first, ir.Constant(ir.IntType(64), place * plane))
                total = builder.load(pointer(context, builder, base, of, index, vector), align=4) if from_base else None
                for row, factor in zip(loaded, spread, strict=True):
                    term = builder.fmul(_values(builder, row, words, place), factor)
                    total = term if total is None else builder.fadd(total, term)
                builder.store(total, pointer(context, builder, target, to, index, vector), align=4)
            return context.get_dummy_value()

        return types.void(target, types.intp, base, codes, types.intp, scales), generate

    return sum_row


@functools.cache
def row_codes(bits: int, rounder: float) -> Any:
    """The instruction (values, first, plane, factor, codes, byte) that writes the integer codes of 32 bytes of a group of ``plane`` bytes: of
    ``values * factor``, float32 from ``first`` on, rounded to nearest by adding ``rounder``."""
    per, bias = 8 // bits, 1 << (bits - 1) if bits < 8 else 0

    @primitive
    def write_row(_typing: Any, values: Any, _first: Any, _plane: Any, _factor: Any, codes: Any, _byte: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            of, first, plane, factor, to, byte = arguments
            vector, wide, stored = ir.VectorType(_FLOAT, ROW), ir.VectorType(_WORD, ROW), ir.VectorType(ir.IntType(8), ROW)
            spread, packed = splat(builder, factor, vector), None
            for place in range(per):
                index = builder.add(first, builder.mul(plane, ir.Constant(ir.IntType(64), place)))
                loaded = builder.load(pointer(context, builder, values, of, index, vector), align=4)
                rounded = builder.fadd(builder.fmul(loaded, spread), ir.Constant(vector, [rounder] * ROW))
                code = builder.add(builder.bitcast(rounded, wide), ir.Constant(wide, [bias] * ROW))
                code = builder.and_(code, ir.Constant(wide, [(1 << bits) - 1] * ROW))
                code = builder.shl(code, ir.Constant(wide, [bits * place] * ROW))
                packed = code if packed is None else builder.or_(packed, code)
            target = pointer(context, builder, codes, to, byte, stored)
            builder.store(builder.trunc(packed, stored), target, align=1)
            return context.get_dummy_value()

        return types.void(values, types.intp, types.intp, types.float32, codes, types.intp), generate

    return write_row
