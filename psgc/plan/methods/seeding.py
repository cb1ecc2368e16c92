"""The bucketings that a search begins with: the model cut into more and fewer parts, fusions for the limiting link, and other systems' buckets.

The options of each bucketing come from a descent that starts at those of the best plan so far. Owns the families of bucketings and their order.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import numpy as np

from psgc.plan.local_search.choosing import SMALL_JOB_MAX_TENSORS, Chosen, Search
from psgc.plan.local_search.moving import WORTH_POLISHING
from psgc.plan.local_search.pipeline import fused_for
from psgc.plan.methods.baselines import tensors_choices
from psgc.plan.model.bucketing import bucketing, each_alone, every_fusion, fused, renumbered
from psgc.plan.model.costs import GPU, RESOURCES, resources_of

EXHAUSTIVE_MAX_TENSORS: Final = 4  # up to so many, every fusion is tried
RIVALS_MAX_TENSORS: Final = 24  # up to so many, all other systems' choices cost about a millisecond
GREEDY_OPTIONS: Final = 16  # options that are simulated for a tensor in its turn
GREEDY_BUDGET: Final = 6_000  # simulated chains
QUICK_RIVALS: Final = 3  # the systems before HiPress, whose formulas take longest
UNFUSED_MAX_TENSORS: Final = 512  # up to so many, no fusion is tried, too
PIPELINED_OPTIONS: Final = 2  # number of options for which fusions are computed
TAPER: Final = 0.25  # a bucket may hold at most this share of the elements still to come
MANY_TENSORS: Final = 64  # with more, a number of parts between two tried ones is tried, too
MAX_TOTAL_PARTS: Final = 48  # the finest cut of a model that is tried
REFINE_MIN_GAIN: Final = 1e-2  # share of the step that a change of the number of parts must save for the next one to be tried
COARSEST_PARTS: Final = 8  # the first cut of a model that is tried


def seed(made: Search) -> None:
    """Try all families, until the best plan is as good as the lower bound."""
    problem = made.problem
    count, plain = len(problem.tensors.numel), len(made.space.graph.plain)
    refine(made)
    if count <= EXHAUSTIVE_MAX_TENSORS:
        for buckets in every_fusion(problem.tensors, (1, 2, 4)):
            made.choose(buckets)
    if plain == len(made.space.graph.options):  # few options are simulated quickly
        rivals(made)
    if count > UNFUSED_MAX_TENSORS or made.is_done:
        return
    made.go_on(each_alone(problem.tensors))
    if count <= RIVALS_MAX_TENSORS and plain:  # as Espresso does, but among all options
        alone = each_alone(problem.tensors)
        start = Chosen(np.inf, np.inf, alone, np.full(count, made.space.graph.plain[0]))
        made.fully(start, np.argsort(-alone.numel, kind="stable"), GREEDY_OPTIONS, GREEDY_BUDGET)
    if 0 < plain < len(made.space.graph.options) and not problem.constraints.runtime:
        rivals(made, None if count <= RIVALS_MAX_TENSORS else QUICK_RIVALS)
    for _ in range(2):
        if not made.is_done:
            pipelined(made)


def of_parts(made: Search, count: float) -> Chosen:
    """The best options for the model in about ``count`` parts, found from those of the best plan so far."""
    return made.go_on(fused(made.problem.tensors, made.problem.profile.numel / count, TAPER))


def refine(made: Search) -> None:
    """Try the model in more and more parts while that shortens the step enough. Then, if few parts are best for many tensors, try a number
    between the last two, and the buckets uncut."""
    count, before = float(COARSEST_PARTS), np.inf
    most = MAX_TOTAL_PARTS if len(made.problem.profile.tensors) > SMALL_JOB_MAX_TENSORS else MAX_TOTAL_PARTS // 3
    while (found := of_parts(made, count)).step_us < before * (1 - REFINE_MIN_GAIN):
        if made.is_done:
            return
        if found.bucketing.parts.sum() > most:
            break
        count, before = count * 2, found.step_us
    if len(made.problem.profile.tensors) > MANY_TENSORS and count <= 2 * COARSEST_PARTS:
        of_parts(made, count * 3 / 4)
    assert made.best is not None
    made.among(made.best.bucketing.cut(np.ones_like(made.best.bucketing.parts)), made.best.options)
    count, before = COARSEST_PARTS / 2, np.inf
    while count >= 1 and not made.is_done and (found := of_parts(made, count)).step_us < before * (1 - REFINE_MIN_GAIN):
        count, before = count / 2, min(found.step_us, made.best.step_us)


def pipelined(made: Search) -> None:
    """Try the optimal fusions for the limiting resource, as if every bucket took the option that most elements of its codec have now, or the
    second most frequent one."""
    assert made.best is not None
    tensors, here = made.problem.tensors, made.best
    for rank in range(PIPELINED_OPTIONS):
        of, first, group = np.empty(len(tensors.numel), np.int64), np.empty(len(tensors.numel), np.int64), 0
        for codec in np.unique(tensors.codec).tolist():
            own, buckets = np.flatnonzero(tensors.codec == codec), here.bucketing.codec == codec
            share = np.bincount(here.options[buckets], here.bucketing.numel[buckets])
            option = int(np.argsort(-share, kind="stable")[min(rank, int(np.count_nonzero(share)) - 1)])
            latency, rate, lead = held(made, option, float(tensors.numel[own].sum()), codec)
            of[own] = group + fused_for(tensors.numel[own], tensors.ready_us[own], latency, rate, lead)
            first[own], group = option, int(of[own[-1]]) + 1
        fusion, _ = renumbered(tensors, of, [1] * group)
        made.choose(fusion, first[fusion.last])


def held(made: Search, option: int, numel: float, codec: int) -> tuple[float, float, float]:
    """The resource other than the GPU that this option would hold longest: its latency, its microseconds per element, and the time before its
    first use. They are those of a line through a small and a large bucket."""
    sizes = np.array([numel / 64, numel / 4])
    table = made.space.table(np.array([option]), sizes, np.repeat(codec, 2))
    load, lead = np.zeros((2, len(RESOURCES))), np.full(len(RESOURCES), np.nan)
    for kind in range(2):
        so_far = 0.0
        for task in range(table.first[kind, 0], table.first[kind, 0] + table.length[0]):
            for one in resources_of(int(table.resource[task])):
                load[kind, one] += table.us[task] / made.space.threads[one]
                lead[one] = so_far if np.isnan(lead[one]) else lead[one]
            so_far += table.us[task]
    load[:, GPU] = 0.0
    most = int(load[1].argmax())
    rate = float(load[1, most] - load[0, most]) / (sizes[1] - sizes[0])
    return max(0.0, float(load[0, most] - rate * sizes[0])), rate, float(np.nan_to_num(lead[most]))


def rivals(made: Search, most: int | None = None) -> None:
    """Simulate the choices of other systems, except Espresso and those that the constraints rule out, and improve the promising ones. most: only
    the first so many systems, beginning with BytePS."""
    assert made.best is not None
    tensors, number = made.problem.tensors, made.space.graph.number
    for choices in islice(tensors_choices(made.problem), most):
        if all(choice.option in number for choice in choices):
            options, worth = np.array([number[choice.option] for choice in choices]), made.best.objective * WORTH_POLISHING
            made.among(bucketing(tensors, np.arange(len(options)), [choice.parts for choice in choices]), options, budget=0, worth=worth)
