"""What a plan is worth: whether compression pays, by how much, how sure that is; beside other plans and the bound."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods import bound
from psgc.plan.methods.registry import METHODS
from psgc.plan.methods.solver import solver
from psgc.plan.model.job import Job
from psgc.plan.model.options import Constraints, encodes
from psgc.plan.model.plan import check_fits, read_plan
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.report import assessment
from psgc.plan.report.assessment import LEAST_MARGIN, Assessment, assess, document, from_best, verdict
from psgc.plan.report.reasons import quickest, reasons, sentence

# 16 MB of gradients, 30 ms of backward; the CPU encodes and decodes 1 MB in a millisecond
CURVE = CostCurve((1.0, 1 << 18), (10.0, 1000.0), (10.0, 1000.0))
TENSORS = tuple(TensorProfile(f"layer{index}", 1 << 20, 10_000.0 * index) for index in range(4))
PROFILE = Profile("four", TENSORS, codecs={"onebit": {"cpu": CURVE}})
ANY = Constraints()


def assessed(gbps: float, method: str = "psgc", *, compare: bool = False, constraints: Constraints = ANY) -> Assessment:
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(gbps, 20))
    return assess(Job(Problem(PROFILE, cluster, codec_costs("onebit", PROFILE, 2), constraints), ("a note",)), method, compare=compare)


def test_on_a_slow_link_compression_pays_by_more_than_the_margin() -> None:
    found = assessed(1)
    assert verdict(found).startswith("compress: with onebit")
    assert found.gain == pytest.approx(1 - found.best.step_us / found.plain.step_us)
    assert found.gain > found.margin >= LEAST_MARGIN


def test_on_a_fast_link_the_verdict_is_not_to_compress_and_says_how_much_slower_it_would_be() -> None:
    found = assessed(100)
    assert not any(encodes(bucket.option) for bucket in found.found.buckets)
    assert verdict(found).startswith("do not compress: with onebit the step takes")
    assert found.gain < -found.margin
    assert found.encoded is not None
    assert found.gain == pytest.approx(1 - simulate(found.problem, found.encoded).step_us / found.plain.step_us)


def test_a_gain_within_its_margin_is_a_tie() -> None:
    found = assessed(1)
    words = verdict(Assessment(**{**vars(found), "gain": 0.02, "margin": 0.03}))
    assert words.startswith("a tie: with onebit the step takes 2.0% less, +-3.0%")


def test_where_the_best_plan_encodes_nothing_and_it_makes_no_difference_there_is_nothing_to_gain() -> None:
    found = assessed(100)
    words = verdict(Assessment(**{**vars(found), "gain": -0.001, "margin": 0.01}))
    assert words.startswith("do not compress, there is nothing to gain: with onebit the step takes 0.1% longer")


def test_the_margin_is_what_a_tenth_of_the_links_speed_or_the_codecs_time_moves() -> None:
    found = assessed(1)
    slower = assessed(0.9).problem
    assert found.encoded is not None
    moved = 1 - simulate(slower, found.encoded).step_us / simulate(slower, found.plain.buckets).step_us
    assert found.margin >= abs(moved - found.gain)


def test_where_compression_is_ruled_out_the_verdict_says_so() -> None:
    assert verdict(assessed(1, constraints=Constraints(devices=()))).startswith("compression is ruled out")


def test_another_methods_plan_is_set_beside_ours() -> None:
    found = assessed(1, "fp32")
    assert "the plan of fp32 takes" in verdict(found)
    assert set(found.steps_us) == {"fp32", "uncompressed"}


def test_beside_all_methods_each_has_a_step_or_a_reason() -> None:
    found = assessed(1, compare=True)
    assert set(found.rivals) == set(METHODS) - {"psgc"}
    assert isinstance(found.rivals["hitopkcomm"], UsageError)  # it encodes on the GPU, and there are no times for that
    assert all(found.found.step_us <= step for step in found.steps_us.values())


def test_a_method_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown method 'magic'; choose one of"):
        assessed(1, "magic")


def test_the_document_is_a_plan_with_its_figures_at_the_top() -> None:
    found = assessed(1)
    made = json.loads(json.dumps(document(found)))
    check_fits(read_plan(made, "made"), found.problem.numel, "four")
    assert made["step_ms"] == simulate(found.problem, read_plan(made, "made").buckets).step_us / 1e3
    assert made["lower_bound_any_bucketing_ms"] <= made["lower_bound_ms"] <= made["step_ms"] <= made["fp32_step_ms"]
    assert min(made["select_ms"], made["bound_ms"], made["options_considered"]) > 0
    assert made["prediction"]["verdict"] == verdict(found)
    assert made["prediction"]["notes"] == ["a note"]
    assert "from the best with these buckets" in from_best(found)


def test_a_buckets_reason_is_what_the_step_would_be_the_other_way() -> None:
    for gbps, way in ((1.0, "uncompressed"), (100.0, "encoded")):
        found = assessed(gbps)
        why = reasons(found.problem, found.found.buckets)
        assert set(why) == set(range(len(found.found.buckets)))
        for number, reason in why.items():
            assert reason.other is not None
            assert (encodes(reason.other) == 0) == (way == "uncompressed")
            assert way in sentence(found.found.buckets[number], reason, found.found.step_us)


def test_a_slow_links_buckets_are_encoded_for_the_links_sake_and_a_fast_ones_are_not_for_the_cpus() -> None:
    for gbps, lane in ((1.0, "inter-send"), (100.0, "cpu")):
        found = assessed(gbps)
        assert {reason.lane for reason in reasons(found.problem, found.found.buckets).values()} == {lane}


def test_nothing_is_encoded_for_nothing() -> None:
    found = assessed(1)
    free = replace(found.problem, codec=replace(found.problem.codec, bytes_per_element=4.0, pull_bytes_per_element=4.0))
    same = assess(Job(free, ()), "psgc", compare=False)  # as many bytes as without, and the CPU's time besides
    assert not any(encodes(bucket.option) for bucket in same.found.buckets)


def test_what_a_user_leaves_unencoded_is_not_encoded_for_the_verdict_either() -> None:
    profile = replace(PROFILE, tensors=tuple(TensorProfile(f"layer{index}", 1000 << (5 * (index % 2)), 10.0 * index) for index in range(8)))
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(5, 500))
    others = (("layer*[02468]", codec_costs("none", profile)),)
    problem = Problem(profile, cluster, codec_costs("onebit", profile, 2), Constraints(most_encodes=1), others)
    found = assess(Job(problem, ()), "psgc", compare=False)
    assert found.encoded is not None
    for bucket in found.encoded:
        assert not encodes(bucket.option) or not any(name in ("layer0", "layer2", "layer4", "layer6") for name in bucket.tensors)
    mixed = [bucket for bucket in found.plain.buckets if len({problem.codec_numbers[name] for name in bucket.tensors}) > 1]
    assert mixed
    for bucket in mixed:
        assert quickest(problem, [option for option in problem.options if encodes(option)], [bucket]) == [None]


@pytest.mark.parametrize("devices", [("gpu", "cpu"), ()])
@pytest.mark.parametrize("servers", [0, 1])
def test_one_gpu_alone_has_nothing_to_send(devices: tuple[str, ...], servers: int) -> None:
    cluster = Cluster("alone", 1, 1, Link(100, 1), Link(10, 1), servers)
    for most_encodes in (None, 0):
        problem = Problem(PROFILE, cluster, codec_costs("onebit", PROFILE), Constraints(devices, most_encodes, servers=servers > 0))
        found = assess(Job(problem, ()), "psgc", compare=True)
        assert found.found.step_us == pytest.approx(PROFILE.backward_us)
        assert found.bounds.given_us == pytest.approx(PROFILE.backward_us)


def test_where_a_step_takes_no_time_there_is_nothing_to_compress() -> None:
    profile = replace(PROFILE, tensors=(TensorProfile("only", 1000, 0.0),))
    problem = Problem(profile, Cluster("alone", 1, 1, Link(100, 1), Link(10, 1)), codec_costs("onebit", profile))
    found = assess(Job(problem, ()), "psgc", compare=False)
    assert verdict(found) == "do not compress: a step takes no time without it"
    assert "no bound with these buckets" in from_best(found)


def test_other_methods_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "PATIENCE_S", 0.0)
    found = assessed(1, compare=True)
    assert str(found.rivals["espresso"]) == "method espresso: not waited for with 4 tensors; psgc plan --method espresso does"


def test_what_a_solver_says_past_python_is_not_heard(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    real = solver()

    def talking(name: str) -> Any:
        def solve(*arguments: Any, **named: Any) -> Any:
            os.write(1, b"HighsMipSolverData")
            return getattr(real, name)(*arguments, **named)

        return solve

    names = {name: getattr(real, name) for name in ("Bounds", "LinearConstraint")}
    monkeypatch.setattr(bound, "solver", lambda: SimpleNamespace(**names, linprog=talking("linprog"), milp=talking("milp")))
    print("a document")
    assert assessed(1).bounds.given_us > 0
    print("and its end")
    assert capfd.readouterr().out == "a document\nand its end\n"
