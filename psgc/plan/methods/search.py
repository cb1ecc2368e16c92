"""psgc's own method: fusion, cuts and every bucket's option, chosen together.

For each of a few bucketings the options that are cheapest at some mixture of prices (``space``) become candidates, and coordinate descent on the
timeline chooses among them (``descent``). Bucketings are tried from coarse to fine. Then the best one is improved by moves: buckets cut
otherwise, merged and split, each time with candidates from all options again, until no move helps or the budget is spent. Of small jobs every
fusion is tried. ``anytime`` goes on from there for as long as the user gives it; ``bound`` says how far from the best a plan may be.

The constants were chosen on the six published traces and on random jobs of ``benchmarks/planning_rivals.py`` with seeds from 100,000 on; the
benchmark's own jobs are others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.plan.inputs.profile import F64
from psgc.plan.methods.baselines import tensors_choices
from psgc.plan.methods.descent import descend, simplify
from psgc.plan.methods.result import Found
from psgc.plan.methods.space import OptionTable, Space
from psgc.plan.model.bucketing import (
    MAX_PARTS,
    Bucketing,
    Kinds,
    bucketing,
    each_alone,
    every_fusion,
    fused,
    kinds_of,
    merged,
    parts_of,
    split,
)  # fmt: skip
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

PRICE_MIXTURES: Final = 48  # for each size
EXHAUSTIVE_MAX_TENSORS: Final = 4  # every fusion of so many is tried
SMALL_JOB_MAX_TENSORS: Final = 12  # of so many every bucket is changed one by one
RIVALS_MAX_TENSORS: Final = 24  # for so many other systems' choices cost less than a millisecond
TAPER: Final = 0.25  # of the elements still to come, the share that a bucket may hold
UNFUSED_MAX_TENSORS: Final = 512  # so many are also tried without fusion
MANY_TENSORS: Final = 64  # for more, a number of parts between two that were tried is tried, too
MAX_SIMULATIONS: Final = 400  # of one bucketing
SIMULATION_BUDGET: Final = 3_500  # of one bucketing: simulations times their chains
MOVE_BUDGET: Final = 200  # of one move, likewise
MOVES_BUDGET: Final = 1_500  # of all moves: each costs as many as the plan has chains, and
MOVE_OVERHEAD: Final = 20
LARGE_BUDGET: Final = 600  # the same for larger jobs
REFUND: Final = 3  # times its cost, what a move that gains more than CONVERGED_RTOL adds to the budget
SIZE_STEP_BITS: Final = 2  # candidates are shared by sizes within a factor of four
SMALLEST_SIZE_BITS: Final = 10  # and by all sizes up to this power of two
MAX_TOTAL_PARTS: Final = 48  # nothing finer is tried
CONVERGED_RTOL: Final = 2e-3  # of the step, what is not worth a search
REFINE_MIN_GAIN: Final = 1e-2  # for which twice as many parts are tried
COARSEST_PARTS: Final = 8  # of a model
OF_ALL_KINDS: Final = 4  # kinds of parts whose candidates are all options but dominated ones
BOTH, ONE_BY_ONE = True, False  # phases of a descent


class Chosen(NamedTuple):
    """A bucketing with an option for each bucket, by its number (``space``). objective: the step, and a little of the mean completion."""

    step_us: float
    objective: float
    bucketing: Bucketing
    options: Ints


@functools.cache
def mixtures(resources: int) -> F64:
    """Prices of the resources, a column each: each resource alone, all alike, and mixtures over orders of magnitude."""
    spread = np.random.default_rng(1).dirichlet(np.full(resources, 0.35), PRICE_MIXTURES - resources - 1)
    alone = np.eye(resources) + 1e-3  # of options that do not use a resource, the one that uses least of the others
    return np.concatenate([alone, np.ones((1, resources)), spread]).T.copy()


class Candidates(NamedTuple):
    """The options worth trying for parts of a kind. cheapest: at each mixture of prices; options: those and the next ones, without
    duplicates; known: of all options, whether each is among them."""

    cheapest: Ints
    options: Ints
    known: NDArray[np.bool_]


@dataclass
class Search:
    """One problem's search. Keeps the best plan that it has seen. candidates_of: by codec's number and size, as a power of two."""

    problem: Problem
    space: Space
    best: Chosen | None = None
    candidates_of: dict[tuple[int, int], Candidates] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many candidates a mixture of prices gives. The best option of one of a few buckets may be cheapest at no prices, above all
        where few resources can be traded for one another."""
        flat = min(self.problem.cluster.nodes, self.problem.cluster.gpus_per_node) == 1
        return 4 if flat else 2

    def find_candidates(self, kinds: Iterable[tuple[int, int]]) -> None:
        """Price all options for parts of these codecs and sizes (powers of two), and keep the cheapest at each mixture of prices."""
        wanted = [kind for kind in kinds if kind not in self.candidates_of]
        if wanted:
            codec, size = (np.array(column) for column in zip(*wanted, strict=True))
            loads = self.space.loads(self.space.times(np.exp2(size), codec))  # resources, atoms, kinds
            prices = mixtures(loads.shape[0])
            costs = np.tensordot(loads, prices, (0, 0))
            costs[~self.space.may_take[codec].T] = np.inf
            found = self.space.shortest(costs.reshape(len(costs), -1), self.ranks)[1]
            for kind, options in zip(wanted, found.reshape(len(wanted), -1, self.ranks), strict=True):
                every = self.space.unique(options[options >= 0])
                known = np.zeros(len(self.space.graph.options), bool)
                known[every] = True
                self.candidates_of[kind] = Candidates(options[:, 0], every, known)

    def candidates(self, kinds: Kinds, of_all: int = 0) -> list[Candidates]:
        """The candidates for parts of each of these kinds. of_all: for so many of the largest, all options but dominated ones."""
        bits = np.maximum(SIZE_STEP_BITS * np.round(np.log2(kinds.sizes) / SIZE_STEP_BITS), SMALLEST_SIZE_BITS).astype(np.int64).tolist()
        keys = list(zip(kinds.codec.tolist(), bits, strict=True))
        self.find_candidates(dict.fromkeys(keys))
        found = [self.candidates_of[key] for key in keys]
        for at in np.argsort(-kinds.sizes, kind="stable")[:of_all].tolist():
            known = found[at].known.copy()
            known[self.space.undominated(float(kinds.sizes[at]), int(kinds.codec[at]), by_links=True)] = True
            found[at] = Candidates(found[at].cheapest, np.flatnonzero(known), known)
        return found

    def choose(self, buckets: Bucketing, start: Ints | None = None, *, of_all: int = 0) -> Chosen:
        """The best options for these buckets that descent finds from ``start``, or else from the cheapest at each mixture of prices."""
        buckets = self.cut(buckets)
        kinds = kinds_of(buckets)
        found = self.candidates(kinds, of_all)
        options = self.space.unique(np.concatenate([one.options for one in found] + ([] if start is None else [start])))
        fits = np.array([one.known[options] for one in found])
        starts = np.array([one.cheapest for one in found]).T[:, kinds.of] if start is None else start[None]
        return self.descend(buckets, options, kinds, fits, starts, min(SIMULATION_BUDGET, MAX_SIMULATIONS * int(buckets.parts.sum())))

    def restart(self) -> None:
        """Descend once more for the best buckets, from no compression."""
        assert self.best is not None
        plain = self.space.graph.plain
        if not len(plain):
            return
        here = self.best
        buckets = self.cut(here.bucketing)
        kinds = kinds_of(buckets)
        found = self.candidates(kinds, OF_ALL_KINDS)
        options = self.space.unique(np.concatenate([*(one.options for one in found), plain, here.options]))
        fits = np.array([one.known[options] for one in found])
        starts = np.repeat(plain[:, None], len(buckets.parts), axis=1)
        order = np.argsort(-buckets.numel, kind="stable")
        self.descend(buckets, options, kinds, fits, starts, SIMULATION_BUDGET, order, ONE_BY_ONE)

    def move(self, buckets: Bucketing, start: Ints, changed: Ints, budget: int = MOVE_BUDGET) -> Chosen:
        """The best options for these buckets from ``start`` where only the ``changed`` ones (numbers) take others, of all options."""
        buckets = self.cut(buckets)
        kinds = kinds_of(buckets)
        of_changed = np.unique(kinds.of[changed])
        only = Kinds(kinds.sizes[of_changed], kinds.codec[of_changed], kinds.of)
        found = self.candidates(only)
        options = self.space.unique(np.concatenate([one.options for one in found] + [start]))
        fits = np.zeros((len(kinds.sizes), len(options)), bool)
        fits[of_changed] = [one.known[options] for one in found]
        return self.descend(buckets, options, kinds, fits, start[None], budget, changed, ONE_BY_ONE)

    def among(self, buckets: Bucketing, start: Ints, budget: int = SIMULATION_BUDGET // 4) -> Chosen:
        """The best options for these buckets that descent finds from ``start`` among those in it; ``start`` itself if ``budget`` is 0."""
        buckets = self.cut(buckets)
        options, kinds = self.space.unique(start), kinds_of(buckets)
        return self.descend(buckets, options, kinds, self.space.fits(options)[kinds.codec], start[None], budget)

    def cut(self, buckets: Bucketing) -> Bucketing:
        """With parts that a job can have, if the plan is to be run."""
        return buckets.at_blocks() if self.problem.constraints.runtime else buckets

    def descend(
        self, buckets: Bucketing, options: Ints, kinds: Kinds, fits: NDArray[np.bool_], starts: Ints, budget: int,
        order: Ints | None = None, phases: bool = BOTH,
    ) -> Chosen:  # fmt: skip
        """Coordinate descent. fits: as ``descent`` takes it; starts: rows of options; budget: simulations, times their chains; order: of
        the buckets that are changed one by one."""
        parts, table = parts_of(buckets), self.table(options, kinds)
        order = self.order(buckets) if order is None else order
        choice = np.zeros(len(buckets.parts), np.int64)
        simulations = budget // len(parts.ready_us)
        starts = self.space.positions(options, starts)
        step, objective, _ = descend(*parts, kinds.of, fits, *table, self.space.threads, starts, order, choice, simulations, phases)
        made = Chosen(step, objective, buckets, options[choice])
        if self.best is None or made.objective < self.best.objective:
            self.best = made
        return made

    def order(self, buckets: Bucketing) -> Ints:
        """In which buckets are changed one by one: the largest first where the budget is too small for all, else the last ready first."""
        if len(buckets.of) > SMALL_JOB_MAX_TENSORS:
            return np.argsort(-buckets.numel, kind="stable")
        return np.arange(len(buckets.parts))[::-1].copy()

    def table(self, options: Ints, kinds: Kinds) -> OptionTable:
        """The options' tasks for parts of each kind; -1 as the beginning of those that parts of this kind cannot have."""
        made = self.space.table(options, kinds.sizes, kinds.codec)
        made.first[~self.space.fits(options)[kinds.codec]] = -1
        return made

    def simplify(self) -> None:
        """Remove encodings that do not shorten the step."""
        assert self.best is not None
        plain, buckets = self.space.graph.plain, self.best.bucketing
        options, kinds = self.space.unique(np.concatenate([plain, self.best.options])), kinds_of(buckets)
        choice = self.space.positions(options, self.best.options)
        step = simplify(*parts_of(buckets), kinds.of, *self.table(options, kinds), self.space.threads, len(plain), choice)
        self.best = Chosen(step, self.best.objective, buckets, options[choice])

    @functools.cached_property
    def least_us(self) -> float:
        """A lower bound on the step: backward, and then the quickest option for the smallest part of what is ready last."""
        tensors = self.problem.tensors
        last = np.flatnonzero(tensors.ready_us == tensors.ready_us[-1])
        times = self.space.times(tensors.numel[last] / MAX_PARTS, tensors.codec[last])
        costs = self.space.loads(times).max(axis=0)
        costs[~self.space.may_take[tensors.codec[last]].T] = np.inf
        return float(tensors.ready_us[-1] + self.space.shortest(costs)[0].min())

    @property
    def is_done(self) -> bool:
        """Whether the best plan is as good as the lower bound."""
        return self.best is not None and self.best.step_us <= self.least_us * (1 + CONVERGED_RTOL)

    def of_parts(self, count: float) -> Chosen:
        """The best choice with the model in about so many parts, from that of the best bucketing so far."""
        return self.go_on(fused(self.problem.tensors, self.problem.profile.numel / count, TAPER))

    def go_on(self, buckets: Bucketing) -> Chosen:
        """The best choice for these buckets, from the options of the best plan so far for the same tensors."""
        if self.best is None:
            return self.choose(buckets)
        return self.choose(buckets, self.best.options[self.best.bucketing.of[buckets.last]])

    def refine(self) -> None:
        """Try the model in ever more parts, as long as that shortens the step enough; then, where few parts are best of many tensors, in a
        number between the last two, and its buckets uncut."""
        count, before = float(COARSEST_PARTS), np.inf
        most = MAX_TOTAL_PARTS if len(self.problem.profile.tensors) > SMALL_JOB_MAX_TENSORS else MAX_TOTAL_PARTS // 3
        while (found := self.of_parts(count)).step_us < before * (1 - REFINE_MIN_GAIN):
            if self.is_done:
                return
            if found.bucketing.parts.sum() > most:
                break
            count, before = count * 2, found.step_us
        if len(self.problem.profile.tensors) > MANY_TENSORS and count <= 2 * COARSEST_PARTS:
            self.of_parts(count * 3 / 4)
        assert self.best is not None
        self.among(self.best.bucketing.cut(np.ones_like(self.best.bucketing.parts)), self.best.options)

    def unfused(self) -> None:
        """Try every tensor as a bucket of its own, from the options that the best plan has for it."""
        self.go_on(each_alone(self.problem.tensors))

    def rivals(self, most: int | None = None) -> None:
        """Simulate the choices of other systems but Espresso, without those whose options the constraints rule out. most: of so many, BytePS
        first."""
        tensors, number = self.problem.tensors, self.space.graph.number
        for choices in islice(tensors_choices(self.problem), most):
            if all(choice.option in number for choice in choices):
                options = np.array([number[choice.option] for choice in choices])
                self.among(bucketing(tensors, np.arange(len(options)), [choice.parts for choice in choices]), options, budget=0)

    def improve(self, budget: float = MOVES_BUDGET, of_all: int = OF_ALL_KINDS) -> None:
        """Moves of the best plan's buckets, largest first, and its options chosen again, until nothing helps or the budget is spent."""
        improved, restarted = True, of_all <= 1
        while improved and not self.is_done:
            assert self.best is not None
            before = self.best.objective
            self.choose(self.best.bucketing, self.best.options, of_all=of_all)
            of_all = 0
            for bucket in np.argsort(-self.best.bucketing.numel, kind="stable").tolist():
                here = self.best
                for buckets, changed in neighbours(self.problem, here.bucketing, bucket):
                    if budget > 0:
                        start = here.options[here.bucketing.of[buckets.last]]
                        last, cost = self.best.objective, MOVE_OVERHEAD + int(buckets.parts.sum())
                        self.move(buckets, start, changed)
                        budget += cost * REFUND if self.best.objective < last * (1 - CONVERGED_RTOL) else -cost
                if len(self.best.bucketing.parts) != len(here.bucketing.parts):
                    break  # the buckets have other numbers now
            enough = before * (1 - CONVERGED_RTOL / 10)
            if not restarted and (budget <= 0 or self.best.objective >= enough):
                restarted = True
                self.restart()
            improved = budget > 0 and self.best.objective < enough


def neighbours(problem: Problem, made: Bucketing, bucket: int) -> Iterator[tuple[Bucketing, Ints]]:
    """Bucketings that differ in one bucket, with the numbers of the buckets that changed: in twice and half as many parts, merged with the
    next, and split in halves."""
    own = np.array([bucket])
    for count in (made.parts[bucket] * 2, made.parts[bucket] // 2):
        if 0 < count <= MAX_PARTS:
            parts = made.parts.copy()
            parts[bucket] = count
            yield made.cut(parts), own
    for found in (merged(problem.tensors, made, bucket), split(problem.tensors, made, bucket)):
        if found is not None:
            yield found


def search(problem: Problem) -> Found:
    """The plan that psgc would run, of all options that the constraints allow."""
    begun = time.perf_counter()
    made = searched(problem)
    assert made.best is not None
    chosen = planned(problem, made.space, made.best)
    return Found(chosen, made.best.step_us, (time.perf_counter() - begun) * 1e6, len(problem.options))


def searched(problem: Problem) -> Search:
    """The search, done."""
    made = Search(problem, Space(problem))
    count = len(problem.profile.tensors)
    made.refine()
    if count <= EXHAUSTIVE_MAX_TENSORS:
        for buckets in every_fusion(problem.tensors, (1, 2, 4)):
            made.choose(buckets)
    if count <= UNFUSED_MAX_TENSORS and not made.is_done:
        made.unfused()
    plain, every = len(made.space.graph.plain), len(made.space.graph.options)
    if (count <= RIVALS_MAX_TENSORS and plain and not problem.constraints.runtime) or plain == every:  # few options are simulated quickly
        made.rivals()
    elif count <= UNFUSED_MAX_TENSORS and plain and not made.is_done and not problem.constraints.runtime:
        made.rivals(1)
    if count > RIVALS_MAX_TENSORS:
        made.improve(LARGE_BUDGET, 1)
    else:
        made.improve()
    made.simplify()
    return made


def planned(problem: Problem, space: Space, chosen: Chosen) -> tuple[PlannedBucket, ...]:
    """The choice as a plan's buckets."""
    names, found = np.array([tensor.name for tensor in problem.profile.tensors], object), chosen.bucketing
    members = np.split(names[np.argsort(found.of, kind="stable")], np.cumsum(np.bincount(found.of))[:-1])
    plain, codecs = set(space.graph.plain.tolist()), [codec.name for codec in space.codecs]
    columns = (members, chosen.options.tolist(), found.codec.tolist(), found.numel.tolist(), found.parts.tolist())
    return tuple(
        PlannedBucket(
            tuple(tensors), int(numel), parts, -number, UNCOMPRESSED if option in plain else codecs[codec], space.graph.options[option]
        )
        for number, (tensors, option, codec, numel, parts) in enumerate(zip(*columns, strict=True))
    )
