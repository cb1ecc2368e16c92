"""psgc's own method: it chooses fusion, parts and every bucket's option together.

Descents on the timeline choose options for a few bucketings (``seeding``, ``choosing``). For the best of these plans, options are chosen again from
all options. Then their buckets are moved, and options chosen again for each move, until nothing helps or the budget is spent (``moving``). Last, plans
are annealed from several starts (``rounds``). If the user gives more time, ``anytime`` continues from there; ``bound`` says how far a plan may be from
the best one.

The budget counts simulated chains and tasks, not time, so the same job gets the same plan on any machine. The constants were chosen on random
jobs of ``benchmarks/planning_rivals.py`` with 1 to 200 tensors and seeds 200,000 to 200,599, and on the six published traces; the figures in
docs/planner.md are of other seeds.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from psgc.plan.local_search.choosing import Chosen, Search
from psgc.plan.local_search.moving import finish, improve, palette, polish
from psgc.plan.local_search.space import Space
from psgc.plan.methods.result import Found
from psgc.plan.methods.rounds import anneal_from_several
from psgc.plan.methods.seeding import seed
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem

POLISHED: Final = 3  # plans whose options are chosen again from all options
IMPROVED: Final = 3  # plans whose buckets are moved
BUDGET: Final = 10_000  # simulated chains (``full_descent.simulation_work``) after the first plans
ORDER_BUDGET: Final = 2_000  # simulated chains for another order at the end
ANNEALING: Final = 3_000_000  # work of all rounds of annealing, in simulated tasks: some 0.15 s on a busy machine
QUICK: Final = 0  # the same for plans that a running job makes


def search(problem: Problem, annealing: float | None = None) -> Found:
    """The best plan that the search finds, over all options that the constraints allow. annealing: work of annealing, in simulated tasks; None:
    ANNEALING."""
    begun = time.perf_counter()
    made = searched(problem, annealing)
    assert made.best is not None
    chosen = planned(problem, made.space, made.best)
    return Found(chosen, made.best.step_us, (time.perf_counter() - begun) * 1e6, len(problem.options))


def searched(problem: Problem, annealing: float | None = None) -> Search:
    """The finished search."""
    work = ANNEALING if annealing is None else annealing
    made = Search(problem, Space(problem))
    seed(made)
    plans, budget = polish(made, POLISHED, BUDGET)
    for one in plans[:IMPROVED]:
        budget = improve(made, one, budget, palette(made, plans))
    if work:
        anneal_from_several(made, plans, work)
    finish(made, ORDER_BUDGET)
    return made


def planned(problem: Problem, space: Space, chosen: Chosen) -> tuple[PlannedBucket, ...]:
    """The choice as a plan's buckets."""
    names, found = np.array([tensor.name for tensor in problem.profile.tensors], object), chosen.bucketing
    members = np.split(names[np.argsort(found.of, kind="stable")], np.cumsum(np.bincount(found.of))[:-1])
    plain, codecs = set(space.graph.plain.tolist()), [codec.name for codec in space.codecs]
    turns = range(len(members)) if chosen.turn is None else chosen.turn.tolist()
    columns = (members, chosen.options.tolist(), found.codec.tolist(), found.numel.tolist(), found.parts.tolist(), turns)
    return tuple(
        PlannedBucket(
            tuple(tensors), int(numel), parts, -turn, UNCOMPRESSED if option in plain else codecs[codec], space.graph.options[option]
        )
        for tensors, option, codec, numel, parts, turn in zip(*columns, strict=True)
    )
