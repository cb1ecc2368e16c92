"""An iteration with its next forward, with and without a barrier before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.plan.model.forward import with_forward
from psgc.plan.model.problem import Problem, Simulated, simulate
from tests.plan.jobs import bucket_of, problem_of


def job(*tensors: tuple[int, float], forward_us: float | None = 300.0) -> Problem:
    problem = problem_of(*tensors)
    return replace(problem, profile=replace(problem.profile, forward_us=forward_us))


def test_layers_compute_in_reverse_each_when_its_gradients_and_the_one_before_are_there() -> None:
    problem = job((400_000, 0.0), (64, 100.0), (64, 300.0))
    buckets = [bucket_of(problem, index) for index in range(3)]
    simulated = simulate(problem, buckets)
    large, *small = ([us for row, us in zip(simulated.rows, ends(simulated), strict=True) if row.bucket == index][-1] for index in range(3))
    assert 300 < large < min(small)  # links are first come, first served
    found = with_forward(problem, buckets, simulated)
    # the last tensor's share of forward is 200 of 300 us, the second's 100, that of the first, which backward begins with, none
    assert found.overlapped_us == pytest.approx(max(small[1] + 200, small[0]) + 100)
    assert found.barrier_us == pytest.approx(simulated.step_us + 300)


def test_without_a_barrier_an_iteration_is_never_longer_and_hides_what_the_first_layers_do_not_wait_for() -> None:
    problem = job((4_000_000, 90.0), (64, 100.0), (64, 1000.0), forward_us=1000.0)
    late = [bucket_of(problem, 2), bucket_of(problem, 1), bucket_of(problem, 0)]
    problem = replace(problem, cluster=replace(problem.cluster, nodes=1, gpus_per_node=1))
    assert with_forward(problem, late, simulate(problem, late)) == pytest.approx((2000.0, 2000.0))  # nothing to wait for
    problem = job((4_000_000, 990.0), (64, 1000.0), forward_us=1000.0)
    flat, within = bucket_of(problem, 0), bucket_of(problem, 1, option=("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"))
    for buckets in ([flat, within], [within, flat]):
        found = with_forward(problem, buckets, simulate(problem, buckets))
        assert found.overlapped_us <= found.barrier_us


def test_a_profile_without_forward_is_refused() -> None:
    problem = job((64, 0.0), forward_us=None)
    buckets = [bucket_of(problem, 0)]
    with pytest.raises(UsageError, match="profile made: it has no forward_us; measure one with psgc profile, or leave out --forward"):
        with_forward(problem, buckets, simulate(problem, buckets))


def ends(simulated: Simulated) -> list[float]:
    return (simulated.timeline.start_us + simulated.chains.us).tolist()
