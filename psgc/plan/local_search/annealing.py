"""Simulated annealing over complete plans: fusion, parts, options and the order of buckets together.

A move changes one thing at random: a bucket's option, its number of parts, or its turn; or it merges two buckets, splits one, or moves a
tensor from one to another. Buckets need not be neighbours in readiness. A move that makes the step longer is taken with a probability that falls as
the temperature does (Kirkpatrick, Gelatt and Vecchi 1983), so the search leaves plans that no single move improves. The threshold is drawn before the
move is simulated: most bad moves are refused by the resources' total work, and the others end as soon as they are over it. That bound on the step, which
costs a tenth of a simulation or less, can also be annealed in place of the step: for plans to start from that are far from the best one, with the work of all
resources in balance.

Owns the moves and the schedule of temperatures, compiled. Random numbers come from a seed, and the budget counts simulated chains, so the same job
gets the same plan on any machine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, inlined, kernel
from psgc.plan.local_search.rerun import accept, new_memory, rerun, row_of
from psgc.plan.local_search.state import (
    MOVED,
    Palette,
    Tensors,
    bound,
    forget,
    keep_order,
    make_equal,
    move_tensor,
    new_bucket,
    new_state,
    price,
    touch,
    within,
)

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_IN_BOOL_2D: Final = types.Array(types.boolean, 2, "C", readonly=True)
_F64: Final = types.Array(types.float64, 1, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_RESULT: Any = types.Tuple((types.float64, I64, types.float64))  # type: ignore[no-untyped-call]
MOVE_WORK: Final = 16  # work of a move besides its simulation, in simulated tasks
BUCKET_WORK: Final = 1  # the same for each bucket
TENSORS_WORK: Final = 1 / 16  # the same for each tensor
MANY_PARTS: Final = 4  # a plan has at most so many times the parts that it begins with, or MIN_ROOM
MIN_ROOM: Final = 256
SPARE_BUCKETS: Final = 64
OTHERS_OPTION: Final = 0.5  # probability that a bucket's new option is another bucket's
SECOND_MOVE: Final = 0.25  # probability of a second move before the simulation
_U7, _U11, _U13, _U17 = (np.uint64(number) for number in (7, 11, 13, 17))


@inlined
def _uniform(rng: Any) -> Any:
    """A random number from 0 to below 1. rng: [0] is the state. Source: Marsaglia 2003 (xorshift64)."""
    x = rng[0]
    x ^= x << _U13
    x ^= x >> _U7
    x ^= x << _U17
    rng[0] = x
    return float(x >> _U11) * (1.0 / 9007199254740992.0)


@inlined
def _below(rng: Any, count: Any) -> Any:
    return int(_uniform(rng) * count)


@inlined
def _any(state: Any, rng: Any) -> Any:
    return state.order[_below(rng, state.size[0])]


@inlined
def _change_option(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    bucket = _any(state, rng)
    codec, count = tensors.codec[state.last[bucket]], palette.tasks.shape[0]
    option = state.option[_any(state, rng)] if _uniform(rng) < OTHERS_OPTION else _below(rng, count)
    if option == state.option[bucket] or not palette.fits[codec, option]:
        return False
    touch(state, bucket)
    state.option[bucket] = option
    return True


@inlined
def _change_parts(state: Any, tensors: Any, rng: Any) -> Any:
    bucket, kind = _any(state, rng), _below(rng, 4)
    before = state.parts[bucket]
    parts = within(tensors, state.numel[bucket], (before * 2, before // 2, before + 1, before - 1)[kind])
    if parts == before:
        return False
    touch(state, bucket)
    state.parts[bucket] = parts
    return True


@inlined
def _turn_beside(state: Any, other: Any, before: Any) -> Any:
    """A turn just before or just behind a bucket's."""
    turn = state.turn[other]
    neighbour = turn - 1.0 if before else turn + 1.0
    for place in range(state.size[0]):
        one = state.turn[state.order[place]]
        if neighbour < one < turn or turn < one < neighbour:
            neighbour = one
    return 0.5 * (turn + neighbour)


@inlined
def _change_turn(state: Any, rng: Any) -> Any:
    """A bucket goes just before or just behind another."""
    bucket, other = _any(state, rng), _any(state, rng)
    turn = _turn_beside(state, other, _uniform(rng) < 0.5)
    if bucket == other or turn == state.turn[other]:
        return False
    touch(state, bucket)
    state.turn[bucket] = turn
    return True


@inlined
def _beside(state: Any, bucket: Any, step: Any) -> Any:
    """The bucket that is ready just before or just after this one; itself if none is."""
    for place in range(state.size[0]):
        if state.order[place] == bucket:
            return state.order[min(max(place + step, 0), state.size[0] - 1)]
    return bucket


@inlined
def _merge(state: Any, tensors: Any, rng: Any) -> Any:
    """Two buckets become one, with the parts of one of them or of both."""
    bucket = _any(state, rng)
    other = _beside(state, bucket, 1) if _uniform(rng) < 0.6 else _any(state, rng)
    if bucket == other or tensors.codec[state.last[bucket]] != tensors.codec[state.last[other]]:
        return False
    if _uniform(rng) < 0.5:
        bucket, other = other, bucket
    touch(state, bucket)
    touch(state, other)
    if _uniform(rng) < 0.4:
        state.parts[bucket] += state.parts[other]
    tensor = state.last[other]
    while state.members[other]:
        if state.of[tensor] == other:
            move_tensor(state, tensors, tensor, bucket)
        tensor -= 1
    return True


@inlined
def _split(state: Any, tensors: Any, rng: Any) -> Any:
    """A bucket becomes two, at a tensor, or each of its tensors goes to one of them at random."""
    bucket = _any(state, rng)
    members, tensor = state.members[bucket], state.last[bucket]
    turn = _turn_beside(state, bucket, False)
    if members < 2 or turn == state.turn[bucket]:
        return False
    new = new_bucket(state)
    if new < 0:
        return False
    touch(state, bucket)
    state.parts[new], state.option[new] = state.parts[bucket], state.option[bucket]
    leave, at_random, left = 1 + _below(rng, members - 1), _uniform(rng) < 0.25, members
    while left and state.members[bucket] > 1:
        if state.of[tensor] == bucket:
            if _uniform(rng) < 0.5 if at_random else left > leave:
                move_tensor(state, tensors, tensor, new)
            left -= 1
        tensor -= 1
    if state.members[new] == 0:  # all have stayed: the number, the last in the order, is free again
        state.size[0] -= 1
        return False
    if _uniform(rng) < 0.5:
        state.parts[bucket] = max(1, state.parts[bucket] // 2)
        state.parts[new] = state.parts[bucket]
    state.turn[new] = turn
    return True


@inlined
def _move_one(state: Any, tensors: Any, rng: Any) -> Any:
    """A tensor goes to another bucket: most often its bucket's first or last one, to a neighbour."""
    tensor = _below(rng, state.of.size)
    bucket = state.of[tensor]
    if _uniform(rng) < 0.6:
        other = state.of[max(0, tensor - 1)] if _uniform(rng) < 0.5 else state.of[min(state.of.size - 1, tensor + 1)]
    else:
        other = _any(state, rng)
    if bucket == other or tensors.codec[tensor] != tensors.codec[state.last[other]]:
        return False
    touch(state, bucket)
    touch(state, other)
    move_tensor(state, tensors, tensor, other)
    return True


@inlined
def _move_several(state: Any, tensors: Any, rng: Any) -> Any:
    """Some of a bucket's tensors, the first or the last ones, go to the bucket that is ready next before or after it, or to any."""
    bucket = _any(state, rng)
    members = state.members[bucket]
    if members < 2:
        return False
    count = min(members - 1, int(2.0 ** (_uniform(rng) * np.log2(float(members)))))
    from_end = _uniform(rng) < 0.5
    other = _beside(state, bucket, 1 if from_end else -1) if _uniform(rng) < 0.7 else _any(state, rng)
    if bucket == other or tensors.codec[state.last[bucket]] != tensors.codec[state.last[other]]:
        return False
    touch(state, bucket)
    touch(state, other)
    tensor, left = state.last[bucket], members
    while left and count:
        if state.of[tensor] == bucket:
            if from_end or left <= count:
                move_tensor(state, tensors, tensor, other)
                count -= from_end
            left -= 1
        tensor -= 1
    return True


@inlined
def _move(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """Make one random move, most often, or two. Returns whether the plan changed."""
    changed, moves = False, 2 if _uniform(rng) < SECOND_MOVE else 1
    for _ in range(moves):
        kind = _uniform(rng)
        if kind < 0.30:
            done = _change_option(state, tensors, palette, rng)
        elif kind < 0.44:
            done = _change_parts(state, tensors, rng)
        elif kind < 0.56:
            done = _merge(state, tensors, rng)
        elif kind < 0.68:
            done = _split(state, tensors, rng)
        elif kind < 0.80:
            done = _move_one(state, tensors, rng)
        elif kind < 0.94:
            done = _move_several(state, tensors, rng)
        else:
            done = _change_turn(state, rng)
        changed = changed or done
        if state.size[MOVED]:
            keep_order(state)
    return changed


@inlined
def _copy(best: Any, state: Any) -> None:
    """Keep a plan."""
    best.size[0] = state.size[0]
    for tensor in range(state.of.size):
        best.of[tensor] = state.of[tensor]
    for place in range(state.size[0]):
        bucket = state.order[place]
        best.order[place], best.parts[bucket], best.option[bucket], best.turn[bucket] = (
            bucket,
            state.parts[bucket],
            state.option[bucket],
            state.turn[bucket],
        )


@inlined
def _rounds(
    state: Any, trial: Any, best: Any, tensors: Any, palette: Any, memory: Any, rng: Any, most_parts: Any, budget: Any, hot: Any, cold: Any,
    by_bound: Any,
) -> Any:  # fmt: skip
    """Anneal ``state``, which ``trial`` and ``best`` are equal to. Returns the shortest step and the work done; ``best`` is its plan. by_bound: see
    ``anneal``."""
    step, work = bound(state, tensors, np.inf, memory.total, memory.tail, memory.since), 0
    if not by_bound:
        step, work = rerun(state, tensors, memory, -1, np.inf)
        accept(memory, 0)
    shortest, spent = step, float(work)
    while spent < budget:
        temperature = step * hot * (cold / hot) ** (spent / budget)
        changed = _move(trial, tensors, palette, rng)
        limit = step - temperature * np.log(1.0 - _uniform(rng))
        spent += MOVE_WORK + BUCKET_WORK * trial.size[0] + TENSORS_WORK * trial.of.size
        after, row = np.inf, 0
        if changed and price(trial, tensors, palette) <= most_parts:
            after = bound(trial, tensors, limit, memory.total, memory.tail, memory.since)
            if after <= limit and not by_bound:
                row = row_of(state, trial, tensors, memory)
                after, work = rerun(trial, tensors, memory, row, limit)
                spent += work
        if after <= limit:
            if not by_bound:
                accept(memory, row)
            make_equal(state, trial, trial)
            step = after
            if step < shortest:
                shortest = step
                _copy(best, state)
        else:
            make_equal(trial, state, trial)
        forget(trial)
    return shortest, spent


@kernel(
    _RESULT(
        _IN_F64, _IN_F64, _IN_I64, _IN_I64, types.float64, types.float64, I64, _IN_I64_2D, _IN_BOOL_2D, _IN_I64, _IN_F64, _IN_F64_2D, _IN_I64_2D, _IN_F64,
        _IN_I64, _IN_F64, _IN_F64, _I64, _F64, _I64, _I64, _I64, _F64, I64, types.float64, types.float64,
        types.float64, types.boolean,
    )
)  # fmt: skip
def anneal(
    numel: Any, ready: Any, codec: Any, moment: Any, least: Any, most: Any, max_parts: Any, tasks: Any, fits: Any, held: Any, fixed: Any, slope: Any,
    curve: Any, share: Any, first: Any, curve_numel: Any, curve_us: Any, threads: Any, moments: Any, of: Any, parts: Any, option: Any, turn: Any,
    seed: Any, budget: Any, hot: Any, cold: Any, by_bound: Any,
) -> Any:  # fmt: skip
    """Anneal a plan. Returns the shortest step, the number of its buckets, and the work done, about ``budget``.

    numel to max_parts: ``Tensors``. tasks to curve_us: ``Palette``. threads, moments: see ``descent.descend``.
    of, parts, option, turn: the plan, changed in place; the last three have room for as many buckets as there are tensors. Buckets keep no order.
    seed:      of random numbers, above 0.
    budget:    number of tasks to simulate.
    hot, cold: temperatures at the beginning and at the end, as shares of the step.
    by_bound:  anneal the lower bound on the step, and return that; nothing is simulated."""
    tensors = Tensors(numel, ready, codec, moment, least, most, max_parts)
    palette = Palette(tasks, fits, held, fixed, slope, curve, share, first, curve_numel, curve_us, threads)
    count, room = of.max() + 1, tasks.shape[1]
    buckets = min(of.size, 4 * count + SPARE_BUCKETS) + 2
    state, trial, best = new_state(of.size, buckets, room), new_state(of.size, buckets, room), new_state(of.size, buckets, room)
    for bucket in range(count):
        touch(state, bucket)
        state.order[bucket] = bucket
        state.parts[bucket], state.option[bucket], state.turn[bucket] = parts[bucket], option[bucket], turn[bucket]
    for tensor in range(of.size):
        state.of[tensor] = of[tensor]
        state.last[of[tensor]] = tensor
        state.members[of[tensor]] += 1
        state.numel[of[tensor]] += numel[tensor]
    state.size[0], state.size[MOVED] = count, 1
    keep_order(state)
    price(state, tensors, palette)
    make_equal(trial, state, state)
    make_equal(best, state, state)
    forget(state)
    most_parts = max(MIN_ROOM, MANY_PARTS * state.parts[:count].sum(), of.size)
    memory = new_memory(held, threads, moments, most_parts, count)
    rng = np.empty(1, np.uint64)
    rng[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    shortest, spent = _rounds(state, trial, best, tensors, palette, memory, rng, most_parts, budget, hot, cold, by_bound)
    count = best.size[0]
    number = np.empty(buckets, np.int64)
    for place in range(count):
        bucket = best.order[place]
        number[bucket] = place
        parts[place], option[place], turn[place] = best.parts[bucket], best.option[bucket], best.turn[bucket]
    for tensor in range(of.size):
        of[tensor] = number[best.of[tensor]]
    return shortest, count, spent
