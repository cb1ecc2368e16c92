"""The same job on other hardware: each factor moves what it says, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.problem import Problem
from psgc.plan.model.vary import SAME, Change, varied, with_halved_bytes

CURVE = CostCurve((1.0, 2.0), (8.0, 16.0), (4.0, 8.0))
PROFILE = Profile("m", (TensorProfile("a", 4, 0.0), TensorProfile("b", 4, 100.0)), forward_us=50.0)
CLUSTER = Cluster("c", 2, 2, Link(10, 1), Link(1, 2), 1, Link(3, 4))
PROBLEM = Problem(PROFILE, CLUSTER, CodecCosts("int8", 1.0, {"gpu": CURVE, "cpu": CURVE}, 2.0))


def test_no_change_is_the_same_problem() -> None:
    assert varied(PROBLEM, SAME) is PROBLEM


def test_links_are_faster_between_nodes_and_to_servers() -> None:
    found = varied(PROBLEM, Change(link=2)).cluster
    assert found == replace(CLUSTER, inter=Link(2, 2), server=Link(6, 4))


def test_computers_are_faster_at_forward_backward_and_codecs_on_the_gpu() -> None:
    found = varied(PROBLEM, Change(compute=2))
    assert (found.profile.forward_us, found.profile.backward_us) == (25, 50)
    assert found.codec.curves["gpu"].encode_us == (4, 8)
    assert found.codec.curves["cpu"] == CURVE


def test_a_disturbed_backward_is_longer_and_forward_is_not() -> None:
    found = varied(PROBLEM, Change(backward=1.1)).profile
    assert found.backward_us == 100 * 1.1
    assert found.forward_us == 50


def test_codecs_are_slower_and_payloads_larger() -> None:
    found = varied(PROBLEM, Change(codec=3, payload=0.5)).codec
    assert found.curves["cpu"].decode_us == (12, 24)
    assert (found.bytes_per_element, found.pull_bytes_per_element) == (0.5, 1.0)


def test_half_the_bytes_are_links_of_twice_the_bandwidth_and_the_same_latency() -> None:
    found = with_halved_bytes(CLUSTER)
    assert (found.intra, found.inter, found.server) == (Link(20, 1), Link(2, 2), Link(6, 4))
