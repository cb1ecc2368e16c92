"""Annealing finds plans that the simulation confirms, within the constraints, the same on every machine; the adversary's claims are checked, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from psgc.plan.local_search import choosing
from psgc.plan.local_search.annealing import anneal
from psgc.plan.local_search.choosing import Chosen, Search
from psgc.plan.local_search.moving import palette
from psgc.plan.local_search.rerun import MOST_PARTS, MOST_TASKS
from psgc.plan.local_search.space import Space
from psgc.plan.methods import anytime
from psgc.plan.methods.anytime import Anytime
from psgc.plan.methods.rounds import CUTS, of_one_option
from psgc.plan.methods.search import planned, search, searched
from psgc.plan.model.bucketing import MAX_PARTS, bucketing, each_alone
from psgc.plan.model.options import OVER_SERVERS, Constraints
from psgc.plan.model.problem import Problem, simulate
from tests import benchmark_scripts
from tests.plan.jobs import CURVE, SLOW
from tests.plan.test_search import of_several_codecs, random_job

WORK = 140_000


class Rounds(Anytime):
    """The search with a number of looks at the clock in place of a time."""

    left = 0

    @property
    def is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


def after_rounds(problem: Problem, count: int) -> Search:
    """The finished search that has looked at the clock so often; its rounds of annealing are short."""
    with patch.object(anytime, "ROUND", (13.0, 17.0)):
        made = Rounds(problem, float("inf"))
        made.left = count
        return made.run()


def annealed(problem: Problem, seed: int, work: float = WORK) -> tuple[Search, Chosen, Chosen]:
    """The search, its start, and what annealing makes of it."""
    made = searched(problem, 0)
    assert made.best is not None
    return made, made.best, made.anneal(made.best, palette(made, [made.best]), seed, work, 3e-3)[0]


def bound_of(made: Search, plan: Chosen) -> float:
    """The lower bound on the plan's step: what annealing by the bound returns where there is no work to do."""
    bounds: list[float] = []

    def noted(*given: Any) -> Any:
        result = anneal(*given)
        bounds.append(result[0])
        return result

    with patch.object(choosing, "anneal", noted):
        made.anneal(plan, palette(made, [plan]), 1, 0.0, 1e-2, by_bound=True)
    return bounds[0]


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("several", [False, True])
def test_its_plan_takes_the_step_that_the_simulation_gives_and_none_longer_than_the_start(count: int, several: bool) -> None:
    problem = random_job(count, count, Constraints())
    problem = of_several_codecs(problem) if several else problem
    made, start, found = annealed(problem, 5)
    plan = planned(problem, made.space, found)
    assert simulate(problem, plan).step_us == pytest.approx(found.step_us, rel=1e-12)
    assert found.step_us <= start.step_us * (1 + 1e-12)
    assert sorted(name for bucket in plan for name in bucket.tensors) == sorted(problem.numel)


def test_a_plan_has_no_bucket_without_tensors() -> None:
    """A split that leaves all tensors where they are, beside another move, makes none; in this job it did."""
    made = searched(random_job(137, 24, Constraints()))
    assert made.best is not None
    buckets = made.best.bucketing
    assert sorted(set(buckets.of.tolist())) == list(range(len(buckets.parts)))
    assert (buckets.parts > 0).all()


def at_once(problem: Problem, groups: int) -> Problem:
    """The problem with tensors that are ready in so many groups."""
    tensors = problem.profile.tensors
    size = -(-len(tensors) // groups)
    ready = [tensors[min(len(tensors) - 1, place // size * size + size - 1)].ready_us for place in range(len(tensors))]
    made = tuple(replace(tensor, ready_us=us - ready[0]) for tensor, us in zip(tensors, ready, strict=True))
    return replace(problem, profile=replace(problem.profile, tensors=made))


@pytest.mark.parametrize("hot", [1e-4, 1.0])
@pytest.mark.parametrize("kind", ["many buckets", "together", "threads", "servers", "one bucket"])
def test_a_changed_plan_takes_the_step_that_a_whole_simulation_gives(kind: str, hot: float) -> None:
    """Although only what follows the first changed bucket is simulated again: with more buckets than saves, with tensors that are ready together, with
    processors that do several tasks at once, with tasks that hold no resource."""
    problem = random_job(5 if kind == "many buckets" else 17, 300 if kind == "many buckets" else 20, Constraints(servers=kind == "servers"))
    if kind == "together":
        problem = at_once(problem, 3)
    if kind == "servers":
        problem = replace(problem, cluster=replace(problem.cluster, servers=2))
    if kind == "threads":
        codec = replace(problem.codec, curves={"gpu": CURVE, "cpu": SLOW})
        problem = replace(problem, codec=codec, cluster=replace(problem.cluster, cores=9))
    made = Search(problem, Space(problem))
    buckets = (
        bucketing(problem.tensors, np.zeros(len(problem.tensors.numel), np.int64), [3])
        if kind == "one bucket"
        else each_alone(problem.tensors)
    )
    start = made.choose(buckets)
    for seed in (1, 2, 3):
        found, _ = made.anneal(start, palette(made, [start]), seed, WORK, hot)
        assert simulate(problem, planned(problem, made.space, found)).step_us == pytest.approx(found.step_us, rel=1e-12)
        assert found.step_us <= start.step_us * (1 + 1e-12)


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("several", [False, True])
def test_annealing_the_bound_makes_a_plan_with_a_lower_one_that_keeps_the_constraints(count: int, several: bool) -> None:
    """It says nothing of the step, which is simulated next. The bound is one of the step: no plan is shorter than it."""
    problem = random_job(count, count, Constraints(devices=("gpu",), most_encodes=1))
    problem = of_several_codecs(problem) if several else problem
    made = searched(problem, 0)
    assert made.best is not None
    found, _ = made.anneal(made.best, palette(made, [made.best]), 5, WORK, 1e-2, by_bound=True)
    assert found.step_us == found.objective == np.inf
    plan = planned(problem, made.space, found)
    assert sorted(name for bucket in plan for name in bucket.tensors) == sorted(problem.numel)
    assert all(problem.constraints.allows(bucket.option) and bucket.option in problem.options for bucket in plan)
    assert bound_of(made, found) <= bound_of(made, made.best) * (1 + 1e-12)
    for one in (found, made.best):
        assert bound_of(made, one) <= simulate(problem, planned(problem, made.space, one)).step_us * (1 + 1e-12)


@pytest.mark.parametrize("several", [False, True])
def test_rounds_begin_from_plans_of_any_number_of_parts_with_one_option_a_codec(several: bool) -> None:
    problem = random_job(5, 60, Constraints())
    problem = of_several_codecs(problem) if several else problem
    made = searched(problem, 0)
    for parts in CUTS:
        start = of_one_option(made, parts)
        assert several or len(set(start.options.tolist())) == 1
        found, _ = made.anneal(start, palette(made, [start]), 1, WORK, 1e-2)
        assert simulate(problem, planned(problem, made.space, found)).step_us == pytest.approx(found.step_us, rel=1e-12)


def test_a_plan_may_have_as_many_parts_and_tasks_as_a_waiting_tasks_code_holds() -> None:
    problem = random_job(5, 12)
    assert MAX_PARTS < MOST_PARTS
    assert Space(problem).tasks(np.arange(len(problem.options))).shape[1] < MOST_TASKS


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    problem = random_job(31, 30, Constraints())
    plans = [annealed(problem, seed)[2] for seed in (1, 1, 2)]
    same = [np.array_equal(plans[0].bucketing.of, plan.bucketing.of) and plans[0].step_us == plan.step_us for plan in plans]
    assert same == [True, True, False]


def test_it_fuses_tensors_that_are_no_neighbours() -> None:
    """Where that helps: over some jobs it does."""
    apart = 0
    for seed in range(4):
        found = annealed(random_job(seed, 30, Constraints()), 1, 700_000)[2]
        for bucket in range(len(found.options)):
            members = np.flatnonzero(found.bucketing.of == bucket)
            apart += bool(members[-1] - members[0] >= len(members))
    assert apart


def test_a_plan_that_is_to_be_run_keeps_options_and_cuts_that_jobs_have() -> None:
    job = random_job(5, 12)
    problem = replace(
        job, cluster=replace(job.cluster, servers=2), constraints=Constraints(servers=True, runtime=True, among_workers=False)
    )
    made, _, found = annealed(problem, 3)
    assert {made.space.graph.options[option] for option in found.options.tolist()} <= set(OVER_SERVERS)
    assert np.array_equal(made.cut(found.bucketing).parts, found.bucketing.parts)


def test_taking_encodings_back_keeps_the_order_of_the_buckets() -> None:
    """A search for as long as the user gives it was longer than the default one's, because this lost the order."""
    problem = random_job(0, 20, Constraints())
    made = Search(problem, Space(problem))
    rng, kept = np.random.default_rng(0), 0
    start = searched(problem, 0).best
    assert start is not None
    for _ in range(20):
        turn = rng.permutation(len(start.options))
        made.best, _ = made.fully(start._replace(turn=turn), np.empty(0, np.int64), 1, 0)
        before = made.best.step_us
        made.simplify()
        assert np.array_equal(made.best.turn, turn) and made.best.step_us <= before
        assert simulate(problem, planned(problem, made.space, made.best)).step_us == pytest.approx(made.best.step_us, rel=1e-12)
        kept += 1
    assert kept == 20


@pytest.mark.parametrize("seed", range(6))
def test_no_time_makes_a_plan_longer_than_the_default_one(seed: int) -> None:
    """Even no time at all."""
    problem = random_job(40 + seed, 3 + 5 * seed, Constraints())
    made = after_rounds(problem, 3 * seed)
    assert made.best is not None
    assert made.best.step_us <= search(problem).step_us * (1 + 1e-12)


@pytest.mark.parametrize("several", [False, True])
def test_a_long_search_also_begins_from_plans_that_are_far_from_the_best_one_and_keeps_the_best(several: bool) -> None:
    """Other fusions, with other options or with the resources in balance; whatever a round makes of them is a plan of the job."""
    problem = random_job(5, 40, Constraints(devices=("gpu",)))
    problem = of_several_codecs(problem) if several else problem
    made = Rounds(problem, float("inf"))
    made.left, before, fusions = 1000, made.best.objective, set()
    with patch.object(anytime, "ROUND", (13.0, 15.0)), patch.object(anytime, "BOUND_WORK", 1e4):
        for _ in range(12):
            start = made._far()
            fusions.add(tuple(start.bucketing.of.tolist()))
            found = made._round(start, 1e-2)
            plan = planned(problem, made.made.space, found)
            assert sorted(name for bucket in plan for name in bucket.tensors) == sorted(problem.numel)
            assert all(bucket.option in problem.options for bucket in plan)
            assert simulate(problem, plan).step_us == pytest.approx(found.step_us, rel=1e-12)
            assert made.best.objective <= min(before, found.objective)
    assert len(fusions) > 6


def test_the_adversary_starts_from_the_plan_and_what_it_finds_is_simulated() -> None:
    benchmark_scripts.load("planning_rivals")
    adversary: Any = benchmark_scripts.load("planning_adversary")
    problem = random_job(3, 12, Constraints())
    ours = search(problem, 0)
    attack = adversary.Adversary(problem, ours.buckets, 1)
    assert attack.step_us == pytest.approx(ours.step_us, rel=1e-12)
    state = attack.start
    for _ in range(300):
        state = attack._moved(state)
        if attack.rng.random() < 0.05:
            plan = planned(problem, attack.space, attack._chosen(state))
            assert simulate(problem, plan).step_us == pytest.approx(attack._step(state), rel=1e-12)
