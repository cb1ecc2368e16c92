"""The next iteration's forward after a simulated step: begun when every gradient is synchronized, or layer by layer.

Owns the most that a runtime without a barrier between iterations could gain (Peng et al., SOSP 2019, ByteScheduler). Layers compute in the
reverse order of their gradients' readiness, each when its own bucket and the layer before it are done. A layer's forward takes the same share
of forward as its gradient takes of backward. Buckets that are still decoded on the GPU meanwhile do not delay forward in this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psgc.errors import UsageError
from psgc.plan.model.lanes import BACKWARD, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, Simulated


class Iteration(NamedTuple):
    """Microseconds from the first gradient's readiness to the end of the next forward. barrier_us: if forward begins when all gradients are
    synchronized, as under ``psgc.torch``; overlapped_us: if each layer begins when its own gradients are."""

    barrier_us: float
    overlapped_us: float


def with_forward(problem: Problem, buckets: Sequence[PlannedBucket], simulated: Simulated) -> Iteration:
    """The iteration of a simulated plan. Raises UsageError if the profile has no ``forward_us``."""
    profile = problem.profile
    if profile.forward_us is None:
        raise UsageError(f"profile {profile.model}: it has no forward_us; measure one with psgc profile, or leave out --forward")
    done = [0.0] * len(buckets)
    for row, end in zip(simulated.rows, (simulated.timeline.start_us + simulated.chains.us).tolist(), strict=True):
        done[row.bucket] = max(done[row.bucket], end)
    now = max((span.end_us for span in spans(simulated) if span.lane == BACKWARD), default=0.0)
    bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket.tensors}
    ready = np.array([tensor.ready_us for tensor in profile.tensors])
    share = np.diff(ready, prepend=0.0) / ready[-1] if ready[-1] else np.full(len(ready), 1 / len(ready))
    for tensor, forward in zip(reversed(profile.tensors), (share[::-1] * profile.forward_us).tolist(), strict=True):
        now = max(now, done[bucket_of[tensor.name]]) + forward
    return Iteration(simulated.step_us + profile.forward_us, now)
