"""A planning job from what a user names: what is assumed where nothing is said, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import load_cluster
from psgc.plan.inputs.estimates import estimate, located
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.methods.search import search
from psgc.plan.model.constraints import ALL, load_constraints, read_constraints
from psgc.plan.model.job import codec_of, default_codec, recoded
from psgc.plan.model.options import OVER_SERVERS, Constraints, encodes, over_groups
from psgc.plan.model.plan import Plan, PlannedBucket
from psgc.plan.model.problem import simulate
from psgc.plan.planfile.runtime import check_runs
from tests.plan.jobs import load_job

CURVE = CostCurve((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
TENSORS = (TensorProfile("a", 10, 0.0),)


def test_a_codec_that_trains_as_without_it_is_chosen_first() -> None:
    profile = Profile("m", TENSORS, codecs={"onebit": {"gpu": CURVE}, "bf16": {"cpu": CURVE}})
    assert default_codec(profile, ("gpu", "cpu")) == "bf16"
    assert default_codec(profile, ("gpu",)) == "onebit"
    with pytest.raises(UsageError, match="times of no codec on cpu"):
        default_codec(Profile("m", TENSORS, codecs={"onebit": {"gpu": CURVE}}), ("cpu",))


def test_a_chosen_codec_is_taken_and_what_was_assumed_is_noted() -> None:
    job = load_job("vgg16", "espresso-nvlink", "efsignsgd")
    assert job.problem.codec.name == "efsignsgd"
    assert not any("since none was chosen" in note for note in job.notes)
    default = load_job("vgg16", "espresso-nvlink")
    assert default.problem.codec.name.startswith("onebit")
    assert any("codec onebit, since none was chosen" in note for note in default.notes)


def test_a_well_known_models_times_are_of_the_gpu_that_is_named_and_said_to_be() -> None:
    on_v100, on_h100, by_figure = (load_job("vgg16", "espresso-nvlink", "none", gpu=gpu) for gpu in (None, "h100", "300"))
    assert on_v100.problem.profile.backward_us == pytest.approx(on_h100.problem.profile.backward_us * 400 / 11)
    assert on_v100.notes == (
        "profile vgg16: computed for v100: 32 images a GPU at 11 TFLOP/s achieved, with the published codec times of V100 and its host; "
        "--gpu chooses another",
    )
    assert on_h100.notes == ("profile vgg16: computed for h100: 32 images a GPU at 400 TFLOP/s achieved",)
    assert by_figure.notes == ("profile vgg16: computed for 300: 32 images a GPU at 300 TFLOP/s achieved",)
    with pytest.raises(UsageError, match="unknown GPU 'abacus'"):
        load_job("vgg16", "espresso-nvlink", gpu="abacus")


def test_codec_times_that_a_known_gpu_lacks_are_estimates_and_said_to_be() -> None:
    asked = load_job("vgg16", "espresso-nvlink", "int8")
    assert asked.problem.profile.curve("int8", "gpu") == estimate("int8", 900.0)
    assert asked.estimated == {"int8"}
    assert asked.notes[-2] == "codec times of int8 are estimates: bytes moved at 70% of the 900 GB/s of the GPU's memory"
    assert asked.notes[-1].startswith("codec times of int8 on CPUs are estimates: what one core of an AMD EPYC took")
    default = load_job("vgg16", "espresso-nvlink", gpu="h100")
    assert (default.problem.codec.name, default.estimated) == ("int8", {"int8"})
    assert any("codec times of int8 are estimates: bytes moved at 70% of the 3350 GB/s" in note for note in default.notes)
    own = load_job("vgg16", "espresso-nvlink", "int8", Constraints(codecs=(("*.bias", "onebit"),)), gpu="h100", beside=["topk"])
    assert own.estimated == {"int8", "onebit", "topk"}
    published = load_job("vgg16", "espresso-nvlink", "onebit")
    assert not published.estimated
    assert published.problem.codec.knows("cpu")


def test_where_gpus_may_not_encode_or_are_unknown_times_are_those_of_cpus() -> None:
    for constraints, gpu in ((Constraints(devices=("cpu",)), "h100"), (Constraints(devices=("cpu",)), None), (ALL, "300")):
        job = load_job("vgg16", "espresso-nvlink", "int8", constraints, gpu=gpu)
        assert (job.problem.devices(job.problem.codec), job.estimated) == (("cpu",), {"int8"})
        assert any("codec times of int8 on CPUs are estimates" in note for note in job.notes)
    with pytest.raises(UsageError, match="codec dithering: the profile has no times for it"):
        load_job("vgg16", "espresso-nvlink", "dithering", Constraints(devices=("cpu",)))


def test_a_model_without_a_gpu_is_never_planned_to_encode_on_one(tmp_path: Path) -> None:
    """Whatever times a profile has: a trace of a training on a CPU has none, and a machine's profile may have those of its GPU."""
    curve = {"numel": [1, 1 << 20], "encode_us": [1, 9], "decode_us": [1, 9]}
    tensors = [{"name": "a", "numel": 1 << 20, "ready_us": 0}]
    link = "{gbps = 0.1, latency_us = 1}"
    (tmp_path / "c.toml").write_text(f"nodes = 2\ngpus_per_node = 1\nservers = 1\nintra = {link}\ninter = {link}\n")
    for more in ({"device": "cpu"}, {"source": "measured: medians of 8 iterations"}, {"device": "cpu", "codecs": {"int8": {"gpu": curve}}}):
        (tmp_path / "p.json").write_text(json.dumps({"version": 1, "tensors": tensors, **more}))
        for runtime in (False, True):
            for gpu in (None, "h100") if "device" in more else (None,):
                job = load_job(
                    str(tmp_path / "p.json"), str(tmp_path / "c.toml"), "int8", Constraints(servers=True, runtime=runtime), gpu=gpu
                )
                assert job.problem.profile.device == "cpu"
                assert not any("gpu" in action for option in job.problem.options for action in option)
                assert any("comp@cpu" in bucket.option for bucket in search(job.problem).buckets), (
                    "it is worth encoding over so slow a link"
                )
        if "device" not in more:
            assert "gradients are taken to lie in hosts' memory, since the profile was measured and names no GPU" in job.notes


@pytest.mark.parametrize(
    ("given", "gpu", "device", "said"),
    [
        ({"device": "cuda"}, None, "cuda", ""), ({"device": "cpu"}, "h100", "cpu", ""),
        ({"hardware": "NVIDIA H200, host7"}, None, "cuda", "on a GPU, since NVIDIA H200, host7 is one"), ({}, "a100", "cuda", "on a GPU, since a100 is one"),
        ({"codecs": {"int8": {"gpu": CURVE, "cpu": CURVE}}}, None, "cuda", "on a GPU, since the profile has codec times there"),
        ({"codecs": {"int8": {"cpu": CURVE}}}, None, "cpu", "in hosts' memory, since the profile has codec times on CPUs alone"),
        ({"source": "measured: medians of 8 iterations"}, None, "cpu", "in hosts' memory, since the profile was measured and names no GPU"),
        ({"source": "t.csv"}, None, "cuda", "on a GPU, since the profile does not say where"),
    ],
)  # fmt: skip
def test_where_gradients_lie_is_always_known_and_it_is_said_how(given: dict[str, Any], gpu: str | None, device: str, said: str) -> None:
    found, note = located(Profile("m", TENSORS, **given), gpu)
    assert found.device == device
    assert note == (f"gradients are taken to lie {said}" if said else "")


def test_no_codec_is_chosen_for_tensors_that_all_have_one_of_their_own() -> None:
    biases = (("*.bias", "none"),)
    for codecs, chosen in ((biases, True), ((*biases, ("*.weight", "efsignsgd")), False), ((("*", "none"),), False)):
        job = load_job("vgg16", "espresso-pcie", None, Constraints(codecs=codecs))
        assert any("since none was chosen" in note for note in job.notes) is chosen
        assert ("onebit" in {codec.name for codec in job.problem.used}) is chosen
    own = load_job("vgg16", "espresso-pcie", None, Constraints(codecs=(("*.bias", "none"), ("*", "int8")))).problem
    assert [codec.name for codec in own.used] == ["int8"]
    with pytest.raises(UsageError, match="codec int8: the profile has no times for it on tpu"):
        own.codec.device("tpu")  # what is missing is said of a codec that the job has


def test_a_table_of_tensors_takes_published_codec_times_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name,numel,ready_us\nx,100,0\n")
    job = load_job(str(tmp_path / "t.csv"), "espresso-pcie", "randomk")
    assert job.problem.codec.knows("gpu")
    assert any("published ones of V100" in note for note in job.notes)


@pytest.mark.parametrize(("codec", "constraints"), [("none", ALL), (None, Constraints(devices=())), (None, Constraints(most_encodes=0))])
def test_without_compression_options_are_the_uncompressed_ones(codec: str | None, constraints: Constraints) -> None:
    problem, notes = load_job("vgg16", "espresso-pcie", codec, constraints)[:2]
    assert len(notes) == 1  # nothing is said of codecs
    assert len(problem.options) == 9
    assert not any(map(encodes, problem.options))


def test_a_plan_that_is_to_be_run_needs_a_codec_that_jobs_have_on_the_cpu_and_servers_for_one_of_several_rounds(tmp_path: Path) -> None:
    runnable = Constraints(servers=True, runtime=True)
    with pytest.raises(UsageError, match="codec dgc: known by its published times alone, so no job can use it"):
        load_job("vgg16", "espresso-pcie", "dgc", runnable)
    curve = {"numel": [1, 2], "encode_us": [1, 2], "decode_us": [1, 2]}
    codecs = {"dithering": {"gpu": curve}, "bf16": {"cpu": curve}, "shared": {"cpu": curve}, "powersgd": {"cpu": curve}}
    document = {"version": 1, "model": "m", "device": "cuda", "tensors": [{"name": "a", "numel": 10, "ready_us": 0}], "codecs": codecs}
    (tmp_path / "p.json").write_text(json.dumps(document))
    link = "{gbps = 1, latency_us = 1}"
    (tmp_path / "c.toml").write_text(f"nodes = 2\ngpus_per_node = 1\nservers = 1\nintra = {link}\ninter = {link}\n")
    files = (str(tmp_path / "p.json"), str(tmp_path / "c.toml"))
    problem = load_job(*files, None, runnable).problem
    assert problem.codec.name == "bf16" and set(OVER_SERVERS) < set(problem.options)
    assert not any("@gpu" in action for option in problem.options for action in option)
    assert not any(map(encodes, load_job(*files, "none", runnable).problem.options))
    with pytest.raises(UsageError, match="codec dithering: the profile has no times for it on cpu"):
        load_job(*files, "dithering", replace(runnable, devices=("cpu",)))
    with pytest.raises(UsageError, match="codec powersgd: it does not cut tensors"):
        load_job(*files, "powersgd", runnable)
    with pytest.raises(UsageError, match="leave no option; allow flat ones over servers, which alone can be run"):
        _ = load_job(*files, None, Constraints(flat=False, servers=True, runtime=True, among_workers=False)).problem.options
    rounds = load_job(*files, "shared", runnable).problem
    assert {option for option in rounds.options if encodes(option)} == {OVER_SERVERS[1]} and any(map(over_groups, rounds.options))
    (tmp_path / "none.toml").write_text((tmp_path / "c.toml").read_text().replace("servers = 1", "servers = 0"))
    for cluster, constraints, lacking in (
        (str(tmp_path / "none.toml"), runnable, "cluster none has no servers"),
        (files[1], replace(runnable, servers=False), "the constraints rule servers out"),
    ):
        with pytest.raises(UsageError, match=f"codec shared: it takes several rounds, for which jobs push to servers, but {lacking}"):
            _ = load_job(files[0], cluster, "shared", constraints).problem.options


def test_a_codec_without_times_on_the_devices_is_refused(tmp_path: Path) -> None:
    curve = {"numel": [1, 2], "encode_us": [1, 2], "decode_us": [1, 2]}
    document = {"version": 1, "model": "m", "tensors": [{"name": "a", "numel": 10, "ready_us": 0}], "codecs": {"int8": {"cpu": curve}}}
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(
        UsageError, match="codec int8: the constraints leave GPUs alone to encode on, but this model's gradients lie in hosts' memory"
    ):
        load_job(str(tmp_path / "p.json"), "espresso-nvlink", "int8", Constraints(devices=("gpu",)))
    (tmp_path / "p.json").write_text(json.dumps(document | {"device": "cuda", "codecs": {"dithering": {"cpu": curve}}}))
    with pytest.raises(UsageError, match="codec dithering: the profile has no times for it on gpu"):
        load_job(str(tmp_path / "p.json"), "espresso-nvlink", "dithering", Constraints(devices=("gpu",)))
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert all("gpu" not in action for option in load_job(str(tmp_path / "p.json"), "espresso-nvlink").problem.options for action in option)


def bucket(name: str, codec: str, *option: str) -> PlannedBucket:
    return PlannedBucket((name,), 10, 1, 0, codec, option)


def test_a_plans_codec_is_that_of_the_first_bucket_it_encodes_and_all_of_them_can_get_another() -> None:
    plain, ways = bucket("a", "none", "flat.all_reduce"), ("comp@gpu", "flat.all_gather.c", "decomp@gpu")
    assert codec_of([plain]) == "none"
    assert codec_of([plain, bucket("b", "int8", *ways), bucket("c", "onebit", *ways)]) == "int8"
    assert recoded([plain, bucket("b", "int8", *ways)], "bf16") == (plain, bucket("b", "bf16", *ways))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'most_encodes = 1\ndevices = ["gpu"]\nflat = false\nruntime = true\n[codecs]\n"*.bias" = "none"\n"fc?" = "onebit"\n'),
        (
            "c.json",
            '{"most_encodes": 1, "devices": ["gpu"], "flat": false, "runtime": true, "codecs": {"*.bias": "none", "fc?": "onebit"}}',
        ),
    ],
)
def test_constraints_are_read_from_toml_and_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    codecs = (("*.bias", "none"), ("fc?", "onebit"))
    assert load_constraints(str(tmp_path / name)) == Constraints(
        ("gpu",), 1, flat=False, hierarchical=True, servers=True, runtime=True, codecs=codecs
    )


def test_tensors_take_the_codec_of_the_first_pattern_that_their_name_matches() -> None:
    constraints = Constraints(codecs=(("*.bias", "none"), ("features.*", "efsignsgd"), ("*.0.*", "dgc")))
    problem = load_job("vgg16", "espresso-pcie", "randomk", constraints).problem
    own = {name: problem.codecs[number].name.partition(":")[0] for name, number in problem.codec_numbers.items()}
    assert [own[f"{name}"] for name in ("features.0.bias", "features.0.weight", "classifier.0.weight", "classifier.3.weight")] == [
        "none", "efsignsgd", "dgc", "randomk",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"constraints: codecs: 'embedding\*' is the name of no tensor of vgg16; its tensors are "):
        load_job("vgg16", "espresso-pcie", None, Constraints(codecs=(("embedding*", "none"),)))
    with pytest.raises(UsageError, match="codec shared: the profile has no times for it"):
        load_job("vgg16", "espresso-pcie", None, Constraints(codecs=(("*", "shared"),)))


@pytest.mark.parametrize("ruled_out", [{"devices": ()}, {"most_encodes": 0}])
def test_a_pattern_that_no_tensor_matches_is_refused_though_nothing_may_be_encoded(ruled_out: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"'embedding\*' is the name of no tensor of vgg16"):
        load_job("vgg16", "espresso-pcie", None, Constraints(codecs=(("embedding*", "onebit"),), **ruled_out))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"most_encoded": 1}, "c: unknown field 'most_encoded'; expected one of most_encodes, devices, flat, hierarchical, servers"),
        ({"most_encodes": -1}, "field most_encodes is -1"),
        ({"most_encodes": True}, "field most_encodes is True"),
        ({"devices": ["tpu"]}, r"field devices is \['tpu'\], expected a list of gpu and cpu"),
        ({"devices": "gpu"}, "field devices is 'gpu'"),
        ({"flat": "no"}, "field flat is 'no', expected true or false"),
        ({"runtime": 1}, "field runtime is 1, expected true or false"),
        ({"codec": "int8"}, r"field codec: choose one for all tensors with --codec, or for those of some names under \[codecs\]"),
        ({"codecs": "int8"}, "field codecs is 'int8', expected codecs by patterns of tensors' names"),
        ({"codecs": {"*.bias": 8}}, r"field codecs is \{'\*.bias': 8\}, expected codecs"),
        ([], "expected an object"),
    ],
)
def test_wrong_constraints_are_refused_by_their_field(document: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_constraints(document, "c")


def test_a_constraints_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"constraints .*none.toml: No such file"):
        load_constraints(str(tmp_path / "none.toml"))
    for name, kind in (("c.toml", "TOML"), ("c.json", "JSON")):
        (tmp_path / name).write_text("{")
        with pytest.raises(UsageError, match=f"not valid {kind}"):
            load_constraints(str(tmp_path / name))


def files_on_gpus(folder: Path, **changes: Any) -> tuple[str, str]:
    """A profile whose gradients lie on GPUs, with times of codecs on CPUs, and a cluster of two nodes of two GPUs with a server."""
    slow = {"numel": [1, 1 << 24], "encode_us": [10, 40_000], "decode_us": [10, 40_000]}
    codecs = {"none": {"cpu": slow, "server": slow}, "int8": {"cpu": slow, "server": slow}}
    tensors = [{"name": f"t{i}", "numel": 1 << 22, "ready_us": 1000 * i} for i in range(4)]
    document = {"version": 1, "model": "m", "device": "cuda", "hardware": "NVIDIA A100-SXM4-80GB", "tensors": tensors, "codecs": codecs}
    (folder / "p.json").write_text(json.dumps(document | changes))
    links = "".join(f"[{name}]\ngbps = {gbps}\nlatency_us = 10\n" for name, gbps in (("intra", 100), ("inter", 10), ("host", 200)))
    (folder / "c.toml").write_text(f"nodes = 2\ngpus_per_node = 2\nservers = 1\n{links}")
    return str(folder / "p.json"), str(folder / "c.toml")


def test_a_plan_to_be_run_encodes_on_gpus_where_gradients_lie_there_and_says_where_its_times_are_from(tmp_path: Path) -> None:
    runnable = Constraints(servers=True, runtime=True)
    job = load_job(*files_on_gpus(tmp_path), "int8", runnable)
    encoded = [option for option in job.problem.options if "flat.push.c" in option]
    assert {(option[0], option[-1]) for option in encoded} == {(f"comp@{a}", f"decomp@{b}") for a in ("gpu", "cpu") for b in ("gpu", "cpu")}
    assert "codec times of int8 are estimates: bytes moved at 70% of the 2039 GB/s of the GPU's memory" in job.notes
    assert job.estimated == {"int8"}
    found, on_cpus = search(job.problem), search(load_job(*files_on_gpus(tmp_path), "int8", replace(runnable, devices=("cpu",))).problem)
    assert any("comp@gpu" in bucket.option for bucket in found.buckets) and found.step_us < on_cpus.step_us
    check_runs(Plan("m", "c", found.buckets), "p")

    quick = {"numel": [1, 1 << 24], "encode_us": [10, 500], "decode_us": [10, 500]}
    slow = {"numel": [1, 1 << 24], "encode_us": [10, 40_000], "decode_us": [10, 40_000]}
    measured = load_job(*files_on_gpus(tmp_path, codecs={"int8": {"cpu": slow, "gpu": quick}}), "int8", runnable)
    assert "codec times of int8 on the GPU are the profile's" in measured.notes and not measured.estimated
    unknown = load_job(*files_on_gpus(tmp_path, hardware="a GPU of 2031"), "int8", runnable)
    assert not any("gpu" in action for option in unknown.problem.options for action in option), (
        "without times there, or memory to estimate them by"
    )
    by_name = load_job(*files_on_gpus(tmp_path, hardware="a GPU of 2031"), "int8", runnable, gpu="h100")
    assert {option[0] for option in by_name.problem.options if "flat.push.c" in option} == {"comp@gpu", "comp@cpu"}
    on_hosts = load_job(*files_on_gpus(tmp_path, device="cpu"), "int8", runnable)
    assert not any("gpu" in action for option in on_hosts.problem.options for action in option)
    only_cpus = load_job(*files_on_gpus(tmp_path), "int8", replace(runnable, devices=("cpu",)))
    assert not any("gpu" in action for option in only_cpus.problem.options for action in option)


def test_collectives_of_gpus_pass_hosts_memory_in_a_plan_to_run_unless_the_cluster_says_that_they_do_not(tmp_path: Path) -> None:
    profile, file = files_on_gpus(tmp_path)
    there = load_cluster(file)
    steps = []
    for collectives, intra in (("", 100.0), ("host", 100.0), ("nccl", 100.0), ("", 1000.0), ("host", 200.0)):
        cluster = replace(there, collectives=collectives, intra=replace(there.intra, gbps=intra))
        problem = load_job(profile, cluster, "int8", Constraints(servers=True, runtime=True)).problem
        assert any(map(over_groups, problem.options))
        found = search(problem)
        check_runs(Plan("m", "c", found.buckets), "p")
        whole = PlannedBucket(
            tuple(f"t{i}" for i in range(4)), 1 << 24, 1, 0, "none", ("intra.reduce_scatter", "inter.all_reduce", "intra.all_gather")
        )
        steps.append(simulate(problem, [whole]).step_us)
    assert steps[0] == steps[1] > steps[2], "through the hosts' memory it takes copies"
    assert steps[3] == steps[4], "and ranks reach it by their links to their hosts, of 200 Gbit/s"
