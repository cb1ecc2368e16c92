"""What a plan is worth: whether compression pays, by how much, how sure that is; beside other plans and the bound."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.correction import NONE, Correction
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods import bound
from psgc.plan.methods.bound import Bounds
from psgc.plan.methods.registry import METHODS
from psgc.plan.methods.solver import solver
from psgc.plan.model.job import Job
from psgc.plan.model.options import OVER_SERVERS, Constraints, encodes
from psgc.plan.model.plan import FIELDS, FIGURES, PlannedBucket, check_fits
from psgc.plan.model.problem import Problem, codec_costs, simulate
from psgc.plan.model.quality import LENIENTLY, SAFELY, Standard, encodings, residual_bytes, server_residual_bytes
from psgc.plan.planfile.reading import read_plan
from psgc.plan.report import assessment
from psgc.plan.report.assessment import LEAST_MARGIN, Assessment, assess
from psgc.plan.report.document import document
from psgc.plan.report.reasons import quickest, reasons, sentence
from psgc.plan.report.running import running
from psgc.plan.report.sentences import (
    STEPS_MEASURED,
    about_held_back,
    about_memory,
    about_quality,
    about_running,
    from_best,
    not_verified,
    verdict,
)
from psgc.plan.report.wording import ms

# 16 MB of gradients, 30 ms of backward; the CPU encodes and decodes 1 MB in a millisecond
CURVE = CostCurve((1.0, 1 << 18), (10.0, 1000.0), (10.0, 1000.0))
TENSORS = tuple(TensorProfile(f"layer{index}", 1 << 20, 10_000.0 * index) for index in range(4))
PROFILE = Profile("four", TENSORS, codecs={"onebit": {"cpu": CURVE}})
ANY = Constraints()


def assessed(
    gbps: float, method: str = "psgc", *, compare: bool = False, constraints: Constraints = ANY, force: bool = False, standard: Standard = LENIENTLY
) -> Assessment:  # fmt: skip
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(gbps, 20))
    problem = Problem(PROFILE, cluster, codec_costs("onebit", PROFILE, 2), constraints)
    return assess(Job(problem, ("a note",)), method, compare=compare, standard=standard, force=force)


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
    assert words.startswith("a tie, so do not compress: with onebit the step takes 2.0% less (not verified): ")


def test_where_the_best_plan_encodes_nothing_and_it_makes_no_difference_there_is_nothing_to_gain() -> None:
    found = assessed(100)
    words = verdict(Assessment(**{**vars(found), "gain": -0.001, "margin": 0.01, "searched_encodes": False}))
    assert words.startswith("do not compress, there is nothing to gain: with onebit the step takes 0.1% longer")


def test_the_margin_is_what_a_tenth_of_the_links_speed_or_the_codecs_time_moves() -> None:
    found = assessed(1)
    slower = assessed(0.9).problem
    assert found.encoded is not None
    moved = 1 - simulate(slower, found.encoded).step_us / simulate(slower, found.plain.buckets).step_us
    assert found.margin >= abs(moved - found.gain)


def test_somebody_whose_gain_is_all_from_bf16_is_told_so_with_both_numbers() -> None:
    """16 MB in fp32 over 5 Gbit/s take 26.8 ms beside 30 ms of backward; a codec of half the bytes that takes no time gains what bf16 does."""
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20))
    free = CostCurve((1.0, 1 << 18), (0.0, 0.0), (0.0, 0.0))
    halves = replace(codec_costs("onebit", PROFILE, 2), curves={"gpu": free}, bytes_per_element=2.0, pull_bytes_per_element=2.0)
    found = assess(Job(Problem(PROFILE, cluster, halves, ANY), ()), "psgc", compare=False, standard=LENIENTLY)
    assert found.bf16 is not None
    assert found.gain > found.margin and not found.over_bf16.sure
    said = verdict(found)
    assert said.startswith("send bf16 gradients, or compress: with onebit")
    assert f"{ms(found.encoded_us)} ms in place of {ms(found.plain.step_us)} uncompressed" in said
    assert f"bf16 gradients take {ms(found.bf16.step_us)} ms uncompressed, so all of the gain is bf16's" in said
    small = assessed(1)
    assert small.bf16 is not None
    assert small.over_bf16.gain == pytest.approx(1 - small.encoded_us / small.bf16.step_us)
    assert "onebit saves" in verdict(small) and small.over_bf16.sure
    assert small.bf16.step_us == pytest.approx(assessed(2).plain.step_us, rel=1e-3)  # half the bytes, so a link twice as fast


def test_a_cast_is_not_compared_with_bf16() -> None:
    cast = replace(codec_costs("onebit", PROFILE, 2), name="bf16")
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20))
    found = assess(Job(Problem(PROFILE, cluster, cast, ANY), ()), "psgc", compare=False)
    assert found.bf16 is None and "bf16 gradients" not in verdict(found)


def test_the_margin_covers_copies_between_gpus_and_hosts_that_are_a_tenth_faster_or_slower() -> None:
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20), host=Link(2, 10))
    problem = Problem(PROFILE, cluster, codec_costs("onebit", PROFILE, 2), ANY)
    hosts = [one.cluster.host for one in assessment._nearby(problem)]
    assert [host.gbps for host in hosts if host is not None] == pytest.approx([2, 2, 1.8, 2.2, 2, 2])
    assert len(assessment._nearby(replace(problem, cluster=replace(cluster, host=None)))) == 4


def test_a_document_has_nothing_but_fields_that_are_read_and_figures_that_are_known() -> None:
    made = document(assessed(4))
    assert set(made) == {*FIELDS, *FIGURES}
    assert (made["optimizer"], set(made["profile"])) == ("sgd", {"hardware", "date", "source"})


def test_do_not_compress_writes_no_compressed_bucket_unless_it_is_forced() -> None:
    """Whatever the link: a plan has a codec only if the verdict is to compress."""
    verdicts = set()
    for gbps in (1, 3, 4, 5, 6, 8, 12, 100):
        found = assessed(gbps)
        made = document(found)
        compresses = {bucket["codec"] for bucket in made["buckets"]} != {"none"}
        assert compresses == ("do not compress" not in verdict(found)), verdict(found)
        verdicts.add(compresses)
        assert any("comp@" in action for bucket in document(assessed(gbps, force=True))["buckets"] for action in bucket["option"])
    assert verdicts == {True, False}
    forced = assessed(100, force=True)
    assert verdict(forced).endswith("the plan compresses all the same, as asked")
    tie = assess(Job(_barely_gaining(), ()), "psgc", compare=False, standard=LENIENTLY)
    assert 0 < tie.gain <= tie.margin and tie.searched_encodes
    assert verdict(tie).startswith("a tie, so do not compress") and "--force" in verdict(tie)
    assert {bucket.codec for bucket in tie.found.buckets} == {"none"}


def _barely_gaining() -> Problem:
    """A codec of 99.5 % of the bytes that takes no time."""
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20))
    free = CostCurve((1.0, 1 << 18), (0.0, 0.0), (0.0, 0.0))
    codec = replace(codec_costs("onebit", PROFILE, 2), curves={"gpu": free}, bytes_per_element=3.98, pull_bytes_per_element=3.98)
    return Problem(PROFILE, cluster, codec, ANY)


def test_a_codec_that_costs_quality_under_adam_is_said_to() -> None:
    found = assessed(1, standard=SAFELY)
    assert verdict(found).startswith("compress, at a cost in quality: with onebit")
    assert document(found)["prediction"]["quality"] | {"encodes": [], "told": []} == {
        "optimizer": "adam", "level": "safe", "sound": False, "unsound_codecs": ["onebit"], "encodes": [], "one_encode_step_ms": None, "told": [],
    }  # fmt: skip
    assert about_quality(found)[0].startswith("quality: onebit: it loses too much in a training's first steps")
    under_sgd = assessed(1)
    assert verdict(under_sgd).startswith("compress: with onebit")
    assert not any("Adam" in line for line in about_quality(under_sgd))


def test_each_buckets_encodings_are_counted_those_of_servers_too() -> None:
    """Once by the worker; once more by the server, unless its answer is uncompressed, relayed, or a sum of integers."""
    encoded = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
    for codec, option, times in (
        ("none", ("flat.push", "flat.pull"), 0), ("int8", encoded, 2), ("int8/none", encoded, 1), ("int8/relay", encoded, 1),
        ("shared", encoded, 1), ("int8", ("comp@gpu", "flat.all_gather.c", "decomp@gpu"), 1),
        ("int8", ("comp@gpu", "flat.all_to_all.c", "decomp@gpu", "comp@gpu", "flat.all_gather.c", "decomp@gpu"), 2),
    ):  # fmt: skip
        assert encodings(PlannedBucket(("a",), 10, 1, 0, codec, option)) == times, (codec, option)
    found = assessed(1)
    assert document(found)["prediction"]["quality"]["encodes"] == [encodings(bucket) for bucket in found.found.buckets]
    assert any("buckets of" in line or "bucket of" in line for line in about_quality(found))


def test_where_buckets_are_encoded_twice_the_step_with_one_encoding_is_told() -> None:
    found = assessed(1)
    assert found.encoded is not None
    twice = any(encodes(bucket.option) > 1 for bucket in found.encoded)
    assert (found.once is not None) == twice
    if found.once is not None:
        assert max(encodes(bucket.option) for bucket in found.once.buckets) <= 1
        assert f"the step takes {ms(found.once.step_us)} ms" in about_quality(found)[-1]


def test_the_memory_of_residuals_is_in_the_plans_answer() -> None:
    """4 bytes an element in each worker, 1 with residual=int8, none without feedback; and 4 over the servers that encode the sum."""
    encoded = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")

    def bucket(codec: str, option: tuple[str, ...] = encoded) -> PlannedBucket:
        return PlannedBucket((codec,), 1000, 1, 0, codec, option)

    for codec, worker, servers in (
        ("int8", 4000, 4000), ("int8/none", 4000, 0), ("int4:residual=int8", 1000, 4000), ("int8:ef=0", 0, 0), ("bf16", 0, 0),
    ):  # fmt: skip
        assert (residual_bytes([bucket(codec)]), server_residual_bytes([bucket(codec)])) == (worker, servers), codec
    assert residual_bytes([bucket("none", ("flat.push", "flat.pull"))]) == 0
    found = assessed(1)
    memory = document(found)["prediction"]["memory"]
    kept = sum(4 * bucket.numel for bucket in found.found.buckets if encodes(bucket.option))
    assert memory["residual_bytes"] == kept > 0
    assert memory["told"] == about_memory(found.found.buckets) and f"{kept / 1e6:.3g} MB in each worker" in memory["told"][0]


def test_a_plan_says_whether_this_version_runs_it_and_what_it_runs_instead() -> None:
    codec = "int8:residual=int8"  # which plans over servers carry, and no other: it is no pair of codecs
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20))
    quicker = replace(CURVE, encode_us=[us / 10 for us in CURVE.encode_us], decode_us=[us / 10 for us in CURVE.decode_us])
    profile = replace(PROFILE, codecs={codec: {"cpu": CURVE, "gpu": quicker}})
    found = assess(Job(Problem(profile, cluster, codec_costs(codec, profile, 2), ANY), ()), "psgc", compare=False, standard=LENIENTLY)
    said = document(found)
    assert said["runnable"] is said["prediction"]["running"]["runs"] is False
    encoded = [number for number, bucket in enumerate(found.found.buckets) if encodes(bucket.option)]
    assert said["prediction"]["running"]["refused"] == encoded != []
    assert about_running(found).startswith("this version cannot run the plan: ")
    instead = found.running.instead
    assert instead is not None and {bucket.option for bucket in instead.buckets} <= set(OVER_SERVERS)
    assert (
        simulate(found.running.problem, instead.buckets).step_us
        == instead.step_us
        == said["prediction"]["running"]["runnable_step_ms"] * 1e3
    )
    assert (found.running.problem.cluster.servers, found.running.problem.cluster.servers_on_nodes) == (2, True)
    served = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20), servers=1)
    constraints = Constraints(servers=True, runtime=True)
    runs = assess(
        Job(Problem(PROFILE, served, codec_costs("onebit", PROFILE, 2), constraints), ()), "psgc", compare=False, standard=LENIENTLY
    )
    assert document(runs)["runnable"] is True
    assert about_running(runs).startswith("this version runs the plan: psgc run --plan")


def test_a_plan_of_collectives_runs_in_the_predicted_time_where_the_cluster_names_what_runs_them() -> None:
    """Where it does not, the time that jobs take by default, through hosts' memory, is beside that of the plan that is best for that."""
    found = assessed(1)
    assert encodes(found.found.buckets[0].option)
    said = document(found)
    moved = said["prediction"]["running"]["moved_step_ms"]
    named = replace(found.problem.cluster, collectives="host")
    assert moved == simulate(replace(found.problem, cluster=named), found.found.buckets).step_us / 1e3
    assert (said["runnable"], said["prediction"]["running"]["refused"]) == (True, [])
    told = about_running(found)
    assert told.startswith("this version runs the plan: psgc run --plan; but it moves collectives between GPUs through hosts' memory, ")
    assert f"the step then takes {ms(1e3 * moved)} ms" in told and 'collectives = "nccl"' in told
    assert f"; the best plan for that, by --runnable, takes {ms(1e3 * said['prediction']['running']['runnable_step_ms'])} ms" in told
    assert said["prediction"]["running"]["runnable_step_ms"] <= moved * (1 + 1e-9)
    for collectives, what in (("host", "as predicted"), ("nccl", "set PSGC_COLLECTIVES=nccl")):
        by = replace(found.job.problem, cluster=replace(found.job.problem.cluster, collectives=collectives))
        priced = running(by, found.found.buckets)
        assert priced.as_predicted
        assert what in about_running(replace(found, job=found.job._replace(problem=by), running=priced))
    on_hosts = replace(found.job.problem, profile=replace(found.job.problem.profile, device="cpu"))
    there = replace(found, job=found.job._replace(problem=on_hosts), running=running(on_hosts, found.found.buckets))
    assert about_running(there) == "this version runs the plan: psgc run --plan"


def test_a_plan_to_run_is_also_held_against_an_all_reduce() -> None:
    """One server for two workers: pushing 16 MB to it takes twice what a ring of the two takes."""
    served = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20), servers=1)
    problem = Problem(PROFILE, served, codec_costs("onebit", PROFILE, 2), Constraints(servers=True, runtime=True))
    problem = replace(problem, constraints=replace(problem.constraints, among_workers=False))
    found = assess(Job(problem, ()), "psgc", compare=False, standard=LENIENTLY)
    assert found.peer.step_us < 0.6 * found.plain.step_us
    assert found.gain == pytest.approx(1 - found.encoded_us / found.peer.step_us)
    assert f"in place of {ms(found.peer.step_us)} uncompressed by all-reduce, as DistributedDataParallel sends them" in verdict(found)


def test_where_compression_is_ruled_out_the_verdict_says_so() -> None:
    assert verdict(assessed(1, constraints=Constraints(devices=()))).startswith("no compression, since the constraints forbid it: ")


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
    assert "other options for these buckets could make the step" in from_best(found)


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
    assert "other options for these buckets could make the step is not known" in from_best(found)


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


def test_a_plan_is_not_verified_and_shows_how_far_predictions_were_off_where_they_were_measured() -> None:
    """The spread is that of the tables in docs/predicted-and-measured.md."""
    text = (Path(__file__).parents[2] / "docs" / "predicted-and-measured.md").read_text()
    tables = text[text.index("## Jobs over servers") :]
    errors = [float(cell) / 100 for cell in re.findall(r"\| ([+-]\d+\.\d)% \|", tables)]
    low = sum(error < 0 for error in errors)
    assert tuple(STEPS_MEASURED) == pytest.approx((len(errors), low, min(errors), statistics.median(errors), max(errors)), abs=5e-4)
    assert not_verified().startswith(
        "not verified: predicted, not measured; of 48 jobs that were measured (docs/predicted-and-measured.md), 47 took longer than predicted"
    )
    told = f"{low} of {len(errors)} took longer than predicted; errors from -{-min(errors):.0%}"
    assert told.replace("%", " %") in (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    words = verdict(assessed(1))
    assert "(not verified)" in words and "+-" not in words


def test_the_distance_from_the_bounds_is_told_as_what_other_plans_could_gain() -> None:
    """A step of 100 over a bound of 80 could be a fifth shorter; over a bound of a hundredth nothing is known."""
    found = assessed(1)
    step = found.found.step_us
    assert from_best(replace(found, bounds=Bounds(0.8 * step, 0.001 * step, 0.0))) == (
        "other options for these buckets could make the step 20% shorter at most; how much shorter other buckets could make the step is not known"
    )


def to_run(gbps: float, *, force: bool = False, error: float | None = None) -> Assessment:
    """Of three tensors that become ready far apart, which a job without a plan would fuse: a plan to run. error: with which its predictions were verified."""
    tensors = tuple(TensorProfile(f"layer{index}", 300_000, 2_000.0 * index) for index in range(3))
    correction = None if error is None else Correction(NONE, error)
    profile = Profile(
        "three",
        tensors,
        forward_us=2_000.0,
        device="cpu",
        codecs={name: {"cpu": CURVE, "server": CURVE} for name in ("none", "int8")},
        correction=correction,
    )
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(gbps, 20), servers=1)
    problem = Problem(
        profile, cluster, codec_costs("int8", profile, 2), Constraints(("cpu",), 2, servers=True, runtime=True, among_workers=False)
    )
    return assess(Job(problem, ()), "psgc", compare=False, standard=LENIENTLY, force=force)


def test_a_plan_to_run_that_is_predicted_quicker_by_too_little_is_held_back_until_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "UNVERIFIED", 0.6)
    cautious, forced, verified = to_run(1.0), to_run(1.0, force=True), to_run(1.0, error=0.01)
    assert len(cautious.found.buckets) == 1, "as the job fuses them without a plan"
    assert cautious.held_back is not None and len(cautious.held_back.buckets) > 1
    assert cautious.held_back.step_us == forced.found.step_us < cautious.found.step_us
    (told,) = about_held_back(cautious)
    assert told.startswith(
        f"the buckets are those of --codec int8 without a plan: planned ones are predicted to take {ms(forced.found.step_us)} ms"
    )
    assert document(cautious)["prediction"]["held_back_step_ms"] == forced.found.step_us / 1e3
    for bold in (forced, verified):
        assert bold.held_back is None and len(bold.found.buckets) > 1 and about_held_back(bold) == ()


def test_a_plan_to_run_that_is_predicted_much_quicker_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "UNVERIFIED", 0.01)
    assert to_run(1.0).held_back is None
