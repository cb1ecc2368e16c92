"""The rule of thumb for hiding a bf16 all-reduce, by arithmetic, and what the timeline makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import Profile, TensorProfile, computed_profile
from psgc.plan.methods.uniform import fused
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, simulate
from psgc.plan.model.vary import with_faster_link
from psgc.plan.whatif.regimes import BUCKETS, exposure, hiding_product, needed_ratio, rule_ratio

H100 = computed_profile("llama-8b", "h100")  # 8192 tokens at 400 TFLOP/s
HIERARCHICAL = ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")


def cluster(gbps: float, nodes: int = 8, gpus: int = 8, latency_us: float = 0.0) -> Cluster:
    return Cluster("test", nodes, gpus, Link(3600, 0), Link(gbps, latency_us))


def step_us(profile: Profile, where: Cluster) -> float:
    problem = Problem(profile, where, CodecCosts("none", 4.0, {}))
    return simulate(problem, fused(problem, profile.numel / BUCKETS, HIERARCHICAL)).step_us


def test_it_hides_from_3_2_million_tokens_times_gbits_on_at_400_tflops() -> None:
    assert hiding_product(400) == pytest.approx(3.2e6)
    assert hiding_product(100) == pytest.approx(0.8e6)


@pytest.mark.parametrize(("gbps", "ratio"), [(400, 1), (100, 4), (25, 16), (10, 40), (1, 390)])
def test_the_ratio_over_bf16_that_8k_tokens_need(gbps: float, ratio: float) -> None:
    assert rule_ratio(8192, gbps, 400) == pytest.approx(ratio, rel=0.03)
    assert needed_ratio(H100, cluster(gbps)) == pytest.approx(ratio, rel=0.07)


def test_the_models_size_cancels_but_for_embeddings_that_nothing_is_computed_with() -> None:
    small, large = (computed_profile(name, "h100", batch=8192) for name in ("llama-1b", "llama-8b"))
    assert large.numel > 6 * small.numel
    by_rule = rule_ratio(8192, 100, 400) * 7 / 8  # of 8 nodes each sends 7 eighths, twice
    assert exposure(small, cluster(100)) == pytest.approx(by_rule, rel=0.01)  # its embedding is the output layer, too
    assert by_rule < exposure(large, cluster(100)) < 1.2 * by_rule


def test_gpus_that_share_a_nodes_link_do_not_need_more() -> None:
    assert needed_ratio(H100, cluster(25, gpus=8)) == needed_ratio(H100, cluster(25, gpus=1))


def test_two_nodes_need_little_more_than_half_as_much_as_many() -> None:
    assert needed_ratio(H100, cluster(25, nodes=2)) == pytest.approx(needed_ratio(H100, cluster(25, nodes=512)) * 0.5, rel=0.01)
    assert needed_ratio(H100, cluster(25, nodes=1)) == 1


def test_latency_adds_to_it_until_no_ratio_would_do() -> None:
    """8 nodes: an all-reduce waits for 14 messages; backward takes 572 ms."""
    ratios = [needed_ratio(H100, cluster(25, latency_us=us)) for us in (0, 20, 1000, 5000, 20_000)]
    assert ratios == sorted(set(ratios)) and ratios[-1] < math.inf
    assert needed_ratio(H100, cluster(25, latency_us=H100.backward_us / 14 - 1)) < math.inf
    assert needed_ratio(H100, cluster(25, latency_us=H100.backward_us / 14)) == math.inf


def test_no_ratio_hides_latency_exactly_where_no_bucket_but_the_last_is_hidden_on_the_timeline() -> None:
    """Payloads of no bytes, 10 ms of backward, 14 messages a bucket. Up to 10 / 14 ms a message the first of two buckets hides, and a ratio is
    told; from there on none does, however many there are. With 21 buckets it would be refused from a twentieth of that on."""
    tensors = tuple(TensorProfile(f"t{number}", 100_000, 250.0 * number) for number in range(41))
    profile, limit = Profile("even", tensors), 10_000 / 14
    for latency_us in (0.04 * limit, 0.06 * limit, 0.5 * limit, 0.99 * limit, 1.01 * limit, 2 * limit):
        problem = Problem(profile, Cluster("far", 8, 1, Link(1e9, 0), Link(1e9, latency_us)), CodecCosts("none", 4.0, {}))
        late = {
            first: simulate(problem, _in_two(problem, first)).step_us - profile.backward_us - 14 * latency_us for first in (1, 2, 10, 40)
        }
        hides = any(us < 1.0 for us in late.values())
        assert hides == (latency_us < limit) == (needed_ratio(profile, problem.cluster) < math.inf), latency_us


def _in_two(problem: Problem, first: int) -> tuple[PlannedBucket, ...]:
    """Two buckets, the first of so many tensors."""
    names = [tensor.name for tensor in problem.profile.tensors]
    groups = (tuple(names[:first]), tuple(names[first:]))
    return tuple(PlannedBucket(group, 100_000 * len(group), 1, -place, "none", ("flat.all_reduce",)) for place, group in enumerate(groups))


def test_slow_messages_are_sent_in_fewer_buckets_as_one_works_out_by_hand() -> None:
    """Two nodes, 1 MB at 1 Gbit/s (8000 us each way, 2 (n - 1) / n = 1 of it), backward 10 ms, 1 ms a message, so 2 ms an all-reduce.

    In n buckets one has 10 / (n - 1) - 2 ms for its bytes, and 0.5 ms at most: the former binds from n = 5 on, where 2.5 - 2 = 0.5. So n = 5,
    and 1600 us of bytes a bucket must shrink to 500: 3.2 times fewer.
    """
    tensors = (TensorProfile("a", 500_000, 0.0), TensorProfile("b", 500_000, 10_000.0))
    where = Cluster("test", 2, 1, Link(100, 0), Link(1, 1000.0))
    assert needed_ratio(Profile("m", tensors), where, bytes_per_element=1.0) == pytest.approx(3.2)


def test_more_tokens_need_less() -> None:
    twice = computed_profile("llama-8b", "h100", batch=16384)
    assert needed_ratio(twice, cluster(25)) == pytest.approx(needed_ratio(H100, cluster(25)) / 2)


@pytest.mark.parametrize("gbps", [100.0, 10.0])
def test_on_the_timeline_that_many_fewer_bytes_hide_and_half_as_many_do_not(gbps: float) -> None:
    where = cluster(gbps)
    ratio = needed_ratio(H100, where, 4.0)
    assert step_us(H100, with_faster_link(where, ratio)) < 1.25 * H100.backward_us
    assert step_us(H100, with_faster_link(where, ratio / 2)) > 1.75 * H100.backward_us


def test_without_backward_nothing_hides() -> None:
    at_once = replace(H100, tensors=tuple(replace(tensor, ready_us=0.0) for tensor in H100.tensors))
    assert exposure(at_once, cluster(25)) == math.inf
    assert needed_ratio(at_once, cluster(25)) == math.inf
