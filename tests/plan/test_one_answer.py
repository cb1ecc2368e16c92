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
from psgc.plan.inputs.estimates import Timed, cluster_of, with_codec_times
from psgc.plan.inputs.profile import Profile, TensorProfile, load_profile
from psgc.plan.live.outlook import LEAST_GAIN, PLAN, Machines, outlook, with_costs
from psgc.plan.local_search.choosing import CONVERGED_RTOL
from psgc.plan.methods.search import ANNEALING, search
from psgc.plan.model.options import OVER_SERVERS, Constraints, all_options, devices_of, is_program, is_uncompressed, server_options
from psgc.plan.model.plan import JobShape, Plan, PlannedBucket, pushes, shape_of
from psgc.plan.model.problem import Problem, codec_costs, is_of_a_node, simulate
from psgc.plan.model.quality import SAFELY
from psgc.plan.planfile.completing import whole_plan
from psgc.plan.planfile.runtime import check_runs, planned_buckets
from psgc.plan.report.running import as_jobs_run, running
from psgc.plan.whatif.candidates import NOMINAL, ladder
from psgc.program.compile import compile_option
from psgc.program.ranks import Ranks
from tests.plan.commands import psgc, quick_search
from tests.plan.questions import questions


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
    if answer.runs:  # collectives without a name, too, which a job moves through hosts' memory
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


@settings(max_examples=12, deadline=None)
@given(questions(), st.integers(1, 3), st.booleans())
def test_no_option_that_a_job_runs_makes_a_shorter_plan_than_runnables(problem: Problem, parts: int, alone: bool) -> None:
    """Of all options that there are, also those that the planner does not consider: for the whole model in one bucket, or for each tensor alone."""
    limited = as_jobs_run(problem)
    best = search(limited, ANNEALING).step_us
    tensors = limited.profile.tensors
    groups = [[tensor] for tensor in tensors] if alone else [list(tensors)]
    codecs = ["none", *(codec.name for codec in limited.used)]
    for option in (*all_options(), *server_options()):
        for codec in codecs[:1] if is_uncompressed(option) else codecs[1:]:
            sizes = [sum(tensor.numel for tensor in group) for group in groups]
            buckets = [
                PlannedBucket(tuple(tensor.name for tensor in group), numel, min(parts, -(-numel // 4096)), 0, codec, option)
                for group, numel in zip(groups, sizes, strict=True)
            ]
            if not running(limited, buckets).runs or (pushes(option) and not limited.cluster.servers):
                continue
            if all(device in limited.devices(limited.costs_of(buckets[0])) for device in devices_of(option)):
                assert best <= simulate(limited, buckets).step_us * (1 + 2 * CONVERGED_RTOL), option


NEAR = 0.02  # searches over other sets of options, without annealing, may differ by that
LONG_MS = 1000.0  # a step so long that auto takes the links to be slow, and plans


@settings(max_examples=20, deadline=None)
@given(questions())
def test_plan_plan_runnable_and_advise_give_one_answer_where_they_call_it_runnable(problem: Problem) -> None:
    """The time of a step. Where ``plan``'s does not run, or not in the predicted time, it names the time of the plan that does: the very one of
    ``plan --runnable`` and ``advise``."""
    if problem.codec.name == "none" or is_of_a_node(problem.codec):
        return
    problem = replace(problem, constraints=Constraints(servers=True))
    with quick_search("plan"):
        found, limited = search(problem), as_jobs_run(problem)
        to_run, answer = search(limited), running(problem, found.buckets)
        timed = Timed(problem.profile)
        (advised,) = (one for one in ladder(timed, problem.cluster, [problem.codec.name], standard=SAFELY) if one.kind == "compress")
    assert running(limited, to_run.buckets).as_predicted
    assert found.step_us <= (1 + NEAR) * to_run.step_us or limited.cluster != problem.cluster, "jobs run a part of all that there is"
    if answer.as_predicted:
        assert found.step_us == pytest.approx(to_run.step_us, rel=NEAR) or limited.cluster != problem.cluster
    elif answer.instead is not None:
        assert answer.instead.step_us == to_run.step_us
        if answer.moved_us is not None and problem.profile.device:  # else it may encode on GPUs, which nobody says that there are
            assert to_run.step_us <= (1 + NEAR) * answer.moved_us
    if advised.runs:
        assert advised.iteration_us(NOMINAL) == pytest.approx(to_run.step_us)
    assert bool(advised.runs) or advised.lacking


@settings(max_examples=20, deadline=None)
@given(questions(("cpu", "cuda")), st.booleans())
def test_auto_predicts_what_plan_runnable_does_and_its_job_accepts_the_plan(problem: Problem, connected: bool) -> None:
    """The same cluster, at the rate that auto fits, and at most as many encodings as it takes. auto tries a plan only where it saves a twentieth."""
    profile, servers = problem.profile, problem.cluster.servers
    codec = problem.codec.name if "/" not in problem.codec.name and not is_of_a_node(problem.codec) else "none"
    if problem.cluster.gpus == 1:
        return
    on_gpus = profile.device == "cuda"
    machines = Machines(
        problem.cluster.nodes, problem.cluster.gpus_per_node, servers, 4, gpus=on_gpus, host=problem.cluster.host,
        connected=connected and on_gpus and problem.cluster.host is not None,
    )  # fmt: skip
    names = tuple(tensor.name for tensor in profile.tensors)
    plain, coded = (
        OVER_SERVERS if servers else (("flat.reduce_scatter", "flat.all_gather"), ("comp@cpu", "flat.all_gather.c", "decomp@cpu"))
    )
    present = (PlannedBucket(names, profile.numel, 1, 0, "none", plain),)
    layouts = {"none": present, codec: (replace(present[0], codec=codec, option=coded),) if codec != "none" else present}
    found = outlook(profile, machines, LONG_MS, present, layouts, "none", plans=True)
    cluster = machines.cluster(found.gbps)
    if found.plan is not None:
        accepted(found.plan, profile, cluster)
        assert on_gpus or not encodes_on_gpus(found.plan.buckets)
    if codec == "none":
        return
    quickest = min(
        {"none": LONG_MS, **{name: ms for name, ms in found.predicted_ms.items() if name != PLAN}}.items(), key=lambda one: one[1]
    )[0]
    of_job = with_costs(profile)
    asked = Problem(of_job, cluster, codec_costs(quickest, of_job, cluster.gpus), replace(machines.constraints, runtime=False))
    with quick_search("plan"):
        limited = as_jobs_run(asked)
        if limited.cluster != cluster:  # plan adds servers where nothing else runs; auto has those of its job
            return
        to_run_ms, planned = search(limited).step_us / 1e3, search(asked)
    if running(asked, planned.buckets).as_predicted:
        assert planned.step_us / 1e3 == pytest.approx(to_run_ms, rel=NEAR)
    best_ms = min(LONG_MS, *found.predicted_ms.values())
    if PLAN in found.predicted_ms:
        assert found.predicted_ms[PLAN] == pytest.approx(to_run_ms, rel=NEAR)
    assert to_run_ms * (1 - NEAR) <= best_ms <= to_run_ms * (1 + NEAR) / (1 - LEAST_GAIN)


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
    answers = [psgc("plan", *asked, "--cluster", str(tmp_path / "c.toml"), *more, "--json") for more in ((), ("--runnable", "--force"))]
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


def test_a_plan_to_run_says_that_collectives_pass_hosts_memory_where_the_cluster_names_nothing_that_runs_them_on_gpus(
    tmp_path: Path,
) -> None:
    (tmp_path / "p.csv").write_text("name,numel,ready_us\na,300000,0\nb,300000,1000\n")
    said = []
    for collectives in ("", "nccl"):
        cluster = replace(cluster_of("", 2, 2, 1.0, 50.0, servers=1), name="c", collectives=collectives)
        (tmp_path / "c.toml").write_text(cluster.to_toml({}))
        done = psgc("plan", "--profile", str(tmp_path / "p.csv"), "--cluster", str(tmp_path / "c.toml"), "--runnable", "--codec", "none")
        said.append("collectives between GPUs pass hosts' memory, at 100 Gbit/s within a node at most" in done.stdout)
    assert said == [True, False]


def test_paragraphs_fit_into_the_terminal_and_break_between_words() -> None:
    text = "links: 8 x 8 GPUs, 100 Gbit/s a node and 20 us, 3600 Gbit/s within one; codec times are estimates, as --help says"
    lines = paragraph(text, "- ", 40).splitlines()
    assert len(lines) > 2
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line[2:] for line in lines) == text
    assert [line[:2] for line in lines] == ["- ", *["  "] * (len(lines) - 1)]
