"""The search with a time limit from the user: it ends when the step is close to the lower bound, or when time is up.

It starts from the default plan (``search``) and from the complete plans of other systems, Espresso's included. Then it repeats three phases. First,
the bound's linear programme for the best plan's buckets gives each bucket's options of low reduced cost as candidates, and the integer solution
as a start. Second, buckets are cut, merged and split until that does not help. Third, plans are annealed (``annealing``) in rounds of random length and
temperature: the best one, or one that is far from it, as in ``rounds``.

Owns the order of these phases. The resulting step is never longer than the default plan's or any other system's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from psgc.errors import UsageError
from psgc.plan.local_search.choosing import BOTH, Chosen, Search
from psgc.plan.local_search.moving import anneal, by_size, finish, improve, palette, reorder
from psgc.plan.methods.baselines import tensors_choices
from psgc.plan.methods.bound import bucketing_of, over_all_bucketings, solve_given
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.result import Found
from psgc.plan.methods.rounds import WARM, of_one_option
from psgc.plan.methods.search import planned, searched
from psgc.plan.model.bucketing import Bucketing, bucketing, fused, kinds_of
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

ESPRESSO_SHARE: Final = 0.25  # share of the time for each run of Espresso's algorithms
PROGRAMME_S: Final = 0.5  # seconds for one linear programme of the bound
MAX_COLUMNS: Final = 40  # options per bucket, those of the lowest reduced cost
MOST_OPTIONS: Final = 64  # options that are simulated for a bucket in its turn
FULL_BUDGET: Final = 200_000  # simulated chains of one descent over all options
MOVES_BUDGET: Final = 60_000  # simulated chains of moves between two looks at the clock
SIMULATIONS: Final = 40_000  # simulations times their chains, of one descent
ORDER_BUDGET: Final = 20_000  # simulated chains to find a better order, and to choose options for it (``reorder``)
HOT: Final = (-4.0, -1.5)  # log10 of a round's first temperature, as a share of the step
ROUND: Final = (19.0, 25.0)  # log2 of a round's work, in simulated tasks
FAR: Final = 0.4  # share of the rounds that begin from a plan far from the best one
FAR_HOT: Final = (-2.5, -1.5)  # log10 of the first temperature of such a round
BOUND_WORK: Final = 1_000_000.0  # work of annealing by the bound, in simulated tasks
GUESS: Final = 0.06  # microseconds of a simulated task, until a round was timed
GAP: Final = 1e-3  # the search ends when the step is within this share of the lower bound


def search_for(problem: Problem, seconds: float) -> Found:
    """The best plan found within about ``seconds``."""
    begun = time.perf_counter()
    made = Anytime(problem, begun + seconds).run()
    assert made.best is not None
    chosen = planned(problem, made.space, made.best)
    return Found(chosen, made.best.step_us, (time.perf_counter() - begun) * 1e6, len(problem.options))


class Anytime:
    """One search. until: the deadline, by ``time.perf_counter``; bound_us: lower bound on every plan's step."""

    def __init__(self, problem: Problem, until: float) -> None:
        self.problem, self.until = problem, until
        self.begun = time.perf_counter()
        self.made = searched(problem)
        self.bound_us = over_all_bucketings(problem, self.made.space)
        self.rng = np.random.default_rng(0)
        self.default = self.best
        self.palette = palette(self.made, [self.best])
        self.us_of_work = GUESS  # microseconds of a simulated task in the last round

    @property
    def best(self) -> Chosen:
        assert self.made.best is not None
        return self.made.best

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.until or self.best.step_us <= self.bound_us * (1 + GAP)

    def run(self) -> Search:
        """Search, then remove encodings that do not shorten the step."""
        for buckets, options in self._seeds():
            if self.is_over:
                break
            self.made.among(buckets, options, budget=0)
            self._polish(self.made, Chosen(np.inf, np.inf, buckets, options))
        bounded: object = None
        while not self.is_over:
            if bounded is not self.best:
                self._columns()
                bounded = self.best
            before = self.best
            self._annealed()
            if self.best is not before:
                reorder(self.made, ORDER_BUDGET)
                self.palette = palette(self.made, [self.best])
            self.made.seen.clear()
        finish(self.made, ORDER_BUDGET)
        if self.default.step_us < self.best.step_us:  # plans are compared by their objectives, of which the step is the largest part
            self.made.best = self.default
        return self.made

    def _seeds(self) -> Iterator[tuple[Bucketing, Ints]]:
        """Plans to start from: the default plan, and other systems' complete plans, with their own buckets and with ours."""
        yield self.best.bucketing, self.best.options
        tensors, number = self.problem.tensors, self.made.space.graph.number
        for choices in () if self.problem.constraints.runtime else tensors_choices(self.problem):
            if all(choice.option in number for choice in choices):
                options = np.array([number[choice.option] for choice in choices])
                yield bucketing(tensors, np.arange(len(options)), [choice.parts for choice in choices]), options
        ours = planned(self.problem, self.made.space, self.best)
        for buckets in (ours, None):
            found = self._espresso(buckets)
            if found is not None:
                made = bucketing_of(self.problem, found)
                of = {name: bucket.option for bucket in found for name in bucket.tensors}
                last = [of[self.problem.profile.tensors[place].name] for place in made.last.tolist()]
                yield made, np.array([number[option] for option in last])

    def _espresso(self, buckets: tuple[PlannedBucket, ...] | None) -> tuple[PlannedBucket, ...] | None:
        """Espresso's plan; None if the constraints rule it out, or if it takes too long."""
        patience = ESPRESSO_SHARE * (self.until - self.begun)
        try:
            return espresso(self.problem, buckets, space=self.made.space, patience_s=patience).buckets
        except UsageError:
            return None

    def _polish(self, search: Search, start: Chosen | None) -> None:
        """Descend from ``start`` over all options, then move buckets until nothing helps. ``search`` keeps the best plan."""
        if start is None or self.is_over:
            return
        here = search.choose(start.bucketing, start.options)
        here = search.fully(here, by_size(here.bucketing), MOST_OPTIONS, FULL_BUDGET)[0]
        search.seen.clear()
        if not self.is_over:
            improve(search, here, MOVES_BUDGET, palette(search, [here]))

    def _columns(self) -> None:
        """Descend over the options that have a low reduced cost in the bound's linear programme for the best plan's buckets."""
        buckets = self.made.cut(self.best.bucketing)
        solved = solve_given(self.problem, self.made.space, buckets, self.best.step_us, min(self.until, time.perf_counter() + PROGRAMME_S))
        kinds = kinds_of(buckets)
        reduced = np.full((len(kinds.sizes), solved.reduced.shape[0]), np.inf)
        np.minimum.at(reduced, kinds.of, solved.reduced.T)
        columns = [np.argsort(row, kind="stable")[:MAX_COLUMNS] for row in reduced]
        columns = [column[np.isfinite(row[column])] for row, column in zip(reduced, columns, strict=True)]
        starts = [self.best.options] if solved.options is None else [solved.options, self.best.options]
        options = self.made.space.unique(np.concatenate([*columns, *starts]))
        fits = np.array([np.isin(options, column) for column in columns])
        for start in starts:
            if not self.is_over:
                self.made.descend(buckets, options, kinds, fits, start[None], SIMULATIONS, None, BOTH)

    def _annealed(self) -> None:
        """A round of annealing from the best plan; or one from a plan that is far from it, and a cooler one from the result."""
        if self.rng.random() >= FAR:
            self._round(self.best, 10 ** self.rng.uniform(*HOT))
            return
        found = self._round(self._far(), 10 ** self.rng.uniform(*FAR_HOT))
        if not self.is_over:
            self._round(found, WARM)

    def _far(self) -> Chosen:
        """A plan that is far from the best one: another fusion, with the best plan's options, with one of them, or with the resources in balance."""
        made, tensors, here = self.made, self.problem.tensors, self.best
        parts, kind = 2 ** self.rng.uniform(0, 6), self.rng.integers(3)
        if kind == 0:
            return of_one_option(made, parts)
        other = fused(tensors, self.problem.profile.numel / parts, 2 ** self.rng.uniform(-4, 0))
        start = made.choose(other, here.options[here.bucketing.of[other.last]])
        if kind == 1:
            return start
        return made.anneal(start, self.palette, self._seed(), BOUND_WORK, 10 ** self.rng.uniform(*FAR_HOT), by_bound=True)[0]

    def _round(self, start: Chosen, hot: float) -> Chosen:
        """What annealing makes of a plan, in a round of random length."""
        left = self.until - time.perf_counter()
        budget = min(2 ** self.rng.uniform(*ROUND), 1e6 * max(left, 0.0) / self.us_of_work + 1)
        begun = time.perf_counter()
        found = anneal(self.made, self.palette, self._seed(), budget, hot, FULL_BUDGET, start)
        self.us_of_work = 1e6 * (time.perf_counter() - begun) / budget
        return found

    def _seed(self) -> int:
        return int(self.rng.integers(1, 1 << 40))
