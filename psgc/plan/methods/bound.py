"""Lower bounds on the step, certified over every allowed option.

**For a given bucketing.** Whatever options the buckets have, and whatever the order of tasks, a step T satisfies for every resource r and every
bucket j in order of readiness:

    r works           T >= ready_j + head + sum over b >= j of load_r(b) + tail      all of r's work for buckets that are ready from j on
    the GPU           T >= backward + sum over all b of load_gpu(b) + tail           backward is work of the GPU, too
    one bucket        T >= ready_b + before_r(b) + K load_r(b) + after_r(b)          K parts take turns on r

load, before and after are the times that the bucket's option spends on r (divided by r's number of threads), before its first use of r, and
after its last. head and tail are the minima of before and after over the options that are not ruled out; they count only if every such option uses
r. All terms are linear in the choice of options. So the least T over mixtures of options is a linear programme with 4341 options per bucket. It is
solved over few columns, and the dual prices say which other options would help (column generation). By weak duality, any prices give a valid
bound over all options, whatever the solver's tolerance. An option whose reduced cost lifts the bound over the step of a known plan is ruled out,
which raises heads and tails. At the end, a mixed-integer programme of the remaining options demands one whole option per bucket. Work is counted in
coefficients and in nodes of the search tree, not in time.

**Over all bucketings.** Each tensor pays for its elements the least rate of any bucket size. If every option uses a resource, its work for a tensor
begins after the tensor is ready by at least the time that the smallest part takes before it, and ends before the step does by the time after it. A
run of tensors counts as ready when its first tensor is. Mixtures of options then cover every fusion and every number of parts. The last tensor's
bucket begins after backward, and takes at least as long as its quickest option, in any number of parts, with only that tensor's elements.

Owns the argument and its programmes. Does not know how plans are found.
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
TENSOR_GROUPS: Final = 40  # the bound over all bucketings groups the tensors into at most so many runs
MOST_PARTS: Final = 16  # numbers of parts of the last tensor's bucket that are tried one by one; more parts are bounded together
RELAXED_WORK: Final = 6e7  # for the linear programmes of a bucketing, and again for those over all bucketings
WHOLE_WORK: Final = 2.5e6  # for the mixed-integer programme: (coefficients + NODE_WORK) times nodes of the search tree
NODE_WORK: Final = 1e5
LP_WORK: Final = 100  # work to solve a linear programme, per coefficient
MOST_COEFFICIENTS: Final = 300_000  # of a mixed-integer programme; larger ones are not solved
GAP_RTOL: Final = 1e-4
_SLACK: Final = 1e-6


@dataclass(slots=True)
class Work:
    """The work left for finding a bound: the coefficients priced, and those of programmes times LP_WORK. Work is counted and not timed, so that the
    same plan has the same bound on a busy machine. until: a deadline by ``time.perf_counter``, for searches that do not report the bound."""

    left: float
    until: float = np.inf

    def spend(self, amount: float) -> None:
        self.left -= amount

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or time.perf_counter() > self.until


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the step, in microseconds. given_us: for every plan with these buckets; any_us: for every plan; bound_ms: milliseconds that
    it took to find them."""

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
    """The bucketing of planned buckets, in order of readiness."""
    of = {name: number for number, bucket in enumerate(buckets) for name in bucket.tensors}
    last = {of[tensor.name]: index for index, tensor in enumerate(problem.profile.tensors)}
    order = sorted(last, key=last.__getitem__)
    place = {number: at for at, number in enumerate(order)}
    numbers = [place[of[tensor.name]] for tensor in problem.profile.tensors]
    return bucketing(problem.tensors, numbers, [buckets[number].parts for number in order])


def _sequences(space: Space) -> NDArray[np.int64]:
    """Every option as a row of indices of distinct tasks, padded with the index of an extra task that takes no time."""
    rows = space.rows(np.arange(len(space.graph.options)))
    return np.where(rows < 0, len(space.distinct), rows)


def _uses(space: Space, sequences: NDArray[np.int64]) -> Iterator[NDArray[np.bool_]]:
    """For each resource, whether it does each task of the sequences."""
    for used in holds(np.append(space.resources, len(RESOURCES)), space.held):
        yield used[sequences]


def _allowed(space: Space) -> NDArray[np.bool_]:
    """Whether buckets of each codec (columns) can have each option (rows)."""
    return space.fits(np.arange(len(space.graph.options))).T


class Features(NamedTuple):
    """Microseconds by resource, option and bucket. load: work of the whole bucket on the resource; before, after: time of one part before its first
    and after its last use of the resource, inf if it is not used; chain: all tasks of one part, without the axis of resources."""

    load: F64
    before: F64
    after: F64
    chain: F64


def features(space: Space, buckets: Bucketing) -> Features:
    """The features of every option for these buckets."""
    return _features(space, space.times(buckets.numel / buckets.parts, buckets.codec), buckets.parts)


def _features(space: Space, times: F64, parts: NDArray[np.int64]) -> Features:
    """The features, from the microseconds of distinct tasks (rows) for each bucket's parts (columns). parts: each bucket's number of parts."""
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
    """An inequality: T >= constant + the sum over features and buckets of weights[feature, bucket] times the feature of the bucket's option."""

    constant: float
    weights: F64


class Programme(NamedTuple):
    """All inequalities. constants: by row; weights: by row, feature and bucket; spent: microseconds by feature, option and bucket."""

    constants: F64
    weights: F64
    spent: F64

    def columns(self, option: NDArray[np.int64], bucket: NDArray[np.int64]) -> F64:
        """The coefficients (rows) of these pairs of option and bucket (columns); the last column is that of -T."""
        made = np.einsum("kfc,fc->kc", self.weights[:, :, bucket], self.spent[:, option, bucket])
        return np.concatenate([made, np.full((len(made), 1), -1.0)], axis=1)

    def one_each(self, bucket: NDArray[np.int64]) -> F64:
        """The equations that give each bucket one option."""
        chosen = (bucket[None, :] == np.arange(self.spent.shape[2])[:, None]).astype(float)
        return np.concatenate([chosen, np.zeros((len(chosen), 1))], axis=1)


def programme(found: Features, buckets: Bucketing, backward_us: float, allowed: NDArray[np.bool_]) -> Programme:
    """The inequalities of the module's text, with heads and tails taken over the allowed options."""
    routes = np.where(np.isfinite(found.before), found.load + found.before + found.after, 0.0)
    spent = np.concatenate([found.load, routes, found.chain[None]])
    rows = [*_of_resources(found, buckets, allowed, spent.shape[0]), *_of_buckets(found, buckets, spent.shape[0])]
    tail = min(float(np.where(allowed, found.after[GPU], np.inf).min()), float(np.where(allowed, found.chain, np.inf)[:, -1].min()))
    weights = np.zeros((spent.shape[0], len(buckets.parts)))
    weights[GPU] = 1.0
    rows.append(Row(backward_us + tail, weights))
    return Programme(np.array([row.constant for row in rows]), np.array([row.weights for row in rows]), spent)


def _of_resources(found: Features, buckets: Bucketing, allowed: NDArray[np.bool_], features: int) -> Iterator[Row]:
    """The first two inequalities: all work of a resource for the buckets from one on."""
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
    """The third inequality: one bucket's chain, and the resources on which its parts take turns."""
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
    """The solution for given buckets. bound_us: valid for every choice of options; reduced: reduced costs, by which the bound rises at least if a
    bucket (columns) takes an option (rows), infinite if that is ruled out; options: those of the integer solution, None if none was found."""

    bound_us: float
    reduced: F64
    options: NDArray[np.int64] | None


def given_buckets(problem: Problem, space: Space, buckets: Bucketing, step_us: float) -> float:
    """The bound over every choice of options for these buckets; about ``step_us`` if no choice is better."""
    return solve_given(problem, space, buckets, step_us).bound_us


def solve_given(problem: Problem, space: Space, buckets: Bucketing, step_us: float, until: float = np.inf) -> Solved:
    """Solve the programme for these buckets. step_us: the step of a known choice of options; until: see ``Work``."""
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
    """bound: valid for all options; reduced: by how much it rises at least if a bucket takes an option."""

    bound: float
    reduced: F64


def _relaxed(made: Programme, allowed: NDArray[np.bool_], work: Work) -> Relaxed:
    """The least T over mixtures of options, or the best bound that the work was enough to prove."""
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
    """The bound with one whole option per bucket, as far as it is proved within the limit on the search tree's nodes, and the best solution's options.

    The plan that takes ``step_us`` is a solution of the programme. If the solver reports that there is none, the solver is wrong, and its results are
    discarded."""
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
        selected = np.flatnonzero(solved.x[:-1] > 0.5)
        chosen[bucket[selected]] = option[selected]
    return min(float(bound) * (1 - _SLACK), step_us), chosen


def _undominated(made: Programme, allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each bucket, the allowed options that no other option dominates in the features that the inequalities use."""
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
    """Set ``dominated`` to whether an earlier row, itself not dominated, dominates each row. Rows are sorted by their sums."""
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
    """The bound over every fusion, number of parts and choice of options."""
    tensors = problem.tensors
    sizes = tensors.numel
    group = np.minimum((np.cumsum(sizes) - sizes) * TENSOR_GROUPS // sizes.sum(), TENSOR_GROUPS - 1).astype(np.int64)
    # one column for each group and codec, ready when the group's first tensor is
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
    """Lower bound on the time of the last tensor's bucket, alone, after backward, in any number of parts. rates: microseconds per element by
    resource, option and codec; least: the features of the quickest part of any size."""
    numel, codec = problem.tensors.numel[-1], int(problem.tensors.codec[-1])
    parts = np.arange(1, MOST_PARTS + 1)
    found = _features(space, space.least_times(numel / parts, np.full(MOST_PARTS, codec)), parts)
    turns = np.where(np.isfinite(found.before), found.before + found.load + found.after, 0.0).max(axis=0)
    finer = np.maximum(least.chain[:, codec], (rates[:, :, codec] * numel).max(axis=0))  # in more parts than MOST_PARTS
    every = np.minimum(np.maximum(found.chain, turns).min(axis=1), finer)
    return float(every[allowed[:, codec]].min())
