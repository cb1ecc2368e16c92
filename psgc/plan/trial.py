"""What a step takes if one bucket takes another option: the timeline again, from where that bucket is ready, given up once it cannot be better.

Owns a table of what each option's tasks take for each size of part, and a second kernel of ``timeline``'s rule, which is the
specification. Knows nothing of which options are worth a trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.kernel import I64, helper, kernel
from psgc.plan.costs import BOTH_WAYS, GPU, INTRA, RECEIVE, RESOURCES, SEND
from psgc.plan.space import Space

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]
_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_TABLE: Final = types.Array(types.float64, 2, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_OUT_F64: Final = types.Array(types.float64, 1, "C")
_OUT_I64: Final = types.Array(types.int64, 1, "C")
_numba: Any = types  # untyped
_COUNT: Final = len(RESOURCES)
_RATHER: Final = 1 - 1e-9  # sums of remaining work are rounded otherwise than the timeline's


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Every option's tasks. first: where each option's begin in ``kind``, and their number at the end; resource: of each kind of task;
    us: [size and codec, kind]."""

    first: Ints
    kind: Ints
    resource: Ints
    us: F64


def option_table(space: Space, ways: Ints, kinds: Sequence[tuple[float, int]]) -> OptionTable:
    """The table of these ways for parts of these sizes, in elements, and codecs."""
    length, kind = space.sequences(ways)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    sizes, codecs = (np.array(column) for column in zip(*kinds, strict=True))
    return OptionTable(first, kind, space.resources, np.ascontiguousarray(space.times(sizes, codecs).T))


@dataclass(frozen=True, slots=True)
class Trials:
    """Chains in order of readiness, each with a size, with its codec, and an option of the table by number. ``option`` is changed by who tries."""

    table: OptionTable
    ready_us: F64
    size: Ints
    option: Ints

    def best(self, low: int, high: int, candidates: Ints, step_us: float) -> tuple[int, float]:
        """The candidate with which chains [low, high) make the shortest step, and that; the first of equal ones. (-1, ``step_us``) if none
        is shorter than ``step_us``."""
        best, step = _best(*self._job(), low, high, candidates, step_us)
        return int(best), float(step)

    def step(self, below_us: float = np.inf) -> float:
        """The step as it stands; infinity if it is not below ``below_us``."""
        return float(_step(*self._job(), below_us, np.zeros(len(self.ready_us)))[0])

    def last_bubble(self) -> tuple[float, F64]:
        """When the last bubble began: nothing was being sent, in whole or in part, before something was again. And when each chain was last
        sent. Both in us, 0 for never."""
        sent = np.zeros(len(self.ready_us))
        return float(_step(*self._job(), np.inf, sent)[1]), sent

    def _job(self) -> tuple[Any, ...]:
        table = self.table
        return self.ready_us, self.size, self.option, table.first, table.kind, table.resource, table.us


@helper
def _claim(resource: Any, free: Any, available: Any) -> Any:
    if resource == BOTH_WAYS:
        return max(available, free[SEND], free[RECEIVE])
    return max(available, free[resource])


@helper
def _hold(resource: Any, free: Any, remaining: Any, us: Any, end: Any) -> None:
    if resource == BOTH_WAYS:
        free[SEND], free[RECEIVE] = end, end
        remaining[SEND] -= us
        remaining[RECEIVE] -= us
    else:
        free[resource] = end
        remaining[resource] -= us


@helper
def _add(remaining: Any, option: Any, size: Any, sign: Any, first: Any, kind: Any, resource: Any, us: Any) -> Any:
    for task in range(first[option], first[option + 1]):
        which = kind[task]
        if resource[which] == BOTH_WAYS:
            remaining[SEND] += sign * us[size, which]
            remaining[RECEIVE] += sign * us[size, which]
        else:
            remaining[resource[which]] += sign * us[size, which]


@helper
def _is_link(resource: Any) -> Any:
    return resource == BOTH_WAYS or INTRA <= resource <= RECEIVE


@helper
def _sends_no_more(task: Any, end: Any, kind: Any, resource: Any) -> Any:
    links = 0
    for later in range(task, end):
        links += 1 if _is_link(resource[kind[later]]) else 0
    return links == 0


@helper
def _work(ready: Any, size: Any, option: Any, first: Any, kind: Any, resource: Any, us: Any, remaining: Any) -> Any:
    """Each resource's work, and the number of tasks."""
    remaining[:] = 0.0
    remaining[GPU] = ready[-1]
    tasks = 0
    for chain in range(ready.size):
        _add(remaining, option[chain], size[chain], 1.0, first, kind, resource, us)
        tasks += first[option[chain] + 1] - first[option[chain]]
    return tasks


@helper
def _go_on(
    until: Any, below: Any, ready: Any, size: Any, option: Any, first: Any, kind: Any, resource: Any, us: Any,
    nexts: Any, available: Any, free: Any, remaining: Any, clock: Any, count: Any, sent: Any,
) -> Any:  # fmt: skip
    """Go on until backward would compute chain ``until``, or to the end. False: given up.

    clock: backward's end, the step so far, the links' end, the last bubble; count: chains computed, the first that may have tasks left, tasks
    left, and chains that have been sent in part. nexts: of each chain, how many of its tasks have begun."""
    while count[2] > 0 or count[0] < ready.size:
        when, chosen = np.inf, -1
        for chain in range(count[1], count[0]):
            task = first[option[chain]] + nexts[chain]
            if task < first[option[chain] + 1]:
                possible = _claim(resource[kind[task]], free, available[chain])
                if possible < when:
                    when, chosen = possible, chain
            elif chain == count[1]:
                count[1] += 1
        if count[0] < ready.size and max(clock[0], free[GPU]) < when:
            computed = count[0]
            if computed == until:
                break
            segment = ready[computed] - (ready[computed - 1] if computed else 0.0)
            when, where = max(clock[0], free[GPU]), GPU
            end = when + segment
            worst = when + remaining[GPU]
            _hold(GPU, free, remaining, segment, end)
            clock[0], at = end, ready[computed]
            while count[0] < ready.size and ready[count[0]] == at:
                available[count[0]] = end
                count[0] += 1
        else:
            which = kind[first[option[chosen]] + nexts[chosen]]
            where, taken = resource[which], us[size[chosen], which]
            end = when + taken
            worst = when + remaining[SEND if where == BOTH_WAYS else where]
            _hold(where, free, remaining, taken, end)
            available[chosen] = end
            nexts[chosen] += 1
            count[2] -= 1
            if _is_link(where):
                if when > clock[2] and count[3] == 0:
                    clock[3] = clock[2]
                last = _sends_no_more(first[option[chosen]] + nexts[chosen], first[option[chosen] + 1], kind, resource)
                count[3] += (0 if sent[chosen] else 1) - (1 if last else 0)
                clock[2], sent[chosen] = max(clock[2], end), end
        clock[1] = max(clock[1], end)
        if max(worst * _RATHER, clock[1]) >= below:
            return False
    return True


_JOB: Final = (_IN_F64, _IN_I64, _IN_I64, _IN_I64, _IN_I64, _IN_I64, _IN_TABLE)


@kernel(_numba.UniTuple(types.float64, 2)(*_JOB, types.float64, _OUT_F64))
def _step(
    ready: Any, size: Any, option: Any, first: Any, kind: Any, resource: Any, us: Any, below: Any, sent: Any
) -> Any:  # fmt: skip
    n = ready.size
    free, remaining, clock, count = np.zeros(_COUNT), np.zeros(_COUNT), np.zeros(4), np.zeros(4, np.int64)
    count[2] = _work(ready, size, option, first, kind, resource, us, remaining)
    done = _go_on(
        n, below, ready, size, option, first, kind, resource, us, np.zeros(n, np.int64), np.full(n, np.inf), free, remaining, clock, count,
        sent,
    )  # fmt: skip
    return (clock[1] if done else np.inf), clock[3]


@kernel(_numba.Tuple((I64, types.float64))(_IN_F64, _IN_I64, _OUT_I64, *_JOB[3:], I64, I64, _IN_I64, types.float64))
def _best(
    ready: Any, size: Any, option: Any, first: Any, kind: Any, resource: Any, us: Any, low: Any, high: Any, candidates: Any, step: Any
) -> Any:
    n, before = ready.size, option[low]
    nexts, available, sent = np.zeros(n, np.int64), np.full(n, np.inf), np.zeros(n)
    free, remaining, clock, count = np.zeros(_COUNT), np.zeros(_COUNT), np.zeros(4), np.zeros(4, np.int64)
    tasks = _work(ready, size, option, first, kind, resource, us, remaining) - (high - low) * (first[before + 1] - first[before])
    for chain in range(low, high):
        _add(remaining, before, size[chain], -1.0, first, kind, resource, us)
    count[2] = tasks
    until = low
    while until > 0 and ready[until - 1] == ready[low]:
        until -= 1
    _go_on(until, np.inf, ready, size, option, first, kind, resource, us, nexts, available, free, remaining, clock, count, sent)
    best = -1
    for candidate in candidates:
        work, at, left = remaining.copy(), clock.copy(), count.copy()
        for chain in range(low, high):
            option[chain] = candidate
            _add(work, candidate, size[chain], 1.0, first, kind, resource, us)
        left[2] += (high - low) * (first[candidate + 1] - first[candidate])
        # a resource has all its work still before it from when it is next free
        if max((free + work).max() * _RATHER, at[1]) >= step:
            continue
        done = _go_on(
            n, step, ready, size, option, first, kind, resource, us, nexts.copy(), available.copy(), free.copy(), work, at, left, sent
        )
        if done and at[1] < step:
            best, step = candidate, at[1]
    option[low:high] = before
    return best, step
