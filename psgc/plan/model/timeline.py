"""The simulation of one iteration: backward, and every bucket's tasks on the resources that they share. First come, first served.

A bucket's tasks run one after the other; the first may start when backward has computed the bucket. Backward holds the GPU from the start.
A task on the GPU may start only between two tensors of backward, and delays all tensors that backward computes later. A resource does one
task at a time, or as many as it has threads, without preemption. Of the tasks that could start next, the one that can start earliest does; ties go
to the chain with the least rank. Owns this rule, as a kernel and as its reference.

The step is over when the last bucket is done. What happens before a bucket is computed does not depend on its tasks. So if only they change, a
run can be resumed from there, as the search does. Sources: Espresso (Wang et al. 2023), section 4.3, for which tasks contend. That links within a
node and between nodes work at the same time, and that decoding delays what follows it on the same device, is our addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.jit.kernel import helper, inlined, kernel
from psgc.plan.model.costs import ALL_LINKS, ALWAYS, GPU, IN_FLIGHT, INTRA, RECEIVE, RESOURCES, SEND, resources_of

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]
_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_OUT_F64: Final = types.Array(types.float64, 1, "C")
# Indices in a run's state. Before these come the resources, behind them the threads of resources that have several.
DELAY: Final = len(RESOURCES)  # how much tasks on the GPU have delayed backward, in microseconds
STEP: Final = DELAY + 1
_COMPUTED: Final = STEP + 1
EVENTS: Final = _COMPUTED + 1  # number of tasks that have begun
STATE: Final = EVENTS + 1
TOLERANCE: Final = 1e-9  # relative rounding error that a sum of times may have, as a share of backward or of the step
ROUNDING: Final = 1 - TOLERANCE  # a bound is multiplied by it, because it may be rounded differently from the run's own sum


class Chains(NamedTuple):
    """The tasks of all chains, one after the other. A chain is one part of a bucket.

    ready_us:   when backward alone, without delays, would have computed each chain; ascending, and equal for parts of one bucket.
    first:      index of each chain's first task, and at the end the number of tasks.
    resource:   each task's resource.
    us:         each task's microseconds.
    threads:    number of tasks that each resource does at once.
    moments_us: when backward alone would have computed each tensor, ascending; holds all values of ``ready_us``.
    rank:       each chain's rank, all different. If several tasks could start at the same moment, the chain with the least rank goes first."""

    ready_us: F64
    first: Ints
    resource: Ints
    us: F64
    threads: Ints
    moments_us: F64
    rank: Ints


class Timeline(NamedTuple):
    """A simulated step. step_us: when the last bucket is done; start_us: when each task starts; computed_us: when backward has computed each
    chain."""

    step_us: float
    start_us: F64
    computed_us: F64


ONE_EACH: Final = (1,) * len(RESOURCES)


def chains_of(
    ready_us: Sequence[float],
    buckets: Sequence[Sequence[tuple[int, float]]],
    threads: Sequence[int] = ONE_EACH,
    moments_us: F64 | None = None,
    rank: Sequence[int] | Ints | None = None,
) -> Chains:
    """Chains from each one's (resource, microseconds) pairs. moments_us: may be left out if every bucket is one tensor; rank: by default the
    chains' order."""
    sizes = np.array([len(bucket) for bucket in buckets], np.int64)
    flat = [task for bucket in buckets for task in bucket]
    return Chains(
        np.asarray(ready_us, np.float64), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        np.array([resource for resource, _ in flat], np.int64), np.array([us for _, us in flat], np.float64),
        np.array(threads, np.int64), np.asarray(ready_us if moments_us is None else moments_us, np.float64),
        np.arange(len(ready_us)) if rank is None else np.asarray(rank, np.int64),
    )  # fmt: skip


def define_timeline(chains: Chains) -> Timeline:
    """The reference of ``run``: the module's rule in plain Python."""
    count = len(chains.ready_us)
    free = [[0.0] * threads for threads in chains.threads.tolist()]
    start, computed_us = np.zeros(len(chains.us)), np.zeros(count)
    nexts, available = [int(first) for first in chains.first[:-1]], [float("inf")] * count
    computed, delay, step = 0, 0.0, 0.0
    while True:
        candidates = []
        for bucket in range(count):
            if nexts[bucket] < chains.first[bucket + 1]:
                held = resources_of(int(chains.resource[nexts[bucket]]))
                when = max([available[bucket], *(min(free[one]) for one in held)])
                when = _between_tensors(chains, delay, when) if held == (GPU,) else when
                candidates.append((when, int(chains.rank[bucket]), bucket, held))
        earliest = min(candidates, key=lambda candidate: candidate[:2], default=None)
        if computed < count and (earliest is None or chains.ready_us[computed] + delay <= earliest[0]):
            end, ready = chains.ready_us[computed] + delay, chains.ready_us[computed]
            while computed < count and chains.ready_us[computed] == ready:
                computed_us[computed] = available[computed] = end
                computed += 1
        elif earliest is None:
            return Timeline(step, start, computed_us)
        else:
            when, _, chosen, held = earliest
            task = nexts[chosen]
            start[task], nexts[chosen] = when, task + 1
            available[chosen] = end = when + chains.us[task]
            for one in held:
                free[one][free[one].index(min(free[one]))] = end
            if held == (GPU,) and computed < count:
                delay += chains.us[task]
        step = max(step, end)


def _between_tensors(chains: Chains, delay: float, when: float) -> float:
    """The first moment from ``when`` on at which backward is between two tensors, or done."""
    later = chains.moments_us[chains.moments_us >= when - delay - TOLERANCE * chains.moments_us[-1]]
    return max(when, float(later[0]) + delay) if len(later) else when


class Run(NamedTuple):
    """A simulation in progress, for compiled code only; ``new_run`` makes one.

    ready_us:      when backward alone would have computed each chain, ascending.
    moments_us:    when backward alone would have computed each tensor.
    moment:        index of each chain's ``ready_us`` in ``moments_us``.
    resource, us:  each task's resource and microseconds.
    rest_us:       microseconds of each task and of those after it in its chain, together.
    begins, ends:  the range of each chain's tasks.
    alike:         for each chain, the first later chain with another readiness or other tasks. Those in between cannot begin before it.
    rank:          each chain's rank; the least goes first if several could go at the same moment.
    threads:       number of tasks that each resource does at once.
    thread:        for a resource with several threads, the index in ``state`` of the times at which they are free.
    state:         when each resource is free; then DELAY, STEP, the number of computed chains, EVENTS; then the threads.
    available_us:  when each chain's next task can start.
    next_task:     each chain's next task.
    start_us, computed_us: the result, as in ``Timeline``.
    event_chain, event_task, event_us: chain, task and start of every task that has begun, in order.
    """

    ready_us: Any
    moments_us: Any
    moment: Any
    resource: Any
    us: Any
    rest_us: Any
    begins: Any
    ends: Any
    alike: Any
    rank: Any
    threads: Any
    thread: Any
    state: Any
    available_us: Any
    next_task: Any
    start_us: Any
    computed_us: Any
    event_chain: Any
    event_task: Any
    event_us: Any


class Snapshots(NamedTuple):
    """Copies of what changes during a run, one row for each saved moment."""

    state: Any
    available_us: Any
    next_task: Any


@helper
def new_run(ready_us: Any, resource: Any, us: Any, rest_us: Any, threads: Any, moments_us: Any, rank: Any, longest: Any) -> Any:
    """A run of these tasks. Its chains have no tasks yet; each gets at most ``longest``."""
    chains, size, events = ready_us.size, STATE, ready_us.size * longest
    thread = np.zeros(threads.size, np.int64)
    for one in range(threads.size):
        if threads[one] > 1:
            thread[one] = size
            size += threads[one]
    moment, place = np.zeros(chains, np.int64), 0
    for chain in range(chains):
        while moments_us[place] < ready_us[chain]:
            place += 1
        moment[chain] = place
    return Run(
        ready_us, moments_us, moment, resource, us, rest_us, np.zeros(chains, np.int64), np.zeros(chains, np.int64), np.arange(1, chains + 1), rank,
        threads, thread,
        np.zeros(size), np.empty(chains), np.zeros(chains, np.int64), np.empty(us.size), np.empty(chains),
        np.empty(events, np.int64), np.empty(events, np.int64), np.empty(events),
    )  # fmt: skip


@helper
def new_snapshots(rows: Any, run: Any) -> Any:
    """Memory for ``rows`` snapshots of the run."""
    chains = run.ready_us.size
    return Snapshots(np.empty((rows, run.state.size)), np.empty((rows, chains)), np.empty((rows, chains), np.int64))


@helper
def save(run: Any, snapshots: Any, row: Any) -> None:
    """Save the run's present state in a row."""
    snapshots.state[row], snapshots.available_us[row], snapshots.next_task[row] = run.state, run.available_us, run.next_task


@helper
def restore(run: Any, snapshots: Any, row: Any) -> None:
    """Set the run back to the state saved in a row."""
    run.state[:], run.available_us[:], run.next_task[:] = snapshots.state[row], snapshots.available_us[row], snapshots.next_task[row]


@helper
def _free_at(state: Any, resource: Any) -> Any:
    """When all resources that a task on this one holds are free."""
    if resource >= 0:
        return state[resource]
    if resource == IN_FLIGHT:
        return 0.0
    free = max(state[SEND], state[RECEIVE])
    return max(free, state[INTRA]) if resource == ALL_LINKS else free


@helper
def _hold_thread(state: Any, resource: Any, first: Any, threads: Any) -> None:
    """Assign the end of a task, which is in ``state[resource]``, to the thread that was free first; then set ``state[resource]`` to the time at
    which the next thread is free."""
    own = first
    for one in range(first + 1, first + threads):
        own = one if state[one] < state[own] else own
    state[own] = state[resource]
    for one in range(first, first + threads):
        state[resource] = min(state[resource], state[one])


@helper
def _hold(run: Any, resource: Any, until: Any) -> None:
    """Hold all resources that a task on this one holds, until the given time."""
    state = run.state
    if resource >= 0:
        state[resource] = until
        if run.threads[resource] > 1:
            _hold_thread(state, resource, run.thread[resource], run.threads[resource])
    elif resource != IN_FLIGHT:
        state[SEND] = state[RECEIVE] = until
        if resource == ALL_LINKS:
            state[INTRA] = until


@inlined
def when_on_gpu(moments: Any, place: Any, delay: Any, when: Any) -> Any:
    """The first moment from ``when`` on at which backward is between two tensors, or done; searched from moment ``place`` on."""
    at = when - delay - TOLERANCE * moments[-1]
    if moments[-1] < at:
        return when
    width = 1
    while place + width < moments.size and moments[place + width] < at:  # most often it is near
        place, width = place + width, 2 * width
    end = min(place + width, moments.size - 1)
    while place < end:
        middle = (place + end) // 2
        if moments[middle] < at:
            place = middle + 1
        else:
            end = middle
    return max(when, moments[place] + delay)


@helper
def occurring(resource: Any) -> Any:
    """How many of RESOURCES, from the first on, cover all that these tasks hold."""
    count = ALWAYS
    for one in resource:
        count = max(count, one + 1)
    return count


@helper
def add_load(load: Any, threads: Any, resource: Any, us: Any) -> None:
    """Add a task's time to the load of each resource that it holds, divided by the resource's number of threads."""
    if resource >= 0:
        load[resource] += us / threads[resource]
    elif resource != IN_FLIGHT:
        load[SEND] += us
        load[RECEIVE] += us
        if resource == ALL_LINKS:
            load[INTRA] += us


@helper
def begin(run: Any) -> None:
    """Reset a run to its beginning."""
    run.state[:] = 0.0
    run.available_us[:] = np.inf
    run.next_task[:] = run.begins


@helper
def resume(run: Any, until: Any, limit: Any) -> Any:
    """Simulate until just before backward has computed chain ``until``, until the step is sure to exceed ``limit``, or to the end. Returns the
    step so far, or a lower bound on it that is over ``limit``."""
    ready, resource, state, available, nexts = run.ready_us, run.resource, run.state, run.available_us, run.next_task
    event_chain, event_task, event_us = run.event_chain, run.event_task, run.event_us
    count, computed, events, step = ready.size, int(state[_COMPUTED]), int(state[EVENTS]), state[STEP]
    low = 0
    while step <= limit:
        when, chosen = np.inf, -1
        following = low
        while following < computed:
            chain = following
            task = nexts[chain]
            following = run.alike[chain] if task == run.begins[chain] else chain + 1
            if task < run.ends[chain]:
                possible = max(available[chain], _free_at(state, resource[task]))
                if resource[task] == GPU and possible <= when:
                    possible = when_on_gpu(run.moments_us, run.moment[computed - 1], state[DELAY], possible)
                if possible < when or (possible == when and run.rank[chain] < run.rank[chosen]):
                    when, chosen = possible, chain
            elif chain == low:
                low += 1
        if computed < count and ready[computed] + state[DELAY] <= when:
            if computed == until:
                break
            at, end = ready[computed], ready[computed] + state[DELAY]
            while computed < count and ready[computed] == at:
                run.computed_us[computed] = available[computed] = end
                computed += 1
        elif chosen < 0:
            break
        else:
            task = nexts[chosen]
            if (when + run.rest_us[task]) * ROUNDING > limit:
                step = when + run.rest_us[task]
                break
            run.start_us[task], nexts[chosen] = when, task + 1
            event_chain[events], event_task[events], event_us[events] = chosen, task, when
            events += 1
            end = when + run.us[task]
            available[chosen] = end
            _hold(run, resource[task], end)
            if resource[task] == GPU and computed < count:
                state[DELAY] += run.us[task]
        step = max(step, end)
    state[_COMPUTED], state[EVENTS], state[STEP] = computed, events, step
    return step


_KINDS: Final = len(RESOURCES) + 3  # of tasks: on each of RESOURCES, and on each group of them
# A kind's queues: chains that are not there yet when their resources are free, by time; and those that wait for their resources, by rank.
_EARLY, _DUE = 0, 1


class _Queues(NamedTuple):
    """The chains whose next tasks can begin once their resources are free: binary heaps, by kind and queue. size: of each heap; chain: its chains."""

    size: Any
    chain: Any
    available: Any
    rank: Any


@inlined
def _kind(resource: Any) -> Any:
    return resource if resource >= 0 else len(RESOURCES) - 1 - resource


@inlined
def _goes_before(queues: Any, queue: Any, one: Any, other: Any) -> Any:
    if queue == _EARLY and queues.available[one] != queues.available[other]:
        return queues.available[one] < queues.available[other]
    return queues.rank[one] < queues.rank[other]


@helper
def _put(queues: Any, kind: Any, queue: Any, place: Any, chain: Any) -> None:
    """Put a chain into a heap's empty place, or above it."""
    heap = queues.chain[kind, queue]
    while place > 0 and _goes_before(queues, queue, chain, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = chain


@helper
def _push(queues: Any, kind: Any, queue: Any, chain: Any) -> None:
    queues.size[kind, queue] += 1
    _put(queues, kind, queue, queues.size[kind, queue] - 1, chain)


@helper
def _remove(queues: Any, kind: Any, queue: Any, place: Any) -> None:
    """Remove the chain at a place of a heap."""
    heap = queues.chain[kind, queue]
    last = queues.size[kind, queue] - 1
    queues.size[kind, queue] = last
    while 2 * place + 1 < last:  # fill the place from below, then put the last chain into the place that gets empty
        below = 2 * place + 1
        if below + 1 < last and _goes_before(queues, queue, heap[below + 1], heap[below]):
            below += 1
        heap[place] = heap[below]
        place = below
    if place < last:
        _put(queues, kind, queue, place, heap[last])


@helper
def _first_by(queues: Any, until: Any, place: Any, stack: Any) -> Any:
    """The place of the chain with the least rank among those of the GPU's early queue that are there by ``until``; ``place`` is that of one of them."""
    heap, count, waiting = queues.chain[GPU, _EARLY], queues.size[GPU, _EARLY], 1
    stack[0] = 0
    while waiting:
        waiting -= 1
        one = stack[waiting]
        if one < count and queues.available[heap[one]] <= until:
            place = one if queues.rank[heap[one]] < queues.rank[heap[place]] else place
            stack[waiting], stack[waiting + 1] = 2 * one + 1, 2 * one + 2
            waiting += 2
    return place


@kernel(types.float64(_IN_F64, _IN_I64, _IN_I64, _IN_F64, _IN_I64, _IN_F64, _IN_I64, _OUT_F64, _OUT_F64))
def _run(ready: Any, first: Any, resource: Any, us: Any, threads: Any, moments: Any, rank: Any, start: Any, computed_us: Any) -> Any:
    """``resume`` from beginning to end. It has queues, because the plans of other systems have ten thousand chains that wait; a search's have some tens,
    which it goes through."""
    made = new_run(ready, resource, us, us, threads, moments, rank, 0)
    state, nexts, available, count = made.state, first[:-1].copy(), made.available_us, ready.size
    queues = _Queues(np.zeros((_KINDS, 2), np.int64), np.empty((_KINDS, 2, count), np.int64), available, rank)
    stack = np.empty(2 * count + 2, np.int64)
    computed, delay, step = 0, 0.0, 0.0
    while True:
        when, own, chosen, queue, place = np.inf, 0, -1, 0, 0
        for kind in range(_KINDS):
            early, due = queues.chain[kind, _EARLY], queues.chain[kind, _DUE]
            if not queues.size[kind, _EARLY] + queues.size[kind, _DUE]:
                continue
            free = _free_at(state, kind if kind < len(RESOURCES) else len(RESOURCES) - 1 - kind)
            while queues.size[kind, _EARLY] and available[early[0]] <= free:
                chain = early[0]
                _remove(queues, kind, _EARLY, 0)
                _push(queues, kind, _DUE, chain)
            kept, at = (_DUE, 0) if queues.size[kind, _DUE] else (_EARLY, 0)
            chain = due[0] if kept == _DUE else early[0]
            possible = max(available[chain], free)
            if kind == GPU:
                possible = when_on_gpu(moments, made.moment[computed - 1], delay, possible)
                if queues.size[kind, _EARLY] and available[early[0]] <= possible:  # others may wait for the same moment
                    other = _first_by(queues, possible, 0, stack)
                    if kept == _EARLY or rank[early[other]] < rank[chain]:
                        kept, at, chain = _EARLY, other, early[other]
            if possible < when or (possible == when and rank[chain] < rank[chosen]):
                when, own, chosen, queue, place = possible, kind, chain, kept, at
        if computed < count and ready[computed] + delay <= when:
            moment, end = ready[computed], ready[computed] + delay
            while computed < count and ready[computed] == moment:
                computed_us[computed] = available[computed] = end
                if nexts[computed] < first[computed + 1]:
                    _push(queues, _kind(resource[nexts[computed]]), _EARLY, computed)
                computed += 1
        elif chosen < 0:
            return step
        else:
            task = nexts[chosen]
            _remove(queues, own, queue, place)
            start[task], nexts[chosen] = when, task + 1
            end = when + us[task]
            available[chosen] = end
            _hold(made, resource[task], end)
            if own == GPU and computed < count:
                delay += us[task]
            if task + 1 < first[chosen + 1]:
                _push(queues, _kind(resource[task + 1]), _EARLY, chosen)
        step = max(step, end)


def run(chains: Chains) -> Timeline:
    """The timeline of these chains."""
    start, computed = np.zeros(len(chains.us)), np.zeros(len(chains.ready_us))
    step = _run(*chains, start, computed)
    return Timeline(float(step), start, computed)


def busy_us(chains: Chains) -> dict[str, float]:
    """Microseconds that each resource works, by name, averaged over its threads."""
    total = dict.fromkeys(RESOURCES, 0.0)
    total[RESOURCES[GPU]] = float(chains.ready_us[-1]) if len(chains.ready_us) else 0.0
    for resource, us in zip(chains.resource.tolist(), chains.us.tolist(), strict=True):
        for one in resources_of(resource):
            total[RESOURCES[one]] += us / float(chains.threads[one])
    return total
