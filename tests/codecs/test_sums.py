"""Sums over a whole part have one order, which is published: block trees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from psgc.codecs.blocktopk import _sum_squares, reference_squares
from psgc.codecs.codec import F32
from psgc.codecs.common.feedback import NO_RESIDUAL
from psgc.codecs.common.sums import LEAF, reference_tree_sum, sum_magnitudes, sum_squares
from psgc.codecs.kit.cpu import CpuOps
from psgc.codecs.kit.ops import Ops
from tests.cases import for_each

Values = Callable[..., F32]
SIZES = (1, 2, 63, 4095, 4096, 4097, 20_000, 1 << 20)


def tree_by_hand(x: list[float]) -> float:
    """In float64."""
    while True:
        sums = []
        for start in range(0, max(len(x), 1), 4096):
            block = x[start : start + 4096]
            block += [0.0] * (4096 - len(block))
            while len(block) > 1:
                half = len(block) // 2
                block = [block[i] + block[half + i] for i in range(half)]
            sums.append(block[0])
        if len(sums) == 1:
            return sums[0]
        x = sums


@pytest.mark.parametrize("numel", SIZES[:-1])
def test_the_order_is_the_published_one(numel: int, values: Values) -> None:
    x = values("wide", numel).astype(np.float64)
    assert reference_tree_sum(x)[0] == tree_by_hand(x.tolist())


@for_each(numel=SIZES, kind=["gauss", "wide", "huge", "negative zeros"])
def test_kernels_sum_as_defined(kind: str, numel: int, values: Values) -> None:
    p, residual = values(kind, numel), values("gauss", numel, seed=1)
    assert sum_squares(p) == reference_tree_sum(p.astype(np.float64) ** 2)[0]
    assert sum_magnitudes(p, NO_RESIDUAL, 1.0) == reference_tree_sum(np.abs(p).astype(np.float64))[0]
    moved = (p + np.float32(0.3) * residual).astype(np.float32)
    assert sum_magnitudes(p, residual, 0.3) == reference_tree_sum(np.abs(moved).astype(np.float64))[0]


@for_each(numel=[0, *SIZES], kind=["gauss", "wide", "negative zeros"])
def test_the_kits_sum_is_the_tree_in_float32(kind: str, numel: int, values: Values) -> None:
    x = values(kind, numel)
    with np.errstate(over="ignore", invalid="ignore"):
        assert Ops().reduce(x, "sum").tobytes() == CpuOps().reduce(x, "sum").tobytes() == reference_tree_sum(x).tobytes()


def test_a_sum_of_many_equal_numbers_is_exact_where_one_after_the_other_drifts() -> None:
    x = np.full(LEAF * LEAF, 0.1, np.float32)
    assert CpuOps().reduce(x, "sum")[0] == np.float32(0.1) * x.size
    assert np.cumsum(x)[-1] != np.float32(0.1) * x.size


@for_each(block=[1, 7, 256, 4096, 4097, 6000, 65536], numel=[1, 5000, 70_000])
def test_norms_of_blocks_are_as_defined(block: int, numel: int, values: Values) -> None:
    p, squares = values("wide", numel), np.empty(-(-numel // block))
    _sum_squares(p, NO_RESIDUAL, 1.0, block, squares)
    np.testing.assert_array_equal(squares, reference_squares(p, block))
