"""Espresso's algorithms: they are the paper's, step by step, in its order, and leave alone what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from psgc.plan.methods import espresso as module
from psgc.plan.methods.baselines import GATHERED, HIERARCHICAL, tensor_by_tensor, with_option
from psgc.plan.methods.espresso import espresso
from psgc.plan.methods.registry import METHODS
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import Constraints, Option, is_uncompressed
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from tests.plan.jobs import CURVE, bucket_of, problem_of, problems
from tests.plan.test_trial import plain_bubble

FLAT = Constraints(hierarchical=False)
ON_GPU = Constraints(devices=("gpu",), most_encodes=1)


def with_options(problem: Problem, options: list[Option]) -> list[PlannedBucket]:
    return [with_option(bucket, option, problem) for bucket, option in zip(tensor_by_tensor(problem), options, strict=True)]


def plain_algorithm_1(problem: Problem) -> list[Option]:
    """Algorithm 1 as the paper writes it, with a whole simulation for every option that a tensor's codec has."""
    tensors, tree = problem.profile.tensors, [option for option in problem.options if "@cpu" not in " ".join(option)]
    codecs = [problem.codecs[number] for number in problem.codec_numbers.values()]
    start = HIERARCHICAL if HIERARCHICAL in tree else next(filter(is_uncompressed, tree))
    chosen = [start] * len(tensors)

    def remove(left: list[int]) -> list[int]:
        bubble, sent = plain_bubble(simulate(problem, with_options(problem, chosen)))
        return [index for index in left if not is_uncompressed(chosen[index]) or sent.get(index, 0.0) > bubble]

    def step(index: int, option: Option) -> float:
        return simulate(problem, with_options(problem, [*chosen[:index], option, *chosen[index + 1 :]])).step_us

    left = remove(sorted(range(len(tensors)), key=lambda index: (-tensors[index].numel, -index)))
    while left:
        index = left.pop(0)
        best = min((option for option in tree if problem.takes(option, codecs[index])), key=lambda option: step(index, option))
        if step(index, best) < step(index, chosen[index]):
            chosen[index] = best
        left = remove(left)
    return chosen


@settings(max_examples=15, deadline=None)
@given(problems(most=5, constraints=Constraints(devices=("gpu",), hierarchical=False)))
def test_algorithm_1_is_the_papers(problem: Problem) -> None:
    assert [bucket.option for bucket in espresso(problem).buckets] == plain_algorithm_1(problem)


@settings(max_examples=15, deadline=None)
@given(problems(most=5, constraints=Constraints(devices=("gpu",), hierarchical=False)))
def test_algorithm_1_is_the_papers_where_tensors_have_codecs_of_their_own(problem: Problem) -> None:
    others = (("t1", CodecCosts("none", 4.0, {})), ("t[24]", CodecCosts("bytes", 1.0, {"gpu": CURVE})))
    several = replace(problem, others=others)
    assert [bucket.option for bucket in espresso(several).buckets] == plain_algorithm_1(several)


def test_algorithm_1_is_the_papers_over_the_hierarchical_options() -> None:
    problem = problem_of((400_000, 0.0), (50_000, 100.0), (400_000, 200.0), gbps=1.0, constraints=ON_GPU)
    found = espresso(problem)
    assert [bucket.option for bucket in found.buckets] == plain_algorithm_1(problem)
    assert any(not is_uncompressed(bucket.option) for bucket in found.buckets)


@settings(max_examples=15, deadline=None)
@given(problems(most=5))
def test_espresso_is_never_worse_than_what_it_starts_from_and_its_step_is_the_timelines(problem: Problem) -> None:
    found = espresso(problem)
    assert found.step_us == simulate(problem, found.buckets).step_us
    assert found.step_us <= simulate(problem, tensor_by_tensor(problem)).step_us
    assert all((bucket.codec == "none") == is_uncompressed(bucket.option) for bucket in found.buckets)


def test_all_options_on_gpus_are_considered_and_the_counterparts_on_the_cpu() -> None:
    assert METHODS["espresso"] is espresso
    problem = problem_of((1000, 0.0))
    assert espresso(problem).options_considered == 174 + 165
    assert espresso(problem_of((1000, 0.0), devices=("gpu",))).options_considered == 174
    assert espresso(problem_of((1000, 0.0), devices=("cpu",))).options_considered == 9


def test_a_tensor_that_is_sent_before_a_bubble_is_left_alone() -> None:
    early_and_late = problem_of((400_000, 0.0), (400_000, 1e6), gbps=1.0, devices=("gpu",))
    first, last = espresso(early_and_late).buckets
    assert is_uncompressed(first.option)
    assert not is_uncompressed(last.option)


def all_gathered(problem: Problem) -> module.Job:
    """As if Algorithm 1 had compressed every tensor on GPUs, by one option."""
    job = module._job(problem, tensor_by_tensor(problem), None)
    gathered = job.options.index(GATHERED)
    for unit in job.units:
        job.take(unit, gathered)
    return job


def on_cpu(job: module.Job) -> list[bool]:
    return [any("@cpu" in action for action in job.options[job.option(unit)]) for unit in job.units]


def test_of_a_group_those_ready_first_go_to_the_cpu_as_many_as_make_the_shortest_step() -> None:
    # encoding on GPUs holds up backward, and the CPU has time for some
    problem = problem_of(*((50_000, 30.0 * index) for index in range(4)), gbps=100.0, nodes=2)
    elsewhere = tuple(action.replace("@gpu", "@cpu") for action in GATHERED)
    steps = [simulate(problem, with_options(problem, [elsewhere] * count + [GATHERED] * (4 - count))).step_us for count in range(5)]
    best = steps.index(min(steps))
    assert 0 < best < 4
    job = all_gathered(problem)
    module.offload(job)
    assert on_cpu(job) == [place < best for place in range(4)]


def test_two_groups_are_enumerated_together_or_one_by_one_beyond_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(*((50_000 if index % 2 else 30_000, 25.0 * index) for index in range(6)), gbps=100.0, nodes=2)
    together = all_gathered(problem)
    module.offload(together)
    counts = [sum(on_cpu(together)[place::2]) for place in range(2)]
    assert [on_cpu(together)[place::2] for place in range(2)] == [[index < count for index in range(3)] for count in counts]
    elsewhere = tuple(action.replace("@gpu", "@cpu") for action in GATHERED)
    steps = [
        simulate(problem, with_options(problem, [elsewhere if index // 2 < most[index % 2] else GATHERED for index in range(6)])).step_us
        for most in product(range(4), repeat=2)
    ]
    assert together.trials.step() == min(steps)

    monkeypatch.setattr(module, "MAX_ENUMERATED", 1)
    apart = all_gathered(problem)
    module.offload(apart)
    assert min(steps) <= apart.trials.step() < steps[0]


def test_given_buckets_keep_what_they_fuse_and_how_they_are_cut() -> None:
    problem = problem_of((400_000, 0.0), (3000, 10.0), (3000, 20.0), gbps=1.0)
    given = [bucket_of(problem, 0, parts=4), bucket_of(problem, 1, 2)]
    found = espresso(problem, given)
    assert [(bucket.tensors, bucket.parts) for bucket in found.buckets] == [(("t0",), 4), (("t1", "t2"), 1)]
    assert found.step_us == simulate(problem, found.buckets).step_us


@pytest.mark.parametrize("constraints", [FLAT, Constraints(devices=()), Constraints(most_encodes=1)])
def test_constraints_hold(constraints: Constraints) -> None:
    problem = problem_of((400_000, 0.0), (400_000, 10.0), gbps=1.0, constraints=constraints)
    assert all(bucket.option in problem.options for bucket in espresso(problem).buckets)
