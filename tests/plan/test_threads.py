"""Codecs and sums on several threads at once: by hand, and as a job starts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import V100_CODECS, CostCurve, Profile, TensorProfile
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.search import search
from psgc.plan.model.costs import CPU, SERVER, CodecCosts, tasks, threads
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.processes.pool import threads_of
from tests.plan.jobs import check_file, load_job

ENCODED = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
PER_ELEMENT = CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))  # 1 us an element, encoding as decoding
FREE = CostCurve((1.0, 2.0), (0.0, 0.0), (0.0, 0.0))
FAST = Link(1e6, 0)


def step_us(cluster: Cluster, parts: int, **curves: CostCurve) -> float:
    """A bucket of so many parts of 1000 elements each, encoded on the CPU and summed by servers, over links that take no time."""
    profile = Profile("m", (TensorProfile("t", 1000 * parts, 0.0),), codecs={"int8": curves})
    problem = Problem(profile, cluster, codec_costs("int8", profile, cluster.gpus), Constraints(servers=True))
    return simulate(problem, (PlannedBucket(("t",), 1000 * parts, parts, 0, "int8", ENCODED),)).step_us


def test_as_many_parts_are_encoded_at_once_as_a_worker_has_threads() -> None:
    """1000 us to encode a part and 1000 to decode it. On one thread 8 parts take 16 ms; on four two rounds of each: 4 ms; a lone part, 2 ms on
    any number of threads; of 5 parts the last is decoded in the fourth round, with three encodings and decodings before it on its thread."""
    one = Cluster("c", 2, 1, FAST, FAST, servers=1)
    four = replace(one, cores=16)
    assert step_us(one, 8, cpu=PER_ELEMENT, server=FREE) == pytest.approx(16_000, rel=1e-3)
    assert step_us(four, 8, cpu=PER_ELEMENT, server=FREE) == pytest.approx(4_000, rel=1e-3)
    assert step_us(four, 5, cpu=PER_ELEMENT, server=FREE) == pytest.approx(3_000, rel=1e-3)
    assert step_us(one, 1, cpu=PER_ELEMENT, server=FREE) == step_us(four, 1, cpu=PER_ELEMENT, server=FREE) == pytest.approx(2_000, rel=1e-3)


def test_a_server_sums_as_many_parts_at_once_as_it_has_threads() -> None:
    """Two ranks' payloads and the sum's encoding: 3 ms a part. 8 parts on one thread 24 ms, on four 6 ms, on two servers of four 3 ms and the 1.5
    that a lone part is late by."""
    one = Cluster("c", 2, 1, FAST, FAST, servers=1)
    assert step_us(one, 8, cpu=FREE, server=PER_ELEMENT) == pytest.approx(24_000, rel=1e-3)
    assert step_us(replace(one, server_threads=4), 8, cpu=FREE, server=PER_ELEMENT) == pytest.approx(6_000, rel=1e-3)
    assert step_us(replace(one, server_threads=4, servers=2), 8, cpu=FREE, server=PER_ELEMENT) == pytest.approx(4_500, rel=1e-3)


def test_ranks_of_a_node_encode_beside_one_another_on_cores_that_are_enough() -> None:
    """8 ranks of a node: 8 parts' time on a CPU of unknown cores, one part's on 16 cores, two parts' on 4."""
    eight, codec = Cluster("c", 2, 8, FAST, FAST), CodecCosts("c", 1.0, {"cpu": PER_ELEMENT})
    for cluster, us in (
        (eight, 8_000),
        (replace(eight, cores=16), 1_000),
        (replace(eight, cores=4), 2_000),
        (replace(eight, codec_threads=3), 1_000),
    ):
        encode = tasks(("comp@cpu", "flat.all_gather.c", "decomp@cpu"), cluster, codec)[0]
        assert (encode.resource, codec.task_us(encode, 1000.0)) == (CPU, us)


def test_threads_are_those_that_a_job_starts() -> None:
    cluster = Cluster("c", 2, 2, FAST, FAST, servers=1)
    for cores in (1, 2, 6, 64):
        found = threads(replace(cluster, cores=cores))
        assert (found[CPU], found[SERVER]) == (threads_of(cores, 2), threads_of(cores))
    assert threads(cluster)[CPU] == threads(cluster)[SERVER] == 1
    found = threads(replace(cluster, cores=12, codec_threads=8, server_threads=9))
    assert (found[CPU], found[SERVER]) == (6, 9), "two ranks share 12 cores"


def test_the_clusters_file_says_how_many(tmp_path: Path) -> None:
    cluster = Cluster("c", 2, 2, FAST, FAST, servers=1, source="s", cores=12, codec_threads=8, server_threads=9)
    message = "field codec_threads is 0, expected a whole number of at least 1, and 1,024 at most"
    check_file(cluster, tmp_path / "c.toml", "codec_threads = 8", "codec_threads = 0", message)


def test_built_in_times_of_a_whole_node_are_not_taken_for_one_threads() -> None:
    profile = Profile("m", (TensorProfile("t", 1000, 0.0),), codecs=V100_CODECS)
    problem = Problem(profile, Cluster("c", 2, 1, FAST, FAST, cores=8), codec_costs("dgc", profile))
    with pytest.raises(UsageError, match="the built-in codec times are of a node's whole CPU; leave both out"):
        search(problem)


def test_a_job_without_measured_codec_times_is_planned_for_a_cpu_that_encodes_one_part_at_a_time() -> None:
    cluster = Cluster("c", 2, 4, FAST, FAST, cores=8, codec_threads=2, server_threads=3)
    job = load_job("vgg16", cluster, "onebit")
    assert (job.problem.threads[CPU], job.problem.threads[SERVER]) == (1, 3)
    assert any(note.startswith("a node's CPU encodes one part at a time") for note in job.notes)
    assert load_job("vgg16", cluster, "none").problem.threads[CPU] == 2


def test_more_threads_make_no_plan_longer_and_its_bound_holds() -> None:
    curve = CostCurve((1e3, 1e6), (20.0, 20_000.0), (10.0, 10_000.0))
    tensors = tuple(TensorProfile(f"t{index}", 400_000, 2_000.0 * index) for index in range(6))
    profile = Profile("m", tensors, codecs={"int8": {"cpu": curve, "server": curve}})
    steps = []
    for cores in (1, 2, 4, 16):
        cluster = Cluster("c", 4, 1, Link(100, 1), Link(1, 50), servers=2, cores=cores)
        problem = Problem(profile, cluster, codec_costs("int8", profile, 4), Constraints(servers=True))
        found = search(problem)
        assert found.step_us == pytest.approx(simulate(problem, found.buckets).step_us)
        bounds = lower_bounds(problem, found.buckets, found.step_us)
        assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)
        steps.append(found.step_us)
    assert steps[1] < 0.9 * steps[0]
    assert steps[3] <= steps[2] * 1.01 <= steps[1] * 1.02
