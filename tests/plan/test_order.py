"""The issue order: every transfer once on each lane that it uses, in the order of the simulated step; and where parts lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import Profile, TensorProfile
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.lanes import LINKS, spans
from psgc.plan.model.options import all_options, server_options
from psgc.plan.model.plan import Issue, PlannedBucket, plan_text
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.planfile.completing import placed, whole_plan
from psgc.plan.planfile.order import issue_order, lanes_of
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import ENCODED, planned_buckets
from psgc.plan.planfile.strict import parse_strictly
from tests.plan.jobs import CURVE, bucket_of, problems

PUSH = ("flat.push", "flat.pull")


@st.composite
def planned(draw: Any) -> tuple[Problem, list[PlannedBucket]]:
    problem = draw(problems(most=5))
    cluster = replace(problem.cluster, servers=draw(st.integers(0, 3)), servers_on_nodes=draw(st.booleans()))
    problem = replace(problem, cluster=cluster)
    options = st.sampled_from(all_options())
    options = options | st.sampled_from(server_options()) if cluster.servers else options
    buckets = [
        bucket_of(problem, index, parts=draw(st.integers(1, 3)), option=draw(options)) for index in range(len(problem.profile.tensors))
    ]
    return problem, draw(st.permutations(buckets))


@given(planned())
def test_every_transfer_is_issued_once_on_each_of_its_lanes_as_the_timeline_begins_it(
    job: tuple[Problem, list[PlannedBucket]],
) -> None:
    problem, buckets = job
    simulated = simulate(problem, buckets)
    order = issue_order(simulated, buckets)
    wanted = {
        (lane, Issue(number, part, step))
        for number, bucket in enumerate(buckets)
        for step, lanes in enumerate(lanes_of(bucket.option, problem.cluster))
        for lane in lanes
        for part in range(bucket.parts)
    }
    issued = [(lane, issue) for lane, issues in order.items() for issue in issues]
    assert set(issued) == wanted
    assert len(issued) == len(wanted)
    begins: dict[tuple[str, int, int, str], float] = {}
    for span in spans(simulated):
        if span.lane in LINKS:
            begins.setdefault((span.lane, span.bucket, span.part, span.action), span.start_us)
    for lane, issues in order.items():
        starts = [begins[lane, issue.bucket, issue.part, buckets[issue.bucket].option[issue.step]] for issue in issues]
        assert all(first <= second for first, second in pairwise(starts))
    plan = whole_plan(problem, buckets, simulated, {})
    assert read_plan(parse_strictly(plan_text(plan.to_json()), "p"), "p") == plan, "no order of ours is refused"


def test_two_buckets_take_turns_on_the_links_as_computed_by_hand() -> None:
    """1e6 elements are 4e6 bytes, at 8 Gbit/s (1e-3 us a byte) 4,000 us; two GPUs in each of two nodes.

    Bucket 0 is ready at 0, bucket 1 at 100 us. reduce_scatter within nodes: 4 MB / 2 at 80 Gbit/s: 200 us; all-reduce between nodes of each rank's
    half, two halves on a node's link: 4,000 us; all_gather within: 200 us. So: 0 scatters 0-200, 1 scatters 200-400; 0 sums between
    200-4,200; 1 all-reduces everything flat on all links from 4,200 on, before bucket 0's gather, which became possible at the same moment: no,
    the bucket of the smaller number goes first on the links within nodes, 4,200-4,400.
    """
    tensors = tuple(TensorProfile(name, 1_000_000, ready) for name, ready in (("a", 0.0), ("b", 100.0)))
    cluster = Cluster("c", 2, 2, Link(80, 0), Link(8, 0))
    problem = Problem(Profile("m", tensors), cluster, CodecCosts("bits", 1 / 8, {"gpu": CURVE}))
    steps = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    buckets = [PlannedBucket((name,), 1_000_000, 1, 0, "none", steps) for name in "ab"]
    order = issue_order(simulate(problem, buckets), buckets)
    between = (Issue(0, 0, 1), Issue(1, 0, 1))
    assert order == {
        "inter-receive": between, "inter-send": between,
        "intra": (Issue(0, 0, 0), Issue(1, 0, 0), Issue(0, 0, 2), Issue(1, 0, 2)),
    }  # fmt: skip
    flat = [buckets[0], replace(buckets[1], option=("flat.all_reduce",))]
    order = issue_order(simulate(problem, flat), flat)
    assert order["intra"] == (Issue(0, 0, 0), Issue(0, 0, 2), Issue(1, 0, 0))
    assert order["inter-send"] == order["inter-receive"] == (Issue(0, 0, 1), Issue(1, 0, 0))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_plan_balances_the_bytes_of_its_servers_and_a_job_takes_its_places(servers: int) -> None:
    sizes = {"w": 5 * 4096, "v": 3 * 4096, "b": 7}
    buckets = [
        PlannedBucket(("b",), 7, 1, -5, "none", PUSH), PlannedBucket(("w",), sizes["w"], 5, 3, "int8", ENCODED),
        PlannedBucket(("v",), sizes["v"], 3, 9, "none", PUSH),
    ]  # fmt: skip
    tensors = tuple(TensorSpec(name, (numel,), "float32") for name, numel in sizes.items())
    problem = Problem(
        Profile("m", tuple(TensorProfile(name, numel, 0.0) for name, numel in sizes.items())),
        Cluster("c", 2, 1, Link(1, 0), Link(1, 0), servers), CodecCosts("int8", 0.5, {"cpu": CURVE}),
    )  # fmt: skip
    plan = whole_plan(problem, buckets, simulate(problem, buckets), {})
    # v goes first: three parts of 4096 x 8 bytes; then w, five of 4096 x 1; then b: 7 x 8 bytes
    assert [bucket.servers for bucket in plan.buckets] == {
        1: [(0,), (0, 0, 0, 0, 0), (0, 0, 0)],
        2: [(1,), (1, 1, 1, 1, 1), (0, 1, 0)],
        3: [(2,), (0, 1, 2, 0, 1), (0, 1, 2)],
    }[servers]
    declared = Declaration("m", "plan", tensors, "none", True, buckets=planned_buckets(plan, tensors, plan.shape))
    made = build_layout(declared, layout_id=servers, servers=servers, workers=2)
    assert {
        (made.tensors[bucket.tensors[0]].name, number): part.server
        for bucket in made.buckets for number, part in enumerate(bucket.parts)
    } == {(bucket.tensors[0], number): server for bucket in plan.buckets for number, server in enumerate(bucket.servers)}  # fmt: skip


def test_a_bucket_without_servers_has_no_places_and_takes_no_turn() -> None:
    ring, pushed = PlannedBucket(("a",), 9, 1, 5, "none", ("flat.all_reduce",)), PlannedBucket(("b",), 9, 2, 0, "none", PUSH)
    for servers, places in ((3, (0, 1)), (0, ())):
        profile = Profile("m", (TensorProfile("a", 9, 0.0), TensorProfile("b", 9, 0.0)))
        problem = Problem(profile, Cluster("c", 2, 1, Link(1, 0), Link(1, 0), servers), CodecCosts("none", 4.0, {}))
        assert [bucket.servers for bucket in placed(problem, (ring, pushed))] == [(), places]
