"""What other systems would do with the same job, by their papers, under our costs and our timeline."""

from __future__ import annotations

import time
from typing import Final

from psgc.plan.found import Found
from psgc.plan.options import Option
from psgc.plan.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.problem import Problem, simulate

PARTITION_NUMEL: Final = 1 << 20  # BytePS cuts tensors at 4 MB
HIERARCHICAL: Final[Option] = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
OVER_SERVERS: Final[Option] = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")


def fp32(problem: Problem) -> Found:
    """BytePS (Jiang et al., OSDI 2020) without compression: each tensor by itself, cut at 4 MB, summed within nodes and then between
    them, by servers where there are some."""
    begun = time.perf_counter()
    option = OVER_SERVERS if problem.cluster.servers else HIERARCHICAL
    buckets = tuple(
        PlannedBucket((tensor.name,), tensor.numel, -(-tensor.numel // PARTITION_NUMEL), -index, UNCOMPRESSED, option)
        for index, tensor in enumerate(problem.profile.tensors)
    )
    step = simulate(problem, buckets).step_us
    return Found(buckets, step, (time.perf_counter() - begun) * 1e6, 1)
