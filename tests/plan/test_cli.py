"""The verbs that ask, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.cli import main
from psgc.plan.planfile.reading import load_plan
from tests.plan.commands import psgc

Refuses = Callable[..., None]
GOLDEN = Path(__file__).parents[1] / "golden" / "plans"


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuses:
    """Checks, in this process, that a command is wrong usage and says so in one line."""

    def check(*arguments: str, said: str) -> None:
        monkeypatch.setattr(sys, "argv", ["psgc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        refused(subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capsys.readouterr()), said)

    return check


def test_options_are_counted_and_listed() -> None:
    found = json.loads(psgc("options", "--json").stdout)
    assert {key: found[key] for key in ("count", "gpu_only", "uncompressed")} == {"count": 4341, "gpu_only": 174, "uncompressed": 9}
    assert len({tuple(option) for option in found["options"]}) == 4341
    assert json.loads(psgc("options", "--gpu-only", "--json").stdout)["count"] == 174
    assert "flat.push  flat.pull" in psgc("options", "--most-encodes", "0", "--servers").stdout


def test_a_question_gets_a_verdict() -> None:
    command = ("whatif", "--model", "resnet50", "--method", "powersgd", "--backward-ms", "122", "--encode-ms", "45", "--bandwidth", "1")
    done = psgc(*command)
    assert done.returncode == 0, done.stderr
    assert "pays" in done.stdout
    assert json.loads(psgc(*command, "--json").stdout)["gain"] > 0.8


def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"cases": [{"id": "A7", "quantity": "time_ms", "inputs": {"run": {"method": "sync"}}, "expect": {}}]}')
    for arguments, words in (
        (("whatif", "--cases", str(bad)), "case A7: field inputs.run.t_backward_ms: missing"),
        (("whatif", "--cases", str(tmp_path / "none.json")), "No such file"),
        (("whatif", "--model", "resnet50"), "--backward-ms is missing"),
        (("options", "--most-encodes", "-1"), "expected at least 0"),
    ):
        refused(psgc(*arguments), words)


CLUSTER = "nodes = 2\ngpus_per_node = 1\nintra = {gbps = 100, latency_us = 5}\ninter = {gbps = 1, latency_us = 20}\n"
TABLE = "name,numel,ready_us\nlast.weight,4000000,0\nlast.bias,1000,50\nfirst.weight,1000000,9000\n"


def planned(*buckets: dict[str, Any]) -> str:
    plain = {"numel": 5001000, "parts": 2, "priority": 0, "codec": "none", "option": ["flat.all_reduce"]}
    return json.dumps({"version": 1, "model": "table", "cluster": "two", "buckets": [plain | bucket for bucket in buckets]})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a profile, a cluster, and a plan of one bucket for them."""
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "two.toml").write_text(CLUSTER)
    (tmp_path / "plan.json").write_text(planned({"tensors": ["last.weight", "last.bias", "first.weight"]}))
    return tmp_path


def simulating(job: Path, *arguments: str, plan: str = "plan.json") -> tuple[str, ...]:
    return ("simulate", "--profile", str(job / "table.csv"), "--cluster", str(job / "two.toml"), "--plan", str(job / plan), *arguments)


def planning(job: Path, *arguments: str) -> tuple[str, ...]:
    return ("plan", "--profile", str(job / "table.csv"), "--cluster", str(job / "two.toml"), *arguments)


def test_a_plans_step_is_predicted_lane_by_lane(job: Path) -> None:
    found = json.loads(psgc(*simulating(job, "--trace", str(job / "trace.json"), "--json")).stdout)
    assert set(found) == {"step_ms", "lanes", "overlap", "runnable"}
    assert found["runnable"]
    named = (job / "two.toml").read_text()
    (job / "named.toml").write_text('collectives = "nccl"\n' + named)
    by_nccl = (
        "simulate",
        "--profile",
        str(job / "table.csv"),
        "--cluster",
        str(job / "named.toml"),
        "--plan",
        str(job / "plan.json"),
        "--json",
    )
    assert json.loads(psgc(*by_nccl).stdout)["runnable"]
    told = "runs the plan, but moves its collectives between GPUs through hosts' memory, since the cluster names nothing else"
    assert told in " ".join(psgc(*simulating(job)).stdout.split()) and told not in psgc(*by_nccl[:-1]).stdout
    # one bucket of 20 MB, there and back over a 1 Gbit/s link, when the last gradient is ready
    assert found["step_ms"] == pytest.approx(9 + 20.004 * 8 + 2 * 2 * 0.02)
    assert {lane["lane"]: lane["busy_ms"] for lane in found["lanes"]}["backward"] == 9
    assert found["overlap"] == 0
    events = json.loads((job / "trace.json").read_text())["traceEvents"]
    assert {"0/0/flat.all_reduce", "0/1/flat.all_reduce"} <= {event["name"] for event in events}
    assert "backward hides 0% of communication" in psgc(*simulating(job)).stdout


@pytest.mark.parametrize(
    ("profile", "cluster", "arguments"),
    [
        ("lstm", "espresso-pcie", ("--codec", "efsignsgd")),
        ("resnet101", "espresso-nvlink", ()),
        ("bert-base", "cloud-4xa10g-40g", ("--gpu", "a10g", "--codec", "int8")),
        ("vgg16", "two-homes-1g", ("--gpu", "t4", "--codec", "topk")),
        ("bert-base", "cloud-8xh100-3200g", ("--gpu", "h200", "--codec", "onebit")),  # docs/results/ has times of it
        ("resnet50", "served", ("--runnable",)),
        ("lstm", "served", ("--codec", "onebit", "--method", "byteps-compress")),
    ],
)
def test_a_plan_is_simulated_on_its_own_cluster_and_takes_the_very_step_that_the_planner_predicted(
    tmp_path: Path, profile: str, cluster: str, arguments: tuple[str, ...]
) -> None:
    plan, served = str(tmp_path / "plan.json"), tmp_path / "served.toml"
    served.write_text(
        'nodes = 4\ngpus_per_node = 2\nservers = 3\nintra = {gbps = 96.7, latency_us = 5.1, kind = "PCIe"}\n'
        "inter = {gbps = 9.3, latency_us = 20.7}\nserver = {gbps = 24.9, latency_us = 31}\n"
    )
    where = str(served) if cluster == "served" else cluster
    made = psgc("plan", "--profile", profile, "--cluster", where, *arguments, "-o", plan, "--json")
    assert made.returncode == 0, made.stderr
    gpu = arguments[:2] if arguments[:1] == ("--gpu",) else ()
    simulating = ("simulate", "--profile", profile, *gpu, "--plan", plan, "--json")
    own, given, other = (
        json.loads(psgc(*simulating, *more).stdout) for more in ((), ("--cluster", where), ("--cluster", "cloud-8xa100-400g"))
    )
    predicted = json.loads(made.stdout)
    assert own["step_ms"] == given["step_ms"] == predicted["step_ms"] == load_plan(plan).prediction["step_ms"]
    assert own["step_ms"] != other["step_ms"]
    assert own["runnable"] == predicted["runnable"]
    assert own["runnable"] or arguments != ("--runnable",)
    assert not load_plan(plan).unknown


def test_a_plan_of_version_1_is_simulated_on_the_cluster_that_is_named_and_what_it_lacks_is_said(refuses: Refuses) -> None:
    plan = str(GOLDEN / "version-1.json")
    refuses("simulate", "--profile", "lstm", "--plan", plan, said="does not say for which cluster it is; name one with --cluster")
    shown = psgc("simulate", "--profile", "lstm", "--cluster", "espresso-pcie", "--plan", plan)
    assert shown.returncode == 0, shown.stderr
    assert f"{plan} lacks the cluster and the issue order" in " ".join(shown.stdout.split())
    assert "this version of psgc does not run the plan: " in shown.stdout


def test_the_next_forward_is_added_where_the_profile_has_one(job: Path, refuses: Refuses) -> None:
    refuses(*simulating(job, "--forward"), said="it has no forward_us; measure one with psgc profile, or leave out --forward")
    profile = {"version": 1, "model": "table", "forward_us": 6000, "tensors": [
        {"name": name, "numel": numel, "ready_us": ready}
        for name, numel, ready in (("last.weight", 4000000, 0), ("last.bias", 1000, 1000), ("first.weight", 1000000, 9000))
    ]}  # fmt: skip
    (job / "profile.json").write_text(json.dumps(profile))
    arguments = ("simulate", "--profile", str(job / "profile.json"), "--cluster", str(job / "two.toml"), "--plan", str(job / "plan.json"))
    found = json.loads(psgc(*arguments, "--forward", "--json").stdout)
    assert found["iteration_ms"]["barrier"] == pytest.approx(found["step_ms"] + 6)
    assert found["iteration_ms"]["overlapped"] == pytest.approx(found["step_ms"] + 6)  # one bucket: all layers wait for it
    assert "with the next forward" in psgc(*arguments, "--forward").stdout


def test_a_plan_of_several_codecs_is_simulated_with_each_ones_times_or_with_one_for_all(job: Path) -> None:
    encoded = {"option": ["comp@gpu", "flat.all_gather.c", "decomp@gpu"], "parts": 1}
    buckets = (
        {"tensors": ["last.weight", "last.bias"], "numel": 4001000, "codec": "onebit"},
        {"tensors": ["first.weight"], "numel": 1000000, "codec": "topk"},
    )
    (job / "mixed.json").write_text(planned(*(encoded | bucket for bucket in buckets)))

    def sent_ms(*arguments: str) -> float:
        lanes = json.loads(psgc(*simulating(job, *arguments, "--json", plan="mixed.json")).stdout)["lanes"]
        return {lane["lane"]: lane["busy_ms"] for lane in lanes}["inter-send"]

    onebit, topk = sent_ms("--codec", "onebit"), sent_ms("--codec", "topk")
    assert sent_ms() == pytest.approx(onebit * 4001 / 5001 + topk * 1000 / 5001, rel=0.01)


def test_a_plan_encodes_tensors_of_some_names_with_codecs_of_their_own(job: Path) -> None:
    (job / "ruled.toml").write_text('most_encodes = 1\n[codecs]\n"*.bias" = "none"\n"first.*" = "topk"\n')
    report = job / "plan.html"
    arguments = ("--codec", "onebit", "--constraints", str(job / "ruled.toml"), "--report", str(report), "--json")
    found = json.loads(psgc(*planning(job, *arguments)).stdout)
    codecs = {name: bucket["codec"].partition(":")[0] for bucket in found["buckets"] for name in bucket["tensors"]}
    assert codecs == {"last.weight": "onebit", "last.bias": "none", "first.weight": "topk"}
    assert found["lower_bound_ms"] <= found["step_ms"] <= min(found["prediction"]["methods"].values())
    assert "onebit and topk" in found["prediction"]["verdict"].replace(":k=0.01", "")
    assert report.read_text().count("bytes an element") == 2


def test_what_a_simulation_cannot_take_is_one_line_and_status_2(job: Path, refuses: Refuses) -> None:
    everything = ["last.weight", "last.bias", "first.weight"]
    encoded = ["comp@gpu", "flat.all_gather.c", "decomp@gpu"]
    plans = {
        "other": (
            {"tensors": ["decoder.weight"]},
            "it has a tensor 'decoder.weight', the profile of table has none such; the plan is for another model",
        ),
        "cyclic": ({"tensors": everything, "option": ["flat.all_reduce"] * 2}, "'flat.all_reduce' cannot stand after flat.all_reduce"),
        "unknown": ({"tensors": everything, "option": ["flat.sum"]}, "unknown action 'flat.sum'"),
        "nameless": ({"tensors": everything, "option": encoded}, "is encoded, but its codec is none"),
        "unheard": ({"tensors": everything, "option": encoded, "codec": "dithering"}, "codec dithering: the profile has no times for it"),
    }
    for name, (bucket, words) in plans.items():
        (job / f"{name}.json").write_text(planned(bucket))
        refuses(*simulating(job, "--json", plan=f"{name}.json"), said=words)
    refuses(*simulating(job, "--trace", str(job / "nowhere" / "trace.json")), said="No such file")
    refuses(*simulating(job, "--trace", str(job)), said="Is a directory")
    refuses("simulate", "--profile", "vgg16", "--cluster", "mars", "--plan", str(job / "plan.json"), said="cluster 'mars' is neither")


def test_a_plan_is_made_written_and_simulated_to_the_same_step(job: Path) -> None:
    done = psgc(*planning(job, "--codec", "onebit", "-o", str(job / "made.json"), "--json"))
    found = json.loads(done.stdout)
    assert found == json.loads((job / "made.json").read_text())
    assert {"version", "model", "cluster", "buckets", "prediction", "select_ms", "bound_ms", "options_considered"} <= set(found)
    assert found["lower_bound_any_bucketing_ms"] <= found["lower_bound_ms"] <= found["step_ms"] <= found["fp32_step_ms"]
    assert found["options_considered"] == 4341
    simulated = json.loads(psgc(*simulating(job, "--json", plan="made.json")).stdout)
    assert simulated["step_ms"] == pytest.approx(found["step_ms"])
    assert simulated["lanes"] == found["prediction"]["lanes"]


def test_a_plan_for_people_is_tables_a_verdict_and_a_page(job: Path) -> None:
    (job / "c.toml").write_text("most_encodes = 1\n")
    done = psgc(
        *planning(
            job,
            "--codec",
            "onebit",
            "--quality",
            "fast",
            "--optimizer",
            "sgd",
            "--constraints",
            str(job / "c.toml"),
            "--report",
            str(job / "page.html"),
        )
    )
    assert done.returncode == 0, done.stderr
    assert "compress: with onebit" in done.stdout.splitlines()[-1]
    assert all(words in done.stdout for words in ("first.weight", "hipress", "other buckets could make the step", "published ones of V100"))
    assert (job / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("rules", "flags", "line"),
    [
        ("flat = false\nmost_encodes = 1\n", ["--codec", "onebit"], " under these constraints: byteps-compress, hipress"),
        ("devices = []\n", [], ", since encoding is ruled out: byteps-compress, hitopkcomm, hipress"),
        ("most_encodes = 0\n", [], ", since encoding is ruled out: byteps-compress, hitopkcomm, hipress"),
        ('[codecs]\n"*" = "none"\n', [], ", since encoding is ruled out: byteps-compress, hitopkcomm, hipress"),
        ("", ["--codec", "none"], ", since encoding is ruled out: byteps-compress, hitopkcomm, hipress"),
    ],
)
def test_why_methods_are_missing_from_the_table_is_one_line(job: Path, rules: str, flags: list[str], line: str) -> None:
    (job / "c.toml").write_text(rules)
    lines = psgc(*planning(job, *flags, "--constraints", str(job / "c.toml"))).stdout.splitlines()
    table = max(number for number, text in enumerate(lines) if text.startswith("└"))
    assert lines[table + 1] == f"not comparable{line}"
    assert lines[table + 2].startswith(("note: ", "chosen in"))


def test_a_plan_to_run_is_compared_with_no_method_that_needs_more(job: Path) -> None:
    (job / "two.toml").write_text("servers = 1\n" + CLUSTER)
    shown = psgc(*planning(job, "--runnable", "--codec", "onebit")).stdout
    assert "not comparable" not in shown
    (job / "flat.toml").write_text('hierarchical = false\ndevices = ["cpu"]\n')
    shown = psgc(*planning(job, "--runnable", "--codec", "onebit", "--constraints", str(job / "flat.toml"))).stdout
    assert "not comparable under these constraints: byteps-compress, hitopkcomm, hipress\n" in shown


def test_a_job_of_which_a_step_takes_no_time_is_planned_advised_and_asked_about(tmp_path: Path, refuses: Refuses) -> None:
    """One tensor, ready at once, on one GPU: there is no time of which anything saves a share."""
    table, solo = tmp_path / "one.csv", tmp_path / "solo.toml"
    table.write_text("name,numel,ready_us\nw,1000,0\n")
    solo.write_text(CLUSTER.replace("nodes = 2", "nodes = 1").replace("gpus_per_node = 2", "gpus_per_node = 1"))
    plan = tmp_path / "plan.json"
    asked = ("--profile", str(table), "--cluster", str(solo), "--json")
    answers = [psgc(*arguments) for arguments in (
        ("plan", *asked, "-o", str(plan), "--report", str(tmp_path / "page.html")), ("plan", *asked, "--force", "--codec", "int8"),
        ("plan", *asked, "--method", "fp32"), ("simulate", *asked, "--plan", str(plan)), ("whatif", *asked), ("whatif", *asked, "--over", "bf16"),
    )]  # fmt: skip
    assert all(not done.returncode for done in answers), [done.stderr for done in answers]
    found = [json.loads(done.stdout) for done in answers]
    assert found[0]["step_ms"] == found[3]["step_ms"] == found[4]["sync_ms"] == 0
    assert found[0]["prediction"]["verdict"] == "do not compress: a step takes no time without it"
    assert (found[4]["gain"], found[5]["gain"]) == (0, 0)
    assert "int8 at 1 Gbit/s on 1 x 1 GPUs does not pay: a step takes no time without it" in found[4]["verdict"]
    advise = ("advise", "--profile", str(table), "--nodes", "1", "--gpus-per-node", "1", "--link", "1")
    advised = json.loads(psgc(*advise, "--json").stdout)
    assert (advised["choice"], advised["iteration_ms"], advised["gain"]) == ("none", 0, 0)
    refuses(*advise, "--goodput", "--tokens", "5", said="an iteration takes no time, so there is no goodput")


def test_on_a_fast_network_the_advice_is_not_to_compress(job: Path) -> None:
    (job / "two.toml").write_text(CLUSTER.replace("gbps = 1,", "gbps = 400,"))
    assert json.loads(psgc(*planning(job, "--json")).stdout)["prediction"]["verdict"].startswith("do not compress")


def test_a_well_known_model_is_planned_and_simulated_for_the_gpu_that_is_named(job: Path, refuses: Refuses) -> None:
    model = ("--profile", "lstm", "--cluster", "espresso-pcie", "--gpu", "h100", "--json")
    plan = job / "lstm.json"
    found = json.loads(psgc("plan", *model, "--codec", "int8", "-o", str(plan)).stdout)
    assert all(any(words in note for note in found["prediction"]["notes"]) for words in ("computed for h100", "int8 are estimates"))
    step_ms = json.loads(psgc("simulate", *model, "--plan", str(plan)).stdout)["step_ms"]
    assert step_ms == pytest.approx(found["step_ms"])
    document = json.loads(plan.read_text())
    mixed = [bucket | {"codec": "int4"} if bucket["codec"] == "int8" else bucket for bucket in document["buckets"][:1]]
    plan.write_text(json.dumps(document | {"buckets": mixed + document["buckets"][1:]}))
    assert json.loads(psgc("simulate", *model, "--plan", str(plan)).stdout)["step_ms"] != pytest.approx(step_ms, rel=1e-6)


def test_a_file_that_names_no_gpu_is_planned_and_simulated_for_the_one_that_is_named_as_it_is_advised_for(
    job: Path, refuses: Refuses
) -> None:
    """A CSV has neither hardware nor codec times: without ``--gpu`` it gets those of V100."""
    (job / "two.toml").write_text("cores = 8\n" + CLUSTER)
    table, plan = ("--profile", str(job / "table.csv")), job / "plan.json"
    asked = (*table, "--cluster", str(job / "two.toml"), "--codec", "int8", "--json")
    by_default, planned = (json.loads(psgc("plan", *asked, *gpu, "-o", str(plan)).stdout) for gpu in ((), ("--gpu", "h100")))
    notes = planned["prediction"]["notes"]
    assert "codec times of int8 are estimates: bytes moved at 70% of the 3350 GB/s of the GPU's memory" in notes
    assert not any("V100" in note for note in notes), "nor that its host encodes one part at a time"
    assert any("V100" in note for note in by_default["prediction"]["notes"])
    simulated = json.loads(psgc("simulate", *table, "--gpu", "h100", "--plan", str(plan), "--json").stdout)
    assert (
        simulated["step_ms"] == planned["step_ms"] != json.loads(psgc("simulate", *table, "--plan", str(plan), "--json").stdout)["step_ms"]
    )
    advised = psgc("advise", *table, "--gpu", "h100", "--nodes", "2", "--link", "10", "--json")
    assert advised.returncode == 0, advised.stderr
    for arguments in (planning(job), simulating(job)):
        refuses(
            *arguments,
            "--gpu",
            "300",
            said=f"--gpu 300: expected the GPU whose codec times {job / 'table.csv'} is planned with, one of v100, ",
        )
    curve = {"numel": [1000], "encode_us": [5], "decode_us": [5]}
    for own, said in (
        (
            {"hardware": "NVIDIA A100"},
            "times of its own hardware, NVIDIA A100; use --gpu with a model's name, or with a file that has none",
        ),
        ({"codecs": {"int8": {"gpu": curve}}}, "times of codecs on its own GPU; use --gpu with"),
    ):
        (job / "own.json").write_text(json.dumps({"version": 1, "tensors": [{"name": "a", "numel": 1000, "ready_us": 0}], **own}))
        refuses("plan", "--profile", str(job / "own.json"), "--cluster", str(job / "two.toml"), "--gpu", "h100", said=said)
        refuses("simulate", "--profile", str(job / "own.json"), "--plan", str(plan), "--gpu", "h100", said=said)


def test_a_codec_that_a_plan_to_run_could_not_encode_with_is_refused(job: Path, refuses: Refuses) -> None:
    (job / "two.toml").write_text("servers = 1\n" + CLUSTER)
    (job / "gpu.toml").write_text('devices = ["gpu"]\n')
    (job / "run.toml").write_text('devices = ["gpu"]\nruntime = true\n')
    profile = json.loads(psgc("profile", "--model", "lstm", "--no-codecs", "--json").stdout)
    (job / "cpu.json").write_text(json.dumps(profile | {"device": "cpu"}))
    for rules, flags in (("gpu.toml", ["--runnable"]), ("run.toml", [])):
        where = '"cpu", and on "gpu" where gradients lie there'
        said = f"constraints {job / rules} rule out all encoding for a plan to run, which encodes on {where}; leave one of them out"
        asked = ("plan", "--profile", str(job / "cpu.json"), "--cluster", str(job / "two.toml"))
        refuses(*asked, "--codec", "onebit", "--constraints", str(job / rules), *flags, said=said)
    assert psgc(*planning(job, "--codec", "none", "--constraints", str(job / "run.toml"), "--json")).returncode == 0


def test_a_plan_to_run_is_refused_to_methods_that_cannot_make_one(job: Path, refuses: Refuses) -> None:
    (job / "two.toml").write_text("servers = 1\n" + CLUSTER)
    (job / "flat.toml").write_text("hierarchical = false\n")
    flat = (*planning(job, "--runnable"), "--constraints", str(job / "flat.toml"))
    refuses(*flat, "--method", "fp32", said="method fp32: its plan takes intra.reduce_scatter inter.push")
    refuses(*flat, "--optimizer", "sgd", "--method", "byteps-compress", said="which the constraints rule out")
    for method in ("fp32", "espresso", "hipress"):
        made = json.loads(psgc(*planning(job, "--runnable", "--method", method, "--json")).stdout)
        assert made["runnable"] and made["prediction"]["running"]["moved_step_ms"] is None


def test_what_a_plan_cannot_be_made_of_is_one_line_and_status_2(job: Path, refuses: Refuses) -> None:
    (job / "c.toml").write_text("most_encoded = 1\n")
    (job / "gpus.toml").write_text("devices = []\n")
    (job / "negative.csv").write_text(TABLE.replace("1000,50", "-1000,50"))
    (job / "linkless.toml").write_text("nodes = 2\ngpus_per_node = 1\nintra = {gbps = 100, latency_us = 5}\n")
    for arguments, words in (
        (("--method", "magic"), "unknown method 'magic'; choose one of"),
        (("--codec", "zip"), "zip"),
        (("--constraints", str(job / "c.toml")), "unknown field 'most_encoded'"),
        (("--profile", str(job / "negative.csv")), "numel of 'last.bias' is -1000"),
        (("--cluster", str(job / "linkless.toml")), "field inter is missing"),
        (("-o", str(job / "nowhere" / "plan.json"), "--method", "fp32"), "No such file"),
        (("--codec", "int8", "--constraints", str(job / "gpus.toml")), "gpus.toml rule out all encoding; leave one of them out"),
    ):
        refuses(*planning(job, *arguments, "--json"), said=words)
