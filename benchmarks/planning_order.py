"""What another order of tasks could gain: plans with few buckets, under every order of the buckets' priorities. Run by ``benchmarks/planning.py --orders``.

The timeline's rule stays: a resource takes the task that can start first. Of tasks that could start at once it takes the one of the bucket that is ready
first; here, of the bucket that a permutation puts first. Jobs are those of ``planning_rivals.py``; plans with 2 to 5 buckets and 24 parts
at most are tried, all permutations of each. Owns the plain definition of the timeline with priorities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

from planning_rivals import random_job

from psgc.plan.methods.search import search
from psgc.plan.model.costs import GPU, resources_of
from psgc.plan.model.problem import simulate
from psgc.plan.model.timeline import Chains, _between_tensors

FIRST_SEED: Final = 3_000_000
MAX_BUCKETS: Final = 5
MAX_PARTS: Final = 24
GAIN: Final = 1e-3  # from here on another order counts as shorter


def step_of(chains: Chains, rank: Sequence[int]) -> float:
    """The step, as ``define_timeline`` has it, but for tasks that could start at once: the chain of the least rank goes first."""
    count, held_by = len(chains.ready_us), [resources_of(int(resource)) for resource in chains.resource]
    free = [[0.0] * threads for threads in chains.threads.tolist()]
    nexts, available = [int(first) for first in chains.first[:-1]], [float("inf")] * count
    computed, delay, step = 0, 0.0, 0.0
    while True:
        waiting = []
        for chain in range(computed):
            if nexts[chain] < chains.first[chain + 1]:
                held = held_by[nexts[chain]]
                when = max([available[chain], *(min(free[one]) for one in held)])
                waiting.append((_between_tensors(chains, delay, when) if held == (GPU,) else when, rank[chain], chain))
        earliest = min(waiting, default=None)
        if computed < count and (earliest is None or chains.ready_us[computed] + delay <= earliest[0]):
            end, ready = float(chains.ready_us[computed] + delay), chains.ready_us[computed]
            while computed < count and chains.ready_us[computed] == ready:
                available[computed] = end
                computed += 1
        elif earliest is None:
            return step
        else:
            when, _, chain = earliest
            task = nexts[chain]
            nexts[chain], end = task + 1, when + float(chains.us[task])
            available[chain] = end
            for one in held_by[task]:
                free[one][free[one].index(min(free[one]))] = end
            if held_by[task] == (GPU,) and computed < count:
                delay += float(chains.us[task])
        step = max(step, end)


def gains(jobs: int, fewest: int, most: int, first: int = FIRST_SEED) -> Iterator[float]:
    """Of each plan that has few buckets, by which share the best order's step is shorter."""
    for seed in range(first, first + jobs):
        problem = random_job(seed, fewest, most)
        found = search(problem)
        simulated = simulate(problem, found.buckets)
        chains, buckets = simulated.chains, len(found.buckets)
        if not 2 <= buckets <= MAX_BUCKETS or len(chains.ready_us) > MAX_PARTS:
            continue
        own = [simulated.rows[task].bucket for task in chains.first[:-1].tolist()]
        planned = step_of(chains, own)
        assert abs(planned / simulated.step_us - 1) < 1e-9
        yield 1 - min(step_of(chains, [order[bucket] for bucket in own]) for order in permutations(range(buckets))) / planned


def summary(jobs: int, fewest: int, most: int) -> str:
    """What the orders gain, in a line."""
    found = list(gains(jobs, fewest, most))
    shorter = sum(gain > GAIN for gain in found)
    return (
        f"{len(found)} plans with 2 to {MAX_BUCKETS} buckets: another order is shorter by more than {GAIN:.1%} on {shorter}, "
        f"by {max(found, default=0.0):.2%} at most"
    )
