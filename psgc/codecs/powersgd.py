"""The `powersgd` scheme: every matrix of a bucket as the product of two thin factors, in two rounds; vectors as they are.

| round | elements, float32, one after the other                                                                      |
|-------|-------------------------------------------------------------------------------------------------------------|
| 0     | P = M Q of each matrix, row by row [rows, rank]; then the tensors that are not compressed                    |
| 1     | Q = M^T P' of each matrix, row by row [columns, rank], with P' the orthonormalised mean (or sum) of the Ps     |

Owns what the elements mean; both rounds are sums of codec `none`. A tensor of shape (a, b, c, ...) is a matrix of a rows; one that would
not become smaller, or has one dimension, is sent uncompressed. M = gradient + residual. A worker has sent P' Q_i^T, with its own
Q_i, and the mean of that over the workers is exactly what all of them decode. All ranks must agree on P' and P' Q^T, which each computes for itself;
so these are computed in a fixed order of operations (`orthonormal`). The two products with M differ between ranks anyway and run on BLAS. Buckets are
not cut.

Round 0 takes the last step's Q (warm start). Each column is multiplied by the power of two that brings its largest magnitude to [0.5, 1). That does not change
P', and P neither overflows nor vanishes before M does. A column of zeros (in the first step, or if M was zero or had a lower rank) or with
a NaN or infinity (a sum that overflowed) would never change again, since P = M Q and Q = M^T P'. Such a column is drawn anew in each step,
uniform in [-1, 1): element i of Q is number i of the stream (seed, step, layout, bucket) that all ranks share. All ranks have the same
Q, so they draw the same columns.
Source: Vogels, Karimireddy and Jaggi 2019 (PowerSGD), Algorithms 1 and 2; columns that are drawn anew are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, FLOATS, Array, Bytes, CodecPair, Encoded, Stream
from psgc.codecs.common.feedback import NO_RESIDUAL, reference_corrected
from psgc.codecs.common.orthonormal import F32_MATRIX, orthonormalise
from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.streams import reference_uniform
from psgc.codecs.jit.kernel import kernel
from psgc.codecs.none import NoneCodec
from psgc.codecs.scheme import BucketContext, Round, Scheme, SchemeState, check_part
from psgc.errors import CodecError

MOST_RANK: Final = 64
SHARED_RANK: Final = 0xFFFFFFFE  # the rank of random streams that all ranks share; no worker or server has it
F32_READ: Final = types.Array(types.float32, 2, "C", readonly=True)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a compressed tensor lies: its first element in the part, and those of its factors in the rounds."""

    first: int
    rows: int
    columns: int
    first_p: int
    first_q: int


@kernel(types.void(F32_READ, F32_READ, F32_MATRIX))
def multiply(p: Any, q: Any, out: Any) -> None:
    """out <- p q^T, each element summed over the rank in order, every operation rounded to float32."""
    rows, rank = p.shape
    columns = q.shape[0]
    turned = np.empty((rank, columns), np.float32)
    for j in range(columns):
        for k in range(rank):
            turned[k, j] = q[j, k]
    for i in range(rows):
        row = out[i]
        left, right = p[i, 0], turned[0]
        for j in range(columns):
            row[j] = left * right[j]
        for k in range(1, rank):
            left, right = p[i, k], turned[k]
            for j in range(columns):
                row[j] += left * right[j]


def reference_product(p: F32, q: F32) -> F32:
    """p q^T as ``multiply`` sums it."""
    total = p[:, :1] * q[:, :1].T
    for k in range(1, p.shape[1]):
        total = total + p[:, k : k + 1] * q[:, k : k + 1].T
    return np.asarray(total, np.float32)


class PowerSgdScheme(Scheme):
    """rank * (rows + columns) elements of fp32 in each direction for a matrix of rows * columns."""

    name: ClassVar[str] = "powersgd"
    whole = True
    defaults: ClassVar[Mapping[str, str]] = {"rank": "4", "ef": "1"}
    advice: ClassVar[str] = (
        "large matrices whose gradients have few strong directions, as in transformers, over slow links; noise, as measured here, is its worst case"
    )

    def __init__(self, context: BucketContext = BucketContext(), *, rank: int = 4, ef: bool = True) -> None:  # noqa: B008 - immutable
        if context.dtype not in FLOATS:
            raise CodecError(f"codec powersgd carries {', '.join(FLOATS)}, not {context.dtype}; use 'none' for this tensor")
        if not 1 <= rank <= MOST_RANK:
            raise CodecError(f"codec powersgd: parameter rank is a whole number from 1 to {MOST_RANK}, not '{rank}'")
        self.context, self.rank, self._ef = context, rank, ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], context: BucketContext) -> PowerSgdScheme:
        """Build from the text form's parameters. Raises CodecError naming the parameter."""
        given = with_defaults(cls, parameters)
        text = given["rank"]
        if not (text.isascii() and text.isdigit()):
            raise CodecError(f"codec powersgd: parameter rank is a whole number from 1 to {MOST_RANK}, not {text!r}")
        return cls(context, rank=int(text), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def parameters(self) -> dict[str, str]:
        given = {"ef": "1" if self._ef else "0", "rank": str(self.rank)}
        return {key: value for key, value in given.items() if value != self.defaults[key]}

    @property
    def feedback(self) -> bool:
        return self._ef

    @property
    def additive(self) -> bool:
        return True

    def split(self, numel: int) -> tuple[list[Matrix], list[slice], int]:
        """The matrices, the slices of the part that are sent as they are, and the elements of all Ps."""
        matrices: list[Matrix] = []
        plain: list[slice] = []
        place = first_p = first_q = 0
        for shape in self.context.shapes or ((numel,),):
            size = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // rows if rows else 0
            if self.rank * (rows + columns) < size and self.rank <= min(rows, columns):
                matrices.append(Matrix(place, rows, columns, first_p, first_q))
                first_p, first_q = first_p + self.rank * rows, first_q + self.rank * columns
            elif size:
                plain.append(slice(place, place + size))
            place += size
        return matrices, plain, first_p

    def rounds(self, numel: int) -> tuple[Round, ...]:
        matrices, plain, factors = self.split(numel)
        codec = NoneCodec()
        pair = CodecPair(codec, codec)
        first = Round(pair, factors + sum(cut.stop - cut.start for cut in plain))
        return (first, Round(pair, self.rank * sum(m.columns for m in matrices))) if matrices else (first,)

    def new_state(self, numel: int) -> PowerSgdState:
        check_part(self.canonical, numel)
        return PowerSgdState(self, numel)

    def warm(self) -> None:
        """The kernels are compiled on import; those of `none` are the servers'."""
        for round_ in self.rounds(1):
            round_.pair.push.warm()


class PowerSgdState(SchemeState):
    """Keeps the step's P' from round 0 on, and Q from step to step. Q is zero before the first step, so that all its columns are drawn."""

    def __init__(self, scheme: PowerSgdScheme, numel: int) -> None:
        self.rounds = scheme.rounds(numel)
        self._rank, self._numel = scheme.rank, numel
        self._matrices, self._plain, self._factors = scheme.split(numel)
        self._p = np.zeros(self.rounds[0].numel, np.float32)  # P' of each matrix, then the plain tensors' aggregate
        self._q = np.zeros(scheme.rank * sum(matrix.columns for matrix in self._matrices), np.float32)

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        target = out[: 4 * self.rounds[index].numel].view(np.float32)
        with np.errstate(all="ignore"):  # what overflows is found in the result, and whether BLAS warns of it depends on the CPU
            finite = self._encode(index, reference_corrected(grad, residual, rescale) if residual is not None else grad, stream, target)
        if not finite:
            target.fill(0)
        return Encoded(4 * target.size, not finite)

    def _encode(self, index: int, p: F32, stream: Stream, target: F32) -> bool:
        """Write a round's elements; returns whether they and their inputs are finite. If not, the elements are meaningless."""
        if not np.isfinite(p if index == 0 else self._p[: self._factors]).all():
            return False
        for matrix in self._matrices:
            values = self._of(p, matrix)
            if index == 0:
                np.matmul(values, self._started(matrix, stream), out=self._factor_p(target, matrix))
            else:
                np.matmul(values.T, self._factor_p(self._p, matrix), out=self._factor_q(target, matrix))
        if index == 0:
            place = self._factors
            for cut in self._plain:
                target[place : place + cut.stop - cut.start] = p[cut]
                place += cut.stop - cut.start
        return bool(np.isfinite(target).all())

    def take(self, index: int, payload: Bytes) -> None:
        self._take_first(payload)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        if not self._matrices:
            self._take_first(payload)
        else:
            last = self.rounds[1]
            last.pair.pull.validate(payload, last.numel)
            self._q[:] = payload.view(np.float32)
        with np.errstate(all="ignore"):
            if residual is not None:
                residual *= np.float32(rescale)
                residual += target
                for matrix, product in self._products(sent[-1].view(np.float32)):
                    self._of(residual, matrix)[:] -= product
                for cut in self._plain:
                    residual[cut] = 0
        for matrix, product in self._products(self._q):
            self._of(target, matrix)[:] = product
        place = self._factors
        for cut in self._plain:
            target[cut] = self._p[place : place + cut.stop - cut.start]
            place += cut.stop - cut.start

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        place, first = self._factors, sent[0].view(np.float32)
        with np.errstate(all="ignore"):
            if self._matrices:
                for matrix, product in self._products(sent[1].view(np.float32)):
                    self._of(residual, matrix)[:] += product
            for cut in self._plain:
                residual[cut] += first[place : place + cut.stop - cut.start]
                place += cut.stop - cut.start

    @property
    def factors(self) -> dict[int, F32]:
        return {matrix.first: self._factor_q(self._q, matrix).reshape(-1).copy() for matrix in self._matrices}

    def restore_factors(self, factors: Mapping[int, F32]) -> None:
        for matrix in self._matrices:
            values, q = factors.get(matrix.first, NO_RESIDUAL), self._factor_q(self._q, matrix)
            q[:] = values.reshape(q.shape) if values.size == q.size else 0  # zeros are drawn

    def _take_first(self, payload: Bytes) -> None:
        self.rounds[0].pair.pull.validate(payload, self.rounds[0].numel)
        self._p[:] = payload.view(np.float32)
        for matrix in self._matrices:
            orthonormalise(self._factor_p(self._p, matrix))

    def _started(self, matrix: Matrix, stream: Stream) -> F32:
        """The Q that a step begins with: the last step's with its columns scaled, and random columns where the last step left none."""
        q = self._factor_q(self._q, matrix)
        top = np.abs(q).max(axis=0)
        alive = (top > 0) & np.isfinite(top)
        scaled = np.ldexp(q, -np.frexp(np.where(alive, top, 1))[1])
        if alive.all():
            return scaled
        shared = replace(stream, rank=SHARED_RANK, first=0)
        drawn = 2 * reference_uniform(shared, matrix.first_q, q.size).reshape(q.shape) - np.float32(1)
        return np.where(alive, scaled, drawn)

    def _products(self, q: F32) -> list[tuple[Matrix, F32]]:
        """P' Q^T of each matrix, for these Qs."""
        products = []
        for matrix in self._matrices:
            out = np.empty((matrix.rows, matrix.columns), np.float32)
            multiply(self._factor_p(self._p, matrix), self._factor_q(q, matrix), out)
            products.append((matrix, out))
        return products

    def _factor_p(self, ps: F32, matrix: Matrix) -> F32:
        return ps[matrix.first_p : matrix.first_p + self._rank * matrix.rows].reshape(matrix.rows, self._rank)

    def _factor_q(self, qs: F32, matrix: Matrix) -> F32:
        return qs[matrix.first_q : matrix.first_q + self._rank * matrix.columns].reshape(matrix.columns, self._rank)

    @staticmethod
    def _of(part: Array, matrix: Matrix) -> Array:
        return part[matrix.first : matrix.first + matrix.rows * matrix.columns].reshape(matrix.rows, matrix.columns)
