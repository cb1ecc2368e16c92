"""The search for as long as the user gives it: it ends in time, at the bound, and no rival's complete plan is shorter."""

from __future__ import annotations

import time
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from psgc.plan.inputs.cluster import Link
from psgc.plan.local_search.space import Space
from psgc.plan.methods.anytime import GAP, Anytime, search_for
from psgc.plan.methods.bound import bucketing_of, solve_given
from psgc.plan.methods.registry import METHODS
from psgc.plan.methods.search import planned, search
from psgc.plan.model.bucketing import bucketing, merged, split
from psgc.plan.model.options import OVER_SERVERS, Constraints
from psgc.plan.model.problem import simulate
from tests import benchmark_scripts
from tests.plan.test_annealing import after_rounds
from tests.plan.test_search import of_several_codecs, random_job


def test_its_plan_is_not_longer_than_the_default_plan_nor_than_any_rivals() -> None:
    for seed, several in ((12, False), (22, False), (18, True)):
        job = random_job(seed, 12, Constraints())
        problem = of_several_codecs(job) if several else job
        made = after_rounds(problem, 40)
        assert made.best is not None
        step_us = made.best.step_us
        assert step_us <= search(problem).step_us * (1 + 1e-9)
        assert all(step_us <= method(problem).step_us * (1 + 1e-9) for method in METHODS.values())
        assert simulate(problem, planned(problem, made.space, made.best)).step_us == pytest.approx(step_us, rel=1e-9)


def test_it_ends_when_the_step_is_close_to_the_bound() -> None:
    job = random_job(3, 12, Constraints())
    fast = replace(job, cluster=replace(job.cluster, inter=Link(1e6, 0.0), intra=Link(1e6, 0.0)))
    made = Anytime(fast, time.perf_counter() + 3600)
    made.run()
    assert made.best.step_us <= made.bound_us * (1 + GAP)


def test_a_plan_that_is_to_be_run_stays_one() -> None:
    job = random_job(5, 6)
    problem = replace(
        job, cluster=replace(job.cluster, servers=2), constraints=Constraints(servers=True, runtime=True, among_workers=False)
    )
    assert {bucket.option for bucket in search_for(problem, 0.5).buckets} <= set(OVER_SERVERS)


def test_the_programmes_reduced_costs_are_bounds() -> None:
    """The bound and an option's reduced cost are below every step in which the bucket takes the option."""
    problem = random_job(9, 3)
    found = search(problem)
    space = Space(problem)
    buckets = bucketing_of(problem, found.buckets)
    solved = solve_given(problem, space, buckets, found.step_us * 2)
    for place, bucket in enumerate(found.buckets):
        assert solved.bound_us * (1 - 1e-9) <= found.step_us
        assert np.isfinite(solved.reduced[space.graph.number[bucket.option], place])
    assert solved.options is None or len(solved.options) == len(found.buckets)


def test_merging_and_splitting_keep_every_tensor_and_undo_each_other() -> None:
    for several in (False, True):
        job = random_job(11, 30)
        tensors = (of_several_codecs(job) if several else job).tensors
        made = bucketing(tensors, np.arange(len(tensors.numel)), [2] * len(tensors.numel))
        found = merged(tensors, made, 0)
        assert found is not None
        both, (number,) = found
        assert len(both.parts) == len(made.parts) - 1
        members = np.flatnonzero(both.of == number)
        assert len(members) == 2 and members[0] == 0 and both.codec[number] == made.codec[0]
        again = split(tensors, both, int(number), 1)
        assert again is not None
        assert again[0].of.tolist() == made.of.tolist()
        assert split(tensors, made, 0) is None


@pytest.fixture(scope="module")
def rivals() -> ModuleType:
    return benchmark_scripts.load("planning_rivals")  # type: ignore[no-any-return]


def test_random_jobs_have_what_their_distribution_says(rivals: ModuleType) -> None:
    jobs = [rivals.random_job(seed, 3, 40) for seed in range(300)]
    assert {len(job.profile.tensors) for job in jobs} >= {3, 4, 40}
    assert all(3 <= len(job.profile.tensors) <= 40 and job.cluster.gpus > 1 for job in jobs)
    assert 0.4 < sum(job.cluster.servers > 0 for job in jobs) / 300 < 0.6
    assert all(job.constraints.servers == (job.cluster.servers > 0) for job in jobs)
    assert rivals.random_job(7, 3, 40) == jobs[7]


def test_the_comparison_goes_on_from_its_file(rivals: ModuleType, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"  # type: ignore[operator]
    rows = rivals.run(2, 1, 3, out)
    out.write_text(out.read_text() + '{"seed": 2, "ten')  # the process was killed while it wrote
    with monkeypatch.context() as patched:
        patched.setattr(rivals, "compared", lambda *_: pytest.fail("computed again"))
        assert rivals.run(2, 1, 3, out) == rows
    assert "2 jobs" in next(rivals.summary(rows))
