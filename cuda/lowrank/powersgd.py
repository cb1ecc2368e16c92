"""The GPU side of `powersgd`: the two products with the gradient by torch.matmul (cuBLAS), which are the rank's own, and all that ranks must agree on by
kernels in the CPU's order of operations, to the same bits.

A payload is float32. Nothing here waits for the device: where a round is not finite, its payload becomes zeros there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from psgc.codecs.codec import Stream
from psgc.codecs.common.orthonormal import PASSES
from psgc.codecs.common.streams import keys
from psgc.codecs.common.sums import LEAF
from psgc.codecs.powersgd import SHARED_RANK, Matrix, PowerSgdScheme
from psgc.codecs.scheme import Scheme, check_part
from psgc.cuda.common.launching import launch
from psgc.cuda.common.tensor_streams import uniform
from psgc.cuda.lowrank.kernels import orthonormal_kernel, product_kernel
from psgc.device.state import DeviceState
from psgc.errors import CodecError

PUT: Final = 0
ADD: Final = 1
TAKE: Final = 2
ROWS: Final = 32
COLUMNS: Final = 128
MOST_ROWS: Final = LEAF * LEAF  # of a tree of two levels


class PowerSgdDeviceState(DeviceState):
    """Keeps the step's P' from round 0 on, and Q from step to step, as ``PowerSgdState`` does."""

    def __init__(self, scheme: Scheme, numel: int, device: torch.device) -> None:
        assert isinstance(scheme, PowerSgdScheme)
        check_part(scheme.canonical, numel)
        self.rounds = scheme.rounds(numel)
        self._rank, self._device = scheme.rank, device
        self._matrices, self._plain, self._factors = scheme.split(numel)
        tallest = max((matrix.rows for matrix in self._matrices), default=0)
        if tallest > MOST_ROWS:
            raise CodecError(f"codec powersgd: a matrix of {tallest} rows is more than its GPU kernel takes, {MOST_ROWS}")
        self._p = torch.zeros(self.rounds[0].numel, device=device)  # P' of each matrix, then the plain tensors' aggregate
        self._q = torch.zeros(scheme.rank * sum(matrix.columns for matrix in self._matrices), device=device)
        self._leaves = -(-tallest // LEAF)
        table = [number for matrix in self._matrices for number in (matrix.first_p, matrix.rows)]
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._scratch = torch.zeros(len(self._matrices) * (self._leaves + self._rank), dtype=torch.float64, device=device)

    def encode(
        self, index: int, grad: torch.Tensor, residual: torch.Tensor | None, rescale: float, stream: Stream, out: torch.Tensor,
        status: torch.Tensor, scratch: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        target = self._floats(index, out)
        p = grad.float() if residual is None else grad.float() + residual * rescale
        inputs = p if index == 0 else self._p[: self._factors]
        for matrix in self._matrices:
            values = self._of(p, matrix)
            if index == 0:
                torch.matmul(values, self._started(matrix, stream), out=self._factor_p(target, matrix))
            else:
                torch.matmul(values.T, self._factor_p(self._p, matrix), out=self._factor_q(target, matrix))
        if index == 0:
            place = self._factors
            for cut in self._plain:
                target[place : place + cut.stop - cut.start].copy_(p[cut])
                place += cut.stop - cut.start
        finite = torch.isfinite(inputs).all() & torch.isfinite(target).all()
        target.copy_(torch.where(finite, target, torch.zeros((), device=target.device)))
        status[0:1] |= (~finite).long()
        status[1:2].fill_(4 * target.numel())

    def take(self, index: int, payload: torch.Tensor) -> None:
        self._p.copy_(self._floats(0, payload))
        if self._matrices:
            count = len(self._matrices)
            leaves, coefficients = self._scratch[: count * self._leaves], self._scratch[count * self._leaves :]
            launch(
                orthonormal_kernel, count, self._p, self._table, leaves, coefficients, self._rank, self._leaves, LEAF=LEAF,
                STEPS=LEAF.bit_length() - 5, PASSES=PASSES, num_warps=8,
            )  # fmt: skip

    def apply(
        self, pieces: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], target: torch.Tensor, residual: torch.Tensor | None, rescale: float
    ) -> None:  # fmt: skip
        if self._matrices:
            self._q.copy_(self._floats(1, pieces[0]))
        else:
            self.take(0, pieces[0])
        if residual is not None:
            residual *= rescale
            residual += target
            self._products(self._floats(len(self.rounds) - 1, sent[-1]), residual, TAKE)
            for cut in self._plain:
                residual[cut].zero_()
        result = target if target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
        self._products(self._q, result, PUT)
        place = self._factors
        for cut in self._plain:
            result[cut].copy_(self._p[place : place + cut.stop - cut.start])
            place += cut.stop - cut.start
        if result is not target:
            target.copy_(result)

    def add_back(self, sent: Sequence[torch.Tensor], residual: torch.Tensor) -> None:
        if self._matrices:
            self._products(self._floats(1, sent[1]), residual, ADD)
        place, first = self._factors, self._floats(0, sent[0])
        for cut in self._plain:
            residual[cut] += first[place : place + cut.stop - cut.start]
            place += cut.stop - cut.start

    @property
    def factors(self) -> Mapping[int, torch.Tensor]:
        return {matrix.first: self._factor_q(self._q, matrix).reshape(-1).clone() for matrix in self._matrices}

    def restore_factors(self, factors: Mapping[int, torch.Tensor]) -> None:
        for matrix in self._matrices:
            values, q = factors.get(matrix.first), self._factor_q(self._q, matrix)
            if values is not None and values.numel() == q.numel():
                q.copy_(values.reshape(q.shape))
            else:
                q.zero_()  # zeros are drawn

    def _floats(self, index: int, payload: torch.Tensor) -> torch.Tensor:
        """The elements of a round's payload."""
        return payload[: 4 * self.rounds[index].numel].view(torch.float32)

    def _started(self, matrix: Matrix, stream: Stream) -> torch.Tensor:
        """The Q that a step begins with: the last step's with its columns scaled, and random columns where the last step left none."""
        q = self._factor_q(self._q, matrix)
        top = q.abs().amax(0)
        alive = (top > 0) & torch.isfinite(top)
        exponent = (torch.where(alive, top, 1.0).double().view(torch.int64) >> 52) - 1022
        scaled = (q.double() * ((1023 - exponent) << 52).view(torch.float64)).float()
        before, between = keys(replace(stream, rank=SHARED_RANK, first=0))
        drawn = 2 * uniform(matrix.first_q, q.numel(), before, between, self._device).reshape(q.shape) - 1
        return torch.where(alive, scaled, drawn)

    def _products(self, q: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        """P' Q^T of each matrix, put to, added to or taken from its place in ``out``."""
        for matrix in self._matrices:
            programs = -(-matrix.rows // ROWS) * -(-matrix.columns // COLUMNS)
            launch(
                product_kernel, programs, self._factor_p(self._p, matrix), self._factor_q(q, matrix), self._of(out, matrix), matrix.rows,
                matrix.columns, self._rank, MODE=mode, ROWS=ROWS, COLUMNS=COLUMNS,
            )  # fmt: skip

    def _factor_p(self, ps: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return ps[matrix.first_p : matrix.first_p + self._rank * matrix.rows].view(matrix.rows, self._rank)

    def _factor_q(self, qs: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return qs[matrix.first_q : matrix.first_q + self._rank * matrix.columns].view(matrix.columns, self._rank)

    @staticmethod
    def _of(part: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return part[matrix.first : matrix.first + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
