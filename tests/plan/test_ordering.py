"""Another order of the buckets: it is what the plan says and a job gets, it never makes the step longer, and no order is below a bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.plan.local_search.choosing import Search
from psgc.plan.local_search.space import Space
from psgc.plan.methods.bound import lower_bounds, over_all_bucketings
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.result import Found
from psgc.plan.methods.search import planned, search
from psgc.plan.model.bucketing import fused
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import Issue, Plan, PlannedBucket
from psgc.plan.model.problem import Problem, Simulated, simulate
from psgc.plan.model.timeline import define_timeline
from psgc.plan.planfile.completing import whole_plan
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import planned_buckets
from psgc.program.order import issued, ordered
from tests.plan.test_search import FEW, of_several_codecs, random_job

ON_SERVERS = Constraints(servers=True, runtime=True, among_workers=False)
AMONG_WORKERS = Constraints(("cpu",), servers=False)


def job(seed: int, constraints: Constraints) -> Problem:
    problem = random_job(seed, 10, constraints)
    return replace(problem, cluster=replace(problem.cluster, servers=2 * constraints.servers))


def in_order_of_readiness(problem: Problem, found: Found) -> Simulated:
    return simulate(problem, [replace(bucket, priority=-number) for number, bucket in enumerate(found.buckets)])


def reordered(seeds: range, constraints: Constraints) -> list[tuple[Problem, Found]]:
    """Jobs whose plan lets a bucket go before one that is ready earlier."""
    every = [(problem, search(problem)) for problem in (job(seed, constraints) for seed in seeds)]
    return [
        (problem, found) for problem, found in every if [-bucket.priority for bucket in found.buckets] != list(range(len(found.buckets)))
    ]


@pytest.mark.parametrize("constraints", [ON_SERVERS, AMONG_WORKERS, Constraints()])
def test_a_plan_leaves_the_order_of_readiness_only_where_that_shortens_the_step(constraints: Constraints) -> None:
    found = reordered(range(918, 928), constraints)
    assert found
    for problem, plan in found:
        simulated = simulate(problem, plan.buckets)
        assert simulated.step_us == plan.step_us == define_timeline(simulated.chains).step_us
        assert plan.step_us < in_order_of_readiness(problem, plan).step_us * (1 - 1e-4)


def test_no_order_of_few_buckets_is_much_shorter_than_the_one_that_is_found() -> None:
    tried = 0
    for seed in range(900, 925):
        problem = job(seed, ON_SERVERS)
        made = Search(problem, Space(problem))
        made.choose(fused(problem.tensors, problem.profile.numel / 4, 0.5))
        made.reorder(1e6)
        assert made.best is not None
        count = len(made.best.options)
        if 2 <= count <= 4:
            steps = [
                simulate(problem, planned(problem, made.space, made.best._replace(turn=np.array(turn)))).step_us
                for turn in permutations(range(count))
            ]
            assert made.best.step_us <= min(steps) * (1 + 1e-3)
            tried += max(steps) > min(steps) * (1 + 1e-3)
    assert tried >= 5


def test_a_job_over_servers_sends_the_parts_in_the_order_of_the_plan() -> None:
    for problem, found in reordered(range(904, 908), ON_SERVERS):
        plan = whole_plan(problem, found.buckets, simulate(problem, found.buckets), {})
        assert read_plan(plan.to_json(), "p") == plan
        of_codec = [replace(bucket, codec="int8" if bucket.codec != "none" else "none") for bucket in plan.buckets]
        runnable = replace(plan, buckets=tuple(of_codec))
        tensors = tuple(TensorSpec(tensor.name, (tensor.numel,), "float32") for tensor in problem.profile.tensors)
        declared = Declaration("m", "plan", tensors, "none", True, buckets=planned_buckets(runnable, tensors, plan.shape))
        layout = build_layout(declared, layout_id=0, servers=2, workers=problem.cluster.gpus)
        sent = [layout.tensors[bucket.tensors[0]].name for bucket in sorted(layout.buckets, key=lambda bucket: -bucket.priority)]
        chains = simulate(problem, found.buckets)
        first = [(rank, chains.rows[begin].bucket) for rank, begin in zip(chains.chains.rank, chains.chains.first, strict=False)]
        simulated = list(dict.fromkeys(bucket for _, bucket in sorted(first)))
        assert sent == [found.buckets[number].tensors[0] for number in simulated]


def test_a_job_among_workers_begins_its_transfers_in_the_order_of_the_simulated_step() -> None:
    found = reordered(range(903, 907), AMONG_WORKERS)
    assert found
    for problem, planned_step in found:
        simulated = simulate(problem, planned_step.buckets)
        plan = whole_plan(problem, planned_step.buckets, simulated, {})
        assert plan.issue_order is not None
        assert plan.issue_order != whole_plan(problem, planned_step.buckets, in_order_of_readiness(problem, planned_step), {}).issue_order
        _check_turns(problem, plan, simulated)


def _check_turns(problem: Problem, plan: Plan, simulated: Simulated) -> None:
    """On every lane the transfers of a declared layout have their turns in the order in which the simulated step begins them."""
    as_int8 = [replace(bucket, codec="int8" if bucket.codec != "none" else "none") for bucket in plan.buckets]
    tensors = tuple(TensorSpec(tensor.name, (tensor.numel,), "float32") for tensor in problem.profile.tensors)
    specs = planned_buckets(replace(plan, buckets=tuple(as_int8)), tensors, plan.shape)
    owner = [(number, part) for number, spec in enumerate(specs) for part in range(spec.parts)]
    options = [specs[number].option for number, _ in owner]
    each = [len(issued(option)) for option in options]
    turns = [specs[number].turns[part * count : (part + 1) * count] for (number, part), count in zip(owner, each, strict=True)]
    place = {Issue(*owner[turn.chain], turn.action): at for at, turn in enumerate(ordered(options, turns))}
    assert plan.issue_order
    for issues in plan.issue_order.values():
        assert [place[issue] for issue in issues] == sorted(place[issue] for issue in issues)
    starts: dict[tuple[int, int, str], float] = {}
    for row, start in zip(simulated.rows, simulated.timeline.start_us.tolist(), strict=True):
        starts.setdefault((row.bucket, row.part, row.action), start)
    for issues in plan.issue_order.values():
        begun = [starts[issue.bucket, issue.part, plan.buckets[issue.bucket].option[issue.step]] for issue in issues]
        assert begun == sorted(begun)


@pytest.mark.parametrize("several", [False, True])
def test_no_order_of_tasks_is_below_a_bound(several: bool) -> None:
    """Every order of up to four buckets, with several choices of their options."""
    differ = 0
    for seed in range(8):
        made = random_job(300 + seed, 6, FEW if seed % 2 else Constraints(servers=True))
        problem = of_several_codecs(made) if several else made
        problem = replace(problem, cluster=replace(problem.cluster, servers=seed % 3))
        found = search(problem)
        any_us = over_all_bucketings(problem, Space(problem))
        if len(found.buckets) > 4:
            continue
        rng = np.random.default_rng(seed)
        for _ in range(2):
            buckets = [_with_any_option(problem, bucket, rng) for bucket in found.buckets]
            steps = []
            for turn in permutations(range(len(buckets))):
                steps.append(simulate(problem, [replace(bucket, priority=-one) for bucket, one in zip(buckets, turn, strict=True)]).step_us)
            bounds = lower_bounds(problem, buckets, max(steps))
            assert max(bounds.given_us, any_us) <= min(steps) * (1 + 1e-9)
            differ += max(steps) > min(steps) * (1 + 1e-6)
    assert differ >= 3


def _with_any_option(problem: Problem, bucket: PlannedBucket, rng: np.random.Generator) -> PlannedBucket:
    codec = problem.codec_of(bucket)
    possible = [option for option in problem.options if problem.takes(option, codec)]
    option = possible[int(rng.integers(len(possible)))]
    return replace(bucket, option=option, codec=codec.name if any("@" in action for action in option) else "none")


def test_espresso_with_given_buckets_keeps_to_their_order() -> None:
    differ = 0
    for seed in range(904, 909):
        problem = job(seed, Constraints())
        buckets = search(problem).buckets
        for turn in (range(len(buckets)), range(len(buckets))[::-1]):
            given = [replace(bucket, priority=-one) for bucket, one in zip(buckets, turn, strict=True)]
            found = espresso(problem, given)
            assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us, rel=1e-12)
            assert {bucket.tensors: bucket.priority for bucket in found.buckets} == {bucket.tensors: bucket.priority for bucket in given}
            differ += found.step_us != espresso(problem, buckets).step_us
    assert differ
