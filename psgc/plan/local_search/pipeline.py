"""The optimal fusion of neighbouring tensors for one resource that works bucket after bucket, by dynamic programming.

A bucket of n elements holds the resource for ``latency + rate * n``, beginning some lead time after its last tensor is ready. The result is the fusion
of neighbours with which the resource is done first; of those about as good, one with few buckets, since each bucket has latencies elsewhere, too.
The search starts from such fusions for the resource that limits its plan. MG-WFBP (Shi et al. 2019) merges gradients greedily with this model; here
the result is optimal.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.model.timeline import Ints

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_OUT_I64: Final = types.Array(types.int64, 1, "C")
SLACK: Final = 2e-3  # share of the total time that a fusion with fewer buckets may cost


@kernel(I64(_IN_F64, _IN_F64, types.float64, types.float64, types.float64, types.float64, _OUT_I64))
def _fuse(numel: Any, ready: Any, latency: Any, rate: Any, lead: Any, slack: Any, of: Any) -> Any:
    """Set ``of`` to each tensor's bucket. Returns the number of buckets."""
    count = numel.size
    total = np.zeros(count + 1)
    for tensor in range(count):
        total[tensor + 1] = total[tensor] + numel[tensor]
    done = np.full(count + 1, np.inf)  # the earliest time at which all tensors before each one are done
    done[0] = 0.0
    for end in range(1, count + 1):
        for begin in range(end - 1, -1, -1):
            us = latency + rate * (total[end] - total[begin])
            if ready[end - 1] + lead + us >= done[end]:
                break  # a longer bucket takes even longer
            done[end] = min(done[end], max(done[begin], ready[end - 1] + lead) + us)
    latest = np.full(count + 1, -np.inf)  # the latest time at which all tensors before each one may be done
    latest[count] = done[count] * (1 + slack)
    for begin in range(count - 1, -1, -1):
        for end in range(begin + 1, count + 1):
            start = latest[end] - latency - rate * (total[end] - total[begin])
            if start >= ready[end - 1] + lead:
                latest[begin] = max(latest[begin], start)
    fewest, at, before = np.full(count + 1, count + 1), np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    fewest[0], at[0] = 0, 0.0
    for end in range(1, count + 1):
        for begin in range(end - 1, -1, -1):
            until = max(at[begin], ready[end - 1] + lead) + latency + rate * (total[end] - total[begin])
            buckets = fewest[begin] + 1
            if until <= latest[end] and (buckets < fewest[end] or (buckets == fewest[end] and until < at[end])):
                fewest[end], at[end], before[end] = buckets, until, begin
    end, bucket = count, fewest[count]
    while end > 0:
        bucket -= 1
        of[before[end] : end] = bucket
        end = before[end]
    return fewest[count]


def fused_for(numel: F64, ready_us: F64, latency_us: float, us_per_element: float, lead_us: float) -> Ints:
    """Each tensor's bucket. numel, ready_us: sizes and readiness of the tensors, in order of readiness; the other arguments: see the module's text."""
    of = np.empty(len(numel), np.int64)
    _fuse(numel, ready_us, latency_us, us_per_element, lead_us, SLACK, of)
    return of
