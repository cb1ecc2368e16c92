"""What another order of tasks could gain: plans with few buckets, under every order of the buckets. Run by ``benchmarks/planning.py --orders``.

The timeline's rule stays: a resource takes the task that can start first. Of tasks that could start at once it takes that of the bucket of the highest
priority; here, of the bucket that a permutation puts first. Jobs are those of ``planning_rivals.py``; plans with 2 to 5 buckets and 24 parts
at most are tried, all permutations of each. Owns the permutations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final

import numpy as np
from planning_rivals import random_job

from psgc.plan.methods.anytime import search_for
from psgc.plan.methods.search import search
from psgc.plan.model.problem import simulate
from psgc.plan.model.timeline import run

FIRST_SEED: Final = 3_000_000
MAX_BUCKETS: Final = 5
MAX_PARTS: Final = 24
GAIN: Final = 1e-3  # from here on another order counts as shorter


def gains(jobs: int, fewest: int, most: int, first: int = FIRST_SEED, seconds: float | None = None) -> Iterator[float]:
    """Of each plan that has few buckets, by which share the best order's step is shorter. seconds: of each search, in place of the default."""
    for seed in range(first, first + jobs):
        problem = random_job(seed, fewest, most)
        found = search(problem) if seconds is None else search_for(problem, seconds)
        simulated = simulate(problem, found.buckets)
        chains, buckets = simulated.chains, len(found.buckets)
        if not 2 <= buckets <= MAX_BUCKETS or len(chains.ready_us) > MAX_PARTS:
            continue
        own = np.array([simulated.rows[task].bucket for task in chains.first[:-1].tolist()])
        parts = np.arange(len(own))
        orders = (np.array(order)[own] * len(own) + parts for order in permutations(range(buckets)))
        yield 1 - min(run(chains._replace(rank=rank)).step_us for rank in orders) / simulated.step_us


def summary(jobs: int, fewest: int, most: int, seconds: float | None = None) -> str:
    """What the orders gain, in a line."""
    found = list(gains(jobs, fewest, most, seconds=seconds))
    shorter = sum(gain > GAIN for gain in found)
    return (
        f"{len(found)} plans with 2 to {MAX_BUCKETS} buckets: another order is shorter by more than {GAIN:.1%} on {shorter}, "
        f"by {max(found, default=0.0):.2%} at most"
    )
