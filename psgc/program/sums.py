"""Sums of contributions in member order, for every element type of psgc: the reference that backends are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]
QUIET_BF16: Final = 0x7FC0  # the one NaN that rounding makes


def widen_bf16(bits: Array) -> F32:
    """The bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bf16(values: F32) -> Array:
    """float32 to the bits of bfloat16: nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), QUIET_BF16, rounded).astype(np.uint16)


def sum_in_order(contributions: Sequence[Array], dtype: str, divisor: int = 1) -> Array:
    """The sum divided by ``divisor``, added from left to right: 16-bit floats in float32, rounded once; other types in their own type (integers wrap,
    bool is "or"), except that integers that are divided, by floor, are summed in int64."""
    if divisor != 1:
        return _mean_in_order(contributions, dtype, divisor)
    widen, narrow = _WIDER.get(dtype, (_same, _same))
    total = widen(contributions[0]).copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for contribution in contributions[1:]:
            total += widen(contribution)
        return narrow(total)


def _mean_in_order(contributions: Sequence[Array], dtype: str, divisor: int) -> Array:
    widen, narrow = _WIDER.get(dtype, (_same, _same))
    terms = [widen(contribution) for contribution in contributions]
    with np.errstate(over="ignore", invalid="ignore"):
        if terms[0].dtype.kind == "f":
            return narrow(sum_in_order(terms, "float32") / terms[0].dtype.type(divisor))
        total = sum_in_order([term.astype(np.int64) for term in terms], "int64")
        return (total // divisor).astype(contributions[0].dtype)


def _same(array: Array) -> Array:
    return array


_WIDER: Final[dict[str, tuple[Callable[[Array], Array], Callable[[Any], Array]]]] = {
    "bfloat16": (widen_bf16, narrow_bf16),
    "float16": (lambda array: array.astype(np.float32), lambda values: values.astype(np.float16)),
}
