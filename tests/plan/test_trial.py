"""Trials: the second kernel is the timeline, the best option is the best of all, and a bubble is what its definition says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.plan.local_search.space import Space
from psgc.plan.methods.baselines import with_option
from psgc.plan.methods.espresso_trials import Trials
from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, INTRA, RECEIVE
from psgc.plan.model.options import Constraints, Option
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, ranks, simulate
from tests.plan.jobs import bucket_of, problems

FEW = Constraints(most_encodes=1, flat=False)
SEEN = settings(max_examples=25, deadline=None)


def options_tried(problem: Problem, buckets: list[PlannedBucket]) -> list[Option]:
    return sorted({bucket.option for bucket in buckets} | set(problem.options[::29]))


def trials_of(problem: Problem, buckets: list[PlannedBucket]) -> Trials:
    """The same job, a chain for each part, in the buckets' order."""
    space, options = Space(problem), options_tried(problem, buckets)
    sizes = sorted({bucket.numel / bucket.parts for bucket in buckets})
    parts = [bucket.parts for bucket in buckets]
    return Trials(
        space.table(np.array([space.graph.number[option] for option in options]), np.array(sizes), np.zeros(len(sizes), np.int64)),
        np.repeat([problem.ready_us[bucket.tensors[-1]] for bucket in buckets], parts),
        np.repeat([sizes.index(bucket.numel / bucket.parts) for bucket in buckets], parts),
        np.repeat([options.index(bucket.option) for bucket in buckets], parts),
        space.threads,
        space.moments_us,
        ranks(buckets, range(len(buckets))),
    )


@st.composite
def planned(draw: Any) -> tuple[Problem, list[PlannedBucket]]:
    problem = draw(problems(constraints=FEW, most=4))
    count = len(problem.profile.tensors)
    options = [draw(st.sampled_from(problem.options)) for _ in range(count)]
    parts = [draw(st.integers(1, 3)) for _ in range(count)]
    turns = draw(st.permutations(range(count)))
    buckets = [bucket_of(problem, index, parts=parts[index], option=options[index]) for index in range(count)]
    return problem, [replace(bucket, priority=-turn) for bucket, turn in zip(buckets, turns, strict=True)]


@SEEN
@given(planned())
def test_a_trials_step_is_the_timelines(job: tuple[Problem, list[PlannedBucket]]) -> None:
    problem, buckets = job
    assert trials_of(problem, buckets).step() == simulate(problem, buckets).step_us


@SEEN
@given(planned(), st.data())
def test_the_best_option_is_the_first_of_those_with_the_shortest_step(job: tuple[Problem, list[PlannedBucket]], data: Any) -> None:
    problem, buckets = job
    trials = trials_of(problem, buckets)
    chosen = data.draw(st.integers(0, len(buckets) - 1))
    low = sum(bucket.parts for bucket in buckets[:chosen])
    before, step = trials.option.copy(), trials.step()
    options = options_tried(problem, buckets)
    candidates = np.arange(len(options))
    best, shortest = trials.best(low, low + buckets[chosen].parts, candidates, step)
    np.testing.assert_array_equal(trials.option, before)

    steps = []
    for option in options:
        other = with_option(buckets[chosen], option, problem)
        steps.append(simulate(problem, [*buckets[:chosen], other, *buckets[chosen + 1 :]]).step_us)
    assert shortest == min(*steps, step)
    assert best == (steps.index(min(steps)) if min(steps) < step else -1)


@SEEN
@given(planned())
def test_a_step_that_is_not_below_the_bound_is_given_up(job: tuple[Problem, list[PlannedBucket]]) -> None:
    trials = trials_of(*job)
    step = trials.step()
    assert trials.step(step) == np.inf
    assert trials.step(step + 1e-3) == step


def plain_bubble(simulated: Simulated) -> tuple[float, dict[int, float]]:
    """The last bubble's beginning, and when each chain was last sent: from the finished timeline."""
    chains, start = simulated.chains, simulated.timeline.start_us
    owner = np.repeat(np.arange(len(chains.ready_us)), np.diff(chains.first))
    links = [
        task for task in range(len(start)) if chains.resource[task] in (BOTH_WAYS, ALL_LINKS) or INTRA <= chains.resource[task] <= RECEIVE
    ]
    spans = [(start[task], start[task] + chains.us[task], owner[task]) for task in links]
    bubble = 0.0
    for when in sorted({begin for begin, _, _ in spans}):
        earlier = [span for span in spans if span[0] < when]
        later = {chain for begin, _, chain in spans if begin >= when}
        idle = max((end for _, end, _ in earlier), default=0.0)
        if idle < when and not later & {chain for _, _, chain in earlier}:
            bubble = idle
    return bubble, {chain: max(end for _, end, whose in spans if whose == chain) for _, _, chain in spans}


@SEEN
@given(planned())
def test_the_last_bubble_is_the_last_time_in_which_nothing_is_sent_in_whole_or_in_part(job: tuple[Problem, list[PlannedBucket]]) -> None:
    problem, buckets = job
    bubble, sent = trials_of(problem, buckets).last_bubble()
    simulated = simulate(problem, buckets)
    plain, last = plain_bubble(simulated)
    assert bubble == plain
    # The two number chains of the same moment in different orders, but rank them alike.
    rank = ranks(buckets, range(len(buckets)))
    assert {rank[chain]: end for chain, end in enumerate(sent) if end} == {simulated.chains.rank[chain]: end for chain, end in last.items()}
