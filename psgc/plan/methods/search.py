"""psgc's own method: how tensors are fused and cut, and every bucket's option, together.

For each of a few bucketings the options that are cheapest of all at some mixture of prices (``space``) become candidates, and every bucket's is
chosen among them on the timeline (``descent``). Bucketings are tried from coarse to fine around the best; then the best one's larger buckets
are cut anew. For small jobs every way of fusing is tried. What the result may lack to the best plan, ``bound`` says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.plan.inputs.profile import F64
from psgc.plan.methods.baselines import tensors_choices
from psgc.plan.methods.descent import descend, simplify
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.result import Found
from psgc.plan.methods.space import Space, WayTable
from psgc.plan.model.bucketing import MOST_PARTS, Bucketing, Kinds, bucketing, each_alone, every_fusion, fused, kinds_of, parts_of
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

MIXTURES: Final = 48  # of prices, for each size
FEW_TENSORS: Final = 6  # so many are fused in every way
SMALL_JOB: Final = 12  # of so many tensors all get their turn
FOLLOWED_TENSORS: Final = 24  # for so many what other systems would do is a start, too
TAPER: Final = 0.25  # of what is still to come, what a bucket may hold
SOME_TENSORS: Final = 64  # so many are also tried each by itself
MOST_TRIALS: Final = 400  # timelines for one bucketing
WORK: Final = 3_500  # and those times their chains
COARSE: Final = 2  # sizes are alike within a factor of four
LATENCY_ALONE: Final = 10  # and all up to this power of two
ENOUGH_PARTS: Final = 48  # beyond that nothing finer is tried
NOTHING: Final = 2e-3  # what is not worth looking for, of a step
LITTLE: Final = 1e-2  # what is not worth going on for in finer parts
COARSEST: Final = 8  # parts of a model


class Chosen(NamedTuple):
    """A bucketing with an option for each bucket, by its number (``space``)."""

    step_us: float
    bucketing: Bucketing
    ways: Ints


@functools.cache
def mixtures(resources: int) -> F64:
    """Prices of the resources, a column each: each alone, all alike, and mixtures over orders of magnitude."""
    spread = np.random.default_rng(1).dirichlet(np.full(resources, 0.35), MIXTURES - resources - 1)
    alone = np.eye(resources) + 1e-3  # where several need nothing of a resource, the one that needs least of the others
    return np.concatenate([alone, np.ones((1, resources)), spread]).T.copy()


class Fitting(NamedTuple):
    """What is worth trying for parts of a kind. cheapest: the cheapest way at each mixture of prices; ways: those and the next ones, each
    once; known: of all options, which these are."""

    cheapest: Ints
    ways: Ints
    known: NDArray[np.bool_]


@dataclass
class Search:
    """One problem's search. Keeps the best that it has seen. fitting: by codec's number and size, as a power of two."""

    problem: Problem
    space: Space
    best: Chosen | None = None
    fitting: dict[tuple[int, int], Fitting] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many candidates there are at a price. The best option of one of a few buckets may be no one's cheapest, above all where few
        resources are to be traded for one another."""
        flat = min(self.problem.cluster.nodes, self.problem.cluster.gpus_per_node) == 1
        return 4 if flat else 2

    def fit(self, kinds: Iterable[tuple[int, int]]) -> None:
        """Find the options that are the cheapest of all at some prices, for parts of these codecs and sizes, powers of two."""
        wanted = [kind for kind in kinds if kind not in self.fitting]
        if wanted:
            codec, size = (np.array(column) for column in zip(*wanted, strict=True))
            loads = self.space.loads(self.space.times(np.exp2(size), codec))  # resources, atoms, kinds
            prices = mixtures(loads.shape[0])
            costs = np.tensordot(loads, prices, (0, 0))
            costs[~self.space.may_take[codec].T] = np.inf
            found = self.space.shortest(costs.reshape(len(costs), -1), self.ranks)[1]
            for kind, ways in zip(wanted, found.reshape(len(wanted), -1, self.ranks), strict=True):
                every = self.space.once(ways[ways >= 0])
                known = np.zeros(len(self.space.graph.options), bool)
                known[every] = True
                self.fitting[kind] = Fitting(ways[:, 0], every, known)

    def candidates(self, kinds: Kinds) -> list[Fitting]:
        """What is worth trying for parts of each of these kinds."""
        sizes = np.maximum(COARSE * np.round(np.log2(kinds.sizes) / COARSE), LATENCY_ALONE).astype(np.int64).tolist()
        coarse = list(zip(kinds.codec.tolist(), sizes, strict=True))
        self.fit(dict.fromkeys(coarse))
        return [self.fitting[kind] for kind in coarse]

    def choose(self, buckets: Bucketing, start: Ints | None = None) -> Chosen:
        """The best choice of ways for these buckets that is found from ``start``, or else from what is cheapest at some mixture of prices."""
        buckets = self.cut(buckets)
        kinds = kinds_of(buckets)
        fitting = self.candidates(kinds)
        ways = self.space.once(np.concatenate([one.ways for one in fitting] + ([] if start is None else [start])))
        fits = np.array([one.known[ways] for one in fitting])
        starts = np.array([one.cheapest for one in fitting]).T[:, kinds.of] if start is None else start[None]
        return self.descend(buckets, ways, kinds, fits, starts, min(WORK, MOST_TRIALS * int(buckets.parts.sum())))

    def among(self, buckets: Bucketing, start: Ints, work: int = WORK // 4) -> Chosen:
        """The best choice for these buckets that is found from ``start`` among the ways that it has; ``start`` itself if ``work`` is 0."""
        buckets = self.cut(buckets)
        ways, kinds = self.space.once(start), kinds_of(buckets)
        return self.descend(buckets, ways, kinds, self.space.fits(ways)[kinds.codec], start[None], work)

    def cut(self, buckets: Bucketing) -> Bucketing:
        """With parts that a job can have, if the plan is to be run."""
        return buckets.at_blocks() if self.problem.constraints.runtime else buckets

    def descend(self, buckets: Bucketing, ways: Ints, kinds: Kinds, fits: NDArray[np.bool_], starts: Ints, work: int) -> Chosen:
        """Choose among ``ways``; fits: as ``descent`` takes it; starts: rows of ways; work: timelines, times their chains."""
        parts, table, order = parts_of(buckets), self.table(ways, kinds), self.order(buckets)
        choice = np.zeros(len(buckets.parts), np.int64)
        trials = work // len(parts.ready_us)
        step, _, _ = descend(*parts, kinds.of, fits, *table, self.space.places(ways, starts), order, choice, trials)
        made = Chosen(step, buckets, ways[choice])
        if self.best is None or made.step_us < self.best.step_us:
            self.best = made
        return made

    def order(self, buckets: Bucketing) -> Ints:
        """In which buckets are changed one by one: the largest first where not all may have their turn, else those that are ready last."""
        if len(buckets.of) > SMALL_JOB:
            return np.argsort(-buckets.numel, kind="stable")
        return np.arange(len(buckets.parts))[::-1].copy()

    def table(self, ways: Ints, kinds: Kinds) -> WayTable:
        """The ways' tasks for parts of each kind, with -1 where those of a way that parts of this kind cannot have would begin."""
        made = self.space.table(ways, kinds.sizes, kinds.codec)
        made.first[~self.space.fits(ways)[kinds.codec]] = -1
        return made

    def simplify(self) -> None:
        """Encode nothing that gains nothing."""
        assert self.best is not None
        plain, buckets = self.space.graph.plain, self.best.bucketing
        ways, kinds = self.space.once(np.concatenate([plain, self.best.ways])), kinds_of(buckets)
        choice = self.space.places(ways, self.best.ways)
        step = simplify(*parts_of(buckets), kinds.of, *self.table(ways, kinds), len(plain), choice)
        self.best = Chosen(step, buckets, ways[choice])

    @functools.cached_property
    def least_us(self) -> float:
        """What no step is below: backward, and then the quickest way of the least part of what is ready last."""
        tensors = self.problem.tensors
        last = np.flatnonzero(tensors.ready_us == tensors.ready_us[-1])
        times = self.space.times(tensors.numel[last] / MOST_PARTS, tensors.codec[last])
        costs = self.space.loads(times).max(axis=0)
        costs[~self.space.may_take[tensors.codec[last]].T] = np.inf
        return float(tensors.ready_us[-1] + self.space.shortest(costs)[0].min())

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to gain."""
        return self.best is not None and self.best.step_us <= self.least_us * (1 + NOTHING)

    def of_parts(self, count: float) -> Chosen:
        """The best choice with the model in about so many parts, beginning with that of the best bucketing so far."""
        return self.go_on(fused(self.problem.tensors, self.problem.profile.numel / count, TAPER))

    def go_on(self, buckets: Bucketing) -> Chosen:
        """The best choice for these buckets, beginning with what the best bucketing so far has for the same tensors."""
        if self.best is None:
            return self.choose(buckets)
        return self.choose(buckets, self.best.ways[self.best.bucketing.of[buckets.last]])

    def refine(self) -> None:
        """Try the model in ever more parts, as long as more are better and there is anything to gain; then, where few parts
        are best of many tensors, in a number between the last two, and its buckets uncut."""
        count, before = float(COARSEST), np.inf
        most = ENOUGH_PARTS if len(self.problem.profile.tensors) > SMALL_JOB else ENOUGH_PARTS // 3
        while (found := self.of_parts(count)).step_us < before * (1 - LITTLE):
            if self.is_done:
                return
            if found.bucketing.parts.sum() > most:
                break
            count, before = count * 2, found.step_us
        if len(self.problem.profile.tensors) > SOME_TENSORS and count <= 2 * COARSEST:
            self.of_parts(count * 3 / 4)
        assert self.best is not None
        self.among(self.best.bucketing.cut(np.ones_like(self.best.bucketing.parts)), self.best.ways)

    def alone(self) -> None:
        """Try every tensor by itself, from what the best so far has for it."""
        self.go_on(each_alone(self.problem.tensors))

    def followed(self) -> None:
        """Try what other systems than Espresso would do. Constraints may have left their options out."""
        tensors, number = self.problem.tensors, self.space.graph.number
        for choices in tensors_choices(self.problem):
            if all(choice.option in number for choice in choices):
                ways = np.array([number[choice.option] for choice in choices])
                self.among(bucketing(tensors, np.arange(len(ways)), [choice.parts for choice in choices]), ways, work=0)

    def espresso(self) -> None:
        """Try what can be made of Espresso's plan."""
        ways = [self.space.graph.number[bucket.option] for bucket in espresso(self.problem, space=self.space).buckets]
        self.choose(each_alone(self.problem.tensors), np.array(ways))

    def recut_largest(self) -> None:
        """Cut the largest buckets of the best one otherwise, each as long as that is better."""
        assert self.best is not None
        for bucket in np.argsort(-self.best.bucketing.numel)[:2].tolist():
            for times in (2.0, 0.5):
                before = self.best.bucketing
                parts = before.parts.copy()
                parts[bucket] = min(max(1, round(parts[bucket] * times)), ENOUGH_PARTS)
                if parts[bucket] != before.parts[bucket]:
                    self.among(before.cut(parts), self.best.ways)


def search(problem: Problem) -> Found:
    """The plan that psgc would run. Its choice is among all options that the constraints leave."""
    begun = time.perf_counter()
    made = Search(problem, Space(problem))
    count = len(problem.profile.tensors)
    made.refine()
    if count <= FEW_TENSORS:
        for buckets in every_fusion(problem.tensors, (1, 2, 4)):
            made.choose(buckets)
    plain, every = len(made.space.graph.plain), len(made.space.graph.options)
    if count <= FOLLOWED_TENSORS and plain and not problem.constraints.runtime:
        made.followed()
        made.espresso()
    elif count <= SOME_TENSORS and not made.is_done:
        made.alone()
    if plain == every and count > FOLLOWED_TENSORS:  # where there is so little to choose from, there is time for it
        made.followed()
    if not made.is_done:
        made.recut_largest()
    made.simplify()
    assert made.best is not None
    chosen = planned(problem, made.space, made.best)
    return Found(chosen, made.best.step_us, (time.perf_counter() - begun) * 1e6, len(problem.options))


def planned(problem: Problem, space: Space, chosen: Chosen) -> tuple[PlannedBucket, ...]:
    """The choice as a plan's buckets."""
    names, found = np.array([tensor.name for tensor in problem.profile.tensors], object), chosen.bucketing
    members = np.split(names[np.argsort(found.of, kind="stable")], np.cumsum(np.bincount(found.of))[:-1])
    plain, codecs = set(space.graph.plain.tolist()), [codec.name for codec in space.codecs]
    columns = (members, chosen.ways.tolist(), found.codec.tolist(), found.numel.tolist(), found.parts.tolist())
    return tuple(
        PlannedBucket(tuple(tensors), int(numel), parts, -number, UNCOMPRESSED if way in plain else codecs[codec], space.graph.options[way])
        for number, (tensors, way, codec, numel, parts) in enumerate(zip(*columns, strict=True))
    )
