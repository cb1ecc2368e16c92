"""Lower bounds on the step, certified over every allowed option.

**Given the bucketing.** However the buckets' options are chosen and whatever order tasks take, of a step T hold, for every resource r and
every bucket j in order of readiness:

    r works           T >= ready_j + head + sum over b >= j of load_r(b) + tail      all of r's work for buckets that are ready from j on
    the GPU           T >= backward + sum over all b of load_gpu(b) + tail           backward is work of the GPU, too
    one bucket        T >= ready_b + before_r(b) + K load_r(b) + after_r(b)          K parts take turns on r

load, before and after are what the bucket's option spends on r (of r's threads, if it has several, each a share), before its first use of r and
after its last; head and tail are the
least of before and after over the options that are not ruled out, where every bucket must use r for some j. All are linear in which option each
bucket takes. So the least T, with options mixed at will, is a linear programme over 4341 options a bucket: it is solved over few columns,
and the dual prices say which other options would help (column generation). By weak duality any prices give a valid bound over
all options, whatever the solver's tolerance. An option whose price alone lifts the bound over a step that is known to be possible is ruled
out, which raises heads and tails; at last options are made whole again (a mixed-integer programme of those that are left). Work is counted, not
timed: coefficients, and nodes of the search tree.

**Over all bucketings.** Each tensor pays for its elements the least rate of any bucket size. A resource that every option uses can begin no
earlier after a tensor is ready, and be done no later before the step is, than the least part takes before and after it. Runs of tensors are
ready when their first is. Mixtures of options then cover every fusion and every cut. The last tensor's bucket begins after backward, and
takes what its quickest option takes in any number of parts, with no more elements than that tensor.

Owns the argument and its programmes; knows nothing of how plans are found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from psgc.codecs.jit.kernel import kernel
from psgc.plan.inputs.profile import F64
from psgc.plan.local_search.space import Space, holds
from psgc.plan.methods.solver import quiet, solver
from psgc.plan.model.bucketing import Bucketing, bucketing
from psgc.plan.model.costs import GPU, RESOURCES
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem

MAX_PRUNING_ROUNDS: Final = 3
TENSOR_GROUPS: Final = 40  # of tensors, in the bound over all bucketings
MOST_PARTS: Final = 16  # of the last tensor's bucket, one by one; more are bounded together
RELAXED_WORK: Final = 6e7  # for programmes with options mixed, and as much over all bucketings
WHOLE_WORK: Final = 2.5e6  # for making options whole: coefficients, and NODE_WORK, times nodes of the search tree
NODE_WORK: Final = 1e5
LP_WORK: Final = 100  # a programme's solution, for each of its coefficients
MOST_COEFFICIENTS: Final = 300_000  # of a programme whose options are made whole
GAP_RTOL: Final = 1e-4
_SLACK: Final = 1e-6


@dataclass(slots=True)
class Work:
    """What finding a bound may still cost: coefficients priced, and those of programmes times LP_WORK. Counted rather than timed, so that the
    same plan has the same bound on a busy machine. until: the moment on the clock at which a search ends, whose programmes are not reported."""

    left: float
    until: float = np.inf

    def spend(self, amount: float) -> None:
        self.left -= amount

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or time.perf_counter() > self.until


@dataclass(frozen=True, slots=True)
class Bounds:
    """In this model, microseconds. given_us: of every plan with these buckets; any_us: of every plan; bound_ms: how long finding them took."""

    given_us: float
    any_us: float
    bound_ms: float


def lower_bounds(problem: Problem, buckets: Sequence[PlannedBucket], step_us: float) -> Bounds:
    """Bounds for a plan that takes ``step_us`` with these buckets."""
    begun = time.perf_counter()
    space = Space(problem)
    any_us = over_all_bucketings(problem, space)
    given_us = max(any_us, given_buckets(problem, space, bucketing_of(problem, buckets), step_us))
    return Bounds(given_us, any_us, (time.perf_counter() - begun) * 1e3)


def bucketing_of(problem: Problem, buckets: Sequence[PlannedBucket]) -> Bucketing:
    """Sizes, cuts and readiness of planned buckets, in order of readiness."""
    of = {name: number for number, bucket in enumerate(buckets) for name in bucket.tensors}
    last = {of[tensor.name]: index for index, tensor in enumerate(problem.profile.tensors)}
    order = sorted(last, key=last.__getitem__)
    place = {number: at for at, number in enumerate(order)}
    numbers = [place[of[tensor.name]] for tensor in problem.profile.tensors]
    return bucketing(problem.tensors, numbers, [buckets[number].parts for number in order])


def _sequences(space: Space) -> NDArray[np.int64]:
    """Every option as a row of numbers of distinct tasks. Behind them stands a task that takes no time."""
    rows = space.rows(np.arange(len(space.graph.options)))
    return np.where(rows < 0, len(space.distinct), rows)


def _uses(space: Space, sequences: NDArray[np.int64]) -> Iterator[NDArray[np.bool_]]:
    """Of each resource, which tasks of the sequences it does."""
    for used in holds(np.append(space.resources, len(RESOURCES)), space.held):
        yield used[sequences]


def _allowed(space: Space) -> NDArray[np.bool_]:
    """Which options (rows) buckets of each codec (columns) can have."""
    return space.fits(np.arange(len(space.graph.options))).T


class Features(NamedTuple):
    """Of each option and bucket, microseconds: load, before and after by resource, each of a whole bucket, one part and one part; inf where
    the resource is not used. chain: all tasks of one part."""

    load: F64
    before: F64
    after: F64
    chain: F64


def features(space: Space, buckets: Bucketing) -> Features:
    """Arrays of resources (but for ``chain``), options and buckets."""
    return _features(space, space.times(buckets.numel / buckets.parts, buckets.codec), buckets.parts)


def _features(space: Space, times: F64, parts: NDArray[np.int64]) -> Features:
    """times: of distinct tasks and buckets' parts; parts: of each bucket."""
    times = np.concatenate([times, np.zeros((1, times.shape[1]))])
    sequences = _sequences(space)
    spent = times[sequences]
    until = np.cumsum(spent, axis=1)
    chain = until[:, -1]
    shape = (space.held, *chain.shape)
    load, before, after = np.zeros(shape), np.full(shape, np.inf), np.full(shape, np.inf)
    rows = np.arange(len(sequences))
    for one, used in enumerate(_uses(space, sequences)):
        load[one] = np.einsum("ot,otb->ob", used.astype(float), spent) * parts / space.threads[one]
        some = used.any(axis=1)
        first, last = used.argmax(axis=1), used.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
        before[one][some] = (until[rows, first] - spent[rows, first])[some]
        after[one][some] = (chain - until[rows, last])[some]
    return Features(load, before, after, chain)


class Row(NamedTuple):
    """T >= constant + sum over buckets of weights[feature, bucket] times what the bucket's option spends."""

    constant: float
    weights: F64


class Programme(NamedTuple):
    """Rows together: constants by row; weights by row, feature and bucket; spent by feature, option and bucket."""

    constants: F64
    weights: F64
    spent: F64

    def columns(self, option: NDArray[np.int64], bucket: NDArray[np.int64]) -> F64:
        """Coefficients of these options for these buckets: rows and columns, the last that of -T."""
        made = np.einsum("kfc,fc->kc", self.weights[:, :, bucket], self.spent[:, option, bucket])
        return np.concatenate([made, np.full((len(made), 1), -1.0)], axis=1)

    def one_each(self, bucket: NDArray[np.int64]) -> F64:
        """The equations that give each bucket one option."""
        chosen = (bucket[None, :] == np.arange(self.spent.shape[2])[:, None]).astype(float)
        return np.concatenate([chosen, np.zeros((len(chosen), 1))], axis=1)


def programme(found: Features, buckets: Bucketing, backward_us: float, allowed: NDArray[np.bool_]) -> Programme:
    """The inequalities of the module's text, with heads and tails over the allowed options."""
    routes = np.where(np.isfinite(found.before), found.load + found.before + found.after, 0.0)
    spent = np.concatenate([found.load, routes, found.chain[None]])
    rows = [*_of_resources(found, buckets, allowed, spent.shape[0]), *_of_buckets(found, buckets, spent.shape[0])]
    tail = min(float(np.where(allowed, found.after[GPU], np.inf).min()), float(np.where(allowed, found.chain, np.inf)[:, -1].min()))
    weights = np.zeros((spent.shape[0], len(buckets.parts)))
    weights[GPU] = 1.0
    rows.append(Row(backward_us + tail, weights))
    return Programme(np.array([row.constant for row in rows]), np.array([row.weights for row in rows]), spent)


def _of_resources(found: Features, buckets: Bucketing, allowed: NDArray[np.bool_], features: int) -> Iterator[Row]:
    """All of a resource's work for the buckets that are ready from one on."""
    before, after = (np.where(allowed, times, np.inf).min(axis=1) for times in (found.before, found.after))  # by resource and bucket
    always = np.all(np.isfinite(found.before) | ~allowed, axis=1)
    for one in range(1, len(found.load)):
        if not found.load[one].any():
            continue
        for j in range(len(buckets.parts)):
            if j and buckets.ready_us[j] == buckets.ready_us[j - 1]:
                continue
            constant = buckets.ready_us[j]
            if always[one, j:].any():
                constant = (before[one, j:] + buckets.ready_us[j:]).min() + after[one, j:].min()
            weights = np.zeros((features, len(buckets.parts)))
            weights[one, j:] = 1.0
            yield Row(float(constant), weights)


def _of_buckets(found: Features, buckets: Bucketing, features: int) -> Iterator[Row]:
    """One bucket's chain, and its use of each resource that its parts take turns on."""
    for b, parts in enumerate(buckets.parts):
        for feature in range(len(found.load), features - 1) if parts > 1 else ():
            if found.load[feature - len(found.load)].any():
                weights = np.zeros((features, len(buckets.parts)))
                weights[feature, b] = 1.0
                yield Row(float(buckets.ready_us[b]), weights)
        weights = np.zeros((features, len(buckets.parts)))
        weights[-1, b] = 1.0
        yield Row(float(buckets.ready_us[b]), weights)


class Solved(NamedTuple):
    """The programme of given buckets. bound_us: valid over every choice of options; reduced: by how much it rises at least if a bucket
    (columns) takes an option (rows), infinite where it is ruled out; options: the integer solution's, None if none was found."""

    bound_us: float
    reduced: F64
    options: NDArray[np.int64] | None


def given_buckets(problem: Problem, space: Space, buckets: Bucketing, step_us: float) -> float:
    """The bound over every choice of options for these buckets; about ``step_us`` where none is better."""
    return solve_given(problem, space, buckets, step_us).bound_us


def solve_given(problem: Problem, space: Space, buckets: Bucketing, step_us: float, until: float = np.inf) -> Solved:
    """The programme solved for these buckets, of which a choice with ``step_us`` is known. until: as ``Work`` has it."""
    work = Work(RELAXED_WORK, until)
    found = features(space, buckets)
    allowed = _allowed(space)[:, buckets.codec]
    best, reduced = 0.0, np.where(allowed, 0.0, np.inf)
    for _ in range(MAX_PRUNING_ROUNDS):
        made = programme(found, buckets, problem.profile.backward_us, allowed)
        relaxed = _relaxed(made, allowed, work)
        if relaxed.bound > best:
            best, reduced = relaxed.bound, np.where(allowed, relaxed.reduced, np.inf)
        if best >= step_us * (1 - GAP_RTOL) or work.is_spent:
            return Solved(best, reduced, None)
        left = allowed & (relaxed.bound + relaxed.reduced <= step_us + _SLACK)
        if left.sum() == allowed.sum():
            break
        allowed = left
    made = programme(found, buckets, problem.profile.backward_us, allowed)
    whole, options = _whole(made, allowed, step_us, until)
    return Solved(max(best, whole), reduced, options)


class Relaxed(NamedTuple):
    """bound: valid over all options; reduced: by how much it rises if a bucket takes an option."""

    bound: float
    reduced: F64


def _relaxed(made: Programme, allowed: NDArray[np.bool_], work: Work) -> Relaxed:
    """The least T with options mixed, or the best bound proved with this work."""
    buckets = np.arange(allowed.shape[1])
    weights = np.full(len(made.constants), 1 / len(made.constants))
    used = np.zeros(allowed.shape, bool)
    best = Relaxed(-np.inf, np.zeros(allowed.shape))
    while True:
        prices = np.where(allowed, np.einsum("fb,fob->ob", np.tensordot(weights, made.weights, 1), made.spent), np.inf)
        least = prices.min(axis=0)
        bound = float(weights @ made.constants + least.sum())
        if bound > best.bound:
            best = Relaxed(bound, prices - least)
        cheapest = prices.argmin(axis=0)
        work.spend(made.spent.size)
        if used[cheapest, buckets].all() or work.is_spent:
            return best
        used[cheapest, buckets] = True
        option, bucket = np.nonzero(used)
        columns = made.columns(option, bucket)
        work.spend(LP_WORK * columns.size)
        objective = np.zeros(columns.shape[1])
        objective[-1] = 1.0
        with quiet():
            solved = solver().linprog(objective, columns, -made.constants, made.one_each(bucket), np.ones(len(buckets)), method="highs")
        if solved.status or solved.fun - best.bound <= GAP_RTOL * solved.fun:
            return best
        weights = np.maximum(-solved.ineqlin.marginals, 0.0)
        weights /= weights.sum()


def _whole(made: Programme, allowed: NDArray[np.bool_], step_us: float, until: float) -> tuple[float, NDArray[np.int64] | None]:
    """The bound with one whole option for each bucket, as far as it is proved within the search tree's nodes, and the best solution's options.

    The programme admits the plan that takes ``step_us``, so it has a solution. Should the solver report that it has none, the solver is
    wrong, and nothing that it found counts."""
    option, bucket = _undominated(made, allowed)
    if len(option) * len(made.constants) > MOST_COEFFICIENTS:
        return 0.0, None
    columns = made.columns(option, bucket)
    objective = np.zeros(columns.shape[1])
    objective[-1] = 1.0
    nodes = 1 + int(WHOLE_WORK / (columns.size + NODE_WORK))
    optimize, most_us = solver(), step_us * (1 + _SLACK)
    limit = {"time_limit": max(0.0, until - time.perf_counter())} if np.isfinite(until) else {}
    with quiet():
        solved = optimize.milp(
            objective, integrality=1 - objective, bounds=optimize.Bounds(0, np.append(np.ones(len(option)), most_us)),
            constraints=[optimize.LinearConstraint(columns, ub=-made.constants), optimize.LinearConstraint(made.one_each(bucket), 1, 1)],
            options={"node_limit": nodes, "mip_rel_gap": GAP_RTOL} | limit,
        )  # fmt: skip
    bound, chosen = solved.mip_dual_bound, None
    ended_early = solved.status == 4 and solved.mip_node_count is not None and solved.mip_node_count >= nodes  # scipy has no name for it
    if not (solved.status in (0, 1) or ended_early) or bound is None or not np.isfinite(bound):
        return 0.0, None
    if solved.x is not None:
        chosen = np.empty(allowed.shape[1], np.int64)
        taken = np.flatnonzero(solved.x[:-1] > 0.5)
        chosen[bucket[taken]] = option[taken]
    return min(float(bound) * (1 - _SLACK), step_us), chosen


def _undominated(made: Programme, allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each bucket, the allowed options that no other one dominates in the features that rows use."""
    asked: NDArray[np.bool_] = np.any(made.weights != 0, axis=0)  # by feature and bucket
    options, buckets = [], []
    for b in range(allowed.shape[1]):
        left = np.nonzero(allowed[:, b])[0]
        costs = made.spent[asked[:, b]][:, left, b].T
        order = costs.sum(axis=1).argsort(kind="stable")
        dominated = np.empty(len(left), bool)
        _dominated(np.ascontiguousarray(costs[order]), dominated)
        options.append(left[order[~dominated]])
        buckets.append(np.full(len(options[-1]), b))
    return np.concatenate(options), np.concatenate(buckets)


@kernel(types.void(types.Array(types.float64, 2, "C", readonly=True), types.Array(types.boolean, 1, "C")))
def _dominated(costs: Any, dominated: Any) -> None:
    """Whether each row is dominated by one before it that is not dominated. Rows are sorted by their sums."""
    options, asked = costs.shape
    for option in range(options):
        dominated[option] = False
        for other in range(option):
            if not dominated[other]:
                feature = 0
                while feature < asked and costs[other, feature] <= costs[option, feature]:
                    feature += 1
                if feature == asked:
                    dominated[option] = True
                    break


def over_all_bucketings(problem: Problem, space: Space) -> float:
    """The bound over every fusion, cut and choice of options."""
    tensors = problem.tensors
    sizes = tensors.numel
    group = np.minimum((np.cumsum(sizes) - sizes) * TENSOR_GROUPS // sizes.sum(), TENSOR_GROUPS - 1).astype(np.int64)
    # of each group and codec one column, as ready as the group's first tensor
    columns, of = np.unique(group * len(space.codecs) + tensors.codec, return_inverse=True)
    numel, codec = np.bincount(of, sizes), columns % len(space.codecs)
    begins = np.nonzero(np.diff(group, prepend=-1))[0]
    ready = tensors.ready_us[begins][np.searchsorted(group[begins], columns // len(space.codecs))]
    sequences = _sequences(space)
    rates = np.concatenate([space.least_us_per_element(), np.zeros((1, len(space.codecs)))])[sequences]
    uses = zip(_uses(space, sequences), space.threads, strict=False)
    loads = np.array([np.einsum("ot,otk->ok", used.astype(float), rates) / threads for used, threads in uses])
    allowed = _allowed(space)
    least = _features(
        space, space.least_times(np.ones(len(space.codecs)), np.arange(len(space.codecs))), np.ones(len(space.codecs), np.int64)
    )
    always = np.all(np.isfinite(least.before) | ~allowed, axis=(1, 2))  # whether every bucket uses the resource
    around = np.zeros(space.held)  # before the first and after the last use of a resource, at least
    for one in np.flatnonzero(always).tolist():
        before, after = (np.where(allowed, times[one], np.inf).min() for times in (least.before, least.after))
        around[one] = before + after
    constants, weights = [problem.profile.backward_us], [np.zeros((space.held, len(numel)))]
    weights[0][GPU] = 1.0
    for one in range(1, space.held):
        for j in range(len(numel)) if loads[one].any() else ():
            constants.append(float(ready[j] + around[one]))
            weights.append(np.zeros_like(weights[0]))
            weights[-1][one, j:] = 1.0
    made = Programme(np.array(constants), np.array(weights), loads[:, :, codec] * numel)
    mixed = _relaxed(made, allowed[:, codec], Work(RELAXED_WORK)).bound
    return max(mixed, problem.profile.backward_us + _last_bucket(problem, space, loads, least, allowed))


def _last_bucket(problem: Problem, space: Space, rates: F64, least: Features, allowed: NDArray[np.bool_]) -> float:
    """What the bucket of the last tensor takes at least, alone, after backward, in any number of parts. rates: microseconds an element of each
    resource, option and codec; least: of parts of any size."""
    numel, codec = problem.tensors.numel[-1], int(problem.tensors.codec[-1])
    parts = np.arange(1, MOST_PARTS + 1)
    found = _features(space, space.least_times(numel / parts, np.full(MOST_PARTS, codec)), parts)
    turns = np.where(np.isfinite(found.before), found.before + found.load + found.after, 0.0).max(axis=0)
    finer = np.maximum(least.chain[:, codec], (rates[:, :, codec] * numel).max(axis=0))  # in more parts than MOST_PARTS
    every = np.minimum(np.maximum(found.chain, turns).min(axis=1), finer)
    return float(every[allowed[:, codec]].min())
