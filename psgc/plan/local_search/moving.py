"""Moves of a plan's buckets: they are cut into more or fewer parts, merged and split, and their options chosen again, until nothing helps.

A move changes one or two buckets. Only these get new options, from a palette: the candidates for all sizes, and the options of good plans. After
moves that helped, every bucket chooses again from all options. ``annealing`` makes the same moves and others at random. Owns the moves, their order
and their budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from psgc.plan.local_search.choosing import Chosen, Search
from psgc.plan.model.bucketing import MAX_PARTS, Bucketing, merged, split
from psgc.plan.model.problem import Problem
from psgc.plan.model.timeline import Ints

MOST_OPTIONS: Final = 6  # options that are simulated for a bucket in its turn
MOVE_OPTIONS: Final = 12  # the same, for a bucket that a move changed
MOVE_OVERHEAD: Final = 200  # cost of a move besides simulations, in simulated chains
ORDER_ROUNDS: Final = 4  # of ``reorder``, at most
ORDER_WORTH: Final = 1e-3  # share of the step that another order must save for options to be chosen again
WORTH_POLISHING: Final = 1.2  # plans with an objective of up to this many times the best one's are polished


def polish(made: Search, count: int, budget: float) -> tuple[list[Chosen], float]:
    """Choose options again, from all options, for the best ``count`` plans seen; for the best plan's buckets also with no compression as the
    start. Returns the plans, the best first, and the rest of the budget."""
    seen, made.seen = sorted(made.seen, key=lambda one: one.objective), []
    found: list[Chosen] = []
    known: set[tuple[int, int, float]] = set()
    for one in seen:
        alike = len(one.bucketing.parts), int(one.bucketing.parts.sum()), round(one.step_us, 3)
        worth = one.objective < seen[0].objective * WORTH_POLISHING and alike not in known
        if worth and len(found) < count and budget > 0 and not made.is_done:
            known.add(alike)
            better, spent = made.fully(one, by_size(one.bucketing), MOST_OPTIONS, budget)
            found.append(better)
            budget -= spent
    plain = made.space.graph.plain
    if len(plain) and found and budget > 0 and not made.is_done:
        best = min(found, key=lambda one: one.objective)
        start = best._replace(options=np.full(len(best.options), plain[0]))
        better, spent = made.fully(start, by_size(best.bucketing), MOST_OPTIONS, budget)
        found.append(better)
        budget -= spent
    return sorted(found, key=lambda one: one.objective), budget


def palette(made: Search, plans: list[Chosen]) -> Ints:
    """The options of these plans, and all candidates, without duplicates."""
    return made.space.unique(np.concatenate([*(one.options for one in plans), *(one.options for one in made.candidates_of.values())]))


def improve(made: Search, here: Chosen, budget: float, known: Ints) -> float:
    """Move a plan's critical buckets, the largest first, and choose its options again, until nothing helps or the budget is spent. known: the
    palette. Returns the rest of the budget."""
    while not made.is_done and budget > 0:
        before, critical = here, made.critical(here)
        for bucket in by_size(here.bucketing).tolist():
            if not critical[bucket]:
                continue
            moved = here
            for buckets, changed in neighbours(made.problem, here.bucketing, bucket):
                if budget > 0:
                    start = Chosen(np.inf, np.inf, buckets, here.options[here.bucketing.of[buckets.last]])
                    tried, spent = made.fully(start, changed, MOVE_OPTIONS, budget, known)
                    budget -= MOVE_OVERHEAD + spent
                    moved = tried if tried.objective < moved.objective else moved
            if moved is not here:
                renumbered = len(moved.bucketing.parts) != len(here.bucketing.parts)
                here = moved
                if renumbered:
                    break
                critical = made.critical(here)
        if here is before or budget <= 0:
            return budget
        here, spent = made.fully(here, by_size(here.bucketing), MOST_OPTIONS, budget)
        known = made.space.unique(np.concatenate([known, here.options]))
        budget -= spent
    return budget


def anneal(made: Search, known: Ints, seed: int, budget: float, hot: float, descent: float, start: Chosen | None = None) -> Chosen:
    """Anneal a plan, by default the best one, and choose the result's options again. Returns the result. known: the palette; seed, budget, hot: see
    ``Search.anneal``; descent: number of chains to simulate for the choice of options."""
    assert made.best is not None
    if made.is_done:
        return made.best
    found, _ = made.anneal(start or made.best, known, seed, budget, hot)
    return made.fully(found, by_size(found.bucketing), MOST_OPTIONS, descent)[0]


def reorder(made: Search, budget: float) -> None:
    """Change the order in which the best plan's buckets go if that shortens the step; while it does so by much, choose options again for the new
    order. budget: for each search for an order, and for each choice of options, in simulated chains."""
    for _ in range(ORDER_ROUNDS):
        assert made.best is not None
        before = made.best.step_us
        if made.is_done:
            return
        made.reorder(budget)
        if made.best.step_us > before * (1 - ORDER_WORTH):
            return
        made.fully(made.best, by_size(made.best.bucketing), MOST_OPTIONS, budget)


def finish(made: Search, budget: float) -> None:
    """Take back what does not shorten the best plan's step: turns, then encodings; then look for another order once more (``reorder``)."""
    made.in_readiness_order()
    made.simplify()
    reorder(made, budget)


def by_size(made: Bucketing) -> Ints:
    """The buckets' numbers, the largest bucket first."""
    return np.argsort(-made.numel, kind="stable")


def neighbours(problem: Problem, made: Bucketing, bucket: int) -> Iterator[tuple[Bucketing, Ints]]:
    """The bucketings that one move of a bucket gives, each with the numbers of the buckets that it changed: with twice and half as many
    parts, merged with the next one, and split in halves."""
    own = np.array([bucket])
    for count in (made.parts[bucket] * 2, made.parts[bucket] // 2):
        if 0 < count <= MAX_PARTS:
            parts = made.parts.copy()
            parts[bucket] = count
            yield made.cut(parts), own
    for found in (merged(problem.tensors, made, bucket), split(problem.tensors, made, bucket)):
        if found is not None:
            yield found
