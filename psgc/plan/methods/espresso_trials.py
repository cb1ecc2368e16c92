"""What a step takes if one bucket takes another option: the timeline again, from where that bucket is ready, given up once it cannot be better.

Owns how many options are tried one after the other. The timeline's rule is ``timeline``'s. Knows nothing of which options are worth a trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.methods.space import WayTable
from psgc.plan.model.costs import BOTH_WAYS, GPU, INTRA, RECEIVE, RESOURCES, SEND
from psgc.plan.model.timeline import STATE, SURELY, Ints, begin, resume

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_OUT_F64: Final = types.Array(types.float64, 1, "C")
_numba: Any = types  # untyped


@dataclass(frozen=True, slots=True)
class Trials:
    """Chains in order of readiness, each with a kind and an option of the table by number. ``option`` is changed by who tries."""

    table: WayTable
    ready_us: F64
    kind: Ints
    option: Ints

    def best(self, low: int, high: int, candidates: Ints, step_us: float) -> tuple[int, float]:
        """The candidate with which chains [low, high), a bucket's parts, make the shortest step, and that; the first of equal ones. (-1,
        ``step_us``) if none is shorter than ``step_us``."""
        best, step = _best(*self._job(), low, high, candidates, step_us)
        return int(best), float(step)

    def step(self, below_us: float = np.inf) -> float:
        """The step as it stands; infinity if it is not below ``below_us``."""
        return float(_step(*self._job(), below_us))

    def last_bubble(self) -> tuple[float, F64]:
        """When the last bubble began: nothing was being sent, in whole or in part, before something was again. And when each chain was last
        sent. Both in us, 0 for never."""
        sent = np.zeros(len(self.ready_us))
        return float(_last_bubble(*self._job(), sent)), sent

    def _job(self) -> tuple[Any, ...]:
        return self.ready_us, self.kind, self.option, *self.table


@helper
def _set(ready: Any, kind: Any, option: Any, first: Any, length: Any, begins: Any, last: Any, alike: Any) -> None:
    """Every chain's tasks, and how many chains after it are as it is."""
    for chain in range(ready.size - 1, -1, -1):
        begins[chain] = first[kind[chain], option[chain]]
        last[chain] = begins[chain] + length[option[chain]]
        alike[chain] = chain + 1
        if chain + 1 < ready.size and ready[chain] == ready[chain + 1] and begins[chain] == begins[chain + 1]:
            alike[chain] = alike[chain + 1]


@helper
def _sends(resource: Any) -> Any:
    return resource == BOTH_WAYS or INTRA <= resource <= RECEIVE


@helper
def _add(load: Any, begins: Any, last: Any, times: Any, resource: Any, us: Any) -> None:
    """Add to each resource's work that of some tasks, so many times."""
    for task in range(begins, last):
        if resource[task] == BOTH_WAYS:
            load[SEND] += times * us[task]
            load[RECEIVE] += times * us[task]
        else:
            load[resource[task]] += times * us[task]


_JOB: Final = (_IN_F64, _IN_I64, _IN_I64, _IN_I64_2D, _IN_I64, _IN_I64, _IN_F64, _IN_F64)


@kernel(types.float64(*_JOB, types.float64))
def _step(ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, below: Any) -> Any:
    n = ready.size
    begins, last, alike = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    state, available, nexts, start, backward = np.empty(STATE), np.empty(n), np.empty(n, np.int64), np.empty(us.size), np.empty(n)
    _set(ready, kind, option, first, length, begins, last, alike)
    begin(begins, state, available, nexts)
    limit = np.nextafter(below, 0.0)
    step = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, n, limit, start, backward)
    return step if step < below else np.inf


@kernel(_numba.Tuple((I64, types.float64))(*_JOB, I64, I64, _IN_I64, types.float64))
def _best(
    ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, low: Any, high: Any, candidates: Any, best: Any
) -> Any:  # fmt: skip
    n = ready.size
    begins, last, alike = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    state, available, nexts, start, backward = np.empty(STATE), np.empty(n), np.empty(n, np.int64), np.empty(us.size), np.empty(n)
    _set(ready, kind, option, first, length, begins, last, alike)
    for chain in range(low - 1, -1, -1):  # others that are alike now will not be
        alike[chain] = min(alike[chain], low)
    alike[low:high] = high
    until = low
    while until > 0 and ready[until - 1] == ready[low]:
        until -= 1
    begin(begins, state, available, nexts)
    resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, until, np.inf, start, backward)
    kept_state, kept_available, kept_nexts = state.copy(), available.copy(), nexts.copy()
    # what each resource has before it from when it is next free
    busy = np.empty(len(RESOURCES))
    busy[:] = state[: busy.size]
    busy[GPU] += ready[-1] - (ready[until - 1] if until else 0.0)
    for chain in range(n):
        if not low <= chain < high:
            _add(busy, nexts[chain], last[chain], 1.0, resource, us)
    chosen, load = -1, np.empty(busy.size)
    for candidate in candidates:
        begins[low:high] = first[kind[low], candidate]
        last[low:high] = begins[low] + length[candidate]
        load[:] = busy
        _add(load, begins[low], last[low], float(high - low), resource, us)
        if load.max() * SURELY >= best:
            continue
        state[:], available[:], nexts[:] = kept_state, kept_available, kept_nexts
        nexts[low:high] = begins[low]
        limit = np.nextafter(best, 0.0)
        step = resume(ready, begins, last, alike, resource, us, rest, state, available, nexts, n, limit, start, backward)
        if step < best:
            chosen, best = candidate, step
    return chosen, best


@kernel(types.float64(*_JOB, _OUT_F64))
def _last_bubble(
    ready: Any, kind: Any, option: Any, first: Any, length: Any, resource: Any, us: Any, rest: Any, sent: Any
) -> Any:  # fmt: skip
    """Run it all, each chain with tasks of its own, and go through what is sent, by when it begins. ``sent`` is when each chain was last sent."""
    n = ready.size
    begins, last, alike = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    _set(ready, kind, option, first, length, begins, last, alike)
    count = (last - begins).sum()
    owner, own_resource, own_us, start = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count), np.empty(count)
    state, available, nexts, backward = np.empty(STATE), np.empty(n), np.empty(n, np.int64), np.empty(n)
    end, left = 0, np.zeros(n, np.int64)
    for chain in range(n):
        begin_at, begins[chain] = begins[chain], end
        for task in range(begin_at, last[chain]):
            owner[end], own_resource[end], own_us[end] = chain, resource[task], us[task]
            left[chain] += 1 if _sends(resource[task]) else 0
            end += 1
        last[chain] = end
    begin(begins, state, available, nexts)
    resume(ready, begins, last, alike, own_resource, own_us, own_us, state, available, nexts, n, np.inf, start, backward)
    bubble, until, in_part = 0.0, 0.0, 0
    for task in np.argsort(start):
        chain = owner[task]
        if not _sends(own_resource[task]):
            continue
        if start[task] > until and in_part == 0:
            bubble = until
        left[chain] -= 1
        in_part += (0 if sent[chain] else 1) - (0 if left[chain] else 1)
        sent[chain] = start[task] + own_us[task]
        until = max(until, sent[chain])
    return bubble
