"""What a plan costs: parts are chains, priorities break ties, and codecs are found in the profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.local_search.space import Space
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


def test_a_pair_has_the_times_of_both_halves() -> None:
    """By hand: of 100 elements a server adds a onebit payload in 2 us each, and finishes the sum as int8 does, in 40 us."""
    onebit = CostCurve((1.0, 100.0), (5.0, 5.0), (2.0, 2.0), ((1, (7.0, 7.0)), (4, (11.0, 11.0))))
    int8 = CostCurve((100.0,), (40.0,), (20.0,))
    curves = {
        "onebit": {"cpu": onebit, "gpu": onebit, "server": onebit},
        "int8": {"cpu": int8, "server": int8},
        "none": {"cpu": int8, "server": int8},
    }
    profile = replace(PROFILE, codecs=curves)
    pair, alone = codec_costs("onebit/int8:rotate=1", profile, 2), codec_costs("onebit", profile, 2)
    assert pair.curves["cpu"] == onebit and pair.pull_curves == {"cpu": int8, "gpu": onebit, "server": int8}
    assert pair.curves["server"].sum_us(1) == (pytest.approx(42), pytest.approx(42)) and pair.curves["server"].sum_us(4)[
        1
    ] == pytest.approx(46)
    assert alone.pull_curves is None and alone.curves["server"].sum_us(4)[1] == 11
    assert codec_costs("onebit/none", profile, 2).pull_curves == pair.pull_curves, "answers of floats are copied"
    lacking = replace(PROFILE, codecs={"onebit": curves["onebit"]})
    assert codec_costs("onebit/int8", lacking, 2).pull_curves is None, "as the push codec, where nothing is known of the other"


def test_the_search_prices_each_half_as_the_simulation_does() -> None:
    onebit, int8 = CostCurve((1.0, 100.0), (5.0, 9.0), (2.0, 2.0)), CostCurve((1.0, 100.0), (40.0, 70.0), (20.0, 30.0))
    profile = replace(PROFILE, codecs={"onebit": {"gpu": onebit}, "int8": {"gpu": int8}})
    two_codecs = (("a", codec_costs("int8", profile, 2)),)
    asked = Problem(profile, CLUSTER, codec_costs("onebit/int8", profile, 2), Constraints(devices=("gpu",)), two_codecs)
    space = Space(asked)
    for number, option in enumerate(space.graph.options):
        times = space.times(np.array([100.0, 50.0]), np.array([0, 1]))
        for column, (size, codec) in enumerate(zip((100.0, 50.0), asked.codecs, strict=True)):
            wanted = [us for _, _, us in asked.part_tasks(option, size, codec)]
            assert [times[task, column] for task in space.tasks(np.array([number]))[0] if task >= 0] == pytest.approx(wanted), option


def typed(b: int, a: int) -> Profile:
    """The profile, with gradients of so many bytes per element."""
    tensors = (replace(PROFILE.tensors[0], itemsize=b), replace(PROFILE.tensors[1], itemsize=a))
    return replace(PROFILE, tensors=tensors)


def test_gradients_travel_uncompressed_in_their_own_type() -> None:
    for b, a, wanted in ((2, 2, 150 * 2), (8, 8, 150 * 8), (2, 4, 100 * 2 + 50 * 4), (4, 2, 100 * 4 + 50 * 2)):
        profile = typed(b, a)
        asked = Problem(profile, CLUSTER, codec_costs("onebit", profile, 2))
        apart = simulate(asked, [bucket("b", numel=100), bucket("a", numel=50)])
        assert apart.step_us == pytest.approx(wanted + 2 * 2 * 10), (b, a)
    over_servers = replace(CLUSTER, servers=1)
    halves = Problem(typed(2, 2), over_servers, codec_costs("none", typed(2, 2), 2))
    pushed = replace(bucket("b", "a", numel=150), option=("flat.push", "flat.pull"))
    floats = simulate(replace(halves, profile=PROFILE, codec=codec_costs("none", PROFILE, 2)), [pushed]).chains.us
    push, late, pull, back = simulate(halves, [pushed]).chains.us.tolist()
    assert [2 * push, late, 2 * pull, back] == pytest.approx(floats.tolist()), "servers answer in the same type"


def test_options_that_encode_take_as_long_whatever_type_gradients_have() -> None:
    """Jobs cast to float32 before they encode, so the floats that such an option sends besides are float32."""
    hierarchical = ("intra.reduce_scatter", "comp@gpu", "inter.all_gather.c", "decomp@gpu", "intra.all_gather")
    nodes = replace(CLUSTER, gpus_per_node=2)
    for option in (hierarchical, ("comp@gpu", "flat.all_gather.c", "decomp@gpu")):
        encoded = replace(bucket("b", "a", numel=150), codec="onebit", option=option)
        steps = {simulate(Problem(typed(s, s), nodes, codec_costs("onebit", typed(s, s), 2)), [encoded]).step_us for s in (2, 4)}
        assert len(steps) == 1, option


def test_a_search_fuses_gradients_of_one_type_alone_and_prices_them_as_the_simulation_does() -> None:
    profile = replace(typed(2, 4), tensors=tuple(replace(t, name=f"{t.name}{n}") for n in range(4) for t in typed(2, 4).tensors))
    asked = Problem(profile, CLUSTER, codec_costs("onebit", profile, 2), Constraints(devices=("gpu",)))
    found = find("psgc", asked)
    for each in found.buckets:
        assert len({profile.itemsize_of[name] for name in each.tensors}) == 1, each
    assert found.step_us == pytest.approx(simulate(asked, found.buckets).step_us)
    space = Space(asked)
    for number, option in enumerate(space.graph.options):
        times = space.times(np.array([100.0, 100.0]), np.array([0, 1]))
        for column, codec in enumerate(asked.codecs):
            wanted = [us for _, _, us in asked.part_tasks(option, 100.0, codec)]
            assert [times[task, column] for task in space.tasks(np.array([number]))[0] if task >= 0] == pytest.approx(wanted), option


def test_methods_go_by_name() -> None:
    assert find("fp32", problem()).step_us == simulate(problem(), find("fp32", problem()).buckets).step_us
    with pytest.raises(UsageError, match="unknown method 'magic'; choose one of"):
        find("magic", problem())


@pytest.mark.parametrize(("text", "for_"), [("demo:k=16", "psgc.DeMo"), ("sparseloco", "psgc.DiLoCo")])
def test_a_relayed_codec_is_not_said_to_be_measured_by_psgc_profile(text: str, for_: str) -> None:
    profile = Profile("m", (TensorProfile("a", 1 << 20, 1.0),))
    with pytest.raises(UsageError, match=f"codec {text}: servers relay its payloads.* no profile times and no plan has; it is for {for_}"):
        codec_costs(text, profile, 4)
