"""The `powersgd` scheme: every matrix of a bucket as the product of two thin factors, in two rounds; vectors as they are.

| round | elements, float32, one after the other                                                                      |
|-------|-------------------------------------------------------------------------------------------------------------|
| 0     | P = M Q of each matrix, row by row [rows, rank]; then the tensors that are not compressed                    |
| 1     | Q = M^T P' of each matrix, row by row [columns, rank], with P' the orthonormalised mean (or sum) of the Ps     |

Owns what the elements mean; both rounds are sums of codec `none`. A tensor of shape (a, b, c, ...) is a matrix of a rows; one that would
not become smaller, or has one dimension, is sent as it is. M = gradient + residual; what a worker has sent is P' Q_i^T with its own
Q_i, and the mean of that over the workers is just what all of them decode. Q is kept for the next step (warm start); the first one is
uniform in [-1, 1), by a stream that all ranks share. What every rank computes for itself and must agree on, P' and P' Q^T, is computed
in a fixed order of operations; the two products with M are the rank's own and run on BLAS. Buckets are not cut.
Source: Vogels, Karimireddy and Jaggi 2019 (PowerSGD), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numba import types

from psgc.codecs.codec import F32, FLOATS, Array, Bytes, CodecPair, Encoded, Stream, parse_codec
from psgc.codecs.feedback import NO_RESIDUAL, define_corrected
from psgc.codecs.kernel import kernel
from psgc.codecs.parameters import read_switch, with_defaults
from psgc.codecs.random import define_uniform
from psgc.codecs.scheme import Round, Scheme, Setting, Way, check_part
from psgc.errors import CodecError

MOST_RANK: Final = 64
SHARED_RANK: Final = 0xFFFFFFFE  # in random streams: no worker's and no server's
_LEAST_NORM: Final = 1e-30  # a column shorter than this is zero: the matrix has a lower rank
F32_MATRIX: Final = types.Array(types.float32, 2, "C")
F32_READ: Final = types.Array(types.float32, 2, "C", readonly=True)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a compressed tensor lies: its first element in the part, and those of its factors in the rounds."""

    first: int
    rows: int
    columns: int
    first_p: int
    first_q: int


@kernel(types.void(F32_MATRIX))
def orthonormalise(p: Any) -> None:
    """Columns of p by modified Gram-Schmidt, in double precision; a column that depends on those before it becomes zero."""
    rows, rank = p.shape
    for k in range(rank):
        before = 0.0
        for i in range(rows):
            before += np.float64(p[i, k]) * np.float64(p[i, k])
        for j in range(k):
            dot = 0.0
            for i in range(rows):
                dot += np.float64(p[i, j]) * np.float64(p[i, k])
            for i in range(rows):
                p[i, k] = np.float32(np.float64(p[i, k]) - dot * np.float64(p[i, j]))
        square = 0.0
        for i in range(rows):
            square += np.float64(p[i, k]) * np.float64(p[i, k])
        norm = np.sqrt(square)
        factor = 1.0 / norm if norm > _LEAST_NORM and square > 1e-10 * before else 0.0
        for i in range(rows):
            p[i, k] = np.float32(np.float64(p[i, k]) * factor)


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


def define_product(p: F32, q: F32) -> F32:
    """p q^T as ``multiply`` sums it."""
    total = p[:, :1] * q[:, :1].T
    for k in range(1, p.shape[1]):
        total = total + p[:, k : k + 1] * q[:, k : k + 1].T
    return np.asarray(total, np.float32)


class PowerSgdScheme(Scheme):
    """rank * (rows + columns) elements of fp32 each way for a matrix of rows * columns."""

    name: ClassVar[str] = "powersgd"
    whole = True
    defaults: ClassVar[Mapping[str, str]] = {"rank": "4", "ef": "1"}
    advice: ClassVar[str] = (
        "large matrices whose gradients have few strong directions, as in transformers, over slow links; noise, as measured here, is its worst case"
    )

    def __init__(self, setting: Setting = Setting(), *, rank: int = 4, ef: bool = True) -> None:  # noqa: B008 - immutable
        if setting.dtype not in FLOATS:
            raise CodecError(f"codec powersgd carries {', '.join(FLOATS)}, not {setting.dtype}; use 'none' for this tensor")
        if not 1 <= rank <= MOST_RANK:
            raise CodecError(f"codec powersgd: parameter rank is a whole number from 1 to {MOST_RANK}, not '{rank}'")
        self.setting, self.rank, self._ef = setting, rank, ef

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], setting: Setting) -> PowerSgdScheme:
        """Build from the text form's parameters. Raises CodecError naming the parameter."""
        given = with_defaults(cls, parameters)
        text = given["rank"]
        if not (text.isascii() and text.isdigit()):
            raise CodecError(f"codec powersgd: parameter rank is a whole number from 1 to {MOST_RANK}, not {text!r}")
        return cls(setting, rank=int(text), ef=read_switch(cls, "ef", given["ef"]))

    @property
    def canonical(self) -> str:
        given = {"ef": "1" if self._ef else "0", "rank": str(self.rank)}
        text = ",".join(f"{key}={value}" for key, value in given.items() if value != self.defaults[key])
        return f"powersgd:{text}" if text else "powersgd"

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
        for shape in self.setting.shapes or ((numel,),):
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
        codec = parse_codec("none")
        pair = CodecPair(codec, codec)
        first = Round(pair, factors + sum(cut.stop - cut.start for cut in plain))
        return (first, Round(pair, self.rank * sum(m.columns for m in matrices))) if matrices else (first,)

    def way(self, numel: int) -> PowerSgdWay:
        check_part(self.canonical, numel)
        return PowerSgdWay(self, numel)

    def warm(self) -> None:
        """The kernels are compiled on import; those of `none` are the servers'."""
        for round_ in self.rounds(1):
            round_.pair.push.warm()


class PowerSgdWay(Way):
    """Keeps the step's P' from round 0 on, and Q from step to step."""

    def __init__(self, scheme: PowerSgdScheme, numel: int) -> None:
        self.rounds = scheme.rounds(numel)
        self._rank, self._numel = scheme.rank, numel
        self._matrices, self._plain, self._factors = scheme.split(numel)
        self._p = np.zeros(self.rounds[0].numel, np.float32)  # P' of each matrix, then the plain tensors' aggregate
        self._q: F32 | None = None

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        p = define_corrected(grad, residual, rescale) if residual is not None else grad
        target = out[: 4 * self.rounds[index].numel].view(np.float32)
        for matrix in self._matrices:
            values = p[matrix.first : matrix.first + matrix.rows * matrix.columns].reshape(matrix.rows, matrix.columns)
            if index == 0:
                np.matmul(values, self._factor_q(self._started(stream), matrix), out=self._factor_p(target, matrix))
            else:
                np.matmul(values.T, self._factor_p(self._p, matrix), out=self._factor_q(target, matrix))
        if index == 0:
            place = self._factors
            for cut in self._plain:
                target[place : place + cut.stop - cut.start] = p[cut]
                place += cut.stop - cut.start
        finite = bool(np.isfinite(target).all()) and (index > 0 or bool(np.isfinite(p).all()))
        return Encoded(4 * target.size, not finite)

    def take(self, index: int, payload: Bytes) -> None:
        self._take_first(payload)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        if not self._matrices:
            self._take_first(payload)
        else:
            last = self.rounds[1]
            last.pair.pull.validate(payload, last.numel)
            self._q = payload.view(np.float32).copy()
        if residual is not None:
            residual *= np.float32(rescale)
            residual += target
            for matrix, product in self._products(sent[-1].view(np.float32)):
                self._of(residual, matrix)[:] -= product
            for cut in self._plain:
                residual[cut] = 0
        if self._q is not None:
            for matrix, product in self._products(self._q):
                self._of(target, matrix)[:] = product
        place = self._factors
        for cut in self._plain:
            target[cut] = self._p[place : place + cut.stop - cut.start]
            place += cut.stop - cut.start

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        if self._matrices:
            for matrix, product in self._products(sent[1].view(np.float32)):
                self._of(residual, matrix)[:] += product
        place, first = self._factors, sent[0].view(np.float32)
        for cut in self._plain:
            residual[cut] += first[place : place + cut.stop - cut.start]
            place += cut.stop - cut.start

    @property
    def factors(self) -> dict[int, F32]:
        q = self._q
        return {} if q is None else {matrix.first: self._factor_q(q, matrix).reshape(-1).copy() for matrix in self._matrices}

    def restore_factors(self, factors: Mapping[int, F32]) -> None:
        found = [factors.get(matrix.first, NO_RESIDUAL) for matrix in self._matrices]
        fits = all(values.size == self._rank * matrix.columns for values, matrix in zip(found, self._matrices, strict=True))
        self._q = np.concatenate(found) if found and fits else None

    def _take_first(self, payload: Bytes) -> None:
        self.rounds[0].pair.pull.validate(payload, self.rounds[0].numel)
        self._p[:] = payload.view(np.float32)
        for matrix in self._matrices:
            orthonormalise(self._factor_p(self._p, matrix))

    def _started(self, stream: Stream) -> F32:
        if self._q is None:
            shared = Stream(stream.seed, 0, SHARED_RANK, stream.bucket)
            self._q = 2 * define_uniform(shared, 0, self.rounds[1].numel) - np.float32(1)
        return self._q

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
