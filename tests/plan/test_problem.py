"""What a plan costs: parts are chains, priorities break ties, and codecs are found in the profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.registry import find
from psgc.plan.model.options import Constraints
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import Problem, codec_costs, simulate

# a byte takes 1 us
CLUSTER = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(8, 0), inter=Link(8e-3, 10))
CURVES = {"onebit": {"gpu": CostCurve((1.0, 2.0), (3.0, 6.0), (1.0, 2.0))}}
PROFILE = Profile("tiny", (TensorProfile("b", 100, 0.0), TensorProfile("a", 50, 0.0)), codecs=CURVES)
RING = ("flat.all_reduce",)


ANY = Constraints()


def problem(constraints: Constraints = ANY) -> Problem:
    return Problem(PROFILE, CLUSTER, codec_costs("onebit", PROFILE, 2), constraints)


def bucket(*names: str, numel: int, parts: int = 1, priority: int = 0) -> PlannedBucket:
    return PlannedBucket(names, numel, parts, priority, "none", RING)


def test_parts_share_the_bytes_and_each_pays_the_latency() -> None:
    whole = simulate(problem(), [bucket("b", "a", numel=150)])
    cut = simulate(problem(), [bucket("b", "a", numel=150, parts=3)])
    assert whole.step_us == pytest.approx(150 * 4 + 2 * 10)
    assert cut.step_us == pytest.approx(150 * 4 + 3 * 2 * 10)
    assert [row[:2] for row in cut.rows] == [(0, 0), (0, 1), (0, 2)]


def test_of_buckets_that_are_ready_at_once_the_one_of_higher_priority_goes_first() -> None:
    first = simulate(problem(), [bucket("b", numel=100, priority=0), bucket("a", numel=50, priority=1)])
    assert [row.bucket for row in first.rows] == [1, 0]


def test_each_bucket_is_encoded_with_its_own_codec() -> None:
    gathered = ("comp@gpu", "flat.all_gather.c", "decomp@gpu")
    curves = CURVES | {"bf16": {"gpu": CostCurve((1.0, 2.0), (7.0, 14.0), (0.0, 0.0))}}
    profile = replace(PROFILE, codecs=curves)
    asked = Problem(profile, CLUSTER, codec_costs("onebit", profile, 2))
    mixed = [
        replace(bucket(name, numel=numel), codec=codec, option=gathered) for name, numel, codec in (("b", 100, "bf16"), ("a", 50, "onebit"))
    ]
    found = simulate(asked, mixed)
    spent = {(row.bucket, row.action): us for row, us in zip(found.rows, found.chains.us.tolist(), strict=True)}
    assert spent[0, "comp@gpu"] == pytest.approx(7 * 100)
    assert spent[1, "comp@gpu"] == pytest.approx(3 * 50)
    assert spent[0, "flat.all_gather.c"] == pytest.approx(10 + 2 * 100)
    assert spent[1, "flat.all_gather.c"] == pytest.approx(10 + 50 * asked.codec.bytes_per_element)


def test_parts_that_are_not_equal_take_as_long_as_each_has_elements() -> None:
    uneven = simulate(problem(), [replace(bucket("b", "a", numel=150, parts=2), part_numel=100)])
    assert uneven.chains.us.tolist() == pytest.approx([100 * 4 + 20, 50 * 4 + 20])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": "int8"}, "codec int8: the profile has no times for it, but for onebit"),
        ({"codec": "none"}, "the bucket of 'b' is encoded, but its codec is none"),
        ({"parts": 2, "part_numel": 150}, "the bucket of 'b': 150 elements are not 2 parts of 150"),
        ({"parts": 2, "part_numel": 60}, "150 elements are not 2 parts of 60"),
    ],
)
def test_buckets_that_cannot_be_priced_are_refused(change: dict[str, Any], said: str) -> None:
    given = replace(bucket("b", "a", numel=150), **{"codec": "onebit", "option": ("comp@gpu", "flat.all_gather.c", "decomp@gpu"), **change})
    with pytest.raises(UsageError, match=said):
        simulate(problem(), [given])


def test_buckets_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match="no bucket has tensor 'a' of the profile of tiny"):
        simulate(problem(), [bucket("b", numel=100)])


def test_options_are_those_on_devices_that_the_codec_has_times_for() -> None:
    assert len(problem().options) == 174
    assert all(".push" not in action for option in problem(Constraints(servers=True)).options for action in option)  # there are no servers


def test_a_codecs_times_are_found_by_its_name_and_its_bytes_by_its_payloads() -> None:
    costs = codec_costs("onebit/none", PROFILE, 2)
    assert costs.bytes_per_element == pytest.approx(1 / 8, rel=0.02)
    assert costs.pull_bytes_per_element == 4.0
    with pytest.raises(UsageError, match="codec int8: the profile has no times for it, but for onebit"):
        codec_costs("int8", PROFILE)


def test_methods_go_by_name() -> None:
    assert find("fp32", problem()).step_us == simulate(problem(), find("fp32", problem()).buckets).step_us
    with pytest.raises(UsageError, match="unknown method 'magic'; choose one of"):
        find("magic", problem())
