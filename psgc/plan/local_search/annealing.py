"""Simulated annealing over complete plans: fusion, parts, options and the order of buckets together.

A move changes one thing at random: a bucket's option, its number of parts, or its turn; or it merges two buckets, splits one, or moves a
tensor from one to another. Buckets need not be neighbours in readiness. A move that makes the step longer is taken with a probability that falls as
the temperature does (Kirkpatrick, Gelatt and Vecchi 1983), so the search leaves plans that no single move improves. The threshold is drawn before the
move is simulated: most bad moves are refused by the resources' total work, and the others end as soon as they are over it.

Owns the moves and the schedule of temperatures, compiled. Random numbers come from a seed, and the budget counts simulated chains, so the same job
gets the same plan on any machine.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from psgc.codecs.jit.kernel import I64, helper, kernel
from psgc.plan.local_search.full_descent import simulation_work
from psgc.plan.model.costs import GPU
from psgc.plan.model.curves import task_us
from psgc.plan.model.timeline import ROUNDING, STATE, Run, add_load, begin, occurring, resume

_IN_F64: Final = types.Array(types.float64, 1, "C", readonly=True)
_IN_F64_2D: Final = types.Array(types.float64, 2, "C", readonly=True)
_IN_I64: Final = types.Array(types.int64, 1, "C", readonly=True)
_IN_I64_2D: Final = types.Array(types.int64, 2, "C", readonly=True)
_IN_BOOL_2D: Final = types.Array(types.boolean, 2, "C", readonly=True)
_F64: Final = types.Array(types.float64, 1, "C")
_I64: Final = types.Array(types.int64, 1, "C")
_RESULT: Any = types.Tuple((types.float64, I64, types.float64))  # type: ignore[no-untyped-call]
EARLY_WORK: Final = 0.4  # work of a simulation that its threshold ends, as a share of a whole one
MOVE_WORK: Final = 8  # work of a move besides its simulation, in simulated chains
TENSORS_WORK: Final = 1 / 16  # the same for each tensor
SIMULATION_OVERHEAD: Final = 16  # work of a simulation besides that of its chains
MANY_PARTS: Final = 4  # a plan has at most so many times the parts that it begins with, or MIN_ROOM
MIN_ROOM: Final = 256
OTHERS_OPTION: Final = 0.5  # probability that a bucket's new option is another bucket's
SECOND_MOVE: Final = 0.25  # probability of a second move before the simulation
_work = helper(simulation_work)
_U7, _U11, _U13, _U17 = (np.uint64(number) for number in (7, 11, 13, 17))


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
    held, fixed to us: each task's resource and costs, see ``curves.task_times``."""

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


class State(NamedTuple):
    """A plan, in memory for as many buckets as there are tensors. count: [0] is the number of buckets; of: each tensor's bucket; parts, option, turn: of
    each bucket; last: its last tensor; tasks: the number of tasks of its option; resource, us, rest: its part's tasks, ``room`` for each
    bucket."""

    count: Any
    of: Any
    parts: Any
    option: Any
    turn: Any
    last: Any
    tasks: Any
    resource: Any
    us: Any
    rest: Any


@helper
def _uniform(rng: Any) -> Any:
    """A random number from 0 to below 1. rng: [0] is the state. Source: Marsaglia 2003 (xorshift64)."""
    x = rng[0]
    x ^= x << _U13
    x ^= x >> _U7
    x ^= x << _U17
    rng[0] = x
    return float(x >> _U11) * (1.0 / 9007199254740992.0)


@helper
def _below(rng: Any, count: Any) -> Any:
    return int(_uniform(rng) * count)


@helper
def _new_state(tensors: Any, room: Any) -> Any:
    return State(
        np.zeros(1, np.int64), np.zeros(tensors, np.int64), np.zeros(tensors, np.int64), np.zeros(tensors, np.int64), np.zeros(tensors, np.int64),
        np.zeros(tensors, np.int64), np.zeros(tensors, np.int64), np.zeros(tensors * room, np.int64), np.zeros(tensors * room), np.zeros(tensors * room),
    )  # fmt: skip


@helper
def _copy(source: Any, target: Any, room: Any) -> None:
    count = source.count[0]
    target.count[0] = count
    target.of[:] = source.of
    target.parts[:count], target.option[:count], target.turn[:count] = source.parts[:count], source.option[:count], source.turn[:count]
    target.last[:count], target.tasks[:count] = source.last[:count], source.tasks[:count]
    end = count * room
    target.resource[:end], target.us[:end], target.rest[:end] = source.resource[:end], source.us[:end], source.rest[:end]


@helper
def _refresh(state: Any, tensors: Any, palette: Any, bucket: Any) -> None:
    """Bring a bucket's number of parts within its limits, and its tasks up to date."""
    numel, last = 0.0, 0
    for tensor in range(state.of.size):
        if state.of[tensor] == bucket:
            numel += tensors.numel[tensor]
            last = tensor
    state.last[bucket] = last
    fewest, most = int(np.ceil(numel / tensors.most)), int(min(float(tensors.parts), np.ceil(numel / tensors.least)))
    state.parts[bucket] = max(1, fewest, min(most, state.parts[bucket]))
    size, codec, room = numel / state.parts[bucket], tensors.codec[last], palette.tasks.shape[1]
    begins, count = bucket * room, 0
    for task in palette.tasks[state.option[bucket]]:
        if task < 0:
            break
        state.resource[begins + count] = palette.held[task]
        state.us[begins + count] = task_us(
            palette.fixed,
            palette.slope,
            palette.curve,
            palette.share,
            palette.first,
            palette.curve_numel,
            palette.curve_us,
            task,
            size,
            codec,
        )
        count += 1
    state.tasks[bucket] = count
    left = 0.0
    for task in range(begins + count - 1, begins - 1, -1):
        left += state.us[task]
        state.rest[task] = left


@helper
def _is_hopeless(state: Any, tensors: Any, threads: Any, room: Any, load: Any, limit: Any) -> Any:
    """Whether some bucket's part or some resource cannot be done by ``limit``. load: scratch."""
    load[:] = 0.0
    for bucket in range(state.count[0]):
        begins = bucket * room
        if state.tasks[bucket] and (tensors.ready[state.last[bucket]] + state.rest[begins]) * ROUNDING > limit:
            return True
        for task in range(begins, begins + state.tasks[bucket]):
            add_load(load, threads, state.resource[task], state.parts[bucket] * state.us[task])
    load[GPU] += tensors.ready[-1]
    return load.max() * ROUNDING > limit


@helper
def _simulate(state: Any, tensors: Any, memory: Any, room: Any, limit: Any) -> Any:
    """The step of a plan, or a lower bound on it that is over ``limit``, and the number of its chains."""
    chains = 0
    for tensor in range(state.of.size):
        bucket = state.of[tensor]
        if state.last[bucket] != tensor:
            continue
        begins, end = bucket * room, chains + state.parts[bucket]
        for chain in range(chains, end):
            memory.ready_us[chain], memory.moment[chain] = tensors.ready[tensor], tensors.moment[tensor]
            memory.begins[chain], memory.ends[chain] = begins, begins + state.tasks[bucket]
            memory.alike[chain], memory.rank[chain] = end, state.turn[bucket] * memory.ready_us.size + chain
        chains = end
    run = Run(
        memory.ready_us[:chains], memory.moments_us, memory.moment[:chains], state.resource, state.us, state.rest, memory.begins[:chains],
        memory.ends[:chains], memory.alike[:chains], memory.rank[:chains], memory.threads, memory.thread, memory.state,
        memory.available_us[:chains], memory.next_task[:chains], memory.start_us, memory.computed_us[:chains], memory.event_chain,
        memory.event_task, memory.event_us,
    )  # fmt: skip
    begin(run)
    return resume(run, chains, limit), chains


@helper
def _memory(tensors: Any, threads: Any, moments: Any, chains: Any, room: Any) -> Any:
    """Memory for runs of up to so many chains."""
    thread, size = np.zeros(threads.size, np.int64), STATE
    for one in range(threads.size):
        if threads[one] > 1:
            thread[one] = size
            size += threads[one]
    return Run(
        np.empty(chains), moments, np.empty(chains, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(chains, np.int64),
        np.empty(chains, np.int64), np.empty(chains, np.int64), np.empty(chains, np.int64), threads, thread, np.zeros(size), np.empty(chains),
        np.empty(chains, np.int64), np.empty(tensors * room), np.empty(chains), np.empty(chains * room, np.int64),
        np.empty(chains * room, np.int64), np.empty(chains * room),
    )  # fmt: skip


@helper
def _change_option(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    bucket = _below(rng, state.count[0])
    codec, count = tensors.codec[state.last[bucket]], palette.tasks.shape[0]
    option = state.option[_below(rng, state.count[0])] if _uniform(rng) < OTHERS_OPTION else _below(rng, count)
    if option == state.option[bucket] or not palette.fits[codec, option]:
        return False
    state.option[bucket] = option
    _refresh(state, tensors, palette, bucket)
    return True


@helper
def _change_parts(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    bucket, kind = _below(rng, state.count[0]), _below(rng, 4)
    before = state.parts[bucket]
    state.parts[bucket] = (before * 2, before // 2, before + 1, before - 1)[kind]
    _refresh(state, tensors, palette, bucket)
    return state.parts[bucket] != before


@helper
def _change_turn(state: Any, rng: Any) -> Any:
    """A bucket goes just before or just behind another."""
    bucket, other = _below(rng, state.count[0]), _below(rng, state.count[0])
    if bucket == other:
        return False
    turn = state.turn[other] + (1 if _uniform(rng) < 0.5 else 0)
    for one in range(state.count[0]):
        state.turn[one] += 1 if state.turn[one] >= turn else 0
    state.turn[bucket] = turn
    return True


@helper
def _neighbour(state: Any, bucket: Any) -> Any:
    """The bucket that is ready just after this one; itself if none is."""
    for tensor in range(state.last[bucket] + 1, state.of.size):
        if state.last[state.of[tensor]] == tensor:
            return state.of[tensor]
    return bucket


@helper
def _remove(state: Any, bucket: Any, room: Any) -> None:
    """Remove a bucket without tensors: the last bucket takes its number."""
    last = state.count[0] - 1
    state.count[0] = last
    if bucket == last:
        return
    for tensor in range(state.of.size):
        if state.of[tensor] == last:
            state.of[tensor] = bucket
    state.parts[bucket], state.option[bucket], state.turn[bucket] = state.parts[last], state.option[last], state.turn[last]
    state.last[bucket], state.tasks[bucket] = state.last[last], state.tasks[last]
    for task in range(state.tasks[last]):
        own, other = bucket * room + task, last * room + task
        state.resource[own], state.us[own], state.rest[own] = state.resource[other], state.us[other], state.rest[other]


@helper
def _merge(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """Two buckets become one, with the parts of one of them or of both."""
    bucket = _below(rng, state.count[0])
    other = _neighbour(state, bucket) if _uniform(rng) < 0.6 else _below(rng, state.count[0])
    if bucket == other or tensors.codec[state.last[bucket]] != tensors.codec[state.last[other]]:
        return False
    if _uniform(rng) < 0.5:
        bucket, other = other, bucket
    if _uniform(rng) < 0.4:
        state.parts[bucket] += state.parts[other]
    for tensor in range(state.of.size):
        if state.of[tensor] == other:
            state.of[tensor] = bucket
    _refresh(state, tensors, palette, bucket)
    _remove(state, other, palette.tasks.shape[1])
    return True


@helper
def _split(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """A bucket becomes two, at a tensor, or each of its tensors goes to one of them at random."""
    bucket, new = _below(rng, state.count[0]), state.count[0]
    members = 0
    for tensor in range(state.of.size):
        members += state.of[tensor] == bucket
    if members < 2:
        return False
    cut, at_random, place, moved = 1 + _below(rng, members - 1), _uniform(rng) < 0.25, 0, 0
    for tensor in range(state.of.size):
        if state.of[tensor] == bucket:
            leaves = _uniform(rng) < 0.5 if at_random else place < cut
            place += 1
            if leaves:
                state.of[tensor] = new
                moved += 1
    if moved == 0:
        return False
    state.count[0] = new + 1
    state.parts[new], state.option[new] = state.parts[bucket], state.option[bucket]
    if moved == members:  # all have left: the new bucket is the old one
        _refresh(state, tensors, palette, new)
        _remove(state, bucket, palette.tasks.shape[1])
        return False
    if _uniform(rng) < 0.5:
        state.parts[bucket] = max(1, state.parts[bucket] // 2)
        state.parts[new] = state.parts[bucket]
    turn = state.turn[bucket]
    for one in range(new):
        state.turn[one] += 1 if state.turn[one] >= turn else 0
    state.turn[new] = turn
    _refresh(state, tensors, palette, bucket)
    _refresh(state, tensors, palette, new)
    return True


@helper
def _move_tensor(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """A tensor goes to another bucket: most often its bucket's first or last one, to a neighbour."""
    tensor = _below(rng, state.of.size)
    bucket = state.of[tensor]
    if _uniform(rng) < 0.6:
        other = state.of[max(0, tensor - 1)] if _uniform(rng) < 0.5 else state.of[min(state.of.size - 1, tensor + 1)]
    else:
        other = _below(rng, state.count[0])
    if bucket == other or tensors.codec[tensor] != tensors.codec[state.last[other]]:
        return False
    state.of[tensor] = other
    _refresh(state, tensors, palette, other)
    for one in state.of:
        if one == bucket:
            _refresh(state, tensors, palette, bucket)
            return True
    _remove(state, bucket, palette.tasks.shape[1])
    return True


@helper
def _move_several(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """Some of a bucket's tensors, the first or the last ones, go to the bucket that is ready next before or after it, or to any."""
    bucket = _below(rng, state.count[0])
    members = 0
    for tensor in range(state.of.size):
        members += state.of[tensor] == bucket
    if members < 2:
        return False
    count = min(members - 1, int(2.0 ** (_uniform(rng) * np.log2(float(members)))))
    from_end = _uniform(rng) < 0.5
    kind = _uniform(rng)
    other = _below(rng, state.count[0])
    if kind < 0.7 and from_end:
        other = _neighbour(state, bucket)
    elif kind < 0.7:
        other = bucket
        for tensor in range(state.last[bucket] - 1, -1, -1):
            if state.last[state.of[tensor]] == tensor:
                other = state.of[tensor]
                break
    if bucket == other or tensors.codec[state.last[bucket]] != tensors.codec[state.last[other]]:
        return False
    place = 0
    for tensor in range(state.of.size):
        if state.of[tensor] == bucket:
            if (place >= members - count) if from_end else (place < count):
                state.of[tensor] = other
            place += 1
    _refresh(state, tensors, palette, bucket)
    _refresh(state, tensors, palette, other)
    return True


@helper
def _move(state: Any, tensors: Any, palette: Any, rng: Any) -> Any:
    """Make one random move. Returns whether it changed the plan."""
    kind = _uniform(rng)
    if kind < 0.30:
        return _change_option(state, tensors, palette, rng)
    if kind < 0.44:
        return _change_parts(state, tensors, palette, rng)
    if kind < 0.56:
        return _merge(state, tensors, palette, rng)
    if kind < 0.68:
        return _split(state, tensors, palette, rng)
    if kind < 0.80:
        return _move_tensor(state, tensors, palette, rng)
    if kind < 0.94:
        return _move_several(state, tensors, palette, rng)
    return _change_turn(state, rng)


@kernel(
    _RESULT(
        _IN_F64, _IN_F64, _IN_I64, _IN_I64, types.float64, types.float64, I64, _IN_I64_2D, _IN_BOOL_2D, _IN_I64, _IN_F64, _IN_F64_2D, _IN_I64_2D, _IN_F64,
        _IN_I64, _IN_F64, _IN_F64, _I64, _F64, _I64, _I64, _I64, _I64, I64, types.float64, types.float64,
        types.float64,
    )
)  # fmt: skip
def anneal(
    numel: Any, ready: Any, codec: Any, moment: Any, least: Any, most: Any, max_parts: Any, tasks: Any, fits: Any, held: Any, fixed: Any, slope: Any,
    curve: Any, share: Any, first: Any, curve_numel: Any, curve_us: Any, threads: Any, moments: Any, of: Any, parts: Any, option: Any, turn: Any,
    seed: Any, budget: Any, hot: Any, cold: Any,
) -> Any:  # fmt: skip
    """Anneal a plan. Returns the shortest step, the number of its buckets, and the work done, about ``budget``.

    numel to max_parts: ``Tensors``. tasks to curve_us: ``Palette``. threads, moments: see ``descent.descend``.
    of, parts, option, turn: the plan, changed in place; the last three have room for as many buckets as there are tensors. Buckets keep no order.
    seed:      of random numbers, above 0.
    budget:    number of simulated chains (``simulation_work``).
    hot, cold: temperatures at the beginning and at the end, as shares of the step."""
    tensors = Tensors(numel, ready, codec, moment, least, most, max_parts)
    palette = Palette(tasks, fits, held, fixed, slope, curve, share, first, curve_numel, curve_us)
    room, count = tasks.shape[1], of.max() + 1
    state, trial, best = _new_state(of.size, room), _new_state(of.size, room), _new_state(of.size, room)
    state.count[0], state.of[:] = count, of
    state.parts[:count], state.option[:count], state.turn[:count] = parts[:count], option[:count], turn[:count]
    for bucket in range(count):
        _refresh(state, tensors, palette, bucket)
    most_chains = max(MIN_ROOM, MANY_PARTS * state.parts[:count].sum(), of.size)
    memory = _memory(of.size, threads, moments, most_chains, room)
    load = np.zeros(occurring(held))
    rng = np.empty(1, np.uint64)
    rng[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    step, chains = _simulate(state, tensors, memory, room, np.inf)
    _copy(state, best, room)
    shortest, spent = step, _work(chains)
    while spent < budget:
        temperature = step * hot * (cold / hot) ** (spent / budget)
        _copy(state, trial, room)
        changed = _move(trial, tensors, palette, rng)
        if _uniform(rng) < SECOND_MOVE:
            changed = _move(trial, tensors, palette, rng) or changed
        limit = step - temperature * np.log(1.0 - _uniform(rng))
        spent += MOVE_WORK + TENSORS_WORK * of.size
        total = trial.parts[: trial.count[0]].sum()
        if not changed or total > most_chains or _is_hopeless(trial, tensors, threads, room, load, limit):
            continue
        after, chains = _simulate(trial, tensors, memory, room, limit)
        spent += SIMULATION_OVERHEAD + _work(chains) * (1.0 if after <= limit else EARLY_WORK)
        if after <= limit:
            state, trial, step = trial, state, after
            if step < shortest:
                shortest = step
                _copy(state, best, room)
    count = best.count[0]
    of[:] = best.of
    parts[:count], option[:count], turn[:count] = best.parts[:count], best.option[:count], best.turn[:count]
    return shortest, count, spent
