"""The simulation of a plan that annealing changes, from the first changed bucket on, until the step is sure to be too long.

The rule is the timeline's (``timeline.define_timeline``). Each class of tasks (``state``) has a queue in the order of turns, and the task of it that could
begin next is kept, so that a task that begins costs a look at the queues that it affects, not at all tasks that wait. What happens before a bucket is
ready does not depend on it. So a run is saved just before buckets get ready, and that of the changed plan goes on from the last save before the first
change. It ends when a task that begins, with those behind it, would end too late; or when a resource would, with all the work that it still has to
do. Owns this simulation and the saves.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from psgc.codecs.jit.kernel import helper, inlined
from psgc.plan.local_search.state import ALL_CLASS, BOTH_CLASS, CLASSES, COUNT, FLIGHT_CLASS, class_of
from psgc.plan.model.costs import GPU, INTRA, RECEIVE, SEND
from psgc.plan.model.timeline import ROUNDING, when_on_gpu

ROWS: Final = 64  # saves of one run
# Indices in ``now``, behind the time at which each class of tasks finds its resources free; behind these, the threads' times.
DONE: Final = CLASSES  # the work that each resource has done or begun, by its threads
DELAY: Final = DONE + COUNT
STEP: Final = DELAY + 1
NOW: Final = STEP + 1
COMPUTED: Final = CLASSES  # index in ``waiting``, behind the number of tasks in each queue: the number of buckets that are ready
# A waiting task's code is its bucket, part and task.
_BUCKET: Final = 16
_PART: Final = 8
_LOW: Final = (1 << _PART) - 1
MOST_PARTS: Final = 1 << (_BUCKET - _PART)  # of a bucket
MOST_TASKS: Final = 1 << _PART  # of an option


class Memory(NamedTuple):
    """A run in progress, and saves of it.

    now: numbers, see above; waiting: see COMPUTED; code, at: of the tasks in each class's queue, in the order of turns; at: when the task could begin.
    Of a bucket's parts that have not begun, only the first waits. next_at, next_place: when a queue's next task would begin, and its place;
    changed: the queues for which these are to be found again.
    place: threads' index in ``now``, of each resource that has several; threads: their number; moments: when backward would have computed each tensor.
    total, tail, since: see ``state.bound``.
    saved_*: two saves of each row; valid: which of the two is the plan's, the other one is for the changed plan; stride: saves are made before every so
    manieth bucket; kinds: the classes that occur."""

    now: Any
    waiting: Any
    code: Any
    at: Any
    next_at: Any
    next_place: Any
    changed: Any
    place: Any
    threads: Any
    moments: Any
    total: Any
    tail: Any
    since: Any
    saved_now: Any
    saved_waiting: Any
    saved_code: Any
    saved_at: Any
    valid: Any
    stride: Any
    kinds: Any


@helper
def new_memory(held: Any, threads: Any, moments: Any, parts: Any, buckets: Any) -> Any:
    """Memory for plans of up to so many parts. held: resources of all tasks that may occur; buckets: how many there are to begin with."""
    place, size, occurs = np.zeros(threads.size, np.int64), NOW, np.zeros(CLASSES, np.bool_)
    for resource in held:
        occurs[class_of(resource)] = True
    for one in range(threads.size):
        if threads[one] > 1:
            place[one] = size
            size += threads[one]
    return Memory(
        np.zeros(size), np.zeros(CLASSES + 1, np.int64), np.empty((CLASSES, parts), np.int64), np.empty((CLASSES, parts)), np.empty(CLASSES),
        np.empty(CLASSES, np.int64), np.zeros(CLASSES, np.bool_), place, threads, moments, np.zeros(COUNT), np.zeros(COUNT), np.zeros(COUNT),
        np.empty((2, ROWS, size)), np.empty((2, ROWS, CLASSES + 1), np.int64), np.empty((2, ROWS, parts), np.int64), np.empty((2, ROWS, parts)),
        np.zeros(ROWS, np.int64), np.full(1, 1 + 2 * buckets // ROWS), np.flatnonzero(occurs),
    )  # fmt: skip


@inlined
def _save(memory: Any, row: Any, which: Any) -> None:
    end = 0
    for one in range(memory.now.size):
        memory.saved_now[which, row, one] = memory.now[one]
    for one in range(CLASSES + 1):
        memory.saved_waiting[which, row, one] = memory.waiting[one]
    for kind in memory.kinds:
        for place in range(memory.waiting[kind]):
            memory.saved_code[which, row, end], memory.saved_at[which, row, end] = memory.code[kind, place], memory.at[kind, place]
            end += 1


@inlined
def _restore(memory: Any, row: Any) -> None:
    which, end = memory.valid[row], 0
    for one in range(memory.now.size):
        memory.now[one] = memory.saved_now[which, row, one]
    for one in range(CLASSES + 1):
        memory.waiting[one] = memory.saved_waiting[which, row, one]
    for kind in memory.kinds:
        for place in range(memory.waiting[kind]):
            memory.code[kind, place], memory.at[kind, place] = memory.saved_code[which, row, end], memory.saved_at[which, row, end]
            end += 1


@inlined
def accept(memory: Any, row: Any) -> None:
    """Keep the saves of the changed plan, whose run began at ``row``."""
    for one in range(row, ROWS):
        memory.valid[one] = 1 - memory.valid[one]


@inlined
def row_of(state: Any, changed: Any, tensors: Any, memory: Any) -> Any:
    """The save from which the changed plan's run goes on; ``state`` is the plan whose saves there are."""
    place, count = 0, min(state.size[0], changed.size[0])
    while place < count and state.order[place] == changed.order[place] and not changed.is_touched[state.order[place]]:
        place += 1
    if place == count:
        place = max(0, count - 1)
    elif place and tensors.ready[changed.last[changed.order[place]]] < tensors.ready[state.last[state.order[place]]]:
        place -= 1  # the save before this bucket would be too late for the changed plan's bucket
    return min(ROWS - 1, place // memory.stride[0])


@inlined
def _hold(memory: Any, kind: Any, us: Any, until: Any) -> Any:
    """Hold the resources of a task's class. Returns a lower bound on the step, by the work that they still have to do."""
    now = memory.now
    if kind < COUNT:
        now[kind] = until
        threads = memory.threads[kind]
        if threads > 1:
            first = memory.place[kind]
            own = first
            for one in range(first + 1, first + threads):
                own = one if now[one] < now[own] else own
            now[own] = until
            for one in range(first, first + threads):
                now[kind] = min(now[kind], now[one])
            us /= threads
        if INTRA <= kind <= RECEIVE:  # a link
            now[BOTH_CLASS] = max(now[SEND], now[RECEIVE])
            now[ALL_CLASS] = max(now[BOTH_CLASS], now[INTRA])
        now[DONE + kind] += us
        return now[kind] + memory.total[kind] - now[DONE + kind] + memory.tail[kind]
    if kind == FLIGHT_CLASS:
        return 0.0
    now[SEND] = now[RECEIVE] = now[BOTH_CLASS] = until
    now[DONE + SEND] += us
    now[DONE + RECEIVE] += us
    left = max(
        memory.total[SEND] - now[DONE + SEND] + memory.tail[SEND], memory.total[RECEIVE] - now[DONE + RECEIVE] + memory.tail[RECEIVE]
    )
    if kind == ALL_CLASS:
        now[INTRA] = now[ALL_CLASS] = until
        now[DONE + INTRA] += us
        return until + max(left, memory.total[INTRA] - now[DONE + INTRA] + memory.tail[INTRA])
    now[ALL_CLASS] = max(until, now[INTRA])
    return until + left


@inlined
def _find_next(state: Any, tensors: Any, memory: Any) -> None:
    """Find the next task of each queue that has changed: of those that could begin first, the one with the least turn."""
    for kind in memory.kinds:
        if not memory.changed[kind]:
            continue
        memory.changed[kind] = False
        free, count, found, first = memory.now[kind], memory.waiting[kind], -1, np.inf
        for place in range(count):
            possible = memory.at[kind, place]
            if possible <= free:
                found, first = place, free
                break
            if possible < first:
                found, first = place, possible
        if kind == GPU and found >= 0:
            moment = tensors.moment[state.last[state.order[memory.waiting[COMPUTED] - 1]]]
            first = when_on_gpu(memory.moments, moment, memory.now[DELAY], first)
            for place in range(found):  # others may wait for the same moment
                if memory.at[kind, place] <= first:
                    found = place
                    break
        memory.next_at[kind], memory.next_place[kind] = first, found


@inlined
def _is_before(state: Any, one: Any, other: Any) -> Any:
    """Whether a task goes before another one if both could begin now."""
    own, others = one >> _BUCKET, other >> _BUCKET
    return one < other if own == others else state.turn[own] < state.turn[others]


@inlined
def _wait(state: Any, memory: Any, kind: Any, code: Any, at: Any) -> None:
    """A task waits from now on."""
    place = memory.waiting[kind]
    memory.waiting[kind] = place + 1
    while place > 0 and _is_before(state, code, memory.code[kind, place - 1]):
        memory.code[kind, place], memory.at[kind, place] = memory.code[kind, place - 1], memory.at[kind, place - 1]
        place -= 1
    memory.code[kind, place], memory.at[kind, place] = code, at
    memory.changed[kind] = True


@inlined
def _take(memory: Any, kind: Any) -> None:
    """A queue's next task has begun, and holds its resources."""
    last = memory.waiting[kind] - 1
    memory.waiting[kind] = last
    for place in range(memory.next_place[kind], last):
        memory.code[kind, place], memory.at[kind, place] = memory.code[kind, place + 1], memory.at[kind, place + 1]
    memory.changed[kind] = True
    if INTRA <= kind <= RECEIVE or BOTH_CLASS <= kind <= ALL_CLASS:  # links
        for other in (SEND, RECEIVE, INTRA, BOTH_CLASS, ALL_CLASS):
            memory.changed[other] = True


@inlined
def rerun(state: Any, tensors: Any, memory: Any, row: Any, limit: Any) -> Any:
    """The step of a plan, or a lower bound on it that is over ``limit``, and the number of tasks that began. row: from which to go on, -1 for the
    beginning. ``memory.total`` and ``tail`` are of this plan."""
    now, waiting, next_at = memory.now, memory.waiting, memory.next_at
    if row < 0:
        for one in range(now.size):
            now[one] = 0.0
        for one in range(CLASSES + 1):
            waiting[one] = 0
    else:
        _restore(memory, row)
    for kind in memory.kinds:
        memory.changed[kind] = True
    count, step, work, stride, from_row = state.size[0], now[STEP], 0, memory.stride[0], max(0, row)
    while step <= limit:
        _find_next(state, tensors, memory)
        when, own = np.inf, -1
        for kind in memory.kinds:
            if next_at[kind] < when:
                when, own = next_at[kind], kind
            elif (
                next_at[kind] == when
                and own >= 0
                and _is_before(state, memory.code[kind, memory.next_place[kind]], memory.code[own, memory.next_place[own]])
            ):
                own = kind
        computed = waiting[COMPUTED]
        if computed < count and tensors.ready[state.last[state.order[computed]]] + now[DELAY] <= when:
            now[STEP] = step
            ready = tensors.ready[state.last[state.order[computed]]]
            end, behind = ready + now[DELAY], computed
            while behind < count and tensors.ready[state.last[state.order[behind]]] == ready:
                save = behind // stride
                if behind % stride == 0 and from_row <= save < ROWS:
                    _save(memory, save, 1 - memory.valid[save])
                behind += 1
            waiting[COMPUTED] = behind
            for place in range(computed, behind):
                bucket = state.order[place]
                if state.tasks[bucket]:
                    _wait(state, memory, state.kind[bucket, 0], bucket << _BUCKET, end)
        elif own < 0:
            break
        else:
            code, at = memory.code[own, memory.next_place[own]], memory.at[own, memory.next_place[own]]
            bucket, part, task = code >> _BUCKET, (code >> _PART) & _LOW, code & _LOW
            if (when + state.rest[bucket, task]) * ROUNDING > limit:
                return when + state.rest[bucket, task], work
            end = when + state.us[bucket, task]
            bound = _hold(memory, own, state.us[bucket, task], end)
            if bound * ROUNDING > limit:
                return bound, work
            work += 1
            if own == GPU and computed < count:
                now[DELAY] += state.us[bucket, task]
            _take(memory, own)
            if task == 0 and part + 1 < state.parts[bucket]:
                _wait(state, memory, own, code + (1 << _PART), at)
            if task + 1 < state.tasks[bucket]:
                _wait(state, memory, state.kind[bucket, task + 1], code + 1, end)
        step = max(step, end)
    return step, work
