"""Chooses options for given buckets, by coordinate descent, and keeps the best plan that it has seen.

There are three kinds of descent. ``choose`` takes the options that are cheapest at some mixture of prices (``space``) as candidates, and may
change all buckets from one on together (``descent``). ``fully`` changes one bucket at a time, to any option (``full_descent``). ``among`` takes only
options that the start has. ``anneal`` changes the buckets, too (``annealing``). Owns the candidates and each descent's budget. Does not know which
bucketings are tried.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import BLOCK, MAX_PART
from psgc.plan.inputs.profile import F64
from psgc.plan.local_search.annealing import anneal
from psgc.plan.local_search.descent import descend, simplify
from psgc.plan.local_search.full_descent import Paths, descend_fully, find_critical, simulation_work
from psgc.plan.local_search.ordering import order, ranks_of
from psgc.plan.local_search.space import OptionTable, Space
from psgc.plan.model.bucketing import MAX_PARTS, Bucketing, Kinds, kinds_of, parts_of, renumbered
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

PRICE_MIXTURES: Final = 48  # for each size
SMALL_JOB_MAX_TENSORS: Final = 12  # up to so many, the budget is enough to change every bucket
MAX_SIMULATIONS: Final = 400  # of one descent among candidates
SIMULATION_BUDGET: Final = 3_000  # simulated chains of one descent (``simulation_work``)
SIMPLIFY_BUDGET: Final = 8_000  # simulated chains of ``simplify``
SIZE_STEP_BITS: Final = 2  # candidates are shared by sizes within a factor of four
SMALLEST_SIZE_BITS: Final = 10  # and by all sizes up to this power of two
CONVERGED_RTOL: Final = 2e-3  # the search ends when the step is this close to the lower bound
COLD: Final = 1e-5  # temperature at the end of a round of annealing, as a share of the step
ORDER_MIN_GAIN: Final = 1e-4  # share of the step that another order of buckets must save
BOTH, ONE_BY_ONE = True, False  # phases of a descent


NO_PATHS: Final = Paths(*[np.zeros(0, np.int64)] * 4)


class Chosen(NamedTuple):
    """A bucketing and the number (``space``) of each bucket's option. objective: the step plus a small share of the mean completion; turn: each
    bucket's turn. If several buckets could go at the same moment, the one with the least turn does. None: in order of readiness."""

    step_us: float
    objective: float
    bucketing: Bucketing
    options: Ints
    turn: Ints | None = None


@functools.cache
def mixtures(resources: int) -> F64:
    """Mixtures of prices, one in each column: each resource alone, all resources equal, and random mixtures over orders of magnitude."""
    spread = np.random.default_rng(1).dirichlet(np.full(resources, 0.35), PRICE_MIXTURES - resources - 1)
    alone = np.eye(resources) + 1e-3  # of the options that do not use the resource, prefer the one that uses the others least
    return np.concatenate([alone, np.ones((1, resources)), spread]).T.copy()


class Candidates(NamedTuple):
    """The options worth trying for parts of one kind. cheapest: the cheapest at each mixture of prices; options: these and the next cheapest,
    without duplicates; known: for each option of the graph, whether it is in ``options``."""

    cheapest: Ints
    options: Ints
    known: NDArray[np.bool_]


@dataclass
class Search:
    """One problem's search. Keeps the best plan that it has seen. candidates_of: by the codec's index and log2 of the size."""

    problem: Problem
    space: Space
    best: Chosen | None = None
    candidates_of: dict[tuple[int, int], Candidates] = field(default_factory=dict)
    seen: list[Chosen] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """The number of candidates for each mixture of prices. The cheapest one alone is not enough: with few buckets, a bucket's best option may
        not be the cheapest at any prices, above all if there are few resources to trade for one another."""
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

    def candidates(self, kinds: Kinds) -> list[Candidates]:
        """The candidates for parts of each of these kinds."""
        bits = np.maximum(SIZE_STEP_BITS * np.round(np.log2(kinds.sizes) / SIZE_STEP_BITS), SMALLEST_SIZE_BITS).astype(np.int64).tolist()
        keys = list(zip(kinds.codec.tolist(), bits, strict=True))
        self.find_candidates(dict.fromkeys(keys))
        return [self.candidates_of[key] for key in keys]

    def choose(self, buckets: Bucketing, start: Ints | None = None) -> Chosen:
        """The best options for these buckets that descent finds from ``start``, by default from the cheapest at each mixture of prices."""
        buckets = self.cut(buckets)
        kinds = kinds_of(buckets)
        found = self.candidates(kinds)
        options = self.space.unique(np.concatenate([one.options for one in found] + ([] if start is None else [start])))
        fits = np.array([one.known[options] for one in found])
        starts = np.array([one.cheapest for one in found]).T[:, kinds.of] if start is None else start[None]
        return self.descend(buckets, options, kinds, fits, starts, min(SIMULATION_BUDGET, MAX_SIMULATIONS * int(buckets.parts.sum())))

    def fully(self, start: Chosen, order: Ints, most: int, budget: float, among: Ints | None = None) -> tuple[Chosen, int]:
        """The best options for ``start``'s buckets that descent over all options finds, and the number of chains that it simulated.

        order:  the buckets that may change, in this order.
        most:   number of options that are simulated for a bucket before the next bucket's turn.
        budget: number of chains to simulate.
        among:  choose from these options only, which include ``start``'s."""
        space, buckets = self.space, self.cut(start.bucketing)
        kinds, parts = kinds_of(buckets), parts_of(buckets)
        rows, choice, paths = space.graph.rows, start.options.astype(np.int64), space.graph.paths
        if among is not None:
            rows, choice, paths = rows[among], space.positions(among, start.options), NO_PATHS
        times = space.times(kinds.sizes, kinds.codec)
        step, objective, spent = descend_fully(
            *parts, kinds.of, *paths, rows, space.of_atom, space.resources, times, space.may_take[kinds.codec], space.threads, space.moments_us,
            self._ranks(start._replace(bucketing=buckets)), order, choice, most, int(min(budget, 1 << 60)), self.least_us,
        )  # fmt: skip
        return self.keep(Chosen(step, objective, buckets, choice if among is None else among[choice], start.turn)), spent

    def anneal(self, start: Chosen, among: Ints, seed: int, budget: float, hot: float, by_bound: bool = False) -> tuple[Chosen, float]:
        """The best plan that one round of annealing from ``start`` finds, and the work done, in simulated tasks. It is not noted as a plan seen.

        among:    the options to choose from, beside ``start``'s.
        seed:     of random numbers, above 0.
        hot:      the temperature at the beginning, as a share of the step.
        by_bound: anneal the lower bound on the step in place of the step; nothing is simulated, and the result's times are infinite."""
        tensors, space = self.problem.tensors, self.space
        options = space.unique(np.concatenate([among, start.options]))
        count, buckets = len(tensors.numel), len(start.options)
        of, (parts, option), turn = start.bucketing.of.astype(np.int64), np.zeros((2, count), np.int64), np.zeros(count)
        parts[:buckets], option[:buckets] = start.bucketing.parts, space.positions(options, start.options)
        turn[:buckets] = np.arange(buckets) if start.turn is None else start.turn
        least, most = (float(BLOCK), float(MAX_PART)) if self.problem.cuts_as_jobs else (1.0, np.inf)
        step, buckets, work = anneal(
            tensors.numel, tensors.ready_us, tensors.codec, np.searchsorted(tensors.ready_us, tensors.ready_us), least, most, MAX_PARTS,
            space.tasks(options), np.ascontiguousarray(space.fits(options)), space.resources, *space.costs, space.threads, space.moments_us,
            of, parts, option, turn, seed, float(budget), hot, COLD, by_bound,
        )  # fmt: skip
        made, number = renumbered(tensors, of, parts[:buckets].tolist())
        order, step = np.argsort(number), np.inf if by_bound else step
        return Chosen(step, step, self.cut(made), options[option[order]], np.argsort(np.argsort(turn[order], kind="stable"))), work

    def _ranks(self, made: Chosen) -> Ints:
        """Each chain's rank."""
        parts = made.bucketing.parts
        return np.arange(int(parts.sum())) if made.turn is None else ranks_of(made.turn, parts)

    def critical(self, made: Chosen) -> NDArray[np.bool_]:
        """Whether each bucket is on a critical path."""
        space, kinds, (ready_us, first, _) = self.space, kinds_of(made.bucketing), parts_of(made.bucketing)
        found, times = np.empty(len(made.options), bool), space.times(kinds.sizes, kinds.codec)
        find_critical(
            ready_us, first, kinds.of, space.graph.rows, space.of_atom, space.resources, times, space.may_take[kinds.codec], space.threads,
            space.moments_us, self._ranks(made), made.options, found,
        )  # fmt: skip
        return found

    def keep(self, made: Chosen) -> Chosen:
        """Note a plan, and keep it as the best if it is."""
        self.seen.append(made)
        if self.best is None or made.objective < self.best.objective:
            self.best = made
        return made

    def among(self, buckets: Bucketing, start: Ints, budget: int = SIMULATION_BUDGET // 4, worth: float = np.inf) -> Chosen:
        """The best options for these buckets that descent finds from ``start``, using only options that ``start`` has; ``start`` itself if ``budget``
        is 0. worth: if ``start``'s objective is not below this, nothing is searched, and the result's times are infinite."""
        buckets = self.cut(buckets)
        options, kinds = self.space.unique(start), kinds_of(buckets)
        return self.descend(buckets, options, kinds, self.space.fits(options)[kinds.codec], start[None], budget, worth=worth)

    def cut(self, buckets: Bucketing) -> Bucketing:
        """The buckets with parts that a job can have, if the plan is to be run."""
        return buckets.at_blocks() if self.problem.cuts_as_jobs else buckets

    def descend(
        self, buckets: Bucketing, options: Ints, kinds: Kinds, fits: NDArray[np.bool_], starts: Ints, budget: int,
        order: Ints | None = None, phases: bool = BOTH, worth: float = np.inf,
    ) -> Chosen:  # fmt: skip
        """Coordinate descent. fits: see ``descent``; starts: rows of options; budget: simulations times their chains; order: the buckets that are
        changed one by one; phases, worth: ``tails`` and ``worth`` of ``descent``."""
        parts, table = parts_of(buckets), self.table(options, kinds)
        order = self.order(buckets) if order is None else order
        choice = np.zeros(len(buckets.parts), np.int64)
        simulations = int(budget / simulation_work(len(parts.ready_us)))
        starts = self.space.positions(options, starts)
        step, objective, _ = descend(
            *parts, kinds.of, fits, *table, self.space.threads, self.space.moments_us, starts, order, choice, simulations, phases, worth
        )
        return self.keep(Chosen(step, objective, buckets, options[choice]))

    def order(self, buckets: Bucketing) -> Ints:
        """The order in which buckets are changed one by one: the largest first if the budget is too small for all, else the last ready first."""
        if len(buckets.of) > SMALL_JOB_MAX_TENSORS:
            return np.argsort(-buckets.numel, kind="stable")
        return np.arange(len(buckets.parts))[::-1].copy()

    def table(self, options: Ints, kinds: Kinds) -> OptionTable:
        """The options' tasks for parts of each kind; ``first`` is -1 for options that parts of the kind cannot have."""
        made = self.space.table(options, kinds.sizes, kinds.codec)
        made.first[~self.space.fits(options)[kinds.codec]] = -1
        return made

    def simplify(self) -> None:
        """Remove encodings that do not shorten the step."""
        assert self.best is not None
        plain, buckets = self.space.graph.plain, self.best.bucketing
        options, kinds = self.space.unique(np.concatenate([plain, self.best.options])), kinds_of(buckets)
        choice = self.space.positions(options, self.best.options)
        parts = parts_of(buckets)
        simulations = int(SIMPLIFY_BUDGET / simulation_work(len(parts.ready_us)))
        step = simplify(
            *parts,
            kinds.of,
            *self.table(options, kinds),
            self.space.threads,
            self.space.moments_us,
            self._ranks(self.best),
            len(plain),
            choice,
            simulations,
        )
        self.best = self.best._replace(step_us=step, options=options[choice])

    def reorder(self, budget: float) -> None:
        """Change the order in which the best plan's buckets go, if that shortens the step noticeably. budget: number of chains to simulate."""
        assert self.best is not None
        buckets, options = self.best.bucketing, self.space.unique(self.best.options)
        kinds, (ready_us, chain, _) = kinds_of(buckets), parts_of(buckets)
        turn = np.arange(len(buckets.parts)) if self.best.turn is None else self.best.turn.copy()
        step, objective, _ = order(
            ready_us, chain, kinds.of, *self.table(options, kinds), self.space.threads, self.space.moments_us,
            self.space.positions(options, self.best.options), turn, budget,
        )  # fmt: skip
        if step < self.best.step_us * (1 - ORDER_MIN_GAIN):
            self.best = self.best._replace(step_us=step, objective=objective, turn=turn)

    def in_readiness_order(self) -> None:
        """Give the best plan's buckets their turns in order of readiness again, unless that makes the step noticeably longer."""
        assert self.best is not None
        if self.best.turn is None:
            return
        best = self.best
        plain, _ = self.fully(best._replace(turn=None), np.empty(0, np.int64), 1, 0)
        self.best = plain if plain.step_us * (1 - ORDER_MIN_GAIN) <= best.step_us else best

    @functools.cached_property
    def least_us(self) -> float:
        """Lower bound on the step: backward, then the quickest option for the smallest part of the last tensor."""
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

    def go_on(self, buckets: Bucketing) -> Chosen:
        """The best options for these buckets, found from those that the best plan so far has for the same tensors."""
        if self.best is None:
            return self.choose(buckets)
        return self.choose(buckets, self.best.options[self.best.bucketing.of[buckets.last]])
