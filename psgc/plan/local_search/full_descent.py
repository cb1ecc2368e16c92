"""Coordinate descent over all options: for one bucket after the other, the most promising of thousands of options are simulated, until nothing helps.

Owns which options are promising. While one bucket changes, the other buckets' work on each resource is known from the last run. So each
option has a lower bound on the step: the work of the busiest resource with the option's work added, and the option's own chain from the bucket's
readiness on. An option whose bound exceeds the best step cannot be better and is left out. Of the others, those with the least bounds are
simulated, ties by the length of their chains. So the candidates depend on the present choice, whereas ``descent`` is given its candidates.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.local_search.critical import note_critical
from psgc.plan.local_search.descent import IMPROVEMENT, MEAN_WEIGHT
from psgc.plan.model.costs import GPU
from psgc.plan.model.timeline import DELAY, ROUNDING, add_load, begin, new_run, new_snapshots, occurring, restore, resume, save

_F64: Final = types.Array(types.float64, 1, "C")
_F64_2D: Final = types.Array(types.float64, 2, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_I64_2D: Final = types.Array(types.int64, 2, "C")
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_BOOL_2D: Final = types.Array(types.boolean, 2, "C")
_RESULT: Any = types.Tuple((types.float64, types.float64, I64))  # type: ignore[no-untyped-call]
CHAIN: Final = -1  # index of the last row of the options' costs: the time of an option's tasks one after the other
CROWD: Final = 64  # with so many chains, a simulation takes twice as long per chain as with few, because more of them wait at once
MOVED_MAX_BUCKETS: Final = 2  # a move changes at most so many buckets; these choose again even if they are not critical
CHAIN_WEIGHT: Final = 0.02  # weight of an option's chain in its score; its bound has weight 1


def simulation_work(chains: int) -> float:
    """The cost of a simulation, in chains of a small simulation. The cost per chain grows with the number of chains, because more wait at once."""
    return chains * (1 + chains / CROWD)


_work = helper(simulation_work)


class Options(NamedTuple):
    """The options to choose from. rows: each option's atoms, padded with -1; tasks: each atom's tasks, padded with -1, and a last row for no atom;
    held: each task's resource; us: microseconds of each task (rows) by kind of part (columns); may_take: whether parts of a kind (rows) can have an
    atom (columns)."""

    rows: Any
    tasks: Any
    held: Any
    us: Any
    may_take: Any


class Paths(NamedTuple):
    """All options as paths through the graph (``space.Graph``); empty arrays if only some options are chosen from. path: for each node, the number of
    paths to the end from the nodes before it."""

    first: Any
    atom: Any
    behind: Any
    path: Any


@helper
def _costs_of_atoms(options: Any, threads: Any, kind: Any, each: Any) -> None:
    """Set ``each`` to every atom's (columns) work on each resource and its chain (rows), for a part of this kind; infinite if it cannot have the
    atom."""
    one = np.empty(each.shape[0])
    for atom in range(each.shape[1]):
        one[:] = 0.0
        for task in options.tasks[atom]:
            if task >= 0:
                one[CHAIN] += options.us[task, kind]
                add_load(one, threads, options.held[task], options.us[task, kind])
        if not options.may_take[kind, atom]:
            one[:] = 0.0
            one[CHAIN] = np.inf
        each[:, atom] = one


@helper
def _costs(options: Any, paths: Any, threads: Any, kind: Any, costs: Any) -> None:
    """Set ``costs`` to every option's (columns) work on each resource and its chain (rows), for a part of this kind; infinite if it cannot have
    the option."""
    each = np.empty((costs.shape[0], options.tasks.shape[0] - 1))
    _costs_of_atoms(options, threads, kind, each)
    if paths.path.size == 0:
        for column in range(costs.shape[0]):
            for option in range(costs.shape[1]):
                costs[column, option] = 0.0
                for atom in options.rows[option]:
                    if atom < 0:
                        break
                    costs[column, option] += each[column, atom]
        return
    last = paths.path.size - 2
    total = np.empty(paths.path[last + 1])
    for column in range(costs.shape[0]):
        total[0] = 0.0
        for node in range(1, last + 1):
            end = paths.path[node]
            for edge in range(paths.first[node], paths.first[node + 1]):
                behind, us = paths.path[paths.behind[edge]], each[column, paths.atom[edge]]
                count = paths.path[paths.behind[edge] + 1] - behind
                for one in range(count):
                    total[end + one] = us + total[behind + one]
                end += count
        costs[column] = total[paths.path[last] :]


@helper
def _give(run: Any, options: Any, option: Any, kind: Any, begins: Any) -> Any:
    """Write an option's tasks for a part of this kind into the run, from index ``begins`` on. Returns the index behind them."""
    end = begins
    for atom in options.rows[option]:
        if atom < 0:
            break
        for task in options.tasks[atom]:
            if task >= 0:
                run.resource[end], run.us[end] = options.held[task], options.us[task, kind]
                end += 1
    left = 0.0
    for task in range(end - 1, begins - 1, -1):
        left += run.us[task]
        run.rest_us[task] = left
    return end


@helper
def _set(run: Any, options: Any, option: Any, kind: Any, low: Any, high: Any, begins: Any) -> None:
    """Give a bucket's chains, from ``low`` to before ``high``, an option's tasks."""
    end = _give(run, options, option, kind, begins)
    run.begins[low:high] = begins
    run.ends[low:high] = end


@helper
def _add(run: Any, chain: Any, bucket: Any, load: Any) -> None:
    """Add a bucket's work to its row of ``load``."""
    low = chain[bucket]
    for task in range(run.begins[low], run.ends[low]):
        add_load(load[bucket], run.threads, run.resource[task], (chain[bucket + 1] - low) * run.us[task])


@helper
def _promising(costs: Any, busy: Any, from_us: Any, parts: Any, own: Any, best: Any, found: Any, bound: Any, score: Any, least: Any) -> Any:
    """Find the options with the least scores. found: set to these options, ascending, at most as many as it holds; bound: set to each one's lower
    bound. Returns their number. busy: when each resource is done with the other buckets; from_us: the earliest time at which the bucket can begin;
    own: the option that it has; score, least: scratch."""
    count, most = 0, found.size
    for option in range(least.size):
        least[option] = from_us + costs[CHAIN, option]
    for resource in range(busy.size):  # without branches, so that the compiler vectorizes it
        for option in range(least.size):
            value = busy[resource] + parts * costs[resource, option]
            least[option] = value if value > least[option] else least[option]
    for option in range(least.size):
        if least[option] * ROUNDING > best or option == own:
            continue
        value = least[option] + CHAIN_WEIGHT * costs[CHAIN, option]
        if count == most and value >= score[most - 1]:
            continue
        place = count if count < most else most - 1
        while place > 0 and score[place - 1] > value:
            score[place], found[place], bound[place] = score[place - 1], found[place - 1], bound[place - 1]
            place -= 1
        score[place], found[place], bound[place] = value, option, least[option]
        count = min(count + 1, most)
    return count


@helper
def _note(run: Any, snapshots: Any, until: Any, first: Any, after: Any) -> None:
    """Save a snapshot from just before each of the buckets ``first`` to before ``after`` is computed."""
    for bucket in range(first, after):
        resume(run, until[bucket], np.inf)
        save(run, snapshots, bucket)


@helper
def _without(run: Any, low: Any, later: Any, busy: Any) -> Any:
    """Set ``busy`` to the earliest time at which each resource can be done with all work except that of the bucket whose chains begin at ``low``,
    which is computed next. later: the work of each later bucket. Returns the earliest time at which the bucket can begin."""
    busy[:] = run.state[: busy.size]
    busy[GPU] = run.ready_us[-1] + run.state[DELAY]
    for chain in range(low):
        for task in range(run.next_task[chain], run.ends[chain]):
            add_load(busy, run.threads, run.resource[task], run.us[task])
    for bucket in range(later.shape[0]):
        for resource in range(busy.size):
            busy[resource] += later[bucket, resource]
    return run.ready_us[low] + run.state[DELAY]


@helper
def _simulate_for_critical(run: Any, snapshots: Any, row: Any, chain: Any, critical: Any) -> None:
    """Resume from a snapshot to the end, and set ``critical`` to which buckets are critical."""
    restore(run, snapshots, row)
    resume(run, run.ready_us.size, np.inf)
    note_critical(run, chain, critical)


@helper
def _best_of(
    run: Any, options: Any, snapshots: Any, bucket: Any, own: Any, low: Any, high: Any, begins: Any, found: Any, bound: Any, best: Any
) -> Any:
    """Simulate a bucket with each option of ``found``. Returns the option with the least objective, -1 if none is below ``best``; the step; the
    objective; and the work spent."""
    chosen, best_step, spent = -1, np.inf, 0.0
    for one in range(found.size):
        if bound[one] * ROUNDING > best:
            continue
        _set(run, options, found[one], own, low, high, begins)
        restore(run, snapshots, bucket)
        step = resume(run, run.ready_us.size, best)
        spent += _work(run.ready_us.size - low)
        objective = step + MEAN_WEIGHT * run.available_us.mean() if step < best else np.inf
        if objective < best * IMPROVEMENT:
            best, best_step, chosen = objective, step, found[one]
    return chosen, best_step, best, spent


@kernel(
    _RESULT(
        _F64, _I64, _I64, _I64, _IN_I64, _IN_I64, _IN_I64, _IN_I64, _IN_I64_2D, _IN_I64_2D, _IN_I64, _F64_2D, _BOOL_2D, _I64, _F64, _I64, _I64, _I64, I64, I64,
        types.float64,
    )
)  # fmt: skip
def descend_fully(
    ready: Any, chain: Any, until: Any, kind: Any, first: Any, atom: Any, behind: Any, path: Any, rows: Any, tasks: Any, held: Any, us: Any,
    may_take: Any, threads: Any, moments: Any, rank: Any, order: Any, choice: Any, most: Any, budget: Any, enough: Any,
) -> Any:  # fmt: skip
    """Improve each bucket's option. Returns the step, the objective, and the number of simulated chains, about ``budget`` at most.

    ready, chain, until, kind, threads, moments: see ``descent.descend``.
    first to path:    ``Paths``.
    rows to may_take: ``Options``.
    rank:   each chain's rank.
    order:  the buckets that may change, in this order.
    choice: each bucket's option, changed in place.
    most:   number of options that are simulated for a bucket in its turn.
    enough: a step at which the search ends, because it is as good as the lower bound."""
    buckets, options, paths = kind.size, Options(rows, tasks, held, us, may_take), Paths(first, atom, behind, path)
    room = rows.shape[1] * tasks.shape[1]
    run = new_run(
        ready, np.empty(buckets * room, np.int64), np.empty(buckets * room), np.empty(buckets * room), threads, moments, rank, room
    )  # fmt: skip
    snapshots = new_snapshots(buckets, run)
    kinds = us.shape[1]
    resources = occurring(held)
    costs, known = np.empty((kinds, resources + 1, rows.shape[0])), np.zeros(kinds, np.bool_)
    load, busy = np.zeros((buckets, resources)), np.empty(resources)
    for bucket in range(buckets):
        run.alike[chain[bucket] : chain[bucket + 1]] = chain[bucket + 1]
        _set(run, options, choice[bucket], kind[bucket], chain[bucket], chain[bucket + 1], bucket * room)
        _add(run, chain, bucket, load)
    found, bound, score, least = np.empty(most, np.int64), np.empty(most), np.empty(most), np.empty(rows.shape[0])
    begin(run)
    _note(run, snapshots, until, 0, buckets)
    best_step = resume(run, ready.size, np.inf)
    best = best_step + MEAN_WEIGHT * run.available_us.mean()
    spent, valid, unchanged, place = _work(ready.size), buckets - 1, 0, 0
    critical, stale = np.ones(buckets, np.bool_), order.size > MOVED_MAX_BUCKETS
    while unchanged < order.size and spent < budget and best_step > enough:
        bucket = order[place % order.size]
        place += 1
        unchanged += 1
        if stale:
            _simulate_for_critical(run, snapshots, valid, chain, critical)
            spent, stale = spent + _work(ready.size), False
        if not critical[bucket]:
            continue
        own, low, high = kind[bucket], chain[bucket], chain[bucket + 1]
        if not known[own]:
            _costs(options, paths, threads, own, costs[own])
            known[own] = True
        if valid < bucket:  # snapshots behind this one are of an earlier choice
            restore(run, snapshots, valid)
            _note(run, snapshots, until, valid + 1, bucket + 1)
            valid = bucket
        restore(run, snapshots, bucket)
        from_us = _without(run, low, load[bucket + 1 :], busy)
        count = _promising(costs[own], busy, from_us, high - low, choice[bucket], best, found, bound, score, least)
        chosen, step, best, work = _best_of(run, options, snapshots, bucket, own, low, high, bucket * room, found[:count], bound, best)
        spent += work
        if chosen >= 0:
            best_step, choice[bucket] = step, chosen
            unchanged, valid, stale = 0, bucket, order.size > MOVED_MAX_BUCKETS
        _set(run, options, choice[bucket], own, low, high, bucket * room)
        if chosen >= 0:
            load[bucket] = 0.0
            _add(run, chain, bucket, load)
    return best_step, best, int(spent)


@kernel(
    types.void(
        _F64, _I64, _I64, _IN_I64_2D, _IN_I64_2D, _IN_I64, _F64_2D, _BOOL_2D, _I64, _F64, _I64, _I64, types.Array(types.boolean, 1, "C")
    )
)
def find_critical(
    ready: Any, chain: Any, kind: Any, rows: Any, tasks: Any, held: Any, us: Any, may_take: Any, threads: Any, moments: Any, rank: Any,
    choice: Any, critical: Any
) -> None:  # fmt: skip
    """Set ``critical`` to whether each bucket has a task on a critical path. The other arguments: see ``descend_fully``."""
    buckets, options = kind.size, Options(rows, tasks, held, us, may_take)
    room = rows.shape[1] * tasks.shape[1]
    run = new_run(
        ready, np.empty(buckets * room, np.int64), np.empty(buckets * room), np.empty(buckets * room), threads, moments, rank, room
    )  # fmt: skip
    for bucket in range(buckets):
        run.alike[chain[bucket] : chain[bucket + 1]] = chain[bucket + 1]
        _set(run, options, choice[bucket], kind[bucket], chain[bucket], chain[bucket + 1], bucket * room)
    begin(run)
    resume(run, ready.size, np.inf)
    note_critical(run, chain, critical)
