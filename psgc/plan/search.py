"""psgc's own method: how tensors are fused and cut, and every bucket's option, together.

For each of a few bucketings the options that are cheapest of all at some mixture of prices (``space``) become candidates, and every bucket's is
chosen among them on the timeline (``descent``). Bucketings are tried from coarse to fine around the best; then the best one's larger buckets
are cut anew. For small jobs every way of fusing is tried. What the result may lack to the best plan, ``bound`` says.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from psgc.plan.bucketing import Bucketing, every_fusion, fused
from psgc.plan.descent import descend
from psgc.plan.found import Found
from psgc.plan.options import encodes
from psgc.plan.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.problem import Problem
from psgc.plan.profile import F64
from psgc.plan.space import Space
from psgc.plan.timeline import Ints

MIXTURES: Final = 64
FEW_TENSORS: Final = 6  # so many are fused in every way
TAPER: Final = 0.5
WORK: Final = 8_000  # timelines for one bucketing, times their chains
MOST_PARTS: Final = 48
NOTHING: Final = 2e-3  # what is not worth looking for, of a step
COARSEST: Final = 8  # parts of a model
Way = tuple[int, ...]


class Chosen(NamedTuple):
    """A bucketing with an option for each bucket. worth: what is minimised, microseconds; trials: timelines that finding it took."""

    worth: float
    step_us: float
    bucketing: Bucketing
    ways: tuple[Way, ...]
    trials: int


@functools.cache
def mixtures(resources: int) -> F64:
    """Prices of the resources, a column each: each alone, all alike, and mixtures over orders of magnitude."""
    spread = np.random.default_rng(1).dirichlet(np.full(resources, 0.35), MIXTURES - resources - 1)
    alone = np.eye(resources) + 1e-3  # where several need nothing of a resource, the one that needs least of the others
    return np.concatenate([alone, np.ones((1, resources)), spread]).T.copy()


class Tables(NamedTuple):
    """The candidates' tasks for every size of part: what ``descent`` takes."""

    kind: Ints
    first: Ints
    length: Ints
    resource: Ints
    us: F64


@dataclass
class Search:
    """One problem's search. Keeps the best that it has seen."""

    problem: Problem
    space: Space
    best: Chosen | None = None
    trials: int = 0

    def candidates(self, numels: Iterable[float]) -> list[Way]:
        """The options that are the cheapest of all at some prices, for parts of these sizes."""
        times = self.space.times(np.array(list(numels)))
        loads = self.space.loads(times)  # resources, atoms, sizes
        costs = np.tensordot(loads, mixtures(loads.shape[0]), (0, 0)).reshape(loads.shape[1], -1)
        return list(dict.fromkeys(self.space.shortest(costs)[1]))

    def tables(self, ways: list[Way], numels: F64) -> Tables:
        sizes, kind = np.unique(numels, return_inverse=True)
        sequences = [[task for atom in way for task in self.space.task_numbers[atom]] for way in ways]
        length = np.array([len(sequence) for sequence in sequences], np.int64)
        flat = np.array([task for sequence in sequences for task in sequence], np.int64)
        us = self.space.times(sizes)[flat].T.ravel() if len(flat) else np.zeros(0)
        begins = np.cumsum(length) - length
        first = begins[None, :] + np.arange(len(sizes))[:, None] * len(flat)
        return Tables(kind.astype(np.int64), first, length, np.tile(self.space.resources[flat], len(sizes)), np.ascontiguousarray(us))

    def choose(self, bucketing: Bucketing, ways: list[Way], start: tuple[Way, ...] | None = None) -> Chosen:
        """The best choice of ways for these buckets that descending from one for all, or from ``start``, finds."""
        tables = self.tables(ways, bucketing.numel / bucketing.parts)
        chain = np.concatenate([np.zeros(1, np.int64), np.cumsum(bucketing.parts)])
        ready = np.repeat(bucketing.ready_us, bucketing.parts)
        until = np.searchsorted(ready, bucketing.ready_us)
        choice = np.zeros(len(bucketing.parts), np.int64)
        if start is not None:
            numbers = {way: number for number, way in enumerate(ways)}
            choice[:] = [numbers[way] for way in start]
        step, worth, trials = descend(ready, chain, until, *tables, choice, WORK // len(ready))
        made = Chosen(worth, step, bucketing, tuple(ways[number] for number in choice.tolist()), trials)
        self.trials += trials
        if self.best is None or made.worth < self.best.worth:
            self.best = made
        return made

    def of_parts(self, count: float, ways: list[Way]) -> Chosen:
        """The best choice with the model in about so many parts, beginning with that of the best bucketing so far."""
        bucketing = fused(self.problem.profile.tensors, self.problem.profile.numel / count, TAPER)
        if self.best is None:
            return self.choose(bucketing, ways)
        before = self.best.bucketing
        covers = np.minimum(np.searchsorted(before.first[1:], bucketing.first[1:]), len(before.parts) - 1)
        start = tuple(self.best.ways[bucket] for bucket in covers.tolist())
        return self.choose(bucketing, list(dict.fromkeys((*ways, *start))), start)

    def refine(self, ways: list[Way]) -> None:
        """Try the model in ever more parts, as long as more are better and there is anything to gain; at last in some fewer than the most."""
        count, before = float(COARSEST), np.inf
        while (found := self.of_parts(count, ways)).worth < before * (1 - NOTHING):
            if found.step_us <= self.problem.profile.backward_us * (1 + NOTHING) or found.bucketing.parts.sum() > MOST_PARTS:
                return
            count, before = count * 2, found.worth
        self.of_parts(count * 0.75, ways)

    def recut(self) -> None:
        """Cut the best one's larger buckets otherwise, as long as that is better."""
        assert self.best is not None
        for bucket in np.argsort(-self.best.bucketing.numel)[:2].tolist():
            for times in (2.0, 0.5):
                found = self.best
                parts = found.bucketing.parts.copy()
                parts[bucket] = max(1, round(parts[bucket] * times))
                if parts[bucket] != found.bucketing.parts[bucket]:
                    bucketing = Bucketing(found.bucketing.first, parts, found.bucketing.numel, found.bucketing.ready_us)
                    self.choose(bucketing, list(dict.fromkeys(found.ways)), found.ways)


def search(problem: Problem) -> Found:
    """The plan that psgc would run. Its choice is among all options that the constraints leave."""
    begun = time.perf_counter()
    made = Search(problem, Space(problem))
    tensors, numel = problem.profile.tensors, problem.profile.numel
    if len(tensors) <= FEW_TENSORS:
        for bucketing in every_fusion(tensors, (1, 2, 4)):
            made.choose(bucketing, made.candidates(set((bucketing.numel / bucketing.parts).tolist())))
    made.refine(made.candidates([numel / COARSEST, numel / COARSEST**2]))
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
