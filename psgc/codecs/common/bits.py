"""Typed views of payload bytes, and bit and vector instructions that Numba does not offer.

Owns how kernels read and write memory of any alignment. Does not know codecs. Payloads are little-endian, like the machines that psgc
runs on.
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.ir
import numba.core.cgutils
import numba.core.registry
import numba.np.arrayobj
import numpy as np
from numba import types

from psgc.codecs.jit.kernel import helper, primitive

ir: Any = llvmlite.ir  # untyped
cgutils: Any = numba.core.cgutils  # untyped
targets: Any = numba.core.registry  # untyped
arrays: Any = numba.np.arrayobj  # untyped
_FLOAT: Final = ir.FloatType()
_HALF: Final = ir.HalfType()
_BIT: Final = ir.IntType(1)
MAX_F32: Final = np.finfo(np.float32).max
INFINITY_BITS: Final = np.uint32(0x7F800000)  # magnitudes whose bits are not below these are not finite


def _view_of(dtype: Any) -> Any:
    @primitive
    def view(_typing: Any, memory: Any, _offset: Any, _count: Any) -> Any:
        made = types.Array(dtype, 1, "C", readonly=not memory.mutable, aligned=False)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            source = arrays.make_array(memory)(context, builder, arguments[0])
            item = context.get_data_type(dtype)
            step = context.get_constant(types.intp, context.get_abi_sizeof(item))
            data = builder.bitcast(builder.gep(source.data, [arguments[1]]), item.as_pointer())
            target = arrays.make_array(made)(context, builder)
            arrays.populate_array(target, data=data, shape=[arguments[2]], strides=[step], itemsize=step, meminfo=None)
            return target._getvalue()

        return made(memory, types.intp, types.intp), generate

    return view


# Each: (bytes, offset in bytes, count) -> count items from there on, read and written at any alignment. A view holds no
# reference (the caller's array does), so that passing it on costs no atomic count.
view_u8 = _view_of(types.uint8)
view_f32 = _view_of(types.float32)
view_u32 = _view_of(types.uint32)
view_u64 = _view_of(types.uint64)
view_u16 = _view_of(types.uint16)
view_i16 = _view_of(types.int16)
view_i32 = _view_of(types.int32)
view_i8 = _view_of(types.int8)


def _convert(result: Any, argument: Any, generate: Any) -> Any:
    @primitive
    def convert(_typing: Any, _value: Any) -> Any:
        return result(argument), lambda _context, builder, _signature, arguments: generate(builder, arguments[0])

    return convert


bits_of_f32 = _convert(types.uint32, types.float32, lambda b, x: b.bitcast(x, ir.IntType(32)))
f32_of_bits = _convert(types.float32, types.uint32, lambda b, x: b.bitcast(x, _FLOAT))
trailing_zeros = _convert(types.int64, types.uint64, lambda b, x: b.cttz(x, ir.Constant(_BIT, 1)))  # x is not 0
leading_zeros = _convert(types.int32, types.uint32, lambda b, x: b.ctlz(x, ir.Constant(_BIT, 0)))  # 32 for 0


@helper
def top_bits(p: Any) -> Any:
    """Bits of max|p|. As signed integers they order like the values, NaN above infinity, and only so does LLVM vectorise this."""
    top = np.int32(0)
    for i in range(p.size):
        top = max(top, np.int32(bits_of_f32(p[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top)


_narrow_f16 = _convert(types.int16, types.float32, lambda b, x: b.bitcast(b.fptrunc(x, _HALF), ir.IntType(16)))
_widen_f16 = _convert(types.float32, types.int16, lambda b, x: b.fpext(b.bitcast(x, _HALF), _FLOAT))


@helper
def narrow_f16_by_integers(x: Any) -> Any:
    """The bits of float16 for a float32, rounded to nearest even, for processors without an instruction for it."""
    bits = bits_of_f32(x)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    if size >= np.uint32(0x47800000):  # 65536 and more, infinity, NaN
        half = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else np.uint32(0x7C00)
    elif size < np.uint32(0x38800000):  # below 2**-14 float16 has steps of 2**-24, as float32 has from 0.5 on
        half = bits_of_f32(f32_of_bits(size) + np.float32(0.5)) - np.uint32(0x3F000000)
    else:  # the exponent is less by 112; a carry of the mantissa, too, belongs there
        half = (size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    return np.int16(np.uint16(half | sign))


@helper
def widen_f16_by_integers(half: Any) -> Any:
    """The float32 for bits of float16, for processors without an instruction for it; a NaN becomes a quiet one."""
    bits = np.uint32(np.uint16(half))
    sign, size = (bits & np.uint32(0x8000)) << np.uint32(16), bits & np.uint32(0x7FFF)
    moved = size << np.uint32(13)
    if size > np.uint32(0x7C00):
        moved |= np.uint32(0x7FC00000)
    elif size == np.uint32(0x7C00):
        moved = np.uint32(0x7F800000)
    elif size < np.uint32(0x0400):
        moved = bits_of_f32(f32_of_bits(moved + np.uint32(113 << 23)) - np.float32(2.0**-14))
    else:
        moved += np.uint32(112 << 23)
    return f32_of_bits(moved | sign)


def converts_f16(triple: str, features: str) -> bool:
    """Whether a processor has instructions to convert to and from float16. Otherwise LLVM calls a function of the compiler's library, which Numba
    lacks."""
    return not triple.startswith(("x86_64", "i686")) or "+f16c" in features.split(",")


_triple, _, _features = targets.cpu_target.target_context.codegen().magic_tuple()
f16_of_f32, f32_of_f16 = (_narrow_f16, _widen_f16) if converts_f16(_triple, _features) else (narrow_f16_by_integers, widen_f16_by_integers)


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    """In a code generator: where element ``index`` of an array is, as a pointer to ``pointee``."""
    data = arrays.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def splat(builder: Any, value: Any, vector: Any) -> Any:
    """In a code generator: a vector all of whose elements are ``value``."""
    blank = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(blank, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, blank, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _magnitude(builder: Any, values: Any, vector: Any) -> Any:
    words = ir.VectorType(ir.IntType(32), vector.count)
    cleared = builder.and_(builder.bitcast(values, words), ir.Constant(words, [0x7FFFFFFF] * vector.count))
    return builder.bitcast(cleared, vector)


@primitive
def negative_mask(_typing: Any, array: Any, _first: Any) -> Any:
    """(float32 array, first) -> uint64 whose bit j says ``array[first + j] < 0``, 64 elements."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_FLOAT, 64)
        values = builder.load(pointer(context, builder, array, arguments[0], arguments[1], vector), align=4)
        return builder.bitcast(builder.fcmp_ordered("<", values, ir.Constant(vector, None)), ir.IntType(64))

    return types.uint64(array, types.intp), generate


def _survey(divided: bool) -> Any:
    @primitive
    def survey(_typing: Any, values: Any, _divisor: Any, addend: Any, _factor: Any, p: Any, masks: Any, lanes: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            vector, word = ir.VectorType(_FLOAT, 64), ir.IntType(64)
            divisor, factor = splat(builder, arguments[1], vector), splat(builder, arguments[3], vector)
            sums = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
            rows = arrays.make_array(masks)(context, builder, arguments[5]).shape
            with cgutils.for_range(builder, builder.extract_value(rows, 0)) as loop:
                first = builder.mul(loop.index, ir.Constant(word, 64))
                x = builder.load(pointer(context, builder, values, arguments[0], first, vector), align=4)
                y = builder.load(pointer(context, builder, addend, arguments[2], first, vector), align=4)
                if divided:
                    x = builder.fdiv(x, divisor)
                x = builder.fadd(x, builder.fmul(factor, y))
                builder.store(x, pointer(context, builder, p, arguments[4], first, vector), align=4)
                mask = builder.bitcast(builder.fcmp_ordered("<", x, ir.Constant(vector, None)), word)
                builder.store(mask, pointer(context, builder, masks, arguments[5], loop.index, word), align=1)
                builder.store(builder.fadd(builder.load(sums), _magnitude(builder, x, vector)), sums)
            zero = ir.Constant(word, 0)
            builder.store(builder.load(sums), pointer(context, builder, lanes, arguments[6], zero, vector), align=4)
            return context.get_dummy_value()

        scalar = types.float32
        return types.void(values, scalar, addend, scalar, p, masks, lanes), generate

    return survey


# (values, divisor, addend, factor, p, masks, lanes): for 64 elements at a time, one row for each of the uint64 masks:
# p <- values / divisor + factor * addend; a bit of the mask <- p < 0; 64 lanes <- the sums of |p| over the rows, in turn.
# One pass in registers: written as loops in Python it is three over memory, and takes twice as long. ``survey`` does not divide.
survey = _survey(divided=False)
survey_mean = _survey(divided=True)


def _reaching(builder: Any, values: Any, least: Any) -> Any:
    """64 bits that say which of the 64 floats have magnitudes whose bits are at least ``least``."""
    vector = ir.VectorType(ir.IntType(32), 64)
    magnitudes = builder.and_(builder.bitcast(values, vector), ir.Constant(vector, [0x7FFFFFFF] * 64))
    # both sides are below 2**31, and SIMD sets compare signed
    return builder.bitcast(builder.icmp_signed(">=", magnitudes, splat(builder, least, vector)), ir.IntType(64))


@primitive
def magnitude_mask(_typing: Any, array: Any, _first: Any, _least: Any) -> Any:
    """(float32 array, first, least) -> uint64 whose bit j says that the bits of ``|array[first + j]|`` are at least ``least``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_FLOAT, 64)
        values = builder.load(pointer(context, builder, array, arguments[0], arguments[1], vector), align=4)
        return _reaching(builder, values, arguments[2])

    return types.uint64(array, types.intp, types.uint32), generate


@primitive
def corrected_mask(_typing: Any, array: Any, addend: Any, _first: Any, _factor: Any, _least: Any) -> Any:
    """(float32 array, float32 addend, first, factor, least) -> the same of ``array + factor * addend``, which is not written anywhere."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_FLOAT, 64)
        x = builder.load(pointer(context, builder, array, arguments[0], arguments[2], vector), align=4)
        y = builder.load(pointer(context, builder, addend, arguments[1], arguments[2], vector), align=4)
        return _reaching(builder, builder.fadd(x, builder.fmul(splat(builder, arguments[3], vector), y)), arguments[4])

    return types.uint64(array, addend, types.intp, types.float32, types.uint32), generate


def _signed_sum(from_base: bool) -> Any:
    @primitive
    def signed_sum(_typing: Any, target: Any, _first: Any, base: Any, masks: Any, scales: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(_FLOAT, 32)
            total = None
            if from_base:
                total = builder.load(pointer(context, builder, base, arguments[2], arguments[1], vector), align=4)
            for k in range(len(masks)):
                mask = builder.bitcast(builder.extract_value(arguments[3], k), ir.VectorType(_BIT, 32))
                scale = builder.extract_value(arguments[4], k)
                term = builder.select(mask, splat(builder, builder.fneg(scale), vector), splat(builder, scale, vector))
                total = term if total is None else builder.fadd(total, term)
            builder.store(total, pointer(context, builder, target, arguments[0], arguments[1], vector), align=4)
            return context.get_dummy_value()

        return types.void(target, types.intp, base, masks, scales), generate

    return signed_sum


# (target, first, base, masks, scales): the 32 float32 elements of ``target`` from ``first`` on become the left-to-right sum over k of
# -scales[k] where bit j of masks[k] is set, else +scales[k]; ``add`` starts from what ``base`` holds there, ``set`` does not read it.
set_signed_sum = _signed_sum(from_base=False)
add_signed_sum = _signed_sum(from_base=True)


@helper
def borrowed(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Views of four byte arrays: an index into a tuple of counted arrays would take and drop a reference each time."""
    return view_u8(a, 0, a.size), view_u8(b, 0, b.size), view_u8(c, 0, c.size), view_u8(d, 0, d.size)
