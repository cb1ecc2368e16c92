"""Plans whose buckets all go the same way: every tensor once, and as good as trying everything."""

from __future__ import annotations

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link, load_cluster
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, computed_profile
from psgc.plan.methods.uniform import best_uniform, codec_us, compressed, fused
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.options import Constraints, encodes
from psgc.plan.model.problem import Problem, simulate

TIMES = {"gpu": CostCurve((1.0, 2.0**20), (20.0, 60.0), (10.0, 30.0))}
CODEC = CodecCosts("int8", 1.016, TIMES)
PROFILE = Profile("tiny", tuple(TensorProfile(f"t{index}", numel, 100.0 * index) for index, numel in enumerate((10, 5, 90, 1, 300, 7))))


def problem(name: str = "espresso-pcie", codec: CodecCosts = CODEC) -> Problem:
    return Problem(computed_profile("resnet50", "v100"), load_cluster(name), codec, Constraints(("gpu",)))


def test_every_tensor_is_fused_once_in_order_and_large_ones_are_cut() -> None:
    buckets = fused(Problem(PROFILE, load_cluster("espresso-pcie"), CODEC), 100.0, ("flat.all_reduce",))
    assert [bucket.tensors for bucket in buckets] == [("t0", "t1", "t2"), ("t3", "t4"), ("t5",)]
    assert [(bucket.numel, bucket.parts) for bucket in buckets] == [(105, 1), (301, 3), (7, 1)]
    assert [bucket.codec for bucket in buckets] == ["none"] * 3
    assert [bucket.priority for bucket in buckets] == [0, -1, -2]


@pytest.mark.parametrize("name", ["espresso-pcie", "espresso-nvlink", "cloud-1xt4-10g"])
def test_the_short_list_loses_nothing_that_matters(name: str) -> None:
    where = problem(name)
    for options in (where.options, compressed(where)):
        found = best_uniform(where, options)
        everything = min(
            simulate(where, fused(where, where.profile.numel / cuts, option)).step_us for option in options for cuts in (1, 8, 64)
        )
        assert found.step_us <= 1.02 * everything


def test_compressed_is_what_goes_between_nodes_as_payloads() -> None:
    assert all(encodes(option) for option in compressed(problem()))
    assert ("comp@gpu", "intra.all_to_all.c", "decomp@gpu", "inter.all_reduce", "intra.all_gather") not in compressed(problem())
    with pytest.raises(UsageError, match="codec int8: the profile has its times on no device"):
        compressed(problem(codec=CodecCosts("int8", 1.016, {})))


def test_one_gpu_has_nothing_to_exchange() -> None:
    alone = Problem(PROFILE, Cluster("one", 1, 1, Link(100, 1), Link(1, 1)), CODEC)
    assert best_uniform(alone, [("flat.all_reduce",)]).step_us == PROFILE.backward_us


def test_codec_time_is_that_of_all_parts() -> None:
    where = Problem(
        PROFILE, load_cluster("cloud-1xt4-10g"), CodecCosts("int8", 1.0, {"gpu": CostCurve((1.0, 2.0), (1.0, 2.0), (3.0, 6.0))})
    )
    option = ("comp@gpu", "flat.all_gather.c", "decomp@gpu")
    assert codec_us(where, fused(where, 1000.0, option)) == pytest.approx(413 * (1 + 3 * 8))  # a rank decodes the payloads of all 8
