"""FSDP2 within nodes, psgc between them: the same training as torch's own HSDP, to the bit where nothing is lost. Real processes over gloo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

HOWS = ("plain", "accumulate", "twice", "clip")
ALL_HOWS = (*HOWS, "summed", "together")
OWN = ("scaled", "hooked", "offloaded")  # what FSDP does with the mean at once, or what the optimizer does without
THAWS = "thaws-accumulated"
FROZEN = ("thaws", "thaws-part", "freezes-part", "freezes", "by-turns")
SKIPS = "skips"
GUARDED = ("guarded", "guarded-zeros", "guarded-frozen")
BEFORE = ("deferred", "evaluated")  # the hook: a model without memory, a forward without a backward
RESUMED = ("resumed", "went-on", "rewrapped", "forgot")


def lines(job: Any, *arguments: str, **env: str) -> dict[tuple[str, str], list[list[str]]]:
    """By codec and way of training, each worker's digest and loss."""
    found = defaultdict(list)
    for text in job.said(*arguments, job="fsdp.py", PSGC_MIN_COMPRESS_BYTES="0", **env):
        for words in (line.split() for line in text.splitlines()):
            if len(words) == 4 and words[1] in (*ALL_HOWS, *OWN, *FROZEN, THAWS, SKIPS, *GUARDED, *BEFORE, "again", "unreduced", *RESUMED):
                found[words[0], words[1]].append(words[2:])
    return found


def test_a_model_on_a_mesh_of_two_dimensions_is_taken_over_and_stays_on_it(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--mesh", "whole", "--hows", *ALL_HOWS, "--codecs", "none", "int8")
    for how in ALL_HOWS:
        assert found["none", how] == found["native", how] != found["int8", how]


@pytest.mark.parametrize("servers", [1, 0])
def test_without_a_codec_parameters_are_those_of_torchs_own_hsdp_to_the_bit(make_job: Callable[..., Any], servers: int) -> None:
    found = lines(make_job(nodes=4, servers=servers), "--hows", *HOWS, "--codecs", "none", "int8")
    for how in HOWS:
        native = found["native", how]
        assert len(native) == 4
        assert native[0][0] == native[2][0] != native[1][0] == native[3][0], "two shards, held by two nodes each"
        assert found["none", how] == native
        lossy = found["int8", how]
        assert lossy[0][0] == lossy[2][0] != native[0][0], "both nodes hold the same, and the codec was in use"
        assert all(abs(float(own[1]) - float(its[1])) < 0.25 for own, its in zip(lossy, native, strict=True))


def test_reduced_in_another_dtype_than_parameters_have_gradients_are_averaged_before_they_are_cast(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--precision", "bf16-reduce", "--hows", "plain", "--codecs", "none", "onebit")
    assert found["none", "plain"] == found["native", "plain"]
    assert found["onebit", "plain"][0][0] == found["onebit", "plain"][2][0] != found["native", "plain"][0][0]


def test_parameters_of_lower_precision_than_gradients_are_reduced_in(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--precision", "bf16-params", "--hows", "plain", "--codecs", "none", "int8")
    assert len(found["native", "plain"]) == 4
    assert found["none", "plain"] == found["native", "plain"]
    assert found["int8", "plain"][0][0] == found["int8", "plain"][2][0] != found["native", "plain"][0][0]


@pytest.mark.parametrize("servers", [1, 0])
def test_scaled_losses_offloading_and_steps_within_backward_are_as_under_hsdp(make_job: Callable[..., Any], servers: int) -> None:
    found = lines(make_job(nodes=4, servers=servers), "--hows", *OWN, "--codecs", "none", "int8")
    for how in OWN:
        assert len(found["native", how]) == 4
        assert found["none", how] == found["native", how]
        assert found["int8", how][0][0] == found["int8", how][2][0] != found["native", how][0][0]


@pytest.mark.parametrize("mesh", ["shard", "whole"])
def test_a_model_may_be_hooked_after_an_evaluation_and_before_it_has_memory(make_job: Callable[..., Any], mesh: str) -> None:
    found = lines(make_job(nodes=4, servers=1), "--mesh", mesh, "--hows", *BEFORE, "--codecs", "none", "int8")
    for how in BEFORE:
        assert len(found["native", how]) == 4
        assert found["none", how] == found["native", how]
        assert found["int8", how][0][0] == found["int8", how][2][0] != found["native", how][0][0]


def test_two_forwards_before_a_backward_and_fsdps_own_switch_of_the_average_which_has_no_effect(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--mesh", "whole", "--hows", "plain", "again", "unreduced", "--codecs", "none")
    assert len(found["native", "plain"]) == 4
    assert found["none", "again"] == found["native", "again"] != found["native", "plain"]
    assert found["none", "unreduced"] == found["native", "plain"] != found["native", "unreduced"]


def test_each_module_may_have_a_precision_of_its_own(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--precision", "mixed", "--hows", "plain", "--codecs", "none", "int8")
    assert found["none", "plain"] == found["native", "plain"], "nothing was rounded to another module's"
    assert found["int8", "plain"][0][0] == found["int8", "plain"][2][0] != found["native", "plain"][0][0]


def test_a_plan_says_by_what_each_module_travels_and_low_rank_codecs_see_parameters_as_matrices(make_job: Callable[..., Any]) -> None:
    found = lines(
        make_job(nodes=4, servers=1), "--hows", "plain", "--codecs", "rule", "plan", "groups", "powersgd:rank=64", "powersgd:rank=1"
    )
    assert found["plan", "plain"] == found["rule", "plain"] != found["native", "plain"]
    assert found["groups", "plain"] == found["native", "plain"]
    exact, whole, rank_1 = ([float(own[1]) for own in found[codec, "plain"]] for codec in ("native", "powersgd:rank=64", "powersgd:rank=1"))
    assert found["powersgd:rank=1", "plain"][0][0] == found["powersgd:rank=1", "plain"][2][0] != found["native", "plain"][0][0]
    off = [max(abs(a - b) for a, b in zip(exact, those, strict=True)) for those in (whole, rank_1)]
    assert off[0] < off[1], "all of the gradient's rank is nearer than one: it is cut by parameters, not taken for a vector"


@pytest.mark.parametrize(("servers", "mesh"), [(1, "shard"), (0, "whole")])
def test_parameters_may_be_frozen_and_trained_again_while_training_goes_on(make_job: Callable[..., Any], servers: int, mesh: str) -> None:
    found = lines(make_job(nodes=4, servers=servers), "--mesh", mesh, "--hows", *FROZEN, "--codecs", "none", "onebit")
    for how in FROZEN:
        native = found["native", how]
        assert len(native) == 4
        assert found["none", how] == native
        lossy = [digest for digest, _ in found["onebit", how]]
        assert lossy[0] == lossy[2] != native[0][0], "both nodes hold the same, and the codec was in use"
        assert lossy[1] == lossy[3] != native[1][0]


def test_a_module_that_was_frozen_whole_is_trained_later_in_the_dtype_that_it_is_accumulated_in(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--precision", "bf16-params", "--hows", THAWS, "--codecs", "none", "int8")
    assert len(found["native", THAWS]) == 4
    assert found["none", THAWS] == found["native", THAWS]
    assert found["int8", THAWS][0][0] == found["int8", THAWS][2][0] != found["native", THAWS][0][0]


@pytest.mark.parametrize("precision", ["fp32", "bf16-reduce"])
@pytest.mark.parametrize("servers", [1, 0])
def test_steps_may_be_without_some_modules(make_job: Callable[..., Any], servers: int, precision: str) -> None:
    found = lines(make_job(nodes=4, servers=servers), "--precision", precision, "--hows", SKIPS, "--codecs", "none", "int8")
    assert len(found["native", SKIPS]) == 4
    assert found["none", SKIPS] == found["native", SKIPS]
    lossy = [digest for digest, _ in found["int8", SKIPS]]
    assert lossy[0] == lossy[2] != found["native", SKIPS][0][0], "both nodes hold the same, and the codec was in use"


@pytest.mark.parametrize("servers", [1, 0])
def test_a_bad_step_that_is_thrown_away_does_not_come_back_however_gradients_are_cleared(
    make_job: Callable[..., Any], servers: int
) -> None:
    """That only the bad step was skipped is asserted in the job."""
    found = lines(make_job(nodes=4, servers=servers), "--hows", *GUARDED, "--codecs", "none", "topk:k=0.05")
    for how in GUARDED:
        native = found["native", how]
        assert len(native) == 4
        assert found["none", how] == native
        lossy = [digest for digest, _ in found["topk:k=0.05", how]]
        assert lossy[0] == lossy[2] != native[0][0], "both nodes hold the same, and the codec was in use"


@pytest.mark.parametrize("servers", [1, 0])
def test_a_model_that_goes_on_from_a_state_takes_what_codecs_kept_along(make_job: Callable[..., Any], servers: int) -> None:
    found = lines(make_job(nodes=4, servers=servers), "--hows", "resumed", "--codecs", "onebit")
    assert found["onebit", "went-on"] == found["onebit", "resumed"] != found["onebit", "forgot"]
    assert found["onebit", "rewrapped"] == found["onebit", "resumed"], "checkpoint_wrapper changes no name"


def test_what_codecs_kept_goes_on_on_another_mesh(make_job: Callable[..., Any]) -> None:
    found = lines(make_job(nodes=4, servers=1), "--hows", "moved", "--codecs", "onebit")
    assert len(found["onebit", "went-on"]) == 4
    assert len({digest for digest, _ in found["onebit", "went-on"]}) == 1, "four nodes of one rank hold the same"


@pytest.mark.parametrize("servers", [1, 0])
def test_along_a_meshs_dimension_models_that_are_cut_otherwise_too_train_as_natively(make_job: Callable[..., Any], servers: int) -> None:
    texts = make_job(nodes=4, servers=servers).said(job="fsdp_mesh.py", PSGC_MIN_COMPRESS_BYTES="0")
    found = [{tuple(words[:2]): words[2:] for line in text.splitlines() if len(words := line.split()) == 4} for text in texts]
    for name in ("tp", "shards"):
        for of_rank in found:
            native = of_rank[name, "native"]
            assert of_rank[name, "none-shard"] == of_rank[name, "none-whole"] == native
            assert of_rank[name, "int8-whole"][0] != native[0], "the codec was in use"
            assert of_rank[name, "state"] == of_rank[name, "shrunk"] == ["True", "4"]
        for how in ("native", "int8-whole"):
            digests = [of_rank[name, how][0] for of_rank in found]
            assert digests[0] == digests[2] != digests[1] == digests[3], "two pieces, held by two ranks each"
    for text in texts:
        said = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        for name in ("tp", "shards"):
            assert (
                "DiLoCo: FSDP averages the gradients of 'model' between the ranks that exchange, in every backward;"
                in said[f"diloco of {name} over both"]
            )
            assert said[f"diloco of {name} over both"].endswith("; shard over mesh['dp_shard'], not over mesh (HSDP)")
            assert said[f"diloco of {name}"] == "nothing"
        assert "the state is of a mesh's part inner=" in said["another's"]
        assert "DTensor of which the ranks that exchange hold different pieces" in said["sharded along it"]
        assert "FSDP averages 'model' between ranks" in said["other replicas"]
        assert "init(mesh=...) says otherwise; join by psgc.init(mesh=mesh, dim=...)" in said["other replicas"]


@pytest.mark.parametrize("servers", [1, 0])
def test_stages_of_a_pipeline_that_torch_schedules_train_as_natively(make_job: Callable[..., Any], servers: int) -> None:
    """torch's pipelining has FSDP reduce gradients where no backward runs, and scales them next."""
    hows = ("plain", "accumulate", "bf16-reduce", "apart", "interleaved")
    texts = make_job(nodes=4, servers=servers).said("--hows", *hows, job="fsdp_pipeline.py", PSGC_MIN_COMPRESS_BYTES="0")
    found = [{tuple(words[:2]): words[2:] for line in text.splitlines() if len(words := line.split()) == 4} for text in texts]
    for how in hows:
        for of_rank in found:
            assert of_rank["none", how] == of_rank["native", how]
            assert of_rank["int8", how][0] != of_rank["native", how][0], "the codec was in use"
        for codec in ("native", "int8"):
            digests = [of_rank[codec, how][0] for of_rank in found]
            assert digests[0] == digests[1] != digests[2] == digests[3], "two stages, held by two ranks each"


def test_pieces_that_are_no_replicas_are_refused_where_no_mesh_says_which_are(make_job: Callable[..., Any]) -> None:
    for text in make_job(nodes=4, servers=1).said("--refused", job="fsdp_mesh.py"):
        said = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        for name in ("tp", "tp of hsdp", "tp without replicas"):
            assert "'model' was cut before FSDP sharded it (DTensor, as of tensor parallelism)" in said[name]
            assert "join by psgc.init(mesh=mesh, dim=...) first" in said[name]
        assert (
            "beside which there are the dimensions 'pipeline_parallel', and which of them has replicas is not known; join by"
            in said["stages"]
        )
        assert "the dimensions 'pp', 'dp_replicate', and which of them has replicas is not known; join by" in said["replicated stages"]
        assert (
            "FSDP averages 'model' between ranks" in said["stages of hsdp"]
            and "and psgc would between 0, 1, 2, 3: " in said["stages of hsdp"]
        )
        assert said["dimensions of one rank"] == said["hsdp beside those"] == "nothing"


def test_what_it_cannot_average_is_told_in_a_line(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=2, servers=1).said(job="fsdp_refused.py")
    told = [dict(line.split(": ", 1) for line in text.splitlines() if ": " in line) for text in texts]
    for of_rank in told:
        assert "no trained parameters that FSDP2 has sharded; apply torch's fully_shard to it first" in of_rank["plain"]
        assert of_rank["native"] == "nothing", "of two dimensions psgc takes the replicas' over"
        assert "torch's replicate() was applied to 'model', and shards nothing; leave it out, and use" in of_rank["replicate"]
        assert of_rank["replicate under diloco"].endswith("in every backward; leave torch's replicate() out")
        assert of_rank["frozen replicate"] == "nothing"
        assert "over all 2 ranks, so there are no replicas to average between; shard within nodes" in of_rank["no replicas"]
        assert "unknown codec 'int9'" in of_rank["codec"]
        assert "or a plan; auto measures whole gradients, not shards" in of_rank["plan"]
        assert "the plan lacks 'bias' and 1 more; make a plan of this model's parameters" in of_rank["plan of others"]
        assert "with stages within nodes, which FSDP does itself; plan for nodes of one rank" in of_rank["plan within nodes"]
        assert "'0' is sharded over ranks" in of_rank["two meshes"]
        assert "'model': set_gradient_divide_factor was called on it and not on others when the first gradients came" in of_rank["divided"]
        assert "FSDP reduced 20 gradients of 'model' on each rank, and its trained parameters are 40" in of_rank["unused"]
        assert "parameters of 'model' are sharded over several meshes; shard each module over one" in of_rank["several meshes"]
        assert "'second' is trained now, and is not sharded over the mesh of the units that were trained" in of_rank["trained elsewhere"]
        assert "all parameters of 'second' were frozen in the first forward, so that FSDP casts no" in of_rank["trained as it comes"]
        assert "'second' is trained now, and was frozen when the job's plan was taken" in of_rank["trained without a plan"]
        assert of_rank["frozen before backward"] == "nothing", "it has no gradients then, on any rank"
        assert "gradients of 'second' of which some parameters are frozen now" in of_rank["frozen while gradients wait"]
        assert "reduced the gradients of 'first' twice in one backward" in of_rank["twice"]
        assert "reduced the gradients of 'first' twice in one backward" in of_rank["a forward twice"]
        assert of_rank["around both"] == of_rank["a backward each"] == "nothing"
        assert "the last backward raised after some gradients had left" in of_rank["raised"]
        assert (
            "'second' come after those of a module that is registered before it, for whose mean FSDP waits"
            in of_rank["registered otherwise"]
        )
        assert of_rank["unused and told"] == of_rank["a module that nobody uses"] == "nothing"
    assert told[0]["a module of rank 0 alone"] == "nothing"
    assert "this rank's backward had no gradients of 'second', and another replica's had" in told[1]["a module of rank 0 alone"]
