"""The kit's operators on the CPU: kernels where NumPy is slow, for the same results.

Owns the kernels. Each is compiled, or loaded from the cache, when it is first called: a codec waits only for those that it uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.bits import bits_of_f32, f32_of_bits
from psgc.codecs.blocks import random_arguments
from psgc.codecs.codec import F32, Bytes, Stream
from psgc.codecs.feedback import NO_RESIDUAL, mean_corrected_block
from psgc.codecs.kernel import BOOL, I64, IN_BYTES, IN_F32, OUT_BYTES, OUT_F32, SCALAR_F32, U32, helper, kernel
from psgc.codecs.kit.ops import How, Ops, Vector, packed_bytes
from psgc.codecs.random import uniform

_INFINITY_BITS: Final = np.uint32(0x7F800000)


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
    """Whether all of x is. As signed integers bits order like magnitudes, and only so does LLVM vectorise this."""
    top = np.int32(0)
    for i in range(x.size):
        top = max(top, np.int32(bits_of_f32(x[i]) & np.uint32(0x7FFFFFFF)))
    return np.uint32(top) < _INFINITY_BITS


@_at_first_call(BOOL(IN_F32, SCALAR_F32, IN_F32, SCALAR_F32, OUT_F32))
def _correct(values: Any, divisor: Any, residual: Any, rescale: Any, p: Any) -> Any:
    """p <- values / divisor + rescale * residual, with zeros for what is not finite; returns whether all of it is."""
    mean_corrected_block(values, divisor, residual, rescale, p)
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


@_at_first_call(types.void(IN_BYTES, I64, OUT_BYTES))
def _pack(codes: Any, bits: Any, out: Any) -> None:
    """Eight codes at a time: they end at a byte whatever their width."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for first in range(0, codes.size, 8):
        word, place = np.uint64(0), first // 8 * bits
        for j in range(min(8, codes.size - first)):
            word |= (np.uint64(codes[first + j]) & mask) << np.uint64(bits * j)
        for j in range(min(bits, out.size - place)):
            out[place + j] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(0xFF))


@_at_first_call(types.void(IN_BYTES, I64, OUT_BYTES))
def _unpack(packed: Any, bits: Any, out: Any) -> None:
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for first in range(0, out.size, 8):
        word, place = np.uint64(0), first // 8 * bits
        for j in range(min(bits, packed.size - place)):
            word |= np.uint64(packed[place + j]) << np.uint64(8 * j)
        for j in range(min(8, out.size - first)):
            out[first + j] = np.uint8((word >> np.uint64(bits * j)) & mask)


def indices_well_formed(packed: Bytes, count: int, numel: int) -> bool:
    """Whether ``packed`` is exactly the bytes of ``count`` indices below ``numel``."""
    from psgc.codecs.gaps import well_formed

    return bool(well_formed(packed, count, numel))


@_at_first_call(BOOL(IN_F32))
def _all_finite(x: Any) -> Any:
    return _is_finite(x)


class CpuOps(Ops):
    """``Ops`` with kernels for what NumPy does slowly."""

    def uniform(self, stream: Stream, lo: int, count: int) -> Vector:
        out = np.empty(count, np.float32)
        _uniform(*random_arguments(stream, lo), out)
        return out

    def reduce(self, x: Vector, how: How) -> Vector:
        return self.block_reduce(x, x.size, how) if how == "magnitude" and x.size else super().reduce(x, how)

    def block_reduce(self, x: Vector, block: int, how: How) -> Vector:
        if how != "magnitude":
            return super().block_reduce(x, block, how)
        out = np.empty(-(-x.size // block), np.float32)
        _block_tops(np.ascontiguousarray(x), block, out)
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
        from psgc.codecs.gaps import GAPS, MAX_WIDTH, pack

        out = np.empty(-(-indices.size // GAPS) * (1 + GAPS * MAX_WIDTH // 8), np.uint8)
        return out[: pack(indices.astype(np.uint32), out)]

    def unpack_indices(self, packed: Vector, count: int) -> Vector:
        from psgc.codecs.gaps import unpack

        indices = np.empty(count, np.uint32)
        unpack(packed, indices)
        return indices.astype(np.int64)

    def largest(self, x: Vector, k: int) -> Vector:
        from psgc.codecs.largest import largest

        return largest(np.ascontiguousarray(x), NO_RESIDUAL, 1.0, k)[0].astype(np.int64)

    def saturate(self, x: Vector) -> Vector:
        return x if x.dtype == np.float32 and _all_finite(np.ascontiguousarray(x)) else super().saturate(x)
