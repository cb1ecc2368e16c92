"""The search against exhaustion, its own bound and its promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from psgc.codecs import BLOCK
from psgc.codecs.codec import MAX_PART
from psgc.plan.bound import lower_bounds
from psgc.plan.bucketing import Bucketing, each_alone, every_fusion, fused, of_runs
from psgc.plan.cluster import Cluster, Link
from psgc.plan.methods import METHODS
from psgc.plan.options import CARRIED, Constraints, constrained
from psgc.plan.plan import Plan, PlannedBucket, read_plan
from psgc.plan.problem import Problem, codec_costs, simulate
from psgc.plan.profile import V100_CODECS, Profile, TensorProfile
from psgc.plan.search import Search, search
from psgc.plan.space import Space

SLOW = Cluster("slow", nodes=4, gpus_per_node=2, intra=Link(100, 10), inter=Link(10, 20))
FEW = Constraints(("gpu",), most_encodes=1, flat=True, hierarchical=False)


def random_job(seed: int, most_tensors: int, constraints: Constraints = FEW) -> Problem:
    """Tensors, readiness and links over orders of magnitude."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_tensors + 1))
    ready = np.cumsum(rng.exponential(10 ** rng.uniform(2, 4), count))
    numel = np.ceil(10 ** rng.uniform(3, 7.5, count))
    tensors = tuple(
        TensorProfile(f"t{index}", int(n), float(at - ready[0])) for index, (n, at) in enumerate(zip(numel, ready, strict=True))
    )
    profile = Profile(f"random{seed}", tensors, codecs=V100_CODECS)
    nodes, gpus = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 8]))
    if nodes * gpus == 1:
        nodes = 2
    cluster = Cluster("random", nodes, gpus, Link(float(10 ** rng.uniform(1.5, 3.5)), 10.0), Link(float(10 ** rng.uniform(0, 2.5)), 20.0))
    codec = str(rng.choice(["randomk", "dgc", "efsignsgd", "onebit"]))
    return Problem(profile, cluster, codec_costs(codec, profile, cluster.gpus), constraints)


def buckets_of(problem: Problem, bucketing: Bucketing, options: tuple[tuple[str, ...], ...]) -> list[PlannedBucket]:
    names = [tensor.name for tensor in problem.profile.tensors]
    runs = [tuple(names[a:b]) for a, b in zip(bucketing.first[:-1], bucketing.first[1:], strict=True)]
    return [
        PlannedBucket(run, int(numel), int(parts), -index, problem.codec.name, option)
        for index, (run, numel, parts, option) in enumerate(zip(runs, bucketing.numel, bucketing.parts, options, strict=True))
    ]


def optimum(problem: Problem) -> float:
    """The best step of every fusion, whole or in two parts, with every choice of options."""
    return min(
        simulate(problem, buckets_of(problem, bucketing, chosen)).step_us
        for bucketing in every_fusion(problem.profile.tensors, (1, 2))
        for chosen in product(problem.options, repeat=len(bucketing.parts))
    )


@pytest.mark.parametrize("seed", range(12))
def test_it_is_within_a_hundredth_of_the_best_there_is_and_the_bound_is_below(seed: int) -> None:
    problem = random_job(seed, 3)
    found, best = search(problem), optimum(problem)
    assert found.step_us <= best * 1.01
    bounds = lower_bounds(problem, found.buckets, found.step_us)
    assert bounds.any_us <= min(best, found.step_us) * (1 + 1e-9)
    assert bounds.given_us <= found.step_us * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_given_the_buckets_is_below_every_choice_of_options_for_them(seed: int) -> None:
    problem = random_job(100 + seed, 3)
    bucketing = fused(problem.profile.tensors, problem.profile.numel / 3, 0.5)
    steps = [
        simulate(problem, buckets_of(problem, bucketing, chosen)).step_us
        for chosen in product(problem.options, repeat=len(bucketing.parts))
    ]
    some = buckets_of(problem, bucketing, (problem.options[0],) * len(bucketing.parts))
    bound = lower_bounds(problem, some, simulate(problem, some).step_us).given_us
    assert bound <= min(steps) * (1 + 1e-9)
    assert bound >= min(steps) * 0.5  # a bound of nothing would be one, too


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_takes_as_long_as_it_says_and_is_a_plan(seed: int) -> None:
    problem = random_job(200 + seed, 30, Constraints())
    found = search(problem)
    assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us, rel=1e-9)
    plan = Plan("m", "c", found.buckets)
    assert read_plan(plan.to_json(), "made") == plan
    assert found.options_considered == len(problem.options)


def losses(seeds: range) -> list[tuple[int, str, float]]:
    """Jobs for which a method that psgc should beat finds a shorter step: seed, method and how much longer ours is."""
    found = []
    for seed in seeds:
        problem = random_job(seed, 12, Constraints())
        ours = METHODS["psgc"](problem).step_us
        ratios = {name: ours / method(problem).step_us for name, method in METHODS.items() if name != "psgc"}
        found += [(seed, name, ratio) for name, ratio in ratios.items() if ratio > 1 + 1e-9]
    return found


def test_it_is_no_worse_than_any_other_method_on_random_jobs() -> None:
    assert losses(range(40)) == []


@pytest.mark.long
def test_it_is_no_worse_than_any_other_method_on_a_thousand_random_jobs() -> None:
    assert losses(range(1000)) == []


def test_constraints_are_kept() -> None:
    problem = random_job(7, 30, Constraints(("gpu",), most_encodes=1, flat=False))
    allowed = set(constrained(problem.allowed))
    assert allowed
    assert {bucket.option for bucket in search(problem).buckets} <= allowed


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_is_to_be_run_has_options_and_cuts_that_a_job_has(seed: int) -> None:
    job = random_job(300 + seed, 12)
    tiny = tuple(replace(t, numel=1 + t.numel % 9000) for t in job.profile.tensors)
    cluster = replace(job.cluster, servers=2, inter=Link(1e-3, 1.0))
    problem = replace(job, profile=replace(job.profile, tensors=tiny), cluster=cluster, constraints=Constraints(servers=True, runtime=True))
    found = search(problem)
    assert {bucket.option for bucket in found.buckets} <= set(CARRIED)
    assert all(bucket.parts <= -(-bucket.numel // BLOCK) for bucket in found.buckets)
    assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us, rel=1e-9)


def test_parts_are_cut_at_blocks_and_none_is_larger_than_a_part_may_be() -> None:
    tensors = [TensorProfile(f"t{index}", numel, 0.0) for index, numel in enumerate((1, BLOCK, BLOCK + 1, 3 * MAX_PART))]
    assert of_runs(tensors, range(5), [8] * 4).at_blocks().parts.tolist() == [1, 1, 2, 8]
    assert of_runs(tensors, range(5), [1] * 4).at_blocks().parts.tolist() == [1, 1, 1, 3]


def test_fusing_keeps_every_tensor_once_and_in_order() -> None:
    tensors = random_job(11, 30).profile.tensors
    total = sum(tensor.numel for tensor in tensors)
    for made in (fused(tensors, total / 8, 0.5), each_alone(tensors, total / 8), *every_fusion(tensors[:4], (1, 3))):
        count = len(tensors) if made.first[-1] > 4 else min(4, len(tensors))
        assert made.first[0] == 0
        assert made.first[-1] == count
        assert (np.diff(made.first) > 0).all()
        assert made.numel.tolist() == [sum(t.numel for t in tensors[a:b]) for a, b in zip(made.first[:-1], made.first[1:], strict=True)]
        assert made.ready_us.tolist() == [tensors[b - 1].ready_us for b in made.first[1:]]


def test_the_shortest_way_is_the_cheapest_of_all_options() -> None:
    problem = random_job(3, 3, Constraints())
    space = Space(problem)
    prices = np.random.default_rng(0).uniform(size=6)
    costs = np.tensordot(prices, space.loads(space.times(np.array([1e6]))), (0, 0))
    ((cost,), *_), ((way, *_),) = space.shortest(costs)
    atoms = {atom: number for number, atom in enumerate(space.graph.atoms)}
    from psgc.plan.costs import walk

    assert cost == pytest.approx(min(sum(costs[atoms[atom], 0] for atom in walk(option)[0]) for option in problem.options))
    assert space.option(way) in problem.options


def test_a_descent_goes_on_from_the_run_so_far_as_if_it_had_begun_anew() -> None:
    problem = random_job(5, 20, Constraints())
    made = Search(problem, Space(problem))
    bucketing = fused(problem.profile.tensors, problem.profile.numel / 6, 0.5)
    chosen = made.choose(bucketing)
    options = tuple(made.space.option(way) for way in chosen.ways)
    assert simulate(problem, buckets_of(problem, bucketing, options)).step_us == pytest.approx(chosen.step_us, rel=1e-12)


def test_nothing_is_encoded_that_gains_nothing() -> None:
    slow_backward = tuple(TensorProfile(f"t{index}", 10_000, index * 1e5) for index in range(10))
    problem = Problem(
        Profile("slow", slow_backward, codecs=V100_CODECS),
        SLOW,
        codec_costs("efsignsgd", Profile("slow", slow_backward, codecs=V100_CODECS)),
    )
    found = search(problem)
    assert {bucket.codec for bucket in found.buckets[:-1]} == {"none"}
