"""The timeline: the kernel is the definition, and both keep the laws of a schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, CPU, GPU, IN_FLIGHT, INTRA, RECEIVE, RESOURCES, SEND, CodecCosts, resources_of
from psgc.plan.model.lanes import BACKWARD, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.timeline import Chains, busy_us, chains_of, define_timeline, run

TASK = st.tuples(st.sampled_from([IN_FLIGHT, ALL_LINKS, BOTH_WAYS, *range(len(RESOURCES))]), st.integers(0, 20).map(float))
THREADS = st.lists(st.integers(1, 3), min_size=len(RESOURCES), max_size=len(RESOURCES)).map(lambda threads: [1, *threads[1:]])
JOBS = st.lists(st.tuples(st.integers(0, 15), st.lists(TASK, max_size=6)), min_size=1, max_size=9)


Job = list[tuple[int, list[tuple[int, float]]]]


def chains(job: Job) -> Chains:
    """Of buckets of several tensors: backward has one every 7 us, too."""
    ready = np.cumsum([gap for gap, _ in job]).astype(float)
    moments = np.unique(np.concatenate([ready, np.arange(0.0, ready[-1], 7.0)]))
    return chains_of(ready.tolist(), [bucket for _, bucket in job], moments_us=moments)


@given(JOBS, THREADS, st.randoms(use_true_random=False))
def test_the_kernel_is_the_definition(job: Job, threads: list[int], random: Random) -> None:
    links = {INTRA, SEND, RECEIVE}  # of which no two messages go at once
    rank = random.sample(range(len(job)), len(job))
    made = chains(job)._replace(threads=np.array([1 if one in links else count for one, count in enumerate(threads)]), rank=np.array(rank))
    plain, quick = define_timeline(made), run(made)
    assert quick.step_us == plain.step_us
    np.testing.assert_array_equal(quick.start_us, plain.start_us)
    np.testing.assert_array_equal(quick.computed_us, plain.computed_us)


@pytest.mark.parametrize("seed", range(6))
def test_of_hundreds_of_chains_that_wait_for_one_another_the_kernel_starts_each_task_when_the_definition_does(seed: int) -> None:
    """As in plans of a bucket a tensor: links are held up for long, several parts of a bucket are alike, and many tasks wait for the same moment of
    backward."""
    rng = np.random.default_rng(seed)
    kinds = [
        [(GPU, 1.0), (BOTH_WAYS, 9.0), (GPU, 2.0)],
        [(INTRA, 3.0), (ALL_LINKS, 8.0)],
        [(CPU, 6.0), (SEND, 5.0), (IN_FLIGHT, 4.0), (RECEIVE, 5.0)],
    ]
    sizes = rng.integers(1, 4, 120)
    parts = np.repeat(np.arange(120), rng.integers(1, 4, 120)).tolist()
    job = [[(resource, us * float(sizes[bucket])) for resource, us in kinds[bucket % 3]] for bucket in parts]
    ready, threads = np.cumsum(rng.integers(0, 4, 120)).astype(float), [1] * len(RESOURCES)
    threads[CPU] = 2
    made = chains_of(ready[parts].tolist(), job, threads, np.unique(ready), rng.permutation(len(parts)) if seed % 2 else None)
    plain, quick = define_timeline(made), run(made)
    assert quick.step_us == plain.step_us
    np.testing.assert_array_equal(quick.start_us, plain.start_us)
    np.testing.assert_array_equal(quick.computed_us, plain.computed_us)


@given(JOBS)
def test_no_resource_does_two_tasks_at_once_and_tasks_keep_their_order(job: Job) -> None:
    made = chains(job)
    timeline = run(made)
    spans: dict[int, list[tuple[float, float]]] = {resource: [] for resource in range(len(RESOURCES))}
    for bucket in range(len(job)):
        before = timeline.computed_us[bucket]
        for task in range(made.first[bucket], made.first[bucket + 1]):
            assert timeline.start_us[task] >= before
            before = timeline.start_us[task] + made.us[task]
            assert before <= timeline.step_us
            for resource in resources_of(int(made.resource[task])):
                spans[resource].append((timeline.start_us[task], before))
    backward = {RESOURCES[GPU]: made.ready_us[-1]}
    for resource, times in spans.items():
        times.sort()
        assert all(a[1] <= b[0] or a[0] == a[1] or b[0] == b[1] for a, b in pairwise(times)), RESOURCES[resource]
        name = RESOURCES[resource]
        assert sum(b - a for a, b in times) == pytest.approx(busy_us(made)[name] - backward.get(name, 0.0))
        assert busy_us(made)[name] <= timeline.step_us + 1e-9


@given(JOBS)
def test_tasks_on_the_gpu_start_between_tensors_and_delay_what_is_computed_later(job: Job) -> None:
    made = chains(job)
    timeline = run(made)
    on_gpu = sorted((timeline.start_us[task], made.us[task]) for task in np.flatnonzero(made.resource == GPU))
    for ready, computed in zip(made.ready_us, timeline.computed_us, strict=True):
        assert computed == pytest.approx(ready + sum(us for start, us in on_gpu if start < computed))
    delay = 0.0
    for start, us in on_gpu:
        if start < timeline.computed_us[-1]:
            assert np.abs(made.moments_us + delay - start).min() < 1e-6
        delay += us


def test_encoding_on_the_gpu_delays_backward_and_on_the_cpu_it_does_not() -> None:
    for device, second in ((GPU, 14.0), (CPU, 10.0)):
        made = chains_of([0.0, 10.0], [[(device, 4.0), (SEND, 1.0)], [(SEND, 3.0)]])
        assert run(made).computed_us[1] == second
        assert run(made).step_us == second + 3.0


def test_a_task_on_the_gpu_waits_for_the_tensor_that_is_being_computed_not_for_its_bucket() -> None:
    """Tensors at 0, 4, 8 .. 20 us; the first is a bucket, the five others are one. The first's link takes 5 us, so at 5 its decode, 3 us,
    could start: it waits for the tensor at 8 and ends at 11, what follows takes until 21, and the second bucket is there at 23, with its own 2 us
    until 25. Were the second bucket one tensor, the decode would wait until 20 and end at 23, and what follows at 33."""
    first, second = [(SEND, 5.0), (GPU, 3.0), (INTRA, 10.0)], [(INTRA, 2.0)]
    made = run(chains_of([0.0, 20.0], [first, second], moments_us=np.arange(0.0, 24.0, 4.0)))
    assert made.start_us.tolist() == [0.0, 8.0, 11.0, 23.0]
    assert (made.computed_us.tolist(), made.step_us) == ([0.0, 23.0], 25.0)
    whole = run(chains_of([0.0, 20.0], [first, second]))
    assert whole.start_us.tolist() == [0.0, 20.0, 23.0, 20.0]
    assert (whole.computed_us.tolist(), whole.step_us) == ([0.0, 20.0], 33.0)


def test_the_lane_of_backward_shows_it_interrupted() -> None:
    """100 us to encode the first of three tensors, ready at 0, 300 and 600 us: backward is 300 us, then again 300; with the second and third in
    one bucket and a decode that may start at 250 us, backward pauses at the second tensor."""
    curve = CostCurve((1.0, 2.0), (100.0, 100.0), (50.0, 50.0))
    profile = Profile("m", tuple(TensorProfile(f"t{index}", 1000, 300.0 * index) for index in range(3)))
    problem = Problem(profile, Cluster("c", 2, 1, Link(1e6, 0), Link(1e6, 150)), CodecCosts("c", 0.0, {"gpu": curve}))
    option = ("comp@gpu", "flat.all_gather.c", "decomp@gpu")
    buckets = (PlannedBucket(("t0",), 1000, 1, 0, "c", option), PlannedBucket(("t1", "t2"), 2000, 1, -1, "none", ("flat.all_reduce",)))
    found = spans(simulate(problem, buckets))
    # encoded from 0 to 100, gathered until 250, decoded (twice 50 us in two pieces' time, 50 us by this curve) when tensor 1 is there, at 400
    assert [(span.start_us, span.end_us) for span in found if span.lane == BACKWARD] == [(100.0, 400.0), (450.0, 750.0)]
    assert [(span.start_us, span.end_us) for span in found if span.lane == "gpu"] == [(0.0, 100.0), (400.0, 450.0)]


def test_links_within_and_between_nodes_work_at_once() -> None:
    made = chains_of([0.0, 0.0], [[(INTRA, 5.0), (BOTH_WAYS, 5.0)], [(INTRA, 5.0), (BOTH_WAYS, 5.0)]])
    assert run(made).step_us == 15.0
    assert run(chains_of([0.0, 0.0], [[(SEND, 5.0)], [(RECEIVE, 5.0)]])).step_us == 5.0
    assert run(chains_of([0.0, 0.0], [[(BOTH_WAYS, 5.0)], [(RECEIVE, 5.0)]])).step_us == 10.0


def test_parts_that_are_ready_at_once_do_not_wait_for_one_another_on_the_gpu() -> None:
    made = chains_of([5.0, 5.0], [[(GPU, 4.0), (SEND, 1.0)], [(INTRA, 1.0), (GPU, 1.0)]])
    assert run(made).start_us.tolist() == [5.0, 9.0, 5.0, 9.0]


def test_of_two_tasks_that_wait_for_a_link_that_of_the_higher_priority_goes_first() -> None:
    """Three buckets over a link of 4 us each way: the first holds it from 0 to 4, meanwhile the others are ready, at 1 and 2 us. The one that goes
    first has it from 4 to 8, the other from 8 to 12. The third then works 10 us for itself: the step is 22 us with the second first, and 18 with the
    third first."""
    buckets = [[(SEND, 4.0)], [(SEND, 4.0)], [(SEND, 4.0), (CPU, 10.0)]]
    for rank, starts, step in (([0, 1, 2], [0.0, 4.0, 8.0, 12.0], 22.0), ([1, 2, 0], [0.0, 8.0, 4.0, 8.0], 18.0)):
        made = run(chains_of([0.0, 1.0, 2.0], buckets, rank=rank))
        assert (made.start_us.tolist(), made.step_us) == (starts, step)


def test_a_plans_priorities_decide_who_goes_first_whatever_is_ready_first() -> None:
    """As above, in milliseconds: 500,000 elements are 2 MB, 4 ms at 4 Gbit/s each way of two nodes' all-reduce."""
    tensors = tuple(TensorProfile(f"t{index}", 500_000 if index < 2 else 1_000_000, 1000.0 * index) for index in range(3))
    problem = Problem(Profile("m", tensors), Cluster("c", 2, 1, Link(80, 0), Link(4, 0)), CodecCosts("none", 4.0, {}))
    buckets = [
        PlannedBucket((tensor.name,), tensor.numel, 1, priority, "none", ("flat.all_reduce",))
        for tensor, priority in zip(tensors, (0, 1, 2), strict=True)
    ]
    simulated = simulate(problem, buckets)
    assert simulated.timeline.start_us == pytest.approx([0.0, 12_000.0, 4_000.0])
    equal = simulate(problem, [replace(bucket, priority=0) for bucket in buckets])
    assert equal.timeline.start_us == pytest.approx([0.0, 4_000.0, 8_000.0])
