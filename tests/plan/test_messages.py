"""What the runtime takes to handle parts, by the profile: by hand, and the search's kernels beside the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.estimates import with_carriers
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.search import search
from psgc.plan.model.costs import IN_FLIGHT, MESSAGES, SEND, CodecCosts, tasks
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.timeline import chains_of, run


def test_a_lone_part_takes_what_the_profile_measured_and_each_further_one_what_the_next_part_took() -> None:
    """Measured: 300 us for a lone part there and back besides its bytes and latencies, and 80 us for each further one under way. One worker and
    one server, no bytes: 300 us for one part, 300 + 31 * 80 for 32."""
    measured = CodecCosts("none", 0.0, {}, carriers={"tcp": CarrierCosts(150.0, 40.0)})
    cluster = Cluster("c", 1, 1, Link(1e6, 0), Link(1e6, 0), servers=1)
    part = [(task.resource, measured.task_us(task, 1e-9)) for task in tasks(("flat.push", "flat.pull"), cluster, measured)]
    assert part[0] == (MESSAGES, pytest.approx(40.0))
    assert run(chains_of([0.0], [part])).step_us == pytest.approx(300.0)
    assert run(chains_of([0.0] * 32, [part] * 32)).step_us == pytest.approx(300.0 + 31 * 80.0, rel=0.04)


def test_a_server_handles_every_ranks_message_and_a_worker_its_own() -> None:
    """4 workers and 2 servers, 80 us for each further part, half of it for the push: of each part 4 messages come to one of 2 servers. So
    parts follow each other every 4 / 2 * 40 = 80 us, and a lone part's push is done after 4 * 40 = 160 us, but for the (300 - 80) / 2 = 110
    us that a lone part takes besides."""
    measured = CodecCosts("none", 0.0, {}, carriers={"tcp": CarrierCosts(150.0, 40.0)})
    cluster = Cluster("c", 4, 1, Link(1e6, 0), Link(1e6, 0), servers=2)
    part = [(task.resource, measured.task_us(task, 1e-9)) for task in tasks(("flat.push",), cluster, measured)]
    assert part == [(MESSAGES, pytest.approx(80.0)), (SEND, pytest.approx(0.0)), (IN_FLIGHT, pytest.approx(80.0 + 110.0))]
    many = replace(cluster, servers=8)  # more servers than messages of a part: the worker's own thread is the slower
    assert tasks(("flat.push",), many, measured)[0].fixed_us == 40.0


def test_a_plan_over_servers_pays_what_its_profile_says_of_parts() -> None:
    """64 parts of 8 KiB of one tensor, 50 us for each: 3.2 ms, where the bytes take 0.4."""
    tensors = (TensorProfile("t", 131_072, 0.0),)
    cluster = Cluster("c", 1, 1, Link(1e3, 0), Link(10, 0), servers=1)
    steps = []
    for overheads in ({}, {"part_us": 200.0, "next_part_us": 50.0}):
        profile = Profile("m", tensors, overheads=overheads)
        problem = Problem(profile, cluster, codec_costs("none", profile), Constraints(servers=True, runtime=True))
        steps.append(simulate(problem, (PlannedBucket(("t",), 131_072, 64, 0, "none", ("flat.push", "flat.pull")),)).step_us)
    assert steps[0] == pytest.approx(131_072 * 4 * 8e-4 * 65 / 64)  # each way at 10 Gbit/s, a part later
    assert steps[1] == pytest.approx(200 + 63 * 50, rel=0.04)


def test_the_search_prices_messages_as_the_timeline_does_and_its_bound_holds() -> None:
    """With 2 ms for each further part one part is best of a bucket, without them many are."""
    tensors = tuple(TensorProfile(f"t{index}", 400_000, 4_000.0 * index) for index in range(6))
    curve = CostCurve((1e3, 1e6), (10.0, 1_000.0), (10.0, 1_000.0))
    cluster = Cluster("c", 2, 1, Link(100, 1), Link(1, 50), servers=1)
    parts = []
    for overheads in ({}, {"part_us": 2_500.0, "next_part_us": 2_000.0}):
        profile = Profile("m", tensors, codecs={"int8": {"cpu": curve, "server": curve}}, overheads=overheads)
        for constraints in (Constraints(servers=True, runtime=True, among_workers=False), Constraints(servers=True)):
            problem = Problem(profile, cluster, codec_costs("int8", profile, 2), constraints)
            found = search(problem)
            assert found.step_us == pytest.approx(simulate(problem, found.buckets).step_us)
            bounds = lower_bounds(problem, found.buckets, found.step_us)
            assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)
            parts.append(sum(bucket.parts for bucket in found.buckets))
    assert parts[2] < parts[0]


def in_memory(cluster: Cluster, **overheads: float) -> Problem:
    """Three tensors of 1,000 elements on a job whose gradients lie in hosts' memory, with links that take no time."""
    tensors = tuple(TensorProfile(f"t{index}", 1_000, 0.0) for index in range(3))
    profile = Profile("m", tensors, overheads=overheads, device="cpu")
    return Problem(profile, cluster, codec_costs("none", profile), Constraints(runtime=True, servers=True))


def test_each_collective_through_hosts_memory_costs_its_fixed_time_whatever_its_bytes() -> None:
    """Between nodes 590 us, within one 280. Three buckets of a flat reduce_scatter and all_gather on two nodes: 3 x 2 x 590 = 3,540 us, one after
    the other on the thread that handles messages; in one bucket 1,180, in one bucket of two parts 2,360. Two ranks of one node: 3 x 2 x 280 = 1,680."""
    nodes = Cluster("c", 2, 1, Link(1e6, 0), Link(1e6, 0))
    flat = ("flat.reduce_scatter", "flat.all_gather")
    apart = [PlannedBucket((f"t{index}",), 1_000, 1, 0, "none", flat) for index in range(3)]
    together = [PlannedBucket(("t0", "t1", "t2"), 3_000, 1, 0, "none", flat)]
    problem = in_memory(nodes, collective_us=590.0, collective_within_us=280.0)
    assert simulate(problem, apart).step_us == pytest.approx(3540, abs=1)
    assert simulate(problem, together).step_us == pytest.approx(1180, abs=1)
    assert simulate(problem, [replace(together[0], parts=2)]).step_us == pytest.approx(2360, abs=1)
    one_node = replace(problem, cluster=Cluster("c", 1, 2, Link(1e6, 0), Link(1e6, 0)))
    assert simulate(one_node, apart).step_us == pytest.approx(1680, abs=1)


def test_sums_within_nodes_and_between_them_pay_each_its_own_and_collectives_of_gpus_pay_neither() -> None:
    """reduce_scatter and all_gather within nodes, 280 us each, and an all_reduce between them, 590: 1,150 us. NCCL's start on the GPU."""
    cluster = Cluster("c", 2, 2, Link(1e6, 0), Link(1e6, 0))
    bucket = [PlannedBucket(("t0", "t1", "t2"), 3_000, 1, 0, "none", ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather"))]
    problem = in_memory(cluster, collective_us=590.0, collective_within_us=280.0)
    assert simulate(problem, bucket).step_us == pytest.approx(280 + 590 + 280, abs=1)
    on_gpus = replace(problem, profile=replace(problem.profile, device="cuda"), cluster=replace(cluster, collectives="nccl"))
    assert simulate(on_gpus, bucket).step_us == pytest.approx(0, abs=1)


def test_a_plan_of_many_small_collectives_is_not_preferred_for_costs_that_are_missing() -> None:
    """48 gradients of 4 KB, ready 20 us apart: at 590 us a collective few are planned, and the plan is not predicted shorter than what its collectives cost.
    What a profile lacks gets the defaults, and that is said."""
    tensors = tuple(TensorProfile(f"t{index}", 1_000, 20.0 * index) for index in range(48))
    cluster = Cluster("c", 2, 1, Link(10, 5), Link(10, 50))
    profile, notes = with_carriers(Profile("m", tensors, device="cpu"))
    assert "sockets 590 us" in notes[0] and "memory 280 us" in notes[0]
    older = Profile("m", tensors, device="cpu", overheads={"collective_us": 7.0})
    assert with_carriers(older)[0].all_carriers["sockets"] == CarrierCosts(7.0, 7.0)
    problem = Problem(profile, cluster, codec_costs("none", profile), Constraints(servers=True, runtime=True))
    found = search(problem)
    count = sum(bucket.parts * len(bucket.option) for bucket in found.buckets)
    assert found.step_us >= 590 * count
    assert count <= 4
    bounds = lower_bounds(problem, found.buckets, found.step_us)
    assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)
