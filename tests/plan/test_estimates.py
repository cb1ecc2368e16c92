"""Codec times by bytes and bandwidth, and clusters by GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.estimates import cluster_of, estimate, with_codec_times
from psgc.plan.inputs.profile import computed_profile
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate


def test_int8_with_feedback_moves_22_bytes_an_element_to_encode_and_9_to_decode() -> None:
    # 1000 GB/s at 70 % are 700,000 bytes a us
    curve = estimate("int8", 1000.0)
    assert curve.encode(7e8) == pytest.approx(22.03e3, rel=1e-2)
    assert curve.decode(7e8) == pytest.approx(9.02e3, rel=1e-2)
    assert curve.encode(1) == pytest.approx(20, rel=1e-3)  # two launches


def test_faster_memory_is_faster_and_selection_costs_passes() -> None:
    assert estimate("onebit", 2000.0).encode(1e9) == pytest.approx(estimate("onebit", 1000.0).encode(1e9) / 2, rel=1e-3)
    assert estimate("topk", 1000.0).encode(1e9) > 2 * estimate("onebit", 1000.0).encode(1e9)


def test_what_is_measured_stays_and_what_nobody_knows_is_left_out() -> None:
    profile = computed_profile("gpt2", "v100")
    found = with_codec_times(profile, ["onebit", "int8", "int4:rotate=1", "magic"])
    timed = found.profile
    assert [found.times(codec) for codec in ("onebit", "int8", "int4:rotate=1")] == ["measured", "estimated", "estimated"]
    assert timed.codecs["onebit"] == profile.codecs["onebit"]
    assert timed.curve("int8", "gpu") == estimate("int8", 900.0)
    assert timed.curve("int4", "gpu") is not None and timed.curve("int4", "cpu") is not None
    assert "magic" not in timed.codecs
    on_hosts = with_codec_times(replace(profile, device="cpu", codecs={}), ["int8"], gpu="h100").profile.codecs["int8"]
    assert on_hosts.keys() == {"cpu", "server"}, "a model without a GPU has no times on one"


def test_both_halves_of_a_pair_have_estimates_and_a_step_among_workers_lies_between_those_of_each() -> None:
    """On a slow link, where two stages of as many elements follow each other, half-way."""
    bare, where = replace(computed_profile("gpt2", "a100"), codecs={}), cluster_of("a100", 4, 1, 1.0, 50.0)
    two_stages = ("comp@gpu", "flat.all_to_all.c", "decomp@gpu", "comp@gpu", "flat.all_gather.c", "decomp@gpu")
    steps = {}
    for name in ("onebit/int8", "onebit", "int8", "onebit/none", "onebit/relay"):
        found = with_codec_times(bare, [name])
        assert found.times(name) == "estimated" and set(found.profile.codecs) - {"none"} == set(name.split("/")) - {"none", "relay"}
        if "relay" not in name:
            problem = Problem(found.profile, where, codec_costs(name, found.profile, 4))
            buckets = [PlannedBucket((t.name,), t.numel, 1, 0, problem.codec.name, two_stages) for t in found.profile.tensors]
            steps[name] = simulate(problem, buckets).step_us
    assert steps["onebit/int8"] == pytest.approx((steps["onebit"] + steps["int8"]) / 2, rel=0.01)
    assert steps["onebit/none"] > steps["int8"]


def test_a_cluster_has_the_links_that_such_gpus_have() -> None:
    found = cluster_of("a100", 4, 8, 100.0, 20.0)
    assert (found.nodes, found.gpus_per_node, found.intra.gbps, found.inter.gbps) == (4, 8, 2400, 100)
    assert cluster_of("t4", 4, 1, 10.0, 20.0).intra.gbps == 100
    assert cluster_of("t4", 4, 1, 10.0, 20.0, intra_gbps=7.0).intra.gbps == 7
    assert (found.cores, found.threads_of_a_worker, found.threads_of_a_server) == (32, 4, 4), "as many as psgc's threads use"
    assert (found.host, cluster_of("h100", 4, 8, 100.0, 20.0, host_gbps=50.0).host) == (Link(200, 10), Link(50, 10))
    measured = cluster_of("NVIDIA H100 80GB HBM3, Intel Xeon Platinum 8480, 52 cores", 4, 8, 100.0, 20.0)
    named = cluster_of("h100", 4, 8, 100.0, 20.0)
    assert replace(measured, source="") == replace(named, source="") and measured.collectives == "nccl", "as a profile's hardware has it"
    cards = cluster_of("NVIDIA A100-PCIE-40GB, AMD EPYC, 64 cores", 4, 8, 100.0, 20.0)
    assert (cards.intra.gbps, cards.host, cards.collectives) == (100, Link(200, 10), "nccl"), "no NVLink"
    assert cluster_of("AMD EPYC, beside a T4", 4, 1, 10.0, 20.0).host is None, "behind the comma is the host"
    unknown = cluster_of("AMD EPYC, 2 cores", 4, 8, 100.0, 20.0, cores=16)
    assert (unknown.host, unknown.threads_of_a_worker) == (None, 2), "gradients of a profile that was measured on CPUs are on their hosts"
    with pytest.raises(UsageError, match="advise: field nodes is 0"):
        cluster_of("a100", 0, 8, 100.0, 20.0)
    with pytest.raises(UsageError, match=r"advise: field inter\.gbps is -1"):
        cluster_of("a100", 2, 8, -1.0, 20.0)
