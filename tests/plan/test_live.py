"""``auto``, without a job: when it plans, what it tries and keeps, and what it predicts from what was measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.live.outlook import CODECS, MOST_GBPS, PLAN, Machines, fitted_gbps, losses, outlook, sound_codecs
from psgc.plan.live.steering import MOST_SWITCHES, PATIENCE, Steering
from psgc.plan.model.options import over_groups
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.quality import is_sound
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN, check_runs
from psgc.torch.plans.calibrating import within_node_gbps

MACHINES = Machines(nodes=2, workers_per_node=1, servers=1, cores=2)
NAMES = [f"t{n}" for n in range(8)]
NUMEL = 1 << 20


def curve(ns_per_element: float) -> dict[str, CostCurve]:
    one = CostCurve((float(NUMEL),), (ns_per_element * NUMEL / 1e3,), (ns_per_element * NUMEL / 1e3,))
    return {"cpu": one, "server": one}


def profile(ns_per_element: float = 1.0) -> Profile:
    tensors = tuple(TensorProfile(name, NUMEL, 2000.0 * number) for number, name in enumerate(NAMES))
    return Profile("m", tensors, forward_us=10_000.0, codecs={codec: curve(ns_per_element) for codec in CODECS})


def buckets(codec: str) -> tuple[PlannedBucket, ...]:
    option = PLAIN if codec == "none" else ENCODED
    return tuple(PlannedBucket((name,), NUMEL, 1, -number, codec, option) for number, name in enumerate(NAMES))


def steer(steering: Steering, step_ms: float, candidates: list[str] | None = None) -> str:
    verdict = steering.window(step_ms)
    if verdict == "plan":
        assert candidates is not None, "it was not to plan"
        return steering.planned(losses(candidates))
    return verdict


def test_candidates_are_tried_in_turn_and_the_quickest_is_kept() -> None:
    steering = Steering()
    assert steer(steering, 100.0, ["none", "onebit", "int8", "bf16"]) == "switch"
    assert [(steer(steering, ms), steering.kept) for ms in (40.0, 30.0, 60.0)] == [("switch", 2), ("switch", 3), ("switch", 2)]
    assert steering.over
    assert steering.reference_ms == 30.0
    assert [steer(steering, ms) for ms in (31.0, 29.0, 36.0, 30.0)] == ["go on"] * 4


@pytest.mark.parametrize(("times", "kept"), [((100.0, 40.0, 40.9), "int8"), ((40.8, 40.0, 41.0), "none"), ((50.0, 60.0, 70.0), "none")])
def test_of_those_about_as_quick_the_one_that_loses_least_is_kept(times: tuple[float, ...], kept: str) -> None:
    names, steering = ["none", "onebit", "int8"], Steering()
    steer(steering, times[0], names)
    while not steering.over:
        steer(steering, times[steering.kept])
    assert names[steering.kept] == kept


def test_candidates_near_the_quickest_are_measured_once_more_and_the_shorter_step_counts() -> None:
    """The machine was slow while the second was measured first."""
    steering, seen = Steering(), []
    steer(steering, 42.0, ["none", "int8", "topk"])
    for ms in (44.0, 90.0, 30.0, 41.0):
        seen.append(steering.kept)
        steer(steering, ms)
    assert seen == [1, 2, 1, 0]
    assert steering.over
    assert (steering.kept, steering.measured_ms) == (1, [41.0, 30.0, 90.0])


def test_it_plans_again_when_windows_in_a_row_depart_and_not_for_one() -> None:
    steering = Steering()
    steer(steering, 100.0, ["none", "int8"])
    steer(steering, 50.0)
    assert [steer(steering, ms) for ms in (500.0, 50.0, 500.0)] == ["go on"] * 3
    assert steer(steering, 510.0, ["int8", "topk"]) == "switch"
    assert steer(steering, 200.0) == "go on"
    assert (steering.kept, steering.reference_ms) == (1, 200.0)


def test_noise_makes_it_neither_plan_nor_switch_and_plans_that_change_nothing_become_rare() -> None:
    numbers = random.Random(0)
    steering = Steering()
    steer(steering, 100.0, ["none"])
    assert all(steer(steering, steering.reference_ms * numbers.uniform(0.8, 1.2)) == "go on" for _ in range(10_000))
    plans = 0
    for window in range(2000):
        if steering.window(100.0 if window // 40 % 2 else 300.0) == "plan":
            plans += 1
            steering.planned(losses(["none"]))
    assert plans <= 10
    assert steering.switches == 0


def test_a_job_that_goes_to_and_fro_is_left_alone_in_the_end() -> None:
    steering = Steering()
    ms = 100.0
    for _ in range(50 * MOST_SWITCHES):
        ms = 1000.0 - ms if steering.over else ms
        if steering.window(ms) == "plan":
            steering.planned(losses(["none", "int8"]))
    assert steering.switches <= MOST_SWITCHES + PATIENCE


def test_every_rank_that_is_fed_the_same_does_the_same() -> None:
    numbers = random.Random(1)
    ranks = [Steering() for _ in range(4)]
    for _ in range(500):
        ms, names = numbers.choice((50.0, 80.0, 300.0)), numbers.sample(CODECS, numbers.randint(1, 4))
        verdicts = {steering.window(ms) for steering in ranks}
        assert len(verdicts) == 1
        if verdicts == {"plan"}:
            assert len({steering.planned(losses(names)) for steering in ranks}) == 1
        assert len({steering.kept for steering in ranks}) == 1


def test_a_slow_links_rate_is_found_from_one_step_and_a_codec_is_worth_a_trial_there() -> None:
    wire_ms = 2 * 2 * 32 * 8 * NUMEL / 0.1e9 * 1e3 / 2  # of two workers, over one server's link, each way at once
    found = outlook(profile(), MACHINES, wire_ms, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=True)
    assert 0.05 < found.gbps < 0.2
    assert found.tried
    assert set(found.tried) <= {*CODECS, PLAN}
    assert found.predicted_ms["int8"] == pytest.approx(wire_ms / 4, rel=0.15)
    again = fitted_gbps(profile(), MACHINES, 1e3 * found.predicted_ms["int8"] - 10_000, buckets("int8"))
    assert again == pytest.approx(found.gbps, rel=0.01), "from any codec's steps the same rate is found"


def test_where_links_do_not_matter_nothing_is_tried() -> None:
    step_ms = (10_000 + 14_000) / 1e3
    found = outlook(profile(3.0), MACHINES, step_ms, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=False)
    assert found.gbps == MOST_GBPS
    assert found.tried == ()


@pytest.mark.parametrize("machines", [
    Machines(nodes=2, workers_per_node=2, servers=1, cores=2), Machines(nodes=2, workers_per_node=2, servers=0, cores=2),
    Machines(nodes=2, workers_per_node=1, servers=0, cores=2), Machines(nodes=3, workers_per_node=2, servers=2, cores=2, even=False),
])  # fmt: skip
def test_plans_are_of_all_that_such_a_job_runs(machines: Machines) -> None:
    of_host = replace(profile(), device="cpu")
    found = outlook(of_host, machines, 20_000.0, buckets("none"), {codec: buckets(codec) for codec in CODECS}, "none", plans=True)
    assert found.tried[0] == PLAN
    assert found.plan is not None
    check_runs(found.plan, "auto")
    for bucket in found.plan.buckets:
        assert machines.servers or over_groups(bucket.option)
        assert (machines.workers_per_node > 1) == any(action.startswith("intra.") for action in bucket.option)
    assert (found.plan.issue_order is None) != machines.even
    assert read_plan(found.plan.to_json(), "auto") == found.plan, "so that rank 0 can hand it out"


def test_where_groups_are_refused_plans_are_over_servers() -> None:
    machines = Machines(nodes=2, workers_per_node=2, servers=1, cores=2, groups=False)
    for device in ("cpu", "cuda"):
        given = replace(profile(), device=device)
        of = replace(machines, gpus=device == "cuda")
        found = outlook(given, of, 20_000.0, buckets("none"), {codec: buckets(codec) for codec in CODECS[:2]}, "none", plans=True)
        assert found.plan is None or all(bucket.option in (PLAIN, ENCODED) for bucket in found.plan.buckets)


def test_of_gradients_on_gpus_plans_encode_there_and_move_payloads_through_the_hosts() -> None:
    """The GPU encodes in a twentieth of the CPU's time, and a gradient takes as long to be copied to the host as over the link."""
    known = {codec: {**curve(1.0), "gpu": curve(0.05)["cpu"]} for codec in CODECS}
    given = replace(profile(), device="cuda", codecs=known)
    for servers, groups in ((1, False), (0, True)):
        machines = Machines(nodes=2, workers_per_node=2, servers=servers, cores=2, groups=groups, gpus=True, host=Link(1.0, 10.0))
        found = outlook(given, machines, 20_000.0, buckets("none"), {"bf16": buckets("bf16")}, "none", plans=True)
        assert found.plan is not None and found.tried[0] == PLAN
        check_runs(found.plan, "auto")
        actions = {action for bucket in found.plan.buckets for action in bucket.option}
        assert "comp@gpu" in actions and (servers > 0) == any("push" in action for action in actions)
        assert machines.cluster(1.0).collectives == ("host" if groups else "")


def test_sums_within_a_node_take_the_rate_that_its_memory_has() -> None:
    machines = Machines(nodes=2, workers_per_node=2, servers=1, cores=2, within_gbps=7.0)
    assert machines.cluster(1.0).intra.gbps == 7.0 and machines.cluster(10.0).intra.gbps == 10.0, "no less than the links have"
    one, two = within_node_gbps(2, 2), within_node_gbps(2, 1)
    assert two > 0 and 0 < one < 10_000


def test_only_codecs_that_the_planners_judge_calls_sound_are_tried() -> None:
    assert sound_codecs(adam=False) == list(CODECS)
    assert sound_codecs(adam=True) == ["none", "bf16", "int8", "int4"]
    assert all(is_sound(codec, adam=True) for codec in sound_codecs(adam=True))
