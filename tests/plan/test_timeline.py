"""The timeline: the kernel is the definition, and both keep the laws of a schedule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.plan.model.costs import ALL_LINKS, BOTH_WAYS, CPU, GPU, IN_FLIGHT, INTRA, RECEIVE, RESOURCES, SEND, resources_of
from psgc.plan.model.timeline import Chains, busy_us, chains_of, define_timeline, run

TASK = st.tuples(st.sampled_from([IN_FLIGHT, ALL_LINKS, BOTH_WAYS, *range(len(RESOURCES))]), st.integers(0, 20).map(float))
THREADS = st.lists(st.integers(1, 3), min_size=len(RESOURCES), max_size=len(RESOURCES)).map(lambda threads: [1, *threads[1:]])
JOBS = st.lists(st.tuples(st.integers(0, 15), st.lists(TASK, max_size=6)), min_size=1, max_size=9)


def chains(job: list[tuple[int, list[tuple[int, float]]]]) -> Chains:
    return chains_of(np.cumsum([gap for gap, _ in job]).astype(float).tolist(), [bucket for _, bucket in job])


@given(JOBS, THREADS)
def test_the_kernel_is_the_definition(job: list[tuple[int, list[tuple[int, float]]]], threads: list[int]) -> None:
    links = {INTRA, SEND, RECEIVE}  # of which no two messages go at once
    made = chains(job)._replace(threads=np.array([1 if one in links else count for one, count in enumerate(threads)]))
    plain, quick = define_timeline(made), run(made)
    assert quick.step_us == plain.step_us
    np.testing.assert_array_equal(quick.start_us, plain.start_us)
    np.testing.assert_array_equal(quick.backward_us, plain.backward_us)


@given(JOBS)
def test_no_resource_does_two_tasks_at_once_and_tasks_keep_their_order(job: list[tuple[int, list[tuple[int, float]]]]) -> None:
    made = chains(job)
    timeline = run(made)
    segments = np.diff(made.ready_us, prepend=0.0)
    spans: dict[int, list[tuple[float, float]]] = {resource: [] for resource in range(len(RESOURCES))}
    spans[GPU] += list(zip(timeline.backward_us, timeline.backward_us + segments, strict=True))
    for bucket in range(len(job)):
        computed_with = int(np.searchsorted(made.ready_us, made.ready_us[bucket]))  # the first that is ready at this moment
        before = timeline.backward_us[bucket] + segments[computed_with]
        for task in range(made.first[bucket], made.first[bucket + 1]):
            assert timeline.start_us[task] >= before
            before = timeline.start_us[task] + made.us[task]
            assert before <= timeline.step_us
            for resource in resources_of(int(made.resource[task])):
                spans[resource].append((timeline.start_us[task], before))
    for resource, times in spans.items():
        times.sort()
        assert all(a[1] <= b[0] or a[0] == a[1] or b[0] == b[1] for a, b in pairwise(times)), RESOURCES[resource]
        assert sum(b - a for a, b in times) == pytest.approx(busy_us(made)[RESOURCES[resource]])
        assert busy_us(made)[RESOURCES[resource]] <= timeline.step_us + 1e-9


def test_encoding_on_the_gpu_delays_backward_and_on_the_cpu_it_does_not() -> None:
    for device, second in ((GPU, 14.0), (CPU, 10.0)):
        made = chains_of([0.0, 10.0], [[(device, 4.0), (SEND, 1.0)], [(SEND, 3.0)]])
        assert run(made).backward_us[1] + 10.0 == second
        assert run(made).step_us == second + 3.0


def test_links_within_and_between_nodes_work_at_once() -> None:
    made = chains_of([0.0, 0.0], [[(INTRA, 5.0), (BOTH_WAYS, 5.0)], [(INTRA, 5.0), (BOTH_WAYS, 5.0)]])
    assert run(made).step_us == 15.0
    assert run(chains_of([0.0, 0.0], [[(SEND, 5.0)], [(RECEIVE, 5.0)]])).step_us == 5.0
    assert run(chains_of([0.0, 0.0], [[(BOTH_WAYS, 5.0)], [(RECEIVE, 5.0)]])).step_us == 10.0


def test_parts_that_are_ready_at_once_do_not_wait_for_one_another_on_the_gpu() -> None:
    made = chains_of([5.0, 5.0], [[(GPU, 4.0), (SEND, 1.0)], [(INTRA, 1.0), (GPU, 1.0)]])
    assert run(made).start_us.tolist() == [5.0, 9.0, 5.0, 9.0]
