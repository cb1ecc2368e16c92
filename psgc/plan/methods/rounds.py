"""Rounds of annealing: from which plans they start, how much work each may do, and how hot it begins.

A round from the best plan seldom leaves that plan's surroundings. So rounds begin from plans that are far apart: two whose resources are in balance
(annealed by the lower bound on the step, in a quarter of a round's time), the best plan so far, and coarse and fine cuts of the model with one option.
The last rounds begin from the best plan of all, cooler. Shares are of the whole work; what is annealed by the bound comes on top.
"""

from __future__ import annotations

from itertools import count
from typing import Final

import numpy as np

from psgc.plan.local_search.choosing import Chosen, Search
from psgc.plan.local_search.moving import MOST_OPTIONS, anneal, by_size, palette
from psgc.plan.methods.seeding import TAPER
from psgc.plan.model.bucketing import fused

BALANCED: Final = 2  # plans that are annealed by the bound first
BOUND_SHARE: Final = 0.1  # of the work, for each of these by the bound
BALANCED_SHARE: Final = 0.14  # and for each of these by the step
CUTS: Final = (4, 32)  # the number of parts of other plans to start from
CUT_SHARE: Final = 0.087  # for each of these, and for the best plan beside them
HOT: Final = 1e-2  # temperature at the beginning of these rounds, as a share of the step
LAST: Final = 5  # rounds from the best plan
LAST_SHARE: Final = 0.078
WARM: Final = 3e-3  # temperature at the beginning of these
MANY_TENSORS: Final = 512  # with more, a round is of few moves, and all begin from the best plan
ROUNDS_OF_MANY: Final = 10
DESCENT: Final = 1_000  # simulated chains of the descent behind a round


def anneal_from_several(made: Search, plans: list[Chosen], work: float) -> None:
    """Anneal from several plans, and then the best one. plans: see ``palette``; work: of all rounds, in simulated tasks."""
    if made.is_done:
        return
    first, seeds = made.best, count(1)
    assert first is not None
    if len(made.problem.tensors.numel) > MANY_TENSORS:
        for _ in range(ROUNDS_OF_MANY):
            anneal(made, palette(made, plans), next(seeds), work / ROUNDS_OF_MANY, WARM, DESCENT)
        return
    for _ in range(BALANCED):
        known = palette(made, plans)
        balanced, _ = made.anneal(first, known, next(seeds), BOUND_SHARE * work, HOT, by_bound=True)
        start, _ = made.fully(balanced, by_size(balanced.bucketing), MOST_OPTIONS, DESCENT)
        anneal(made, known, next(seeds), BALANCED_SHARE * work, HOT, DESCENT, start)
    for other in (made.best, *(of_one_option(made, parts) for parts in CUTS)):
        anneal(made, palette(made, plans), next(seeds), CUT_SHARE * work, HOT, DESCENT, other)
    for _ in range(LAST):
        anneal(made, palette(made, plans), next(seeds), LAST_SHARE * work, WARM, DESCENT)


def of_one_option(made: Search, count: float) -> Chosen:
    """The model in about ``count`` parts, all with the option that most elements of the best plan have; not simulated. Where tensors have several
    codecs, each keeps its option."""
    assert made.best is not None
    here, tensors = made.best, made.problem.tensors
    buckets = made.cut(fused(tensors, made.problem.profile.numel / count, TAPER))
    options = here.options[here.bucketing.of[buckets.last]]
    if len(made.space.codecs) == 1:
        options = np.full(len(buckets.parts), np.bincount(here.options, here.bucketing.numel).argmax())
    return Chosen(np.inf, np.inf, buckets, options)
