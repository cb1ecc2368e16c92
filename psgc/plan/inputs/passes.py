"""A server's passes over different numbers of payloads, measured, as the ``server`` curve of a profile.

One fused pass decodes and adds several payloads at once, so its time is not a multiple of one payload's. The curve has the passes as they were measured, and
a line through them: what each payload adds, and what finishing the sum takes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from psgc.plan.inputs.profile import CostCurve

PAYLOADS: Final = (1, 2, 3, 4, 8)  # of the passes that are measured; 8 is the most that servers add in one pass


def server_curve(numel: Sequence[float], passes: Sequence[Mapping[int, float]]) -> CostCurve:
    """The curve of passes at each of these sizes: microseconds by the number of payloads, the same numbers for all sizes."""
    lines = [line_through(times) for times in passes]
    found = tuple((count, tuple(round(times[count], 3) for times in passes)) for count in sorted(passes[0]))
    finish, add = (tuple(round(us, 3) for us in column) for column in zip(*lines, strict=True))
    return CostCurve(tuple(map(float, numel)), finish, add, found)


def line_through(times: Mapping[int, float]) -> tuple[float, float]:
    """What a sum takes besides its payloads, and what each payload adds, neither negative: least squares of relative errors."""
    counts, us = np.array(sorted(times), float), np.array([times[count] for count in sorted(times)])
    if len(counts) == 1:
        return 0.0, float(us[0] / counts[0])
    weights = 1 / np.maximum(us, 1e-9)
    add, finish = np.polyfit(counts, us, 1, w=weights)
    if add < 0:
        return float(np.average(us, weights=weights**2)), 0.0
    if finish < 0:
        return 0.0, float((weights**2 * counts * us).sum() / (weights**2 * counts**2).sum())
    return float(finish), float(add)
