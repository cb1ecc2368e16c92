"""Baselines: each does what its paper says, with what it fuses or what is given."""

from __future__ import annotations

import pytest

from psgc.errors import UsageError
from psgc.plan.methods.baselines import (
    CPU_OVER_NODES,
    CPU_OVER_SERVERS,
    GATHERED,
    GPU_OVER_NODES,
    HIERARCHICAL,
    MOST_PARTITIONS,
    OVER_SERVERS,
    byteps_compress,
    fp32,
    hipress,
    hitopkcomm,
    secopa,
)
from psgc.plan.methods.registry import METHODS
from psgc.plan.model.options import Constraints, all_options, server_options
from psgc.plan.model.problem import Problem, simulate
from tests.plan.jobs import bucket_of, problem_of

BASELINES = {"fp32": fp32, "byteps-compress": byteps_compress, "hitopkcomm": hitopkcomm, "hipress": hipress}
MIXED = ((3 << 20, 0.0), (100, 10.0), (1 << 14, 20.0))
SERVERS = Constraints(servers=True)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_goes_tensor_by_tensor_and_its_step_is_the_timelines(name: str) -> None:
    problem = problem_of(*MIXED)
    found = BASELINES[name](problem)
    assert METHODS[name] is BASELINES[name]
    assert [bucket.tensors for bucket in found.buckets] == [("t0",), ("t1",), ("t2",)]
    assert found.step_us == simulate(problem, found.buckets).step_us
    assert all((bucket.codec == "none") == (not any("comp@" in action for action in bucket.option)) for bucket in found.buckets)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_with_buckets_keeps_what_they_fuse_and_how_they_are_cut(name: str) -> None:
    problem = problem_of(*MIXED)
    given = [bucket_of(problem, 0, parts=5), bucket_of(problem, 1, 2)]
    found = BASELINES[name](problem, given)
    assert [(bucket.tensors, bucket.parts) for bucket in found.buckets] == [(("t0",), 5), (("t1", "t2"), 1)]
    assert found.step_us == simulate(problem, found.buckets).step_us


def test_fixed_options_are_ways_that_there_are() -> None:
    assert {HIERARCHICAL, GATHERED, GPU_OVER_NODES, CPU_OVER_NODES} <= set(all_options())
    assert {OVER_SERVERS, CPU_OVER_SERVERS} <= set(server_options())


def test_byteps_cuts_at_4_mib_and_asks_servers_where_there_are_some() -> None:
    assert [bucket.parts for bucket in fp32(problem_of(*MIXED)).buckets] == [3, 1, 1]
    for problem, option in (
        (problem_of(*MIXED), HIERARCHICAL), (problem_of(*MIXED, servers=2), HIERARCHICAL),
        (problem_of(*MIXED, servers=2, constraints=SERVERS), OVER_SERVERS),
    ):  # fmt: skip
        assert {bucket.option for bucket in fp32(problem).buckets} == {option}


def test_byteps_compresses_on_the_cpu_from_64_kib_on() -> None:
    assert [bucket.option for bucket in byteps_compress(problem_of(*MIXED)).buckets] == [CPU_OVER_NODES, HIERARCHICAL, CPU_OVER_NODES]
    over = byteps_compress(problem_of(*MIXED, servers=2, constraints=SERVERS))
    assert [bucket.option for bucket in over.buckets] == [CPU_OVER_SERVERS, OVER_SERVERS, CPU_OVER_SERVERS]
    just_below = byteps_compress(problem_of(((1 << 14) - 1, 0.0)))
    assert just_below.buckets[0].option == HIERARCHICAL


def test_hitopkcomm_compresses_everything_unless_it_is_told_otherwise() -> None:
    assert {bucket.option for bucket in hitopkcomm(problem_of(*MIXED)).buckets} == {GATHERED}
    some = hitopkcomm(problem_of(*MIXED), least_numel=1 << 20)
    assert [bucket.option for bucket in some.buckets] == [GATHERED, HIERARCHICAL, HIERARCHICAL]


def by_hand(problem: Problem, numel: int) -> list[tuple[float, bool, int]]:
    """SeCoPa's table, a line for each formula: (us, compressed, K)."""
    n, k = problem.cluster.nodes, problem.cluster.gpus_per_node
    alpha, beta = problem.cluster.inter.latency_us, problem.cluster.inter.us_per_byte * k
    gpu, rows = problem.codec.device("gpu"), []
    for parts in range(1, n + 1):
        x = numel / k / parts
        for nbytes, compressed in ((4 * x, False), (x / 8, True)):
            ps, ring = 2 * (alpha + beta * (n - 1) * nbytes), 2 * (n - 1) * (alpha + beta * nbytes)
            if compressed:
                ps += min(parts + 1, n) * gpu.encode(x) + min(n - 1 + parts, 2 * (n - 1)) * gpu.decode(x)
                ring += n * gpu.encode(x) + n * gpu.decode(x)
            rows += [(ps, compressed, parts), (ring, compressed, parts)]
    return rows


@pytest.mark.parametrize("numel", [1, 63, 4097, 50_000, 1 << 20, 1 << 26])
@pytest.mark.parametrize("gbps", [1.0, 100.0])
def test_secopa_takes_the_least_of_its_formulas(numel: int, gbps: float) -> None:
    problem = problem_of((numel, 0.0), gbps=gbps)
    chosen = secopa(problem, numel, problem.codec)
    rows = by_hand(problem, numel)
    assert chosen.us == pytest.approx(min(rows)[0])
    assert any((chosen.compressed, chosen.partitions) == row[1:] and row[0] == pytest.approx(chosen.us) for row in rows)


def test_secopa_compresses_large_tensors_on_slow_links_and_never_on_one_node() -> None:
    slow = problem_of((1 << 22, 0.0), gbps=1.0)
    assert secopa(slow, 1 << 22, slow.codec).compressed
    assert not secopa(slow, 64, slow.codec).compressed
    alone = problem_of((1 << 22, 0.0), nodes=1)
    assert not secopa(alone, 1 << 22, alone.codec).compressed


def test_hipress_cuts_what_it_compresses_as_secopa_says_or_not_at_all_if_fused() -> None:
    problem = problem_of((1 << 24, 0.0), (64, 5.0), gbps=1.0)
    large = secopa(problem, 1 << 24, problem.codec)
    assert large.partitions > 1
    found = hipress(problem)
    assert [(bucket.option, bucket.parts) for bucket in found.buckets] == [(GPU_OVER_NODES, large.partitions), (HIERARCHICAL, 1)]
    assert [bucket.parts for bucket in hipress(problem, fused=True).buckets] == [1, 1]


@pytest.mark.parametrize("name", ["byteps-compress", "hitopkcomm", "hipress"])
def test_a_baseline_whose_way_is_ruled_out_says_so(name: str) -> None:
    problem = problem_of(*MIXED, constraints=Constraints(hierarchical=False))
    with pytest.raises(UsageError, match=f"method {name}: it compresses by .* which the constraints rule out"):
        BASELINES[name](problem)
    device = "gpu" if name == "byteps-compress" else "cpu"
    bare = problem_of(*MIXED, devices=(device,))
    with pytest.raises(UsageError, match="the profile has no times for it"):
        BASELINES[name](bare)


def test_an_enormous_models_partitions_are_larger_so_that_their_number_has_a_limit() -> None:
    sizes = [700_000_000] * 100
    parts = [bucket.parts for bucket in fp32(problem_of(*((numel, 10.0) for numel in sizes))).buckets]
    assert MOST_PARTITIONS <= sum(parts) <= MOST_PARTITIONS + len(sizes)
    assert [bucket.parts for bucket in fp32(problem_of(*((numel, 10.0) for numel in sizes[:2]))).buckets] == [668, 668]  # of 4 MB
