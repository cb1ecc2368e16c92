"""A complete plan that annealing changes: its buckets with their tasks and work, and the lower bound that refuses most bad plans unsimulated.

A bucket's number stays as long as the bucket lives; ``order`` has the live ones in order of readiness. What a bucket costs is computed when the bucket
changed (``price``), so that a change of one bucket costs nothing for the others. Changes are noted (``touch``): undoing them, or making them in the
other copy, copies only the buckets that were touched. Owns this record and the bound.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from psgc.codecs.jit.kernel import helper, inlined
from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, GPU, IN_FLIGHT, INTRA, RECEIVE, RESOURCES, SEND
from psgc.plan.model.curves import task_us
from psgc.plan.model.timeline import ROUNDING

COUNT: Final = len(RESOURCES)
# A task's class: its resource, or for tasks that hold several or none, one of these.
BOTH_CLASS, ALL_CLASS, FLIGHT_CLASS = COUNT - 1 - BOTH_WAYS, COUNT - 1 - ALL_LINKS, COUNT - 1 - IN_FLIGHT
CLASSES: Final = COUNT + 3
_TOUCHED, MOVED = 1, 2  # indices in ``size``
FREE: Final = -1  # ``last`` of a number that no bucket has


class Tensors(NamedTuple):
    """The problem. numel, ready, codec: of each tensor, in order of readiness; moment: the index of the first moment at which it is ready. least, most: the
    elements that a part must have at least, but for a bucket that has fewer, and at most; parts: the most that a bucket may be cut into."""

    numel: Any
    ready: Any
    codec: Any
    moment: Any
    least: Any
    most: Any
    parts: Any


class Palette(NamedTuple):
    """The options to choose from. tasks: each option's tasks, -1 behind the last; fits: whether buckets of a codec (rows) can have an option (columns);
    held, fixed to us: each task's resource and costs, see ``curves.task_times``; threads: number of tasks that each resource does at once."""

    tasks: Any
    fits: Any
    held: Any
    fixed: Any
    slope: Any
    curve: Any
    share: Any
    first: Any
    curve_numel: Any
    curve_us: Any
    threads: Any


class State(NamedTuple):
    """A plan. size: [0] is the number of buckets, [_TOUCHED] of touched ones, [MOVED] whether tensors have moved since ``forget``; of: each tensor's
    bucket; order: the buckets in order of readiness.

    Of each bucket: members, numel: the number and the elements of its tensors; last: the last of them, FREE for numbers that no bucket has; parts;
    option; turn: all different, the least goes first; tasks: the number of tasks of a part; kind, us, rest: their classes, microseconds, and
    microseconds with those behind; load: the work of all parts on each resource, by its threads; head, tail: the microseconds of a part before the first
    task on a resource, infinite if there is none, and behind the last.
    touched: the touched buckets; is_touched: of each bucket."""

    size: Any
    of: Any
    order: Any
    members: Any
    numel: Any
    last: Any
    parts: Any
    option: Any
    turn: Any
    tasks: Any
    kind: Any
    us: Any
    rest: Any
    load: Any
    head: Any
    tail: Any
    touched: Any
    is_touched: Any


@inlined
def class_of(resource: Any) -> Any:
    """The class of tasks on a resource, see ``costs.resources_of``."""
    return resource if resource >= 0 else COUNT - 1 - resource


@helper
def new_state(tensors: Any, buckets: Any, room: Any) -> Any:
    """A plan without buckets, with memory for so many, of up to ``room`` tasks each."""
    return State(
        np.zeros(3, np.int64), np.zeros(tensors, np.int64), np.zeros(buckets, np.int64), np.zeros(buckets, np.int64), np.zeros(buckets),
        np.full(buckets, FREE), np.zeros(buckets, np.int64), np.zeros(buckets, np.int64), np.zeros(buckets), np.zeros(buckets, np.int64),
        np.zeros((buckets, room), np.int64), np.zeros((buckets, room)), np.zeros((buckets, room)), np.zeros((buckets, COUNT)),
        np.zeros((buckets, COUNT)), np.zeros((buckets, COUNT)), np.zeros(buckets, np.int64), np.zeros(buckets, np.bool_),
    )  # fmt: skip


@inlined
def touch(state: Any, bucket: Any) -> None:
    """Note that a bucket changes."""
    if not state.is_touched[bucket]:
        state.is_touched[bucket] = True
        state.touched[state.size[_TOUCHED]] = bucket
        state.size[_TOUCHED] += 1


@inlined
def make_equal(to: Any, source: Any, changed: Any) -> None:
    """Make a plan equal to another one. They are equal now but for the buckets that ``changed``, one of the two, has touched."""
    count = source.size[0]
    to.size[0] = count
    for place in range(count):
        to.order[place] = source.order[place]
    if changed.size[MOVED]:
        for tensor in range(to.of.size):
            to.of[tensor] = source.of[tensor]
    for place in range(changed.size[_TOUCHED]):
        _copy_bucket(to, source, changed.touched[place])


@inlined
def forget(state: Any) -> None:
    """Count no bucket as touched."""
    for place in range(state.size[_TOUCHED]):
        state.is_touched[state.touched[place]] = False
    state.size[_TOUCHED] = state.size[MOVED] = 0


@inlined
def _copy_bucket(to: Any, source: Any, bucket: Any) -> None:
    to.members[bucket], to.numel[bucket], to.last[bucket] = source.members[bucket], source.numel[bucket], source.last[bucket]
    to.parts[bucket], to.option[bucket], to.turn[bucket] = source.parts[bucket], source.option[bucket], source.turn[bucket]
    to.tasks[bucket] = source.tasks[bucket]
    for task in range(source.tasks[bucket]):
        to.kind[bucket, task] = source.kind[bucket, task]
        to.us[bucket, task] = source.us[bucket, task]
        to.rest[bucket, task] = source.rest[bucket, task]
    for one in range(COUNT):
        to.load[bucket, one] = source.load[bucket, one]
        to.head[bucket, one] = source.head[bucket, one]
        to.tail[bucket, one] = source.tail[bucket, one]


@inlined
def new_bucket(state: Any) -> Any:
    """The least number that no bucket has, touched; -1 if there is no memory for another bucket."""
    for bucket in range(state.last.size):
        if state.last[bucket] == FREE and state.members[bucket] == 0:
            touch(state, bucket)
            state.order[state.size[0]] = bucket
            state.size[0] += 1
            return bucket
    return -1


@inlined
def move_tensor(state: Any, tensors: Any, tensor: Any, bucket: Any) -> None:
    """Move a tensor to another bucket. The bucket that it leaves may be left without tensors."""
    own, numel = state.of[tensor], tensors.numel[tensor]
    state.of[tensor] = bucket
    state.members[own] -= 1
    state.members[bucket] += 1
    state.numel[own] -= numel
    state.numel[bucket] += numel  # numbers of elements are integers, so the sums are exact
    state.last[bucket] = max(state.last[bucket], tensor)
    state.size[MOVED] = 1
    if state.members[own] == 0:
        state.last[own] = FREE
    elif state.last[own] == tensor:
        while state.of[tensor] != own:
            tensor -= 1
        state.last[own] = tensor


@inlined
def within(tensors: Any, numel: Any, parts: Any) -> Any:
    """The number of parts that is next to ``parts``, of those that a bucket of so many elements may have."""
    fewest, most = int(np.ceil(numel / tensors.most)), int(min(float(tensors.parts), np.ceil(numel / tensors.least)))
    return max(1, fewest, min(most, parts))


@inlined
def price(state: Any, tensors: Any, palette: Any) -> Any:
    """Bring the touched buckets' numbers of parts within their limits, and what they cost up to date. Returns the number of all parts."""
    for place in range(state.size[_TOUCHED]):
        bucket = state.touched[place]
        if state.members[bucket] == 0:
            continue
        parts = within(tensors, state.numel[bucket], state.parts[bucket])
        state.parts[bucket] = parts
        size, codec, count = state.numel[bucket] / parts, tensors.codec[state.last[bucket]], 0
        for column in range(palette.tasks.shape[1]):
            task = palette.tasks[state.option[bucket], column]
            if task < 0:
                break
            state.kind[bucket, count] = class_of(palette.held[task])
            state.us[bucket, count] = task_us(
                palette.fixed, palette.slope, palette.curve, palette.share, palette.first, palette.curve_numel, palette.curve_us, task, size, codec
            )  # fmt: skip
            count += 1
        state.tasks[bucket] = count
        left = 0.0
        for task in range(count - 1, -1, -1):
            left += state.us[bucket, task]
            state.rest[bucket, task] = left
        for one in range(COUNT):
            state.load[bucket, one], state.head[bucket, one] = 0.0, np.inf
        for task in range(count):
            kind = state.kind[bucket, task]
            for resource in range(COUNT):
                holds = kind == resource
                if BOTH_CLASS <= kind <= ALL_CLASS:
                    holds = SEND <= resource <= RECEIVE or (resource == INTRA and kind == ALL_CLASS)
                if holds:
                    us = state.us[bucket, task]
                    if state.head[bucket, resource] == np.inf:
                        state.head[bucket, resource] = state.rest[bucket, 0] - state.rest[bucket, task]
                    state.load[bucket, resource] += parts * us / palette.threads[resource]
                    state.tail[bucket, resource] = state.rest[bucket, task] - us
    parts = 0
    for place in range(state.size[0]):
        parts += state.parts[state.order[place]]
    return parts


@inlined
def keep_order(state: Any) -> None:
    """Bring ``order`` up to date after a move: buckets without tensors are gone, and others may be ready at another time."""
    kept = 0
    for place in range(state.size[0]):
        bucket = state.order[place]
        if state.members[bucket] == 0:
            continue
        at = kept
        while at > 0 and state.last[state.order[at - 1]] > state.last[bucket]:
            state.order[at] = state.order[at - 1]
            at -= 1
        state.order[at] = bucket
        kept += 1
    state.size[0] = kept


@inlined
def bound(state: Any, tensors: Any, limit: Any, total: Any, tail: Any, since: Any) -> Any:
    """A lower bound on the step, or on that bound if it is over ``limit``: each bucket's part takes so long, and each resource, with the work of all buckets
    that are ready from some moment on, after the shortest way to it and before the shortest way from it. total, tail: set to each resource's work and the
    shortest way from it, unless the bound is over ``limit``. since: scratch."""
    backward, least = tensors.ready[-1], 0.0
    for one in range(COUNT):
        total[one], tail[one], since[one] = 0.0, np.inf, np.inf
    for place in range(state.size[0] - 1, -1, -1):
        bucket = state.order[place]
        if state.tasks[bucket] == 0:
            continue
        ready = tensors.ready[state.last[bucket]]
        least = max(least, (ready + state.rest[bucket, 0]) * ROUNDING)
        for one in range(COUNT):
            if state.head[bucket, one] < np.inf:
                total[one] += state.load[bucket, one]
                since[one] = min(since[one], ready + state.head[bucket, one])
                tail[one] = min(tail[one], state.tail[bucket, one])
                end = max(since[one], backward) + total[one] if one == GPU else since[one] + total[one] + tail[one]
                least = max(least, end * ROUNDING)
        if least > limit:
            return least
    return least
