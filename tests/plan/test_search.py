"""The search against exhaustion, its own bound and its promises."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from psgc.codecs import BLOCK
from psgc.codecs.codec import MAX_PART
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import V100_CODECS, Profile, TensorProfile
from psgc.plan.local_search.choosing import CONVERGED_RTOL, Chosen, Search
from psgc.plan.local_search.pipeline import SLACK, fused_for
from psgc.plan.local_search.space import Space
from psgc.plan.methods import bound
from psgc.plan.methods.baselines import with_option
from psgc.plan.methods.bound import _dominated, bucketing_of, given_buckets, lower_bounds, over_all_bucketings
from psgc.plan.methods.registry import METHODS
from psgc.plan.methods.search import planned, search, searched
from psgc.plan.model.bucketing import Bucketing, Tensors, bucketing, each_alone, every_fusion, fused, kinds_of, parts_of
from psgc.plan.model.costs import walk
from psgc.plan.model.options import Constraints, constrained, encodes
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.timeline import run as run_chains
from psgc.plan.planfile.reading import read_plan
from tests.plan.jobs import problem_of

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


def of_several_codecs(problem: Problem) -> Problem:
    """The problem with another codec for every second tensor, and none for every fourth."""
    other = codec_costs("dgc" if problem.codec.name != "dgc" else "onebit", problem.profile, problem.cluster.gpus)
    return replace(problem, others=(("t*[37]", codec_costs("none", problem.profile)), ("t*[13579]", other)))


def jobs_of_one_and_of_several_codecs(count: int) -> pytest.MarkDecorator:
    """seed, several: random jobs, in turn with one codec and with several; three times as many in the long tests, some the other way round."""
    made = [(seed, (seed + seed // 3) % 2 == 1) for seed in range(2 * count)]  # a test takes the number of servers from the seed, modulo 3
    others = [*made[count:], *((seed, not several) for seed, several in made)]
    return pytest.mark.parametrize(
        ("seed", "several"), [*made[:count], *(pytest.param(seed, several, marks=pytest.mark.long) for seed, several in others)]
    )


def buckets_of(problem: Problem, made: Bucketing, options: tuple[tuple[str, ...], ...]) -> list[PlannedBucket]:
    names = [tensor.name for tensor in problem.profile.tensors]
    return [
        PlannedBucket(
            tuple(names[place] for place in np.nonzero(made.of == index)[0]), int(numel), int(parts), -index,
            problem.codecs[codec].name if encodes(option) else "none", option,
        )
        for index, (numel, parts, codec, option) in enumerate(zip(made.numel, made.parts, made.codec, options, strict=True))
    ]  # fmt: skip


def every_choice(problem: Problem, made: Bucketing) -> Iterator[float]:
    """The step of every choice of options that these buckets can have."""
    can = [[option for option in problem.options if problem.takes(option, problem.codecs[codec])] for codec in made.codec]
    for chosen in product(*can):
        yield simulate(problem, buckets_of(problem, made, chosen)).step_us


def optimum(problem: Problem) -> float:
    """The best step of every fusion, whole or in two parts, with every choice of options."""
    return min(step for made in every_fusion(problem.tensors, (1, 2)) for step in every_choice(problem, made))


@jobs_of_one_and_of_several_codecs(6)
def test_it_is_within_a_hundredth_of_the_best_there_is_and_the_bound_is_below(seed: int, several: bool) -> None:
    problem = random_job(seed, 3)
    problem = of_several_codecs(problem) if several else problem
    found, best = search(problem), optimum(problem)
    assert found.step_us <= best * 1.01
    bounds = lower_bounds(problem, found.buckets, found.step_us)
    assert bounds.any_us <= min(best, found.step_us) * (1 + 1e-9)
    assert bounds.given_us <= found.step_us * (1 + 1e-9)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_given_the_buckets_is_below_every_choice_of_options_for_them(seed: int, several: bool) -> None:
    problem = random_job(100 + seed, 3)
    problem = of_several_codecs(problem) if several else problem
    made = fused(problem.tensors, problem.profile.numel / 3, 0.5)
    steps = list(every_choice(problem, made))
    some = buckets_of(problem, made, (problem.options[0],) * len(made.parts))
    bound = lower_bounds(problem, some, simulate(problem, some).step_us).given_us
    assert bound <= min(steps) * (1 + 1e-9)
    assert bound >= min(steps) * 0.5  # a bound of nothing would be one, too


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_plan_takes_as_long_as_it_says_and_is_a_plan(seed: int, several: bool) -> None:
    problem = random_job(200 + seed, 30, Constraints())
    problem = of_several_codecs(problem) if several else problem
    found = search(problem)
    assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us, rel=1e-9)
    plan = Plan("m", "c", found.buckets)
    assert read_plan(plan.to_json(), "made") == plan
    assert found.options_considered == len(problem.options)


@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_holds_tensors_of_one_codec_and_is_encoded_with_it_if_at_all(seed: int) -> None:
    problem = of_several_codecs(random_job(200 + seed, 30, Constraints()))
    for method in METHODS.values():
        for bucket in method(problem).buckets:
            (own,) = {problem.codec_numbers[name] for name in bucket.tensors}
            assert bucket.codec == (problem.codecs[own].name if encodes(bucket.option) else "none")
            assert problem.codecs[own].name != "none" or not encodes(bucket.option)


def losses(seeds: range, several: bool = False) -> list[tuple[int, str, float]]:
    """Jobs for which a method that psgc should beat finds a shorter step: seed, method and how much longer ours is."""
    found = []
    for seed in seeds:
        problem = random_job(seed, 24, Constraints())
        problem = of_several_codecs(problem) if several else problem
        ours = METHODS["psgc"](problem).step_us
        ratios = {name: ours / method(problem).step_us for name, method in METHODS.items() if name != "psgc"}
        found += [(seed, name, ratio) for name, ratio in ratios.items() if ratio > 1 + 1e-9]
    return found


SOME = pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 25), marks=pytest.mark.long)], ids=["some", "more"])


@SOME
def test_it_is_no_worse_than_any_other_method_on_random_jobs(seeds: range) -> None:
    assert losses(seeds) == []


@pytest.mark.parametrize("seed", [19, 32, 53, 55, 58, 70, 91])
def test_without_compression_it_is_no_worse_than_bytepss_plan_however_many_tensors_there_are(seed: int) -> None:
    problem = random_job(seed, 100, Constraints(devices=()))
    assert search(problem).step_us <= METHODS["fp32"](problem).step_us * (1 + 1e-9)


@SOME
def test_another_method_is_seldom_shorter_on_random_jobs_of_several_codecs(seeds: range) -> None:
    longer = [(seed, ratio) for seed, _, ratio in losses(seeds, several=True) if ratio > 1.001]
    assert len({seed for seed, _ in longer}) <= 1
    assert all(ratio <= 1.005 for _, ratio in longer)


@pytest.mark.long
def test_another_method_is_shorter_by_a_thousandth_on_at_most_one_of_a_hundred_random_jobs() -> None:
    assert len({seed for seed, _, ratio in losses(range(1000)) if ratio > 1.001}) <= 10


def test_choosing_one_buckets_option_again_among_all_options_gains_nothing() -> None:
    """On jobs of a few tensors, whose buckets all get candidates from all options."""
    gains = []
    for seed in range(5):
        problem = random_job(800 + seed, 3, Constraints())
        found = search(problem)
        for place, bucket in enumerate(found.buckets):
            others = [with_option(bucket, option, problem) for option in problem.options[:: 1 if seed < 1 else 17]]
            steps = [simulate(problem, [*found.buckets[:place], other, *found.buckets[place + 1 :]]).step_us for other in others]
            gains.append(1 - min(steps) / found.step_us)
    assert max(gains) <= 1e-3


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
    assert not any("@gpu" in action for bucket in found.buckets for action in bucket.option), "nobody says that gradients lie there"
    assert all(bucket.parts <= -(-bucket.numel // BLOCK) for bucket in found.buckets)
    assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us, rel=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_no_part_is_less_than_an_element(name: str) -> None:
    for numels in ((1, 1), (1, 3, 2), (2, 100)):
        problem = problem_of(*((numel, 5.0 * index) for index, numel in enumerate(numels)), nodes=8, gbps=1e-6)
        buckets = METHODS[name](problem).buckets
        assert read_plan(Plan("made", "made", buckets).to_json(), "made").buckets == buckets


def test_parts_are_cut_at_blocks_and_none_is_larger_than_a_part_may_be() -> None:
    tensors = Tensors(np.array([1.0, BLOCK, BLOCK + 1, 3 * MAX_PART]), np.zeros(4), np.zeros(4, np.int64))
    assert bucketing(tensors, range(4), [8] * 4).at_blocks().parts.tolist() == [1, 1, 2, 8]
    assert bucketing(tensors, range(4), [1] * 4).at_blocks().parts.tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_kinds_and_parts_are_what_their_definitions_say(seed: int, several: bool) -> None:
    job = random_job(700 + seed, 60)
    problem = of_several_codecs(job) if several else job
    few_sizes = Tensors(problem.tensors.numel.round(-5) + 64, problem.tensors.ready_us, problem.tensors.codec)
    for made in (fused(few_sizes, few_sizes.numel.sum() / 12, 0.5), each_alone(few_sizes, few_sizes.numel.max() / 3)):
        each = list(zip((made.numel / made.parts).tolist(), made.codec.tolist(), strict=True))
        kinds = kinds_of(made)
        assert list(zip(kinds.sizes.tolist(), kinds.codec.tolist(), strict=True)) == sorted(set(each))
        assert kinds.of.tolist() == [sorted(set(each)).index(kind) for kind in each]
        parts = parts_of(made)
        assert parts.ready_us.tolist() == np.repeat(made.ready_us, made.parts).tolist()
        assert parts.first.tolist() == [0, *np.cumsum(made.parts).tolist()]
        assert parts.together.tolist() == [parts.ready_us.tolist().index(ready) for ready in made.ready_us]


def test_unique_options_keep_their_order_of_first_appearance_and_have_positions() -> None:
    space, numbers = Space(random_job(1, 3, Constraints())), np.random.default_rng(1).integers(0, 300, 1000)
    assert space.unique(numbers).tolist() == list(dict.fromkeys(numbers.tolist()))
    assert space.unique(numbers)[space.positions(space.unique(numbers), numbers)].tolist() == numbers.tolist()


@pytest.mark.parametrize("several", [False, True])
def test_fusing_keeps_every_tensor_once_in_order_and_with_its_codec(several: bool) -> None:
    job = random_job(11, 30)
    tensors = (of_several_codecs(job) if several else job).tensors
    total, few = float(tensors.numel.sum()), Tensors(*(column[:4] for column in tensors))
    for job, made in (
        *((tensors, one) for one in (fused(tensors, total / 8, 0.5), each_alone(tensors, total / 8))),
        *((few, one) for one in every_fusion(few, (1, 3))),
    ):
        runs = [np.nonzero(made.of == bucket)[0] for bucket in range(len(made.parts))]
        assert sorted(place for run in runs for place in run) == list(range(len(job.numel)))
        assert made.last.tolist() == [run[-1] for run in runs]
        assert (np.diff(made.last) > 0).all()
        assert made.numel.tolist() == [job.numel[run].sum() for run in runs]
        assert made.ready_us.tolist() == [job.ready_us[run[-1]] for run in runs]
        assert [[codec] for codec in made.codec] == [sorted(set(job.codec[run])) for run in runs]
        for run in runs:  # nothing of the same codec is left out in between
            between = np.arange(run[0], run[-1] + 1)
            assert run.tolist() == between[job.codec[between] == job.codec[run[0]]].tolist()


@pytest.mark.parametrize("several", [False, True])
def test_every_fusion_is_tried_once(several: bool) -> None:
    job = random_job(12, 30)
    tensors = Tensors(*(column[:5] for column in (of_several_codecs(job) if several else job).tensors))
    made = [tuple(one.of.tolist()) for one in every_fusion(tensors, (1,))]
    assert len(set(made)) == len(made) == 1 << sum(count - 1 for count in np.unique(tensors.codec, return_counts=True)[1])


def test_the_shortest_way_is_the_cheapest_of_all_options() -> None:
    problem = random_job(3, 3, Constraints())
    space = Space(problem)
    loads = space.loads(space.times(np.array([1e6]), np.array([0])))
    costs = np.tensordot(np.random.default_rng(0).uniform(size=len(loads)), loads, (0, 0))
    ((cost,),), ((number,),) = space.shortest(costs)
    atoms = {atom: number for number, atom in enumerate(space.graph.atoms)}
    assert cost == pytest.approx(min(sum(costs[atoms[atom], 0] for atom in walk(option)[0]) for option in problem.options))
    assert cost == pytest.approx(sum(costs[atoms[atom], 0] for atom in walk(space.graph.options[number])[0]))


def test_the_next_cheapest_options_cost_more_one_after_the_other_and_are_what_their_numbers_say() -> None:
    space = Space(random_job(3, 3, Constraints()))
    costs = np.random.default_rng(1).uniform(1, 2, (len(space.graph.atoms), 5))
    found, ways = space.shortest(costs, 4)
    every = np.sort([costs[[atom for atom in row if atom >= 0]].sum(axis=0) for row in space.graph.rows], axis=0)
    assert found == pytest.approx(every[:4])
    for column, numbers in enumerate(ways):
        rows = space.graph.rows[numbers]
        assert [costs[row[row >= 0], column].sum() for row in rows] == pytest.approx(found[:, column])


def test_an_options_number_and_atoms_are_its_own() -> None:
    space = Space(random_job(3, 3, Constraints()))
    found = space.graph
    assert sorted(found.options) == sorted(random_job(3, 3, Constraints()).options)
    assert [found.number[option] for option in found.options] == list(range(len(found.options)))
    for option, row in zip(found.options, found.rows, strict=True):
        assert tuple(found.atoms[atom].action for atom in row if atom >= 0) == option


def test_a_table_of_times_has_the_costs_of_every_task_and_codec() -> None:
    problem = of_several_codecs(random_job(4, 3, Constraints()))
    space, sizes = Space(problem), np.array([1.0, 500.0, 3e4, 1e6, 4e8, 7e9])
    for number, codec in enumerate(problem.codecs):
        times = space.times(sizes, np.full(len(sizes), number))
        for row, task in zip(times, space.distinct, strict=True):
            own = task[number]
            assert row == pytest.approx(codec.all_us(own, sizes) if codec.has(own) else np.zeros(len(sizes)), rel=1e-12)


@pytest.mark.parametrize("several", [False, True])
def test_a_descent_goes_on_from_the_run_so_far_as_if_it_had_begun_anew(several: bool) -> None:
    problem = random_job(5, 20, Constraints())
    problem = of_several_codecs(problem) if several else problem
    made = Search(problem, Space(problem))
    buckets = fused(problem.tensors, problem.profile.numel / 6, 0.5)
    chosen = made.choose(buckets)
    options = tuple(made.space.graph.options[number] for number in chosen.options)
    assert simulate(problem, buckets_of(problem, buckets, options)).step_us == pytest.approx(chosen.step_us, rel=1e-12)


@pytest.mark.parametrize("several", [False, True])
def test_a_descent_over_all_options_misses_no_single_change_that_helps(several: bool) -> None:
    """With room for all options: neither its bounds nor what it notes of a run may hide one."""
    for seed in range(3):
        problem = random_job(820 + seed, 6, Constraints(servers=True))
        problem = of_several_codecs(problem) if several else problem
        problem = replace(problem, cluster=replace(problem.cluster, servers=seed))
        made = Search(problem, Space(problem))
        buckets = fused(problem.tensors, problem.profile.numel / 4, 0.5)
        plain = np.full(len(buckets.parts), made.space.graph.plain[0])
        everything = len(made.space.graph.options)
        found, _ = made.fully(Chosen(np.inf, np.inf, buckets, plain), np.arange(len(plain)), everything, np.inf)
        options = [made.space.graph.options[number] for number in found.options]
        assert simulate(problem, buckets_of(problem, buckets, tuple(options))).step_us == pytest.approx(found.step_us, rel=1e-9)
        for place, codec in enumerate(buckets.codec):
            for option in problem.options[seed::97]:
                if problem.takes(option, problem.codecs[codec]):
                    other = buckets_of(problem, buckets, (*options[:place], option, *options[place + 1 :]))
                    assert simulate(problem, other).step_us >= found.step_us * (1 - 1e-3)  # the objective is not the step alone


def test_fusing_for_a_resource_is_about_as_good_as_the_best_of_all_fusions() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        count = int(rng.integers(1, 9))
        numel, ready = np.ceil(10 ** rng.uniform(2, 6, count)), np.cumsum(rng.exponential(500.0, count))
        latency, rate, lead = float(10 ** rng.uniform(0, 4)), float(10 ** rng.uniform(-4, -1)), float(rng.uniform(0, 500))

        fusions = [made.of for made in every_fusion(Tensors(numel, ready, np.zeros(count, np.int64)), (1,))]
        done = []
        for of in (*fusions, fused_for(numel, ready, latency, rate, lead)):
            at = 0.0
            for bucket in range(int(of[-1]) + 1):
                members = np.flatnonzero(of == bucket)
                at = max(at, ready[members[-1]] + lead) + latency + rate * numel[members].sum()
            done.append(at)
        assert min(done[:-1]) * (1 - 1e-9) <= done[-1] <= min(done[:-1]) * (1 + SLACK) * (1 + 1e-9)


def test_a_bound_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_job(31, 12, Constraints())
    found = search(problem)
    before = lower_bounds(problem, found.buckets, found.step_us)
    hours = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: 3600.0 * next(hours))
    after = lower_bounds(problem, found.buckets, found.step_us)
    assert (after.given_us, after.any_us) == (before.given_us, before.any_us)
    assert after.bound_ms >= 3.6e6  # the clock that it saw was this one


def test_a_solver_that_calls_a_programme_with_a_known_plan_infeasible_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_job(30, 12, Constraints())
    found = search(problem)
    real = bound.solver()
    refuses = types.SimpleNamespace(status=2, x=None, mip_dual_bound=None, mip_node_count=0)
    fake = types.SimpleNamespace(
        milp=lambda *_, **__: refuses, linprog=real.linprog, Bounds=real.Bounds, LinearConstraint=real.LinearConstraint
    )
    believed = lower_bounds(problem, found.buckets, found.step_us).given_us
    monkeypatch.setattr(bound, "solver", lambda: fake)
    assert lower_bounds(problem, found.buckets, found.step_us).given_us <= believed * (1 + 1e-9) < found.step_us


def test_where_latencies_rule_the_bound_of_all_buckets_counts_them() -> None:
    """One tensor of 1000 elements over four nodes with a link of 1 ms: an all-reduce is six messages in a row, no option takes fewer than
    two there and one back."""
    problem = problem_of((1000, 0.0), nodes=4, gbps=100)
    slow = replace(problem, cluster=replace(problem.cluster, inter=Link(100, 1000.0)))
    found = search(slow)
    assert 0.9 * found.step_us <= over_all_bucketings(slow, Space(slow)) <= found.step_us * (1 + 1e-9)


def test_nothing_is_encoded_that_gains_nothing() -> None:
    slow_backward = tuple(TensorProfile(f"t{index}", 10_000, index * 1e5) for index in range(10))
    problem = Problem(
        Profile("slow", slow_backward, codecs=V100_CODECS),
        SLOW,
        codec_costs("efsignsgd", Profile("slow", slow_backward, codecs=V100_CODECS)),
    )
    found = search(problem)
    assert {bucket.codec for bucket in found.buckets[:-1]} == {"none"}


@pytest.mark.parametrize("seed", range(4))
def test_options_that_are_dominated_are_those_that_are_nowhere_less_than_another(seed: int) -> None:
    costs = np.random.default_rng(seed).integers(0, 4, (60, 3)).astype(float)
    costs = costs[costs.sum(axis=1).argsort(kind="stable")]
    dominated = np.empty(len(costs), bool)
    _dominated(costs, dominated)
    for place, row in enumerate(costs):
        others = [other for at, other in enumerate(costs) if (other <= row).all() and ((other < row).any() or at < place)]
        assert dominated[place] == bool(others)


@jobs_of_one_and_of_several_codecs(4)
def test_no_plan_of_any_method_is_below_the_bound_of_all(seed: int, several: bool) -> None:
    problem = random_job(400 + seed, 20, Constraints(servers=True))
    problem = replace(problem, cluster=replace(problem.cluster, servers=seed % 3))
    problem = of_several_codecs(problem) if several else problem
    ours = search(problem)
    given = given_buckets(problem, Space(problem), bucketing_of(problem, ours.buckets), 2 * ours.step_us)
    for method in METHODS.values():
        found = method(problem)
        assert over_all_bucketings(problem, Space(problem)) <= found.step_us * (1 + 1e-9)
    assert given <= ours.step_us * (1 + 1e-9)


@pytest.mark.parametrize("several", [False, True])
def test_no_plan_is_below_what_the_search_takes_for_the_least(several: bool) -> None:
    """Else it would end too early."""
    ended = 0
    for seed in range(12):
        job = random_job(600 + seed, 8, FEW)
        problem = of_several_codecs(job) if several else job
        made = Search(problem, Space(problem))
        step = search(problem).step_us
        assert made.least_us <= step * (1 + 1e-9)
        ended += step <= made.least_us * (1 + CONVERGED_RTOL)
    assert 0 < ended < 12


def test_a_codec_without_a_servers_times_is_not_pushed_to_servers() -> None:
    problem = random_job(7, 10, Constraints(servers=True))
    on_gpu = replace(problem.codec, curves={"gpu": problem.codec.curves["gpu"]})
    problem = replace(problem, codec=on_gpu, cluster=replace(problem.cluster, servers=8, inter=Link(1.0, 5.0)))
    assert not any("flat.push.c" in option for option in problem.options)
    found = search(problem)
    assert simulate(problem, found.buckets).step_us == pytest.approx(found.step_us)
    both = replace(problem, others=(("t1", random_job(7, 10).codec),))
    assert any("flat.push.c" in option for option in both.options)
    assert all(both.takes(bucket.option, both.codec_of(bucket)) for bucket in search(both).buckets)


@pytest.mark.parametrize("several", [False, True])
def test_a_bucket_whose_quicker_tasks_would_shorten_the_step_is_critical(several: bool) -> None:
    shortened = spared = 0
    for seed in range(5):
        problem = random_job(600 + seed, 20, Constraints())
        problem = of_several_codecs(problem) if several else problem
        made = searched(problem)
        assert made.best is not None
        critical = made.critical(made.best)
        simulated = simulate(problem, planned(problem, made.space, made.best))
        owner = np.array([row.bucket for row in simulated.rows], np.int64)
        for bucket in range(len(critical)):
            quicker = simulated.chains._replace(us=np.where(owner == bucket, (1 - 1e-7) * simulated.chains.us, simulated.chains.us))
            if run_chains(quicker).step_us < simulated.step_us * (1 - 1e-11):
                assert critical[bucket], (seed, bucket)
                shortened += 1
            spared += not critical[bucket]
    assert shortened > 3 and spared > 3
