"""The step if one bucket takes another option: the simulation is resumed from where that bucket is ready, and ended once it cannot be better.

Owns the compiled trials of many options. The timeline's rule is in ``timeline``. Does not know which options are worth a trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.local_search.space import OptionTable
from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, GPU, INTRA, RECEIVE, RESOURCES
from psgc.plan.model.timeline import DELAY, ROUNDING, Ints, add_load, begin, new_run, new_snapshots, restore, resume, save

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_OUT_F64: Final = types.Array(types.float64, 1, "C")
_numba: Any = types  # untyped


@dataclass(frozen=True, slots=True)
class Trials:
    """Chains in order of readiness, and the index in the table of each one's kind and option. The caller changes ``option``. threads: number of tasks
    that each resource does at once; moments_us: when each tensor is ready; rank: see ``Chains``."""

    table: OptionTable
    ready_us: F64
    kind: Ints
    option: Ints
    threads: Ints
    moments_us: F64
    rank: Ints

    def best(self, low: int, high: int, candidates: Ints, step_us: float) -> tuple[int, float]:
        """The candidate that gives the shortest step if chains [low, high), a bucket's parts, take it, and this step; the first of equal ones. (-1,
        ``step_us``) if none is shorter than ``step_us``."""
        best, step = _best(*self._job(), low, high, candidates, step_us)
        return int(best), float(step)

    def step(self, below_us: float = np.inf) -> float:
        """The step with the present options; infinity if it is not below ``below_us``."""
        return float(_step(*self._job(), below_us))

    def last_bubble(self) -> tuple[float, F64]:
        """When the last bubble began, in which nothing was being sent, in whole or in part; and when each chain was last sent. Both in us, 0 for
        never."""
        sent = np.zeros(len(self.ready_us))
        return float(_last_bubble(*self._job(), sent)), sent

    def _job(self) -> tuple[Any, ...]:
        return self.ready_us, self.kind, self.option, *self.table, self.threads, self.moments_us, self.rank


@helper
def _new_run(
    ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any, rank: Any
) -> Any:
    """A run at its beginning, every chain with the tasks of its option."""
    run = new_run(ready, resource, us, rest, threads, moments, rank, length.max())
    for chain in range(ready.size - 1, -1, -1):
        run.begins[chain] = first[kind[chain], option[chain]]
        run.ends[chain] = run.begins[chain] + length[option[chain]]
        if (
            chain + 1 < ready.size
            and ready[chain] == ready[chain + 1]
            and rank[chain] < rank[chain + 1]
            and run.begins[chain] == run.begins[chain + 1]
        ):
            run.alike[chain] = run.alike[chain + 1]
    begin(run)
    return run


@helper
def _sends(resource: Any) -> Any:
    return resource in (BOTH_WAYS, ALL_LINKS) or INTRA <= resource <= RECEIVE


@helper
def _add(load: Any, threads: Any, begins: Any, last: Any, times: Any, resource: Any, us: Any) -> None:
    """Add the time of some tasks, ``times`` over, to the load of each resource."""
    for task in range(begins, last):
        add_load(load, threads, resource[task], times * us[task])


_JOB: Final = (_IN_F64, _IN_I64, _IN_I64, _IN_I64_2D, _IN_I64, _IN_I64, _IN_F64, _IN_F64, _IN_I64, _IN_F64, _IN_I64)


@kernel(types.float64(*_JOB, types.float64))
def _step(
    ready: Any,
    kind: Any,
    option: Any,
    first: Any,
    length: Any,
    resource: Any,
    us: Any,
    rest: Any,
    threads: Any,
    moments: Any,
    rank: Any,
    below: Any,
) -> Any:
    run = _new_run(ready, kind, option, first, length, resource, us, rest, threads, moments, rank)
    step = resume(run, ready.size, np.nextafter(below, 0.0))
    return step if step < below else np.inf


@kernel(_numba.Tuple((I64, types.float64))(*_JOB, I64, I64, _IN_I64, types.float64))
def _best(
    ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any, rank: Any, low: Any, high: Any,
    candidates: Any, best: Any,
) -> Any:  # fmt: skip
    run = _new_run(ready, kind, option, first, length, resource, us, rest, threads, moments, rank)
    for chain in range(low - 1, -1, -1):  # chains before it are no longer like the changing ones
        run.alike[chain] = min(run.alike[chain], low)
    run.alike[low:high] = high
    until = low
    while until > 0 and ready[until - 1] == ready[low]:
        until -= 1
    resume(run, until, np.inf)
    snapshots = new_snapshots(1, run)
    save(run, snapshots, 0)
    # the earliest time at which each resource can be done with all work except the changing bucket's
    busy = np.empty(len(RESOURCES))
    busy[:] = run.state[: busy.size]
    busy[GPU] = ready[-1] + run.state[DELAY]
    for chain in range(ready.size):
        if not low <= chain < high:
            _add(busy, threads, run.next_task[chain], run.ends[chain], 1.0, resource, us)
    chosen, load = -1, np.empty(busy.size)
    for candidate in candidates:
        run.begins[low:high] = first[kind[low], candidate]
        run.ends[low:high] = run.begins[low] + length[candidate]
        load[:] = busy
        _add(load, threads, run.begins[low], run.ends[low], float(high - low), resource, us)
        if load.max() * ROUNDING >= best:
            continue
        restore(run, snapshots, 0)
        run.next_task[low:high] = run.begins[low]
        step = resume(run, ready.size, np.nextafter(best, 0.0))
        if step < best:
            chosen, best = candidate, step
    return chosen, best


@kernel(types.float64(*_JOB, _OUT_F64))
def _last_bubble(
    ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, threads: Any, moments: Any, rank: Any, sent: Any
) -> Any:  # fmt: skip
    """Simulate the whole step, and go through the transfers in the order of their starts. Returns when the last bubble began, and sets ``sent`` to
    when each chain was last sent."""
    shared = _new_run(ready, kind, option, first, length, resource, us, rest, threads, moments, rank)
    count = (shared.ends - shared.begins).sum()
    owner, own_resource, own_us = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count)
    run = new_run(ready, own_resource, own_us, own_us, threads, moments, rank, length.max())
    end, left = 0, np.zeros(ready.size, np.int64)
    for chain in range(ready.size):
        run.begins[chain], run.alike[chain] = end, shared.alike[chain]
        for task in range(shared.begins[chain], shared.ends[chain]):
            owner[end], own_resource[end], own_us[end] = chain, resource[task], us[task]
            left[chain] += 1 if _sends(resource[task]) else 0
            end += 1
        run.ends[chain] = end
    begin(run)
    resume(run, ready.size, np.inf)
    bubble, until, in_part = 0.0, 0.0, 0
    for task in np.argsort(run.start_us):
        chain = owner[task]
        if not _sends(own_resource[task]):
            continue
        if run.start_us[task] > until and in_part == 0:
            bubble = until
        left[chain] -= 1
        in_part += (0 if sent[chain] else 1) - (0 if left[chain] else 1)
        sent[chain] = run.start_us[task] + own_us[task]
        until = max(until, sent[chain])
    return bubble
