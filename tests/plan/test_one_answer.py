"""``psgc advise``, ``psgc plan``, ``psgc plan --runnable`` and ``auto`` give one answer; and what any of them calls runnable, a job accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.errors import UsageError
from psgc.launch.tables import paragraph
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.estimates import cluster_of, with_codec_times
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, load_profile
from psgc.plan.live.outlook import Machines, outlook
from psgc.plan.methods.search import search
from psgc.plan.model.options import Constraints, is_program
from psgc.plan.model.plan import JobShape, Plan, PlannedBucket, shape_of
from psgc.plan.model.problem import Problem, codec_costs, is_of_a_node, simulate
from psgc.plan.planfile.completing import whole_plan
from psgc.plan.planfile.runtime import check_runs, planned_buckets
from psgc.plan.report.running import as_jobs_run, running
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from tests.plan.commands import psgc

CURVE = CostCurve((1.0, 1e6), (10.0, 500.0), (10.0, 500.0))
CODECS = ("none", "bf16", "int8", "int4", "onebit", "topk", "onebit/int8", "shared", "dithering")


@st.composite
def questions(draw: st.DrawFn) -> Problem:
    """A profile with gradients on CPUs, on GPUs or nowhere in particular, codec times from the one source, and a cluster."""
    device = draw(st.sampled_from(["cpu", "cuda", ""]))
    sizes = draw(st.lists(st.sampled_from([1, 4096, 70001, 1 << 20]), min_size=1, max_size=4))
    tensors = tuple(TensorProfile(f"t{number}", numel, 300.0 * number) for number, numel in enumerate(sizes))
    codec = draw(st.sampled_from(CODECS))
    own = {name: {"cpu": CURVE, "server": CURVE} for name in ("shared", "dithering")} if codec in ("shared", "dithering") else {}
    profile = Profile("m", tensors, hardware=draw(st.sampled_from(["", "NVIDIA A100"])), device=device, codecs=own)
    timed = with_codec_times(profile, codec.split("/"), memory_gbps=draw(st.sampled_from([None, 900.0]))).profile
    known = codec if codec == "none" or all(half in timed.codecs for half in codec.split("/")) else "none"
    host = draw(st.sampled_from([None, Link(100, 10)])) if device == "cuda" else None
    collectives = draw(st.sampled_from(["", "host", "nccl"])) if device == "cuda" else ""
    costs = codec_costs(known, timed)
    cluster = Cluster(
        "made", draw(st.integers(1, 3)), draw(st.integers(1, 2)), Link(50, 5), Link(draw(st.sampled_from([0.1, 10.0])), 50),
        draw(st.integers(0, 2)), cores=0 if is_of_a_node(costs) else 4, host=host, collectives=collectives,
    )  # fmt: skip
    runtime = draw(st.booleans()) and cluster.servers > 0
    return Problem(timed, cluster, codec_costs(known, timed, cluster.gpus), Constraints(servers=True, runtime=runtime))


def accepted(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """What a job does with a plan before its first exchange: the checks, the layout, and the programs of all ranks. Raises UsageError."""
    check_runs(plan, "plan")
    tensors = tuple(TensorSpec(tensor.name, (tensor.numel,), "float32") for tensor in profile.tensors)
    specs = planned_buckets(plan, tensors, shape_of(cluster))
    declaration = Declaration("m", "plan", tensors, "none", True, buckets=specs)
    layout = build_layout(declaration, layout_id=1, servers=cluster.servers, workers=cluster.gpus, used_by_all=frozenset())
    ranks = Ranks((cluster.gpus_per_node,) * cluster.nodes)
    for bucket in layout.buckets:
        for turn, part in enumerate(bucket.parts):
            if bucket.option:
                assert len(compile_option(bucket.option, part.numel, ranks, turn)) == cluster.gpus


def encodes_on_gpus(buckets: Any) -> bool:
    return any(action.endswith("@gpu") for bucket in buckets for action in bucket.option)


@settings(max_examples=25, deadline=None)
@given(questions())
def test_what_is_called_runnable_is_accepted_by_a_job_and_what_is_not_is_refused(problem: Problem) -> None:
    found = search(problem)
    answer = running(problem, found.buckets)
    plan = whole_plan(problem, found.buckets, simulate(problem, found.buckets), {})
    if answer.runs:
        accepted(plan, problem.profile, problem.cluster)
    else:
        with pytest.raises(UsageError):
            accepted(plan, problem.profile, problem.cluster)
    assert problem.profile.device != "cpu" or not encodes_on_gpus(found.buckets)
    limited = as_jobs_run(problem)
    best = search(limited)
    accepted(whole_plan(limited, best.buckets, simulate(limited, best.buckets), {}), limited.profile, limited.cluster)
    if problem.profile.device != "cuda":
        assert not encodes_on_gpus(best.buckets), "jobs encode where gradients lie, and on CPUs"


@settings(max_examples=8, deadline=None)
@given(questions(), st.integers(1, 3))
def test_every_option_that_planners_choose_from_for_a_job_is_one_that_jobs_run(problem: Problem, parts: int) -> None:
    limited = as_jobs_run(problem)
    numel = sum(tensor.numel for tensor in limited.profile.tensors)
    names = tuple(tensor.name for tensor in limited.profile.tensors)
    for option in limited.options:
        encoded = any(action.startswith("comp@") for action in option)
        codec = limited.codec.name if encoded else "none"
        if encoded and (codec == "none" or not limited.takes(option, limited.codec)):
            continue
        plan = Plan("m", "made", (PlannedBucket(names, numel, min(parts, -(-numel // 4096)), 0, codec, option),), shape=JobShape())
        check_runs(plan, "plan")
        if is_program(option):
            assert compile_option(option, numel, Ranks((limited.cluster.gpus_per_node,) * limited.cluster.nodes))


@settings(max_examples=8, deadline=None)
@given(questions(), st.booleans())
def test_what_auto_plans_is_accepted_by_its_job(problem: Problem, groups: bool) -> None:
    profile, cluster = problem.profile, problem.cluster
    codec = problem.codec.name if "/" not in problem.codec.name else "none"
    if profile.device == "" or not (groups or cluster.servers):
        return
    machines = Machines(
        cluster.nodes, cluster.gpus_per_node, cluster.servers, 4, groups=groups, gpus=profile.device == "cuda", host=cluster.host
    )
    names = tuple(tensor.name for tensor in profile.tensors)
    option = ("flat.push", "flat.pull") if cluster.servers else ("flat.reduce_scatter", "flat.all_gather")
    present = (PlannedBucket(names, profile.numel, 1, 0, "none", option),)
    found = outlook(profile, machines, 1000.0, present, {"none": present, codec: present}, "none", plans=True)
    if found.plan is not None:
        accepted(found.plan, profile, machines.cluster(found.gbps))
        assert profile.device == "cuda" or not encodes_on_gpus(found.plan.buckets)


def test_a_plan_that_encodes_on_a_gpu_is_not_called_runnable_for_a_model_without_one() -> None:
    profile = with_codec_times(Profile("m", (TensorProfile("a", 1 << 20, 0.0),), device="cpu"), ["int8"]).profile
    problem = Problem(profile, Cluster("c", 2, 1, Link(10, 5), Link(1, 50), 1), codec_costs("int8", profile, 2), Constraints(servers=True))
    buckets = [PlannedBucket(("a",), 1 << 20, 1, 0, "int8", ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu"))]
    assert running(problem, buckets).refused == (0,)


CPU_CLUSTER = cluster_of("AMD EPYC", 2, 1, 1.0, 50.0)
GPU_CLUSTER = cluster_of("h100", 8, 8, 100.0, 20.0)


def test_a_bucket_that_is_cut_more_finely_than_jobs_cut_is_not_called_runnable() -> None:
    profile = Profile("m", (TensorProfile("a", 5000, 0.0),))
    problem = Problem(profile, Cluster("c", 2, 1, Link(10, 5), Link(1, 50), 1), codec_costs("none", profile, 2), Constraints(servers=True))
    for parts, runs in ((2, True), (3, False)):
        buckets = [PlannedBucket(("a",), 5000, parts, 0, "none", ("flat.push", "flat.pull"))]
        assert running(problem, buckets).runs is runs
        if not runs:
            with pytest.raises(UsageError, match="so plan at most 2"):
                accepted(Plan("m", "c", tuple(buckets)), profile, problem.cluster)


@pytest.mark.parametrize("kind", ["a trace of a CPU", "llama-8b on GPUs"])
def test_the_same_question_has_the_same_answer_whoever_is_asked(tmp_path: Path, kind: str) -> None:
    """The codec, and what an iteration takes by a plan that runs, to half a percent: searches over other options may differ by that."""
    if kind == "llama-8b on GPUs":
        asked: tuple[str, ...] = ("--profile", "llama-8b", "--gpu", "h100")
        advise = ("advise", "--model", "llama-8b", "--gpu", "h100", "--nodes", "8", "--link", "100")
        profile, cluster = load_profile("llama-8b", "h100"), GPU_CLUSTER
    else:
        tensors = [{"name": f"300x{1000 + n}.0", "numel": 300 * (1000 + n), "ready_us": 2000 * n} for n in range(4)]
        document = {
            "version": 1,
            "model": "traced",
            "device": "cpu",
            "source": "measured: medians of 8 iterations",
            "tensors": tensors,
            "forward_us": 9000,
        }
        (tmp_path / "p.json").write_text(json.dumps(document))
        asked = ("--profile", str(tmp_path / "p.json"))
        advise = ("advise", *asked, "--nodes", "2", "--gpus-per-node", "1", "--link", "1", "--latency-us", "50")
        profile, cluster = load_profile(str(tmp_path / "p.json")), CPU_CLUSTER
    (tmp_path / "c.toml").write_text(replace(cluster, name="c").to_toml({}))
    answers = [psgc("plan", *asked, "--cluster", str(tmp_path / "c.toml"), *more, "--json") for more in ((), ("--runnable",))]
    advised = psgc(*advise, "--json")
    assert all(not done.returncode for done in (*answers, advised)), [done.stderr for done in (*answers, advised)]
    advice = json.loads(advised.stdout)
    assert advice["verdict"] == "compress"
    for answer in (json.loads(done.stdout) for done in answers):
        assert answer["prediction"]["codec"] == advice["choice"]
        assert answer["runnable"] and answer["prediction"]["verdict"].startswith("compress: ")
        assert answer["step_ms"] + (profile.forward_us or 0.0) / 1e3 == pytest.approx(advice["iteration_ms"], rel=5e-3)
        assert any(
            f"codec {advice['choice']}, since none was chosen: the one that psgc advise takes here" in note
            for note in answer["prediction"]["notes"]
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_exact_plans_without_a_codec_and_says_where_advice_differs(tmp_path: Path, device: str) -> None:
    tensors = [{"name": f"t{n}", "numel": 300_000, "ready_us": 2000 * n} for n in range(4)]
    document = {"version": 1, "model": "m", "device": device, "hardware": "NVIDIA A100" if device == "cuda" else "", "tensors": tensors}
    (tmp_path / "p.json").write_text(json.dumps(document))
    (tmp_path / "c.toml").write_text(replace(cluster_of("a100" if device == "cuda" else "", 2, 1, 1.0, 50.0), name="c").to_toml({}))
    asked = ("--profile", str(tmp_path / "p.json"), "--quality", "exact", "--json")
    for more in ((), ("--runnable",)):
        planned = psgc("plan", *asked, "--cluster", str(tmp_path / "c.toml"), *more)
        assert not planned.returncode, planned.stderr
        answer = json.loads(planned.stdout)
        assert answer["runnable"]
        assert not any("comp@" in action for bucket in answer["buckets"] for action in bucket["option"])
        assert any("--quality exact does not allow" in note for note in answer["prediction"]["notes"])
    advice = json.loads(psgc("advise", *asked, "--nodes", "2", "--gpus-per-node", "1", "--link", "1").stdout)
    assert advice["choice"] == "bf16"
    assert any("--quality exact leaves none, as in psgc plan" in note for note in advice["notes"])


def test_a_plan_over_servers_alone_says_that_the_cluster_names_nothing_that_runs_collectives_on_gpus(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("name,numel,ready_us\na,300000,0\nb,300000,1000\n")
    said = []
    for collectives in ("", "nccl"):
        cluster = replace(cluster_of("", 2, 2, 1.0, 50.0, servers=1), name="c", collectives=collectives)
        (tmp_path / "c.toml").write_text(cluster.to_toml({}))
        done = psgc("plan", "--profile", str(tmp_path / "p.csv"), "--cluster", str(tmp_path / "c.toml"), "--runnable", "--codec", "none")
        said.append("plans over servers alone, since the cluster does not say what runs collectives" in done.stdout)
    assert said == [True, False]


def test_paragraphs_fit_into_the_terminal_and_break_between_words() -> None:
    text = "links: 8 x 8 GPUs, 100 Gbit/s a node and 20 us, 3600 Gbit/s within one; codec times are estimates, as --help says"
    lines = paragraph(text, "- ", 40).splitlines()
    assert len(lines) > 2
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line[2:] for line in lines) == text
    assert [line[:2] for line in lines] == ["- ", *["  "] * (len(lines) - 1)]
