"""Predicted beside measured steps, and the correction that explains them: from made-up measurements of jobs whose true costs are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.correction import Correction, Factors, read_correction
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, load_profile, read_profile
from psgc.plan.live.rotation import Rotation
from psgc.plan.model.job import Job
from psgc.plan.model.options import OVER_SERVERS
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.report.assessment import assess
from psgc.plan.report.sentences import verdict, verified
from psgc.plan.report.verification import COMPUTE, Candidate, predicted, verify, where
from tests.plan.commands import psgc
from tests.plan.jobs import problem_of_profile

CURVE = CostCurve((1e3, 1e6), (10.0, 4_000.0), (10.0, 4_000.0))
PROFILE = Profile(
    "m", tuple(TensorProfile(f"t{index}", 250_000, 4_000.0 * index) for index in range(8)), forward_us=10_000.0, device="cpu",
    codecs={name: {"cpu": CURVE, "server": CURVE} for name in ("none", "bf16", "int8")},
    carriers=dict.fromkeys(("tcp", "shm", "sockets", "memory"), CarrierCosts(400.0, 200.0, gbps=50.0)),
)  # fmt: skip
CLUSTER = Cluster("testbed", 2, 1, Link(10, 50), Link(0.2, 50), servers=1, cores=4)
FOUR = ("plan", "int8", "bf16", "none")


def buckets_by(name: str) -> tuple[PlannedBucket, ...]:
    codec = "int8" if name == "plan" else name
    option, parts = OVER_SERVERS[codec != "none"], 2 if name == "plan" else 1
    return tuple(PlannedBucket((f"t{index}",), 250_000, parts, -index, codec, option) for index in range(8))


def problems(cluster: Cluster = CLUSTER) -> Callable[[Factors], Callable[[Candidate], Problem]]:
    return lambda factors: lambda one: problem_of_profile(replace(PROFILE, correction=Correction(factors, 0.0)), cluster, "int8", ("bf16",))


def measured(truth: Factors, cluster: Cluster = CLUSTER, lanes: bool = False) -> list[Candidate]:
    """What a job whose costs differ from the profile's by these factors would measure."""
    found = []
    for name in FOUR:
        one = Candidate(name, buckets_by(name), (), 0.0)
        true = predicted(problems(cluster)(truth)(one), one.buckets)
        of_lanes = {lane: ms for lane, ms in true.lanes_ms.items() if lane in ("cpu", "server")} if lanes else {}
        found.append(replace(one, step_ms=(true.step_ms,) * 3, compute_ms=true.lanes_ms[COMPUTE], lanes_ms=of_lanes))
    return found


@pytest.mark.parametrize(
    "truth", [Factors(), Factors(links=0.7), Factors(links=0.8, messages=3.0, compute=1.1), Factors(codecs=2.0, server=1.5)]
)
@pytest.mark.parametrize("lanes", [False, True])
def test_corrected_predictions_are_what_the_job_measured(truth: Factors, lanes: bool) -> None:
    found = verify(measured(truth, lanes=lanes), problems())
    before = max(abs(each.step_ms / one.measured_ms - 1) for one, each in zip(found.candidates, found.before, strict=True))
    assert found.correction.error <= 0.03
    assert found.correction.error <= before + 1e-3
    if truth == Factors():
        assert before == pytest.approx(0) and found.correction.factors == truth


def test_a_correction_that_one_link_taught_helps_on_another() -> None:
    truth = Factors(compute=1.15, codecs=1.4, server=1.3, messages=2.0, links=0.85)
    found = verify(measured(truth, lanes=True), problems())
    other = replace(CLUSTER, inter=Link(0.8, 50))
    for one in measured(truth, other):
        without = predicted(problems(other)(Factors())(one), one.buckets).step_ms / one.measured_ms - 1
        corrected = predicted(problems(other)(found.correction.factors)(one), one.buckets).step_ms / one.measured_ms - 1
        assert abs(corrected) < abs(without) / 2
        assert abs(corrected) < 0.05


def test_the_lane_that_is_farthest_from_its_prediction_is_named() -> None:
    one, *_ = measured(Factors(codecs=3.0), lanes=True)
    was = predicted(problems()(Factors())(one), one.buckets)
    lane, ms = where(one, was)
    assert lane == "cpu" and ms == pytest.approx(one.lanes_ms["cpu"] - was.lanes_ms["cpu"]) and ms > 0
    assert where(replace(one, lanes_ms={}, compute_ms=was.lanes_ms[COMPUTE] + 1.0), was) == (COMPUTE, pytest.approx(1.0))


def test_steps_that_are_as_predicted_change_nothing_and_windows_count_by_their_median() -> None:
    one = replace(measured(Factors())[0], step_ms=(10.0, 12.0, 11.0, 50.0))
    assert one.measured_ms == 11.0
    assert one.scatter > 0.1


def test_every_candidate_has_its_window_in_each_round_forwards_and_backwards() -> None:
    turns, rotation = [], Rotation(3, 3)
    while not rotation.over:
        turns.append(rotation.present)
        rotation.next()
    assert turns == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert Rotation(1, 1).present == 0


def test_a_profile_keeps_its_correction_and_is_priced_by_it_once() -> None:
    """A link that reaches half of its rate, codecs that take twice, messages three times; a plan's own cluster stays what the user said it is."""
    factors = Factors(compute=1.5, codecs=2.0, messages=3.0, links=0.5)
    profile = replace(PROFILE, correction=Correction(factors, 0.02, "2026-11-26", "testbed", ({"name": "int8"},)))
    assert read_profile(json.loads(json.dumps(profile.to_json())), "p.json") == profile
    once = profile.corrected
    assert once.corrected == once
    assert once.tensors[-1].ready_us == 1.5 * PROFILE.tensors[-1].ready_us and once.forward_us == 15_000.0
    assert once.codecs["int8"]["cpu"].encode(1e6) == 8_000.0 and once.codecs["int8"]["server"].encode(1e6) == 4_000.0
    assert once.carriers["tcp"] == CarrierCosts(1_200.0, 600.0, gbps=50.0)
    problem = problem_of_profile(profile, CLUSTER, "int8")
    assert (problem.priced.inter.gbps, problem.named.inter.gbps, problem.cluster.inter.gbps) == (0.1, 0.2, 0.2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "correction: expected an object with factors"),
        ({"factors": {"speed": 1}}, "unknown factor 'speed'; expected some of codecs, compute, links, messages, server"),
        ({"factors": {"links": 0}}, "correction.factors.links is 0, expected a number from 0.05 to 20"),
        ({"factors": {}, "error": -1}, "correction.error is -1"),
        ({"factors": {}, "error": 0, "steps": 3}, "correction.steps: expected a list"),
    ],
)
def test_a_wrong_correction_is_named(given: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_correction(given, "p.json")
    assert said in str(error.value)


def test_a_plan_says_that_it_is_not_verified_until_its_profile_has_measured_steps_and_its_margin_is_then_the_measured_error() -> None:
    corrected = replace(
        PROFILE, correction=Correction(Factors(), 0.04, "2026-11-26T10:00:00", "testbed", ({"name": "int8"}, {"name": "none"}))
    )
    plain, by_steps = (assess(Job(problem_of_profile(each, CLUSTER, "int8"), ()), "psgc", compare=False) for each in (PROFILE, corrected))
    assert verified(plain.problem).startswith("not verified")
    assert "(not verified)" in verdict(plain)
    assert verified(by_steps.problem) == (
        "predicted by corrected costs: psgc verify measured steps of int8, none on testbed (2026-11-26), and corrected predictions are within 4.0% of them"
    )
    assert by_steps.margin == pytest.approx(2 * 0.04 * (1 - by_steps.gain))
    assert "+-" in verdict(by_steps)


def test_verify_reads_what_a_job_measured_and_writes_the_correction_into_the_profile(tmp_path: Path) -> None:
    profile, plan, job = tmp_path / "profile.json", tmp_path / "plan.json", tmp_path / "measured.json"
    profile.write_text(json.dumps(PROFILE.to_json()))
    plan.write_text(json.dumps(Plan("m", "testbed", buckets_by("plan"), machines=CLUSTER).to_json()))
    candidates = [
        {
            "name": one.name, "plan": Plan("m", "", one.buckets).to_json(),
            "windows": [
                {"step_us": 1e3 * ms, "forward_us": 10_000.0, "backward_us": 1e3 * one.compute_ms - 10_000.0, "layouts": ["optimizer0"]} for ms in one.step_ms
            ],
        }
        for one in measured(Factors(links=0.7))
    ]  # fmt: skip
    job.write_text(json.dumps({"version": 1, "candidates": candidates}))
    asked = ("verify", str(plan), "--profile", str(profile), "--measured", str(job))
    done = psgc(*asked, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["candidates"]] == list(FOUR)
    assert found["factors"]["links"] == pytest.approx(0.7, rel=0.1)
    assert found["error"] < 0.03 < max(abs(one["error"]) for one in found["candidates"])
    correction = load_profile(str(profile)).correction
    assert correction is not None and correction.factors.links == found["factors"]["links"]
    none = next(one for one in found["candidates"] if one["name"] == "none")
    layout = tmp_path / "none.json"
    layout.write_text(json.dumps(Plan("m", "testbed", buckets_by("none"), machines=CLUSTER).to_json()))
    simulated = json.loads(psgc("simulate", "--profile", str(profile), "--plan", str(layout), "--json").stdout)
    assert simulated["step_ms"] + 10.0 * found["factors"]["compute"] == pytest.approx(none["corrected_ms"]), (
        "later plans are priced with it"
    )
    again = json.loads(psgc(*asked, "--json").stdout)
    assert again["factors"] == found["factors"], "found by the profile's own costs, not by corrected ones"
    assert "corrected predictions are within" in psgc(*asked).stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give either the job's command after --, or --measured"),
        (("--measured", "x.json", "--", "python"), "give either the job's command"),
        (("--trace", "x", "--", "python"), "--trace goes with --measured"),
    ],
)
def test_a_wrong_question_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = psgc("verify", "plan.json", "--profile", "p.json", *arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
