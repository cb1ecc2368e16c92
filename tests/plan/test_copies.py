"""Copies between a GPU and its host: by hand, and in plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link, load_cluster
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.local_search.space import Space
from psgc.plan.methods.bound import lower_bounds
from psgc.plan.methods.search import search
from psgc.plan.model.costs import TO_GPU, TO_HOST, CodecCosts, tasks, walk
from psgc.plan.model.options import Constraints, all_options, encodes, server_options
from psgc.plan.model.problem import Problem, simulate
from tests.plan.jobs import check_file

HOST = Link(8, 10)  # a byte takes 1 ns
CURVE = CostCurve((1e3, 1e6), (5.0, 500.0), (5.0, 500.0))
QUARTER = CodecCosts("quarter", 1.0, {"gpu": CURVE, "cpu": CURVE, "server": CURVE})
CLUSTER = Cluster("c", 4, 2, Link(100, 1), Link(10, 10), servers=2, host=HOST)


def copies(cluster: Cluster, *option: str) -> list[tuple[str, int, float]]:
    """(action, direction, bytes an element) of each copy, all of which have the link's latency."""
    found = [task for task in tasks(option, cluster, QUARTER) if task.resource in (TO_HOST, TO_GPU)]
    assert all(task.fixed_us == 10 and not task.curve for task in found)
    return [(task.action, task.resource, task.per_element_us * 1e3) for task in found]


def test_a_gradient_that_the_cpu_encodes_is_copied_to_it_and_the_sum_back() -> None:
    """4 bytes an element there, 4 back; what servers are sent and answer lies in the host's memory already."""
    option = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
    assert copies(CLUSTER, *option) == [("comp@cpu", TO_HOST, 4.0), ("decomp@cpu", TO_GPU, 4.0)]


def test_what_the_gpu_encodes_and_servers_sum_is_copied_encoded() -> None:
    """1 byte an element there, 1 back."""
    option = ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu")
    assert copies(CLUSTER, *option) == [("flat.push.c", TO_HOST, 1.0), ("decomp@gpu", TO_GPU, 1.0)]
    assert copies(CLUSTER, "flat.push", "flat.pull") == [("flat.push", TO_HOST, 4.0), ("flat.pull", TO_GPU, 4.0)]


def test_of_a_hierarchical_push_each_gpu_copies_its_shard() -> None:
    """Two GPUs a node: half of 4 bytes each, and back before they put the halves together."""
    option = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    assert copies(CLUSTER, *option) == [("inter.push", TO_HOST, 2.0), ("intra.all_gather", TO_GPU, 2.0)]


def test_payloads_gathered_from_the_host_and_decoded_on_the_gpu_pass_as_payloads() -> None:
    """8 ranks' payloads of a byte each."""
    assert copies(CLUSTER, "comp@cpu", "flat.all_gather.c", "decomp@gpu") == [("comp@cpu", TO_HOST, 4.0), ("decomp@gpu", TO_GPU, 8.0)]


def test_collectives_of_gpus_pass_the_host_only_without_gpudirect() -> None:
    """A ring of 8 ranks sends 2 * 7 / 8 of 4 bytes, and receives as much; of 4 nodes' halves 2 * 3 / 4 of 2 bytes."""
    assert copies(CLUSTER, "flat.all_reduce") == []
    without = replace(CLUSTER, gpudirect=False)
    assert copies(without, "flat.all_reduce") == [("flat.all_reduce", TO_HOST, 7.0), ("flat.all_reduce", TO_GPU, 7.0)]
    hierarchical = copies(without, "intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
    assert hierarchical == [("inter.all_reduce", TO_HOST, 3.0), ("inter.all_reduce", TO_GPU, 3.0)]


@pytest.mark.parametrize("options", [all_options(), server_options()])
def test_every_option_leaves_the_sum_on_the_gpu_and_copies_as_often_there_as_back(options: tuple[tuple[str, ...], ...]) -> None:
    for option in options:
        made = [task.resource for task in tasks(option, CLUSTER, QUARTER) if task.resource in (TO_HOST, TO_GPU)]
        assert made == [TO_HOST, TO_GPU] * (len(made) // 2), option
        assert bool(made) == any(action.endswith("@cpu") or ".pu" in action for action in option), option
        assert walk(option, True)[0][-1].last


def test_without_a_link_to_the_host_nothing_is_copied_and_the_graph_is_no_larger() -> None:
    free = replace(CLUSTER, host=None, gpudirect=False)
    assert copies(free, "comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu") == []
    profile = Profile("m", (TensorProfile("t", 1000, 0.0),))
    edges = [len(Space(Problem(profile, cluster, QUARTER, Constraints(servers=True))).graph.atom) for cluster in (free, CLUSTER)]
    assert edges[0] < edges[1]


def test_the_clusters_file_has_the_link(tmp_path: Path) -> None:
    cluster = replace(CLUSTER, gpudirect=False, source="s")
    check_file(cluster, tmp_path / "c.toml", "gpudirect = false", "gpudirect = 0", "field gpudirect is 0, expected true or false")


def test_the_clusters_file_has_roots_and_switches(tmp_path: Path) -> None:
    four, path = replace(CLUSTER, gpus_per_node=4, source="s"), tmp_path / "c.toml"
    roots = replace(four, reduce_roots=(2, 3))
    assert roots.inside == {"BYTEPS_REDUCE_ROOTS": "2,3"}
    check_file(roots, path, "reduce_roots = [2, 3]", "reduce_roots = [2, 4]", "field reduce_roots is .*, expected local ranks from 0 to 3")
    switches = replace(four, pcie_switch_size=2)
    assert switches.inside == {"BYTEPS_PCIE_SWITCH_SIZE": "2"}
    check_file(switches, path, "pcie_switch_size = 2", "pcie_switch_size = 3", "pcie_switch_size is 3, which does not divide the 4 GPUs")
    path.write_text(switches.to_toml().replace("pcie_switch_size = 2", "pcie_switch_size = 2\nreduce_roots = [1]"))
    with pytest.raises(UsageError, match="a node has roots or several switches"):
        load_cluster(str(path))


def test_a_slow_link_to_the_host_keeps_codecs_off_the_cpu_and_the_bound_holds() -> None:
    tensors = tuple(TensorProfile(f"t{index}", 400_000, 500.0 * index) for index in range(5))
    gpu = CostCurve((1e3, 1e6), (200.0, 1_000.0), (200.0, 1_000.0))
    codec = replace(QUARTER, bytes_per_element=0.125, curves={"gpu": gpu, "cpu": CURVE})
    used = []
    for host in (Link(1e5, 0), Link(0.1, 10)):
        cluster = Cluster("c", 4, 1, Link(100, 1), Link(2, 10), host=host)
        problem = Problem(Profile("m", tensors), cluster, codec)
        found = search(problem)
        assert found.step_us == pytest.approx(simulate(problem, found.buckets).step_us)
        bounds = lower_bounds(problem, found.buckets, found.step_us)
        assert bounds.any_us <= bounds.given_us <= found.step_us * (1 + 1e-9)
        assert all(encodes(bucket.option) for bucket in found.buckets)
        used.append(sum(any(action.endswith("@cpu") for action in bucket.option) for bucket in found.buckets))
    assert used[0] > 0
    assert used[1] == 0


def test_collectives_through_hosts_memory_are_copied_there_and_stay_until_the_gpu_decodes_them() -> None:
    """Two GPUs a node, 8 ranks: 4 bytes down and 4 back; a payload's byte down, and the 8 ranks' back; of a hierarchical sum the whole gradient."""
    there = replace(CLUSTER, collectives="host")
    assert copies(there, "flat.reduce_scatter", "flat.all_gather") == [
        ("flat.reduce_scatter", TO_HOST, 4.0),
        ("flat.all_gather", TO_GPU, 4.0),
    ]
    gathered = copies(there, "comp@gpu", "flat.all_gather.c", "decomp@gpu")
    assert gathered == [("flat.all_gather.c", TO_HOST, 1.0), ("decomp@gpu", TO_GPU, 8.0)]
    nodes = ("intra.reduce_scatter", "comp@gpu", "inter.all_gather.c", "decomp@gpu", "intra.all_gather")
    assert copies(there, *nodes) == [
        ("intra.reduce_scatter", TO_HOST, 4.0), ("comp@gpu", TO_GPU, 2.0), ("inter.all_gather.c", TO_HOST, 0.5), ("decomp@gpu", TO_GPU, 2.0),
        ("intra.all_gather", TO_HOST, 2.0), ("intra.all_gather", TO_GPU, 4.0),
    ]  # fmt: skip
    assert copies(replace(CLUSTER, collectives="nccl"), *nodes) == copies(CLUSTER, *nodes) == []


def test_a_cluster_says_what_runs_the_collectives_of_gpus(tmp_path: Path) -> None:
    cluster = replace(CLUSTER, collectives="host", source="s")
    check_file(
        cluster,
        tmp_path / "c.toml",
        'collectives = "host"',
        'collectives = "mpi"',
        "field collectives is 'mpi', expected one of nccl, host",
    )
