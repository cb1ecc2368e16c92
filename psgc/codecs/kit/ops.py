"""The operators that a kit codec is written in, as their plain NumPy definitions.

Owns each operator's result, to the bit; a backend (``cpu.CpuOps`` now) replaces operators by faster ones and changes no result. Knows
no payloads.

Vectors are one-dimensional, of one of ``TYPES`` or bool (a *mask*). They take ``+ - * / < <= > >= == != & | ~`` (u32 also ``<< >>``) with vectors as long,
with vectors of one element (what ``reduce`` gives) and with plain numbers; each operation is rounded to float32 on its own. There is no
exp, log or power: their last bits differ between devices. Indices are int64, ascending and distinct.
Source: the operators of Bai et al. 2021 (HiPress's CompLL), section 4.3: map, filter, reduce, random, concat, extract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from psgc.codecs.codec import BLOCK, Stream
from psgc.codecs.common.streams import reference_uniform
from psgc.codecs.kit.dct import transformed
from psgc.codecs.sparsify.gaps import GAPS, reference_packed, reference_unpacked
from psgc.errors import CodecError

Vector: TypeAlias = Any  # a NumPy array on the CPU; typed so that a codec does not lean on it
Type = Literal["f32", "f16", "u8", "i8", "u16", "i16", "u32", "i32"]
How = Literal["sum", "max", "min", "magnitude"]
TYPES: Final[dict[str, Any]] = {
    "f32": np.float32, "f16": np.float16, "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "u32": np.uint32, "i32": np.int32,
}  # fmt: skip
LARGEST: Final = np.finfo(np.float32).max
REVISION: Final = "kit 2"  # of what operators give; part of the digest of codecs that are written in them
_NEUTRAL: Final = {"sum": 0.0, "max": -np.inf, "min": np.inf, "magnitude": 0.0}


class Ops:
    """See the module's text. A backend overrides methods; what they give stays the same."""

    def map(self, function: Callable[..., Vector], *vectors: Vector) -> Vector:
        """``function`` of the vectors, which must work element by element: a backend may call it on pieces, or compile it."""
        return function(*vectors)

    def cast(self, x: Vector, type_: Type) -> Vector:
        """x as ``type_``. Floats that become integers must be whole and in range; to f16 they are rounded to nearest even."""
        return x.astype(TYPES[type_])

    def bitcast(self, x: Vector, type_: Type) -> Vector:
        """The bits of x as another type of the same width: f32, u32 and i32, or f16, u16 and i16."""
        if x.dtype.itemsize != np.dtype(TYPES[type_]).itemsize:
            raise CodecError(f"bitcast of {x.dtype} to {type_}: types of the same width expected")
        return x.view(TYPES[type_])

    def lookup(self, table: Sequence[float], codes: Vector) -> Vector:
        """The table's number for each code, in float32. Codes are u8, below the length of the table."""
        return np.array(table, np.float32)[codes]

    def nearest(self, table: Sequence[float], x: Vector) -> Vector:
        """The code (u8) of the table's number that is nearest to x, for a table of up to 256 ascending float32 numbers; where two are equally
        near, the even code."""
        numbers = np.array(table, np.float32).astype(np.float64)
        middles = (numbers[1:] + numbers[:-1]) / 2  # exact but for numbers that are 2**29 times apart
        below, above = (np.searchsorted(middles, x, side=side) for side in ("left", "right"))
        return np.where(below % 2 == 0, below, above).astype(np.uint8)

    def absolute(self, x: Vector) -> Vector:
        return np.abs(x)

    def minimum(self, x: Vector, y: Vector | float) -> Vector:
        return np.minimum(x, y)

    def maximum(self, x: Vector, y: Vector | float) -> Vector:
        return np.maximum(x, y)

    def clip(self, x: Vector, low: float, high: float) -> Vector:
        """x, but at least ``low`` and at most ``high``."""
        return np.clip(x, low, high)

    def divide(self, x: Vector, y: Vector) -> Vector:
        """x / y, and 0 where y is 0."""
        x, y = np.broadcast_arrays(x, y)
        return np.divide(x, y, out=np.zeros(x.shape, np.float32), where=y != 0)

    def floor(self, x: Vector) -> Vector:
        return np.floor(x)

    def round(self, x: Vector) -> Vector:
        """The nearest whole number, of two the even one."""
        return np.rint(x)

    def round_at_random(self, x: Vector, uniform: Vector) -> Vector:
        """A whole number next to x, above it with the probability of x's fraction, so that the mean is x. uniform: from ``Random``."""
        below = np.floor(x)
        return below + (uniform < x - below)

    def where(self, mask: Vector, x: Vector | float, y: Vector | float) -> Vector:
        """x where the mask is set, else y, in float32."""
        return np.where(mask, x, y).astype(np.float32, copy=False)

    def select(self, mask: Vector) -> Vector:
        """Indices of the elements that the mask sets."""
        return np.flatnonzero(mask)

    def filter(self, mask: Vector, x: Vector) -> Vector:
        """The elements of x that the mask sets, in order."""
        return x[mask]

    def largest(self, x: Vector, k: int) -> Vector:
        """Indices of the k elements of largest magnitude; of equal ones those that come first."""
        from psgc.codecs.sparsify.largest import reference_largest  # compiles its kernels

        return reference_largest(x, k)

    def block_largest(self, x: Vector, block: int, k: int) -> Vector:
        """Indices of the k elements of largest magnitude of each ``block`` elements (all of a shorter last block that has no more); of equal ones those that
        come first."""
        rows = np.full(-(-x.size // block) * block, -1, np.int64)
        rows[: x.size] = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
        chosen = np.sort(np.argsort(-rows.reshape(-1, block), axis=1, kind="stable")[:, :k], axis=1)
        places = (chosen + np.arange(chosen.shape[0])[:, None] * block).ravel()
        return places[places < x.size]

    def extract(self, x: Vector, indices: Vector) -> Vector:
        """The elements of x at these indices."""
        return x[indices]

    def scatter(self, indices: Vector, values: Vector, numel: int) -> Vector:
        """``numel`` float32 zeros, but ``values`` at ``indices``."""
        out = np.zeros(numel, np.float32)
        out[indices] = values
        return out

    def concat(self, *vectors: Vector) -> Vector:
        return np.concatenate(vectors)

    def range(self, numel: int) -> Vector:
        """0, 1, ... as indices."""
        return np.arange(numel, dtype=np.int64)

    def fill(self, value: float, numel: int) -> Vector:
        """``numel`` times ``value``, in float32."""
        return np.full(numel, value, np.float32)

    def reduce(self, x: Vector, how: How) -> Vector:
        """Sum, maximum, minimum or largest magnitude of a float32 vector, as a vector of one element. Sums are those of ``block_reduce`` for
        blocks of 4096, then of these sums in blocks of 4096, until one is left."""
        x = x if x.size else self.fill(_NEUTRAL[how], 1)
        if how != "sum":
            return _most(x.reshape(1, -1), how)
        x = self.block_reduce(x, BLOCK, how)
        while x.size > 1:
            x = self.block_reduce(x, BLOCK, how)
        return x

    def block_reduce(self, x: Vector, block: int, how: How) -> Vector:
        """The same, one number for each ``block`` elements (a power of two up to 4096; the last block may be shorter). Sums add elements
        i and i + block / 2, then i and i + block / 4, ... until one is left."""
        rows = _rows(x, block, how)
        return _halved(rows) if how == "sum" else _most(rows, how)

    def spread(self, x: Vector, block: int, numel: int) -> Vector:
        """The inverse of ``block_reduce``: each element of x ``block`` times, ``numel`` in all."""
        return np.repeat(x, block)[:numel]

    def dct(self, x: Vector, block: int) -> Vector:
        """The orthonormal DCT-II of each ``block`` float32 elements (a power of two from 2 to 256), as `dct` says; elements after the last whole
        block stay as they are. A coefficient may be sqrt(block) times as large as the largest element, and overflow."""
        return transformed(x, block)

    def idct(self, coefficients: Vector, block: int) -> Vector:
        """The inverse of ``dct``."""
        return transformed(coefficients, block, inverse=True)

    def dct2(self, x: Vector, side: int) -> Vector:
        """The orthonormal DCT-II, in both directions, of each ``side`` x ``side`` elements, a square row by row; elements after the last whole square stay as
        they are. First ``dct`` of the rows, then of the columns."""
        return self.turned(self.dct(self.turned(self.dct(self._whole(x, side), side), side), side), side, x)

    def idct2(self, coefficients: Vector, side: int) -> Vector:
        """The inverse of ``dct2``: first the columns, then the rows."""
        by_column = self.idct(self.turned(self._whole(coefficients, side), side), side)
        return self.concat(self.idct(self.turned(by_column, side), side), self._rest(coefficients, side))

    def turned(self, x: Vector, side: int, rest: Vector | None = None) -> Vector:
        """Each ``side`` x ``side`` elements transposed; x has whole squares alone. rest: behind it come the elements that this has after its own."""
        made = np.ascontiguousarray(x.reshape(-1, side, side).transpose(0, 2, 1)).reshape(-1)
        return made if rest is None else self.concat(made, self._rest(rest, side))

    def _whole(self, x: Vector, side: int) -> Vector:
        return x[: x.size // (side * side) * side * side]

    def _rest(self, x: Vector, side: int) -> Vector:
        return x[x.size // (side * side) * side * side :]

    def pack(self, codes: Vector, bits: int) -> Vector:
        """u8 codes below 2**bits as bytes, least significant bit first, without gaps; zero bits up to the last byte's end."""
        return np.packbits(np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little"), bitorder="little")

    def unpack(self, packed: Vector, bits: int, count: int) -> Vector:
        """The ``count`` codes that were packed."""
        rows = np.unpackbits(packed, count=bits * count, bitorder="little").reshape(count, bits)
        return np.packbits(np.pad(rows, ((0, 0), (0, 8 - bits))), axis=1, bitorder="little").reshape(count)

    def pack_indices(self, indices: Vector) -> Vector:
        """Ascending, distinct indices below 2**32 as bytes, in the layout of ``gaps``."""
        return np.frombuffer(reference_packed(indices), np.uint8)

    def unpack_indices(self, packed: Vector, count: int) -> Vector:
        """The ``count`` indices that were packed."""
        return reference_unpacked(packed.tobytes(), count) if count else np.empty(0, np.int64)

    def saturate(self, x: Vector) -> Vector:
        """x with its infinities replaced by the largest finite numbers of their type, and its NaN by zeros."""
        return np.nan_to_num(x)

    def uniform(self, stream: Stream, lo: int, count: int) -> Vector:
        """The numbers of ``Random.uniform``."""
        return reference_uniform(stream, lo, count)


class Random:
    """The random numbers of the elements that ``compress`` is given: counter-based, so that they depend on neither cuts nor threads."""

    def __init__(self, ops: Ops, stream: Stream, lo: int, count: int) -> None:
        self._ops, self._stream, self._lo, self._count = ops, stream, lo, count

    def uniform(self) -> Vector:
        """Uniform in [0, 1), multiples of 2**-24, one an element. The same at each call."""
        return self._ops.uniform(self._stream, self._lo, self._count)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``Ops.pack`` makes of so many codes."""
    return -(-count * bits // 8)


def packed_indices_bytes(packed: Vector, count: int) -> int:
    """Bytes that ``count`` indices take of ``packed``, which begins with them. May lie beyond its end."""
    blocks = -(-count // GAPS)
    sizes = np.full(blocks, GAPS, np.int64)
    sizes[-1:] = count - GAPS * (blocks - 1)
    return blocks + int((-(-sizes * packed[:blocks] // 8)).sum())


def _rows(x: Vector, width: int, how: How) -> Vector:
    """x in rows of ``width``, filled up with what changes no result."""
    padded = np.full(-(-x.size // width) * width, _NEUTRAL[how], np.float32)
    padded[: x.size] = x
    return padded.reshape(-1, width)


def _most(rows: Vector, how: How) -> Vector:
    if how == "magnitude":
        return np.abs(rows).max(axis=1)
    return rows.max(axis=1) if how == "max" else rows.min(axis=1)


def _halved(rows: Vector) -> Vector:
    """Each row's sum, its halves added until one element is left."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
