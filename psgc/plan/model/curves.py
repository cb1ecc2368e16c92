"""Cost curves in the form that kernels read: the points of several curves, one after the other.

Owns the kernel that interpolates many curves at once. ``profile.CostCurve`` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import inlined, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.model.timeline import Ints

Points = tuple[tuple[float, ...], tuple[float, ...]]  # numbers of elements, and microseconds
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_OUT_F64_2D: Final = types.Array(types.float64, 2, "C")


class Curves(NamedTuple):
    """Curve i has the points first[i] to first[i + 1]."""

    first: Ints
    numel: F64
    us: F64


def curves_of(points: Iterable[Points]) -> Curves:
    every = list(points)
    first = np.cumsum([0, *(len(numel) for numel, _ in every)], dtype=np.int64)
    numel, us = (np.array([value for curve in every for value in curve[column]], np.float64) for column in (0, 1))
    return Curves(first, numel, us)


@inlined
def _at(first: Any, last: Any, numel: Any, us: Any, elements: Any) -> Any:
    """The value of one curve: linear between points, constant before the first, and beyond the last with the slope of the last two."""
    if last - first == 1:
        return us[first] * max(1.0, elements / numel[first])
    if elements <= numel[first]:
        return us[first]
    point = first + 1
    while point < last - 1 and numel[point] < elements:
        point += 1
    slope = (us[point] - us[point - 1]) / (numel[point] - numel[point - 1])
    if elements <= numel[point]:
        return us[point - 1] + slope * (elements - numel[point - 1])
    return us[point] + max(slope, 0.0) * (elements - numel[point])


@inlined
def task_us(
    fixed: Any, slope: Any, curve: Any, share: Any, first: Any, numel: Any, us: Any, task: Any, elements: Any, codec: Any
) -> Any:  # fmt: skip
    """The microseconds of one task for a part of so many elements. The other arguments: see ``task_times``."""
    took = fixed[task] + slope[task, codec] * elements
    own = curve[task, codec]
    return took if own < 0 else took + _at(first[own], first[own + 1], numel, us, share[task] * elements)


@kernel(types.void(_IN_F64, _IN_F64_2D, _IN_I64_2D, _IN_F64, _IN_I64, _IN_F64, _IN_F64, _IN_F64, _IN_I64, _OUT_F64_2D))
def task_times(
    fixed: Any, slope: Any, curve: Any, share: Any, first: Any, numel: Any, us: Any, sizes: Any, codec: Any, out: Any
) -> None:  # fmt: skip
    """Set ``out`` to the microseconds of tasks (rows) for parts of these sizes and codecs (columns).

    fixed: fixed microseconds of each task; slope: microseconds per element, by task and codec; curve: index of the task's curve by codec, -1
    for none; share: the share of the part's elements that the task works on; first, numel, us: ``Curves``."""
    for task in range(fixed.size):
        for column in range(sizes.size):
            out[task, column] = task_us(fixed, slope, curve, share, first, numel, us, task, sizes[column], codec[column])
