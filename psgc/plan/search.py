"""psgc's own method: how tensors are fused and cut, and every bucket's option, together.

For each of a few bucketings the options that are cheapest of all at some mixture of prices (``space``) become candidates, and every bucket's is
chosen among them on the timeline (``descent``). Bucketings are tried from coarse to fine around the best; then the best one's larger buckets
are cut anew. For small jobs every way of fusing is tried. What the result may lack to the best plan, ``bound`` says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.plan.bucketing import Bucketing, each_alone, every_fusion, fused
from psgc.plan.descent import descend
from psgc.plan.found import Found
from psgc.plan.options import encodes
from psgc.plan.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.problem import Problem
from psgc.plan.profile import F64
from psgc.plan.space import Space, Way
from psgc.plan.timeline import Ints

MIXTURES: Final = 64
FEW_TENSORS: Final = 6  # so many are fused in every way
TAPER: Final = 0.25
SOME_TENSORS: Final = 12  # so many are also tried each by itself, with more candidates
RANKS: Final = 3  # candidates at a price, then: the best of a few buckets may be no one's cheapest
MOST_TRIALS: Final = 400  # timelines for one bucketing
WORK: Final = 5_000  # and those times their chains
COARSE: Final = 2  # sizes are alike within a factor of four
MOST_PARTS: Final = 48
NOTHING: Final = 2e-3  # what is not worth looking for, of a step
COARSEST: Final = 8  # parts of a model


class Chosen(NamedTuple):
    """A bucketing with an option for each bucket. worth: what is minimised, microseconds."""

    worth: float
    step_us: float
    bucketing: Bucketing
    ways: tuple[Way, ...]


@functools.cache
def mixtures(resources: int) -> F64:
    """Prices of the resources, a column each: each alone, all alike, and mixtures over orders of magnitude."""
    spread = np.random.default_rng(1).dirichlet(np.full(resources, 0.35), MIXTURES - resources - 1)
    alone = np.eye(resources) + 1e-3  # where several need nothing of a resource, the one that needs least of the others
    return np.concatenate([alone, np.ones((1, resources)), spread]).T.copy()


class Tables(NamedTuple):
    """The candidates' tasks for every size of part: what ``descent`` takes."""

    kind: Ints
    fits: NDArray[np.bool_]
    first: Ints
    length: Ints
    resource: Ints
    us: F64


class Fitting(NamedTuple):
    """What is worth trying for parts of a size. cheapest: the cheapest way at each mixture of prices; ways: those and the next ones."""

    cheapest: list[Way]
    ways: frozenset[Way]


@dataclass
class Search:
    """One problem's search. Keeps the best that it has seen. fitting: by size, as a power of two."""

    problem: Problem
    space: Space
    best: Chosen | None = None
    fitting: dict[int, Fitting] = field(default_factory=dict)

    def fit(self, sizes: Iterable[int]) -> None:
        """Find the options that are the cheapest of all at some prices, for parts of these sizes, powers of two."""
        wanted = [size for size in sizes if size not in self.fitting]
        if wanted:
            loads = self.space.loads(self.space.times(np.exp2(wanted)))  # resources, atoms, sizes
            prices = mixtures(loads.shape[0])
            costs = np.tensordot(loads, prices, (0, 0)).reshape(loads.shape[1], -1)
            ranks = RANKS if len(self.problem.profile.tensors) <= SOME_TENSORS else 1
            ways = self.space.shortest(costs, ranks)[1]
            count = prices.shape[1]
            for at, size in enumerate(wanted):
                found = ways[at * count : (at + 1) * count]
                self.fitting[size] = Fitting([column[0] for column in found], frozenset(way for column in found for way in column))

    def tables(self, numels: F64, also: Iterable[Way]) -> tuple[dict[Way, int], Tables, Ints]:
        """The ways worth trying for parts of these sizes and some more, numbered; their tables; and the cheapest at each mixture (rows)."""
        sizes, kind = np.unique(numels, return_inverse=True)
        classes = (COARSE * np.round(np.log2(sizes) / COARSE)).astype(np.int64).tolist()
        self.fit(dict.fromkeys(classes))
        fitting = [self.fitting[size] for size in classes]
        ways = list(dict.fromkeys(way for fits in dict.fromkeys(classes) for way in sorted(self.fitting[fits].ways)))
        numbers = {way: number for number, way in enumerate(dict.fromkeys((*ways, *also)))}
        fits = np.array([[way in one.ways for way in numbers] for one in fitting])
        cheapest = np.array([[numbers[way] for way in one.cheapest] for one in fitting]).T
        sequences = [[task for atom in way for task in self.space.task_numbers[atom]] for way in numbers]
        length = np.array([len(sequence) for sequence in sequences], np.int64)
        flat = np.array([task for sequence in sequences for task in sequence], np.int64)
        us = np.ascontiguousarray(self.space.times(sizes)[flat].T).ravel()
        begins = np.cumsum(length) - length
        first = begins[None, :] + np.arange(len(sizes))[:, None] * len(flat)
        made = Tables(kind.astype(np.int64), fits, first, length, np.tile(self.space.resources[flat], len(sizes)), us)
        return numbers, made, cheapest[:, kind]

    def choose(self, bucketing: Bucketing, start: tuple[Way, ...] = ()) -> Chosen:
        """The best choice of ways for these buckets that is found from ``start``, or from what is cheapest at some mixture of prices."""
        numbers, tables, starts = self.tables(bucketing.numel / bucketing.parts, start)
        chain = np.concatenate([np.zeros(1, np.int64), np.cumsum(bucketing.parts)])
        ready = np.repeat(bucketing.ready_us, bucketing.parts)
        until = np.searchsorted(ready, bucketing.ready_us)
        if start:
            starts = np.concatenate([[[numbers[way] for way in start]], starts])
        choice = np.zeros(len(bucketing.parts), np.int64)
        step, worth, _ = descend(ready, chain, until, *tables, np.ascontiguousarray(starts), choice, min(MOST_TRIALS, WORK // len(ready)))
        ways = list(numbers)
        made = Chosen(worth, step, bucketing, tuple(ways[number] for number in choice.tolist()))
        if self.best is None or made.step_us < self.best.step_us:
            self.best = made
        return made

    def of_parts(self, count: float) -> Chosen:
        """The best choice with the model in about so many parts, beginning with that of the best bucketing so far."""
        return self.go_on(fused(self.problem.profile.tensors, self.problem.profile.numel / count, TAPER))

    def go_on(self, bucketing: Bucketing) -> Chosen:
        """The best choice for these buckets, beginning with what the best bucketing so far has for the same tensors."""
        if self.best is None:
            return self.choose(bucketing)
        before = self.best.bucketing
        covers = np.minimum(np.searchsorted(before.first[1:], bucketing.first[1:]), len(before.parts) - 1)
        return self.choose(bucketing, tuple(self.best.ways[bucket] for bucket in covers.tolist()))

    def refine(self) -> None:
        """Try the model in ever more parts, as long as more are better and there is anything to gain; at last in some fewer than the most."""
        count, before = float(COARSEST), np.inf
        while (found := self.of_parts(count)).worth < before * (1 - NOTHING):
            if found.step_us <= self.problem.profile.backward_us * (1 + NOTHING) or found.bucketing.parts.sum() > MOST_PARTS:
                return
            count, before = count * 2, found.worth
        self.of_parts(count * 0.75)
        assert self.best is not None
        self.go_on(replace(self.best.bucketing, parts=np.ones_like(self.best.bucketing.parts)))

    def alone(self) -> None:
        """Try every tensor by itself, whole and cut: from the best so far, and from nothing encoded."""
        plain = self.space.shortest(self.space.uncompressed(self.problem.profile.numel / COARSEST))[1][0][0]
        for part in (np.inf, self.problem.profile.numel / COARSEST):
            bucketing = each_alone(self.problem.profile.tensors, part)
            self.go_on(bucketing)
            self.choose(bucketing, (plain,) * len(bucketing.parts))

    def recut(self) -> None:
        """Cut the best one's larger buckets otherwise, as long as that is better."""
        assert self.best is not None
        for bucket in np.argsort(-self.best.bucketing.numel)[:2].tolist():
            for times in (2.0, 0.5):
                found = self.best
                parts = found.bucketing.parts.copy()
                parts[bucket] = max(1, round(parts[bucket] * times))
                if parts[bucket] != found.bucketing.parts[bucket]:
                    self.choose(replace(found.bucketing, parts=parts), found.ways)


def search(problem: Problem) -> Found:
    """The plan that psgc would run. Its choice is among all options that the constraints leave."""
    begun = time.perf_counter()
    made = Search(problem, Space(problem))
    tensors = problem.profile.tensors
    made.refine()
    if len(tensors) <= FEW_TENSORS:
        for bucketing in every_fusion(tensors, (1, 2, 4)):
            made.go_on(bucketing)
    elif len(tensors) <= SOME_TENSORS:
        made.alone()
    made.recut()
    assert made.best is not None
    buckets = planned(problem, made.space, made.best)
    return Found(buckets, made.best.step_us, (time.perf_counter() - begun) * 1e6, len(problem.options))


def planned(problem: Problem, space: Space, chosen: Chosen) -> tuple[PlannedBucket, ...]:
    """The choice as a plan's buckets."""
    names = [tensor.name for tensor in problem.profile.tensors]
    first = chosen.bucketing.first.tolist()
    buckets = []
    for number, way in enumerate(chosen.ways):
        option = space.option(way)
        codec = problem.codec.name if encodes(option) else UNCOMPRESSED
        members = tuple(names[first[number] : first[number + 1]])
        numel, parts = int(chosen.bucketing.numel[number]), int(chosen.bucketing.parts[number])
        buckets.append(PlannedBucket(members, numel, parts, -number, codec, option))
    return tuple(buckets)
