"""A better order of the buckets, with their options unchanged.

If several tasks could start at the same moment, the timeline starts the one whose bucket has the least turn. At first, turns are in the order of
readiness. Another order may help if a critical task (``critical``) waited while a resource did another bucket's task that it could have
preceded: then its bucket moves before that one, or that one behind it. The first such move that lowers the objective is taken, again and again,
until none does or the budget is spent. The step never gets longer. Owns these moves.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.local_search.critical import buckets_of, critical_events
from psgc.plan.local_search.descent import IMPROVEMENT, MEAN_WEIGHT
from psgc.plan.local_search.full_descent import simulation_work
from psgc.plan.model.timeline import STEP, TOLERANCE, Ints, begin, new_run, resume

_F64: Final = types.Array(types.float64, 1, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_I64_2D: Final = types.Array(types.int64, 2, "C")
_RESULT: Any = types.Tuple((types.float64, types.float64, I64))  # type: ignore[no-untyped-call]
MAX_PAIRS: Final = 64  # pairs of buckets that are tried for one run
ALL_PAIRS_MAX_BUCKETS: Final = 8  # up to so many, all pairs are tried, the critical ones first
_work = helper(simulation_work)


def ranks_of(turn: Ints, parts: Ints) -> Ints:
    """Each chain's rank: by its bucket's turn, then by its index. parts: the number of each bucket's chains."""
    count = int(parts.sum())
    ranks: Ints = np.repeat(turn * count, parts) + np.arange(count)
    return ranks


@helper
def _set_ranks(run: Any, chain: Any, turn: Any) -> None:
    """Set each chain's rank: by its bucket's turn, then by its index."""
    for bucket in range(turn.size):
        for one in range(chain[bucket], chain[bucket + 1]):
            run.rank[one] = turn[bucket] * run.ready_us.size + one


@helper
def _moved(turn: Any, bucket: Any, before: Any, moved: Any) -> None:
    """Set ``moved`` to the turns after ``bucket`` has moved forward to just before another bucket."""
    for one in range(turn.size):
        moved[one] = turn[one] + (1 if turn[before] <= turn[one] < turn[bucket] else 0)
    moved[bucket] = turn[before]


@helper
def _delayed(turn: Any, bucket: Any, behind: Any, moved: Any) -> None:
    """Set ``moved`` to the turns after ``bucket`` has moved back to just behind another bucket."""
    for one in range(turn.size):
        moved[one] = turn[one] - (1 if turn[bucket] < turn[one] <= turn[behind] else 0)
    moved[bucket] = turn[behind]


@helper
def _contested(run: Any, chain: Any, pairs: Any, known: Any) -> Any:
    """Find pairs of buckets whose order may matter. pairs: set to rows of a bucket that waited on a critical path, and a bucket whose task went first
    although both could have gone; pairs that are latest in the step come first. Returns their number, at most the number of rows. known: scratch."""
    bucket_of, slack = buckets_of(run, chain), TOLERANCE * run.state[STEP]
    before, is_critical = critical_events(run)
    possible, end_us = np.empty(is_critical.size), run.computed_us.copy()  # by event: earliest start; by chain: last end
    for event in range(is_critical.size):
        own = run.event_chain[event]
        possible[event], end_us[own] = end_us[own], run.event_us[event] + run.us[run.event_task[event]]
    known[:] = False
    count = 0
    for event in range(is_critical.size - 1, -1, -1):
        waiting = bucket_of[run.event_chain[event]]
        for column in range(1, before.shape[1] if is_critical[event] else 0):
            other = before[event, column]
            while other >= 0 and run.event_us[other] >= possible[event] - slack:
                occupant = bucket_of[run.event_chain[other]]
                if waiting != occupant and not known[waiting, occupant] and count < pairs.shape[0]:
                    known[waiting, occupant] = True
                    pairs[count, 0], pairs[count, 1] = waiting, occupant
                    count += 1
                other = before[other, column]
    if chain.size - 1 <= ALL_PAIRS_MAX_BUCKETS:
        for waiting in range(chain.size - 1):
            for occupant in range(chain.size - 1):
                if waiting != occupant and not known[waiting, occupant]:
                    pairs[count, 0], pairs[count, 1] = waiting, occupant
                    count += 1
    return count


@kernel(_RESULT(_F64, _I64, _I64, _I64_2D, _I64, _I64, _F64, _F64, _I64, _F64, _I64, _I64, types.float64))
def order(
    ready: Any, chain: Any, kind: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any, choice: Any, turn: Any,
    budget: Any,
) -> Any:  # fmt: skip
    """Improve ``turn``, each bucket's turn, in place. Returns the step, the objective, and the number of simulated chains, about ``budget`` at most.
    choice: each bucket's option; the other arguments: see ``descent.descend``."""
    buckets = kind.size
    run = new_run(ready, resource, us, rest, threads, moments, np.empty(ready.size, np.int64), length.max())
    for bucket in range(buckets):
        run.alike[chain[bucket] : chain[bucket + 1]] = chain[bucket + 1]
        run.begins[chain[bucket] : chain[bucket + 1]] = first[kind[bucket], choice[bucket]]
        run.ends[chain[bucket] : chain[bucket + 1]] = first[kind[bucket], choice[bucket]] + length[choice[bucket]]
    _set_ranks(run, chain, turn)
    begin(run)
    best_step = resume(run, ready.size, np.inf)
    best = best_step + MEAN_WEIGHT * run.available_us.mean()
    each = _work(ready.size)
    spent = each
    pairs, known, moved = np.empty((MAX_PAIRS, 2), np.int64), np.empty((buckets, buckets), np.bool_), np.empty(buckets, np.int64)
    improved = True
    while improved and spent + each <= budget:
        improved = False
        count = _contested(run, chain, pairs, known)
        for place in range(2 * count):
            waiting, occupant = pairs[place // 2]
            if turn[waiting] < turn[occupant] or spent + each > budget:
                continue
            if place % 2 == 0:
                _moved(turn, waiting, occupant, moved)
            else:
                _delayed(turn, occupant, waiting, moved)
            _set_ranks(run, chain, moved)
            begin(run)
            step = resume(run, ready.size, best_step)
            spent += each
            objective = step + MEAN_WEIGHT * run.available_us.mean() if step <= best_step else np.inf
            if objective < best * IMPROVEMENT:
                best_step, best, improved = step, objective, True
                turn[:] = moved
                break
    return best_step, best, int(spent)
