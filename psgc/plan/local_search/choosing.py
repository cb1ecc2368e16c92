"""The options of given buckets: what is worth trying, priced, and chosen by descents. Keeps the best plan that it has seen.

Three descents are at hand: ``choose`` takes the options that are cheapest at some mixture of prices (``space``) as candidates and may change
all buckets from one on together (``descent``); ``fully`` changes one bucket at a time, among all options (``full_descent``); ``among`` only
takes options that the start has. Owns candidates and what one descent may cost; knows nothing of which bucketings are tried.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.plan.inputs.profile import F64
from psgc.plan.local_search.descent import descend, simplify
from psgc.plan.local_search.full_descent import Paths, descend_fully, find_critical, simulation_work
from psgc.plan.local_search.ordering import order, ranks_of
from psgc.plan.local_search.space import OptionTable, Space
from psgc.plan.model.bucketing import MAX_PARTS, Bucketing, Kinds, kinds_of, parts_of
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

PRICE_MIXTURES: Final = 48  # for each size
SMALL_JOB_MAX_TENSORS: Final = 12  # of so many every bucket is changed one by one
MAX_SIMULATIONS: Final = 400  # of one descent among candidates
SIMULATION_BUDGET: Final = 3_000  # of one descent: simulated chains (``simulation_work``)
SIMPLIFY_BUDGET: Final = 8_000  # likewise
SIZE_STEP_BITS: Final = 2  # candidates are shared by sizes within a factor of four
SMALLEST_SIZE_BITS: Final = 10  # and by all sizes up to this power of two
CONVERGED_RTOL: Final = 2e-3  # of the step, what is not worth a search
ORDER_MIN_GAIN: Final = 1e-4  # of the step; for less buckets go on in the order that they had
BOTH, ONE_BY_ONE = True, False  # phases of a descent


NO_PATHS: Final = Paths(*[np.zeros(0, np.int64)] * 4)


class Chosen(NamedTuple):
    """A bucketing with an option for each bucket, by its number (``space``). objective: the step, and a little of the mean completion; turn: of each
    bucket, the least goes first of those that could go at once; None: in order of readiness."""

    step_us: float
    objective: float
    bucketing: Bucketing
    options: Ints
    turn: Ints | None = None


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
    seen: list[Chosen] = field(default_factory=list)

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

    def candidates(self, kinds: Kinds) -> list[Candidates]:
        """The candidates for parts of each of these kinds."""
        bits = np.maximum(SIZE_STEP_BITS * np.round(np.log2(kinds.sizes) / SIZE_STEP_BITS), SMALLEST_SIZE_BITS).astype(np.int64).tolist()
        keys = list(zip(kinds.codec.tolist(), bits, strict=True))
        self.find_candidates(dict.fromkeys(keys))
        return [self.candidates_of[key] for key in keys]

    def choose(self, buckets: Bucketing, start: Ints | None = None) -> Chosen:
        """The best options for these buckets that descent finds from ``start``, or else from the cheapest at each mixture of prices."""
        buckets = self.cut(buckets)
        kinds = kinds_of(buckets)
        found = self.candidates(kinds)
        options = self.space.unique(np.concatenate([one.options for one in found] + ([] if start is None else [start])))
        fits = np.array([one.known[options] for one in found])
        starts = np.array([one.cheapest for one in found]).T[:, kinds.of] if start is None else start[None]
        return self.descend(buckets, options, kinds, fits, starts, min(SIMULATION_BUDGET, MAX_SIMULATIONS * int(buckets.parts.sum())))

    def fully(self, start: Chosen, order: Ints, most: int, budget: float, among: Ints | None = None) -> tuple[Chosen, int]:
        """The best options for these buckets that descent over all options finds from ``start``, and how many chains it simulated. order: of
        the buckets that change; most: how many options of a bucket are simulated before the next bucket's turn; budget: of chains; among:
        the options, ``start``'s among them, in place of all."""
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

    def _ranks(self, made: Chosen) -> Ints:
        """Of each chain."""
        parts = made.bucketing.parts
        return np.arange(int(parts.sum())) if made.turn is None else ranks_of(made.turn, parts)

    def critical(self, made: Chosen) -> NDArray[np.bool_]:
        """Of each bucket, whether the step waits for it."""
        space, kinds, (ready_us, first, _) = self.space, kinds_of(made.bucketing), parts_of(made.bucketing)
        found, times = np.empty(len(made.options), bool), space.times(kinds.sizes, kinds.codec)
        find_critical(
            ready_us, first, kinds.of, space.graph.rows, space.of_atom, space.resources, times, space.may_take[kinds.codec], space.threads,
            space.moments_us, self._ranks(made), made.options, found,
        )  # fmt: skip
        return found

    def keep(self, made: Chosen) -> Chosen:
        """Take it for the best if it is."""
        self.seen.append(made)
        if self.best is None or made.objective < self.best.objective:
            self.best = made
        return made

    def among(self, buckets: Bucketing, start: Ints, budget: int = SIMULATION_BUDGET // 4, worth: float = np.inf) -> Chosen:
        """The best options for these buckets that descent finds from ``start`` among those in it; ``start`` itself if ``budget`` is 0. worth: an
        objective that ``start`` has to be below, or the answer's are infinite."""
        buckets = self.cut(buckets)
        options, kinds = self.space.unique(start), kinds_of(buckets)
        return self.descend(buckets, options, kinds, self.space.fits(options)[kinds.codec], start[None], budget, worth=worth)

    def cut(self, buckets: Bucketing) -> Bucketing:
        """With parts that a job can have, if the plan is to be run."""
        return buckets.at_blocks() if self.problem.constraints.to_be_run else buckets

    def descend(
        self, buckets: Bucketing, options: Ints, kinds: Kinds, fits: NDArray[np.bool_], starts: Ints, budget: int,
        order: Ints | None = None, phases: bool = BOTH, worth: float = np.inf,
    ) -> Chosen:  # fmt: skip
        """Coordinate descent. fits: as ``descent`` takes it; starts: rows of options; budget: simulations, times their chains; order: of
        the buckets that are changed one by one."""
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
        parts = parts_of(buckets)
        simulations = int(SIMPLIFY_BUDGET / simulation_work(len(parts.ready_us)))
        step = simplify(
            *parts, kinds.of, *self.table(options, kinds), self.space.threads, self.space.moments_us, len(plain), choice, simulations
        )
        self.best = Chosen(step, self.best.objective, buckets, options[choice])

    def reorder(self, budget: float) -> None:
        """Let buckets of the best plan go in another order if that shortens the step noticeably. budget: of simulated chains."""
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

    def go_on(self, buckets: Bucketing) -> Chosen:
        """The best choice for these buckets, from the options of the best plan so far for the same tensors."""
        if self.best is None:
            return self.choose(buckets)
        return self.choose(buckets, self.best.options[self.best.bucketing.of[buckets.last]])
