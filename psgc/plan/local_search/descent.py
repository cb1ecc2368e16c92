"""Coordinate descent over the buckets' options on the timeline: first all buckets from one on together, then one by one, until nothing helps.
``simplify`` then removes encodings that do not shorten the step.

Owns the search's inner loops, compiled. A change of all buckets from one on skips buckets that cannot have the option. A change to a bucket
does not affect what happens before the bucket is computed, so each trial resumes the simulation from a snapshot there, not from the beginning.
The objective is the step plus a small share of the mean completion: of two plans with equal steps, the one whose buckets complete earlier
leaves more room for the next change.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.local_search.critical import note_critical
from psgc.plan.model.costs import GPU
from psgc.plan.model.timeline import DELAY, ROUNDING, add_load, begin, new_run, new_snapshots, occurring, restore, resume, save

_F64: Final = types.Array(types.float64, 1, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_BOOL_2D: Final = types.Array(types.boolean, 2, "C")
_I64_2D: Final = types.Array(types.int64, 2, "C")
_RESULT: Any = types.Tuple((types.float64, types.float64, I64))  # type: ignore[no-untyped-call]
MEAN_WEIGHT: Final = 1e-3  # weight of the mean completion in the objective; the step has weight 1
IMPROVEMENT: Final = 1 - 1e-12  # an objective must be lower by this factor, so that rounding does not count


class Choices(NamedTuple):
    """The options that buckets can be given. chain: index of each bucket's first chain, then the number of chains; kind: each bucket's row of
    ``first``; first: index of each option's first task, -1 if buckets of this kind cannot have it; length: each option's number of tasks;
    load_us: how long each bucket holds each resource under each option [bucket, option, resource]."""

    chain: Any
    kind: Any
    first: Any
    length: Any
    load_us: Any


@helper
def _choices(run: Any, chain: Any, kind: Any, first: Any, length: Any) -> Any:
    load = np.zeros((kind.size, length.size, occurring(run.resource)))
    for bucket in range(kind.size):
        parts = chain[bucket + 1] - chain[bucket]
        for option in range(length.size):
            begins = first[kind[bucket], option]
            for task in range(begins, begins + (length[option] if begins >= 0 else 0)):
                add_load(load[bucket, option], run.threads, run.resource[task], parts * run.us[task])
    return Choices(chain, kind, first, length, load)


@helper
def _give(run: Any, choices: Any, bucket: Any, option: Any) -> None:
    """Give a bucket's chains an option's tasks."""
    begins = choices.first[choices.kind[bucket], option]
    for one in range(choices.chain[bucket], choices.chain[bucket + 1]):
        run.begins[one], run.ends[one] = begins, begins + choices.length[option]


@helper
def _give_each(run: Any, choices: Any, choice: Any) -> None:
    """Give every bucket the option that is chosen for it."""
    for bucket in range(choice.size):
        _give(run, choices, bucket, choice[bucket])


@helper
def _is_possible(choices: Any, bucket: Any, option: Any) -> Any:
    return choices.first[choices.kind[bucket], option] >= 0


@helper
def _is_hopeless(run: Any, choices: Any, bucket: Any, end: Any, option: Any, choice: Any, best: Any, total: Any) -> Any:
    """Whether some resource's work alone exceeds ``best`` if the buckets up to ``end`` take the option. total: scratch."""
    total[:] = 0.0
    for one in range(choice.size - 1, -1, -1):
        candidate = option if bucket <= one < end and _is_possible(choices, one, option) else choice[one]
        at = run.ready_us[choices.chain[one]]
        for resource in range(total.size):
            total[resource] += choices.load_us[one, candidate, resource]
            if resource != GPU and at + total[resource] > best:
                return True
    return run.ready_us[-1] + total[GPU] > best


@helper
def _is_over(busy: Any, choices: Any, bucket: Any, option: Any, best: Any) -> Any:
    """Whether some resource cannot be done by ``best`` if the bucket takes the option, which it can have."""
    latest = 0.0
    for resource in range(busy.size):
        latest = max(latest, busy[resource] + choices.load_us[bucket, option, resource])
    return latest * ROUNDING > best


@helper
def _busy(run: Any, choices: Any, snapshots: Any, row: Any, bucket: Any, choice: Any, busy: Any) -> None:
    """Set ``busy`` to the earliest time at which each resource can be done with all work except this bucket's. The snapshot is from before this
    bucket's and all later buckets' tasks."""
    restore(run, snapshots, row)
    busy[:] = run.state[: busy.size]
    first = choices.chain[bucket]
    busy[GPU] = run.ready_us[-1] + run.state[DELAY]
    for chain in range(first):
        for task in range(run.next_task[chain], run.ends[chain]):
            add_load(busy, run.threads, run.resource[task], run.us[task])
    for other in range(bucket + 1, choice.size):
        for resource in range(busy.size):
            busy[resource] += choices.load_us[other, choice[other], resource]


@helper
def _resume_from(run: Any, snapshots: Any, row: Any, chain: Any, limit: Any) -> Any:
    """The step, resumed from a snapshot with the present tasks of the chains from ``chain`` on."""
    restore(run, snapshots, row)
    run.next_task[chain:] = run.begins[chain:]
    return resume(run, run.ready_us.size, limit)


@helper
def _objective(run: Any, step: Any, limit: Any) -> Any:
    return step + MEAN_WEIGHT * run.available_us.mean() if step < limit else np.inf


@helper
def _best_start(run: Any, choices: Any, starts: Any, choice: Any, worth: Any, total: Any) -> Any:
    """Set ``choice`` to the best row of ``starts``. Returns the step, the objective and the number of simulations; infinities if no row's
    objective is below ``worth``. total: scratch."""
    limit, best, best_step, trials = worth, np.inf, np.inf, 0
    for row in range(starts.shape[0]):
        if _is_hopeless(run, choices, 0, 0, 0, starts[row], limit / ROUNDING, total):
            continue
        _give_each(run, choices, starts[row])
        begin(run)
        step = resume(run, run.ready_us.size, limit)
        trials += 1
        objective = _objective(run, step, limit)
        if objective < limit:
            limit, best, best_step = objective, objective, step
            choice[:] = starts[row]
    _give_each(run, choices, choice)
    return best_step, best, trials


@helper
def _note(run: Any, choices: Any, snapshots: Any, until: Any, critical: Any) -> None:
    """Simulate the present choice. Saves a snapshot from just before each bucket is computed, and notes which buckets are critical."""
    begin(run)
    for one in range(until.size):
        resume(run, until[one], np.inf)
        save(run, snapshots, one)
    resume(run, run.ready_us.size, np.inf)
    note_critical(run, choices.chain, critical)


@helper
def _give_those(run: Any, choices: Any, bucket: Any, end: Any, option: Any) -> None:
    """Give an option to those of the buckets from ``bucket`` to before ``end`` that can have it."""
    for one in range(bucket, end):
        if _is_possible(choices, one, option):
            _give(run, choices, one, option)


@helper
def _best_option(
    run: Any, choices: Any, snapshots: Any, fits: Any, bucket: Any, end: Any, choice: Any, best: Any, total: Any, busy: Any
) -> Any:
    """Find the best option for the buckets from ``bucket`` to before ``end``, given to all of them that can have it. Returns the option, the
    step, the objective and the number of simulations; the option is -1 if no objective is below ``best``. total, busy: scratch."""
    alone = end == bucket + 1
    if alone:
        _busy(run, choices, snapshots, bucket, bucket, choice, busy)
    chosen, best_step, trials = -1, np.inf, 0
    for option in range(choices.length.size):
        if not fits[choices.kind[bucket], option]:
            continue
        if alone and (option == choice[bucket] or _is_over(busy, choices, bucket, option, best)):
            continue
        if _is_hopeless(run, choices, bucket, end, option, choice, best, total):
            continue
        _give_those(run, choices, bucket, end, option)
        step = _resume_from(run, snapshots, bucket, choices.chain[bucket], best)
        trials += 1
        objective = _objective(run, step, best)
        if objective < best * IMPROVEMENT:
            best, best_step, chosen = objective, step, option
    for one in range(bucket, end):
        if chosen >= 0 and _is_possible(choices, one, chosen):
            choice[one] = chosen
        _give(run, choices, one, choice[one])
    return chosen, best_step, best, trials


@kernel(
    _RESULT(
        _F64, _I64, _I64, _I64, _BOOL_2D, _I64_2D, _I64, _I64, _F64, _F64, _I64, _F64, _I64_2D, _I64, _I64, I64, types.boolean, types.float64
    )
)  # fmt: skip
def descend(
    ready: Any, chain: Any, until: Any, kind: Any, fits: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any,
    starts: Any, order: Any, choice: Any, budget: Any, tails: Any, worth: Any,
) -> Any:  # fmt: skip
    """Improve each bucket's option, beginning with the best row of ``starts``. Returns the step, the objective, and the number of simulations, about
    ``budget`` at most.

    ready:   when each chain is ready; moments: when each tensor is.
    chain:   index of each bucket's first chain, then the number of chains.
    until:   for each bucket, the first chain that is ready at the same moment.
    kind:    each bucket's row of ``fits`` and ``first``.
    fits:    whether each option (columns) is worth trying for a kind of bucket (rows).
    first:   index in ``resource``, ``us`` and ``rest`` of an option's first task; -1 if buckets of this kind cannot have the option.
    length:  each option's number of tasks.
    threads: number of threads of each resource.
    starts:  options of each bucket, one row for each start.
    order:   the buckets that are changed one by one, in this order.
    choice:  set to each bucket's option.
    tails:   whether all buckets from one on are also changed together.
    worth:   if no start's objective is below this, nothing is searched, and infinities are returned.
    """
    buckets = kind.size
    run = new_run(ready, resource, us, rest, threads, moments, np.arange(ready.size), length.max())
    choices = _choices(run, chain, kind, first, length)
    held = choices.load_us.shape[2]
    snapshots, total, busy, critical = new_snapshots(buckets, run), np.empty(held), np.empty(held), np.empty(buckets, np.bool_)
    for bucket in range(buckets):
        run.alike[chain[bucket] : chain[bucket + 1]] = chain[bucket + 1]
    best_step, best, trials = _best_start(run, choices, starts, choice, worth, total)
    improved = best < np.inf
    while improved and trials < budget:
        improved = False
        for tail in (True, False):
            if tail and not tails:
                continue
            stale = True
            for place in range(buckets if tail else order.size):
                bucket = buckets - 1 - place if tail else order[place]
                if stale:
                    _note(run, choices, snapshots, until, critical)
                    stale = False
                if not tail and not critical[bucket]:
                    continue
                end = buckets if tail else bucket + 1
                chosen, step, objective, tried = _best_option(run, choices, snapshots, fits, bucket, end, choice, best, total, busy)
                trials += tried
                if chosen >= 0:
                    best, best_step, improved = objective, step, True
                stale = chosen >= 0 and not tail
                if trials >= budget:
                    break
    return best_step, best, trials


@kernel(types.float64(_F64, _I64, _I64, _I64, _I64_2D, _I64, _I64, _F64, _F64, _I64, _F64, _I64, I64, _I64, I64))
def simplify(
    ready: Any, chain: Any, until: Any, kind: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any,
    rank: Any, simple: Any, choice: Any, budget: Any,
) -> Any:  # fmt: skip
    """Replace a bucket's option by one of the first ``simple`` options if the step gets no longer, within ``budget`` simulations. Returns the
    step. rank: each chain's rank."""
    run = new_run(ready, resource, us, rest, threads, moments, rank, length.max())
    choices = _choices(run, chain, kind, first, length)
    snapshots, total = new_snapshots(1, run), np.empty(choices.load_us.shape[2])
    _give_each(run, choices, choice)
    begin(run)
    best = resume(run, ready.size, np.inf)
    begin(run)
    save(run, snapshots, 0)
    for bucket in range(kind.size):
        restore(run, snapshots, 0)
        resume(run, until[bucket], np.inf)
        save(run, snapshots, 0)
        for option in range(simple):
            if choice[bucket] < simple or budget <= 0:
                break
            budget -= 1
            if _is_hopeless(run, choices, bucket, bucket + 1, option, choice, best, total):
                continue
            _give(run, choices, bucket, option)
            step = _resume_from(run, snapshots, 0, chain[bucket], best)
            if step <= best:
                best, choice[bucket] = step, option
        _give(run, choices, bucket, choice[bucket])
        snapshots.next_task[0, chain[bucket] :] = run.begins[chain[bucket] :]
    return best
