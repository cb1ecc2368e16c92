"""The bucketings that a search begins with: models in more and fewer parts, fusions for the link that limits, other systems' buckets.

Each gets its options by a descent that begins at the options of the best plan so far. Owns the families that are tried and in which order.
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

EXHAUSTIVE_MAX_TENSORS: Final = 4  # every fusion of so many is tried
RIVALS_MAX_TENSORS: Final = 24  # for so many all other systems' choices cost about a millisecond
GREEDY_OPTIONS: Final = 16  # of a tensor that are simulated in its turn
GREEDY_BUDGET: Final = 6_000  # simulated chains
QUICK_RIVALS: Final = 3  # those before HiPress, whose formulas take longest
UNFUSED_MAX_TENSORS: Final = 512  # so many are also tried without fusion
PIPELINED_OPTIONS: Final = 2  # for which fusions are computed
TAPER: Final = 0.25  # of the elements still to come, the share that a bucket may hold
MANY_TENSORS: Final = 64  # for more, a number of parts between two that were tried is tried, too
MAX_TOTAL_PARTS: Final = 48  # nothing finer is tried
REFINE_MIN_GAIN: Final = 1e-2  # for which twice as many parts, or half as many, are tried
COARSEST_PARTS: Final = 8  # of a model, at first


def seed(made: Search) -> None:
    """Try them all, unless the best plan is as good as the lower bound."""
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
    """The best choice with the model in about so many parts, from that of the best bucketing so far."""
    return made.go_on(fused(made.problem.tensors, made.problem.profile.numel / count, TAPER))


def refine(made: Search) -> None:
    """Try the model in ever more parts, as long as that shortens the step enough; then, where few parts are best of many tensors, in a
    number between the last two, and its buckets uncut."""
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
    """Try the fusions that are best for what limits, were every bucket to take the option that most elements of its codec have now, or the
    next one."""
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
    """Of the link or processor, but the GPU, that this option would hold longest: latency, microseconds an element, and what comes before its
    first use. A line through a small bucket and a large one."""
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
    """Simulate the choices of other systems but Espresso, without those whose options the constraints rule out, and keep those that are worth
    more. most: of so many, BytePS first."""
    assert made.best is not None
    tensors, number = made.problem.tensors, made.space.graph.number
    for choices in islice(tensors_choices(made.problem), most):
        if all(choice.option in number for choice in choices):
            options, worth = np.array([number[choice.option] for choice in choices]), made.best.objective * WORTH_POLISHING
            made.among(bucketing(tensors, np.arange(len(options)), [choice.parts for choice in choices]), options, budget=0, worth=worth)
