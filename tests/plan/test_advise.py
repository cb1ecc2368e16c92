"""Advice: the right regime on the right link, a ladder that is climbed only for what it saves, and words that fit the figures."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.estimates import cluster_of, with_codec_times
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, computed_profile
from psgc.plan.methods.search import search
from psgc.plan.model.options import OVER_SERVERS, Constraints, is_program, is_uncompressed
from psgc.plan.model.plan import Plan
from psgc.plan.model.problem import Problem, codec_costs
from psgc.plan.model.quality import LENIENTLY, SAFELY, is_sound
from psgc.plan.planfile.runtime import why_not_run
from psgc.plan.report.running import as_jobs_run
from psgc.plan.whatif.advise import advise, climb, gain_over
from psgc.plan.whatif.candidates import CORNERS, Candidate, Corner, considered

LLAMA = computed_profile("llama-8b", "h100")  # 8192 tokens


@functools.cache
def advice(gbps: float, nodes: int = 8, **options: Any) -> dict[str, Any]:
    """Several tests look at the same."""
    return advise(LLAMA, cluster_of("h100", nodes, 8, gbps, 20.0), memory_gbps=3350.0, **options)


def rung(kind: str, us: float, spread: float = 0.0) -> Candidate:
    """Takes ``us``, and more or less of it where a codec is slow or fast."""

    def iteration_us(corner: Corner) -> float:
        return us * (1 + spread * corner.codec)

    return Candidate(kind, kind, 4.0, True, "", iteration_us, 1.0)


@pytest.mark.parametrize(
    ("gbps", "verdict", "choice", "today"),
    [
        (3200, "none", "none", "none"), (400, "bf16", "bf16", "bf16"), (100, "compress", "int4", "int4"), (10, "infrequent", "local-500", "int4"),
        (1, "infrequent", "local-500", "int4"),
    ],
)  # fmt: skip
def test_each_link_has_its_regime_and_the_advice_is_what_runs_today(gbps: float, verdict: str, choice: str, today: str) -> None:
    """Jobs encode on the GPUs; local steps run, but are not advised."""
    found = advice(gbps)
    assert (found["in_any_version"]["verdict"], found["in_any_version"]["choice"]) == (verdict, choice)
    assert (found["choice"], found["runs"]) == (today, "psgc" if today == "int4" else "all-reduce")
    assert all(one["not_carried_yet_ms"] is None for one in found["candidates"])
    assert any("encoded on GPUs or on CPUs, over servers or among workers" in note for note in found["notes"])
    assert found["gain"] >= 0
    assert found["needed_ratio_over_bf16"] == pytest.approx(max(1, 3.2e6 / 8192 / gbps), rel=0.05)


def test_candidates_are_of_all_four_kinds_and_add_up() -> None:
    found = advice(25)
    kinds = [one["kind"] for one in found["candidates"]]
    assert kinds == ["none", "bf16", *["compress"] * 5, *["infrequent"] * 3]  # powersgd is the fifth: the model's shapes are known
    none, bf16 = found["candidates"][:2]
    for one in found["candidates"]:
        assert one["gain"] == pytest.approx(1 - one["iteration_ms"] / none["iteration_ms"])
        assert one["gain_over_bf16"] == pytest.approx(1 - one["iteration_ms"] / bf16["iteration_ms"])
        assert one["ratio_fp32"] == pytest.approx(2 * one["ratio_bf16"])
        assert one["margin"] >= 0
    chosen = next(one for one in found["candidates"] if one["name"] == found["choice"])
    assert (found["gain"], found["margin"]) == (chosen["gain"], chosen["margin"])


def hosts(codec: str, us_per_million: float) -> dict[str, dict[str, CostCurve]]:
    """Measured times of a codec on CPUs, the server's included."""
    curve = CostCurve((1.0, 1e6, 1e9), (1.0, us_per_million, 1e3 * us_per_million), (1.0, us_per_million, 1e3 * us_per_million))
    return {codec: {"cpu": curve, "server": curve}}


def test_the_headline_is_of_a_plan_that_runs_today_with_what_does_not_beside_it() -> None:
    """The figure is that of ``psgc plan --runnable`` on the same cluster; a faster one is said not to be in this version, and local steps to be another
    optimizer."""
    profile = with_codec_times(replace(computed_profile("gpt2", "a100"), codecs=hosts("int8", 200.0)), ["int8"]).profile
    where = cluster_of("a100", 4, 1, 10.0, 50.0, 2)
    found = advise(profile, where, codecs=("int8",))
    assert (found["choice"], found["runs"], found["best_that_psgc_carries"]) == ("int8", "psgc", "int8")
    runnable = Problem(profile, where, codec_costs("int8", profile, 4), Constraints(servers=True, runtime=True))
    assert profile.forward_us is not None
    # Options that differ in number are drawn differently by the search, which may find a slightly shorter plan among the one or the other.
    assert found["iteration_ms"] == pytest.approx((search(runnable).step_us + profile.forward_us) / 1e3, rel=5e-3)
    assert f"With int8 an iteration takes {found['iteration_ms']:.3g} ms" in found["why"]
    steps = found["in_any_version"]["choice"].removeprefix("local-")
    assert f"Local steps with an exchange every {steps} (psgc.DiLoCo) would take " in found["why"]
    assert any(note.startswith("what is exchanged rarely, and demo, are other optimizers") for note in found["notes"])
    names = [one["name"].partition("-")[0] for one in found["candidates"] if one["carried"]]
    assert names == ["none", "bf16", "int8", "local", "stream", "sparse", "syncer"]


def test_where_gradients_lie_in_hosts_memory_a_codec_is_advised_by_the_best_of_all_that_jobs_run_there() -> None:
    """Workers among themselves, too: the whole tree but for GPUs, wherever gradients lie. A codec of several rounds is encoded over servers alone."""
    unknown = replace(computed_profile("gpt2", "a100"), codecs={**hosts("int8", 200.0), **hosts("shared", 200.0)})
    profile, where = replace(unknown, device="cpu"), replace(cluster_of("a100", 4, 1, 10.0, 50.0, 2), host=None)
    costs = codec_costs("int8", profile, 4)
    plain = Problem(profile, where, costs, Constraints(("cpu",), servers=True))
    limited = as_jobs_run(plain)
    assert all(why_not_run(Plan("gpt2", "", search(problem).buckets), "plan") is None for problem in (plain, limited))
    left = {option for option in plain.options if is_program(option) or option in OVER_SERVERS}
    assert set(limited.options) == left
    assert len(left) > 100
    rounds = set(as_jobs_run(replace(plain, codec=codec_costs("shared", profile, 4))).options)
    assert rounds == {option for option in left if is_uncompressed(option)} | set(OVER_SERVERS)
    assert set(as_jobs_run(replace(plain, profile=unknown, cluster=replace(where, collectives=""))).options) == left
    assert set(as_jobs_run(replace(plain, cluster=replace(where, host=Link(100.0, 10.0), collectives=""))).options) == left
    found = advise(profile, where, memory_gbps=2039.0, codecs=("int8",))
    assert profile.forward_us is not None
    # Of two searches one may find a slightly shorter plan: options that differ in number are drawn differently.
    assert found["iteration_ms"] == pytest.approx((search(limited).step_us + profile.forward_us) / 1e3, rel=5e-3)
    assert any("encoded on CPUs, over servers or among workers" in note for note in found["notes"])


@pytest.mark.parametrize("device", ["cuda", ""])
def test_a_codec_is_advised_by_what_it_takes_where_jobs_encode(device: str) -> None:
    """Estimated on the GPU int8 takes 156 ms, which is where gradients on GPUs are encoded. Where nobody says that they lie there, the plan that runs
    encodes on CPUs, and takes longer."""
    profile = replace(computed_profile("gpt2", "a100"), codecs={}, device=device)
    where = cluster_of("a100", 4, 1, 10.0, 50.0, 2)
    found = advise(profile, where if device else replace(where, collectives=""), memory_gbps=2039.0, codecs=("int8",))
    (int8,) = (one for one in found["candidates"] if one["name"] == "int8")
    if device:
        assert int8["iteration_ms"] == pytest.approx(156.3, rel=0.05) and int8["not_carried_yet_ms"] is None
    else:
        assert int8["not_carried_yet_ms"] == pytest.approx(156.3, rel=0.05)
        assert int8["iteration_ms"] > 1.05 * int8["not_carried_yet_ms"]
    chosen = next(one for one in found["candidates"] if one["name"] == found["choice"])
    assert chosen["carried"] and found["iteration_ms"] == chosen["iteration_ms"]


@pytest.mark.parametrize(("codec", "servers"), [("int8", 0), ("shared", 4)])
def test_without_servers_jobs_have_one_on_each_node_for_codecs_that_need_them(codec: str, servers: int) -> None:
    profile = with_codec_times(replace(computed_profile("gpt2", "a100"), codecs=hosts(codec, 200.0)), [codec]).profile
    there = replace(cluster_of("a100", 4, 1, 10.0, 50.0), collectives="")
    found = advise(profile, there, codecs=(codec,))
    assert any(note.startswith("servers, for codecs that need them: one on each node, sharing its link") for note in found["notes"])
    beside = replace(there, servers=servers, servers_on_nodes=servers > 0)
    runnable = Problem(profile, beside, codec_costs(codec, profile, 4), Constraints(servers=True, runtime=True))
    (advised,) = (one for one in found["candidates"] if one["kind"] == "compress")
    assert profile.forward_us is not None
    assert advised["iteration_ms"] == pytest.approx((search(runnable).step_us + profile.forward_us) / 1e3)


def test_codecs_that_are_not_psgcs_are_no_advice() -> None:
    found = advise(computed_profile("gpt2", "v100"), cluster_of("v100", 4, 1, 1.0, 50.0), standard=LENIENTLY, codecs=("efsignsgd",))
    (published,) = (one for one in found["candidates"] if one["kind"] == "compress")
    assert not published["carried"] and found["choice"] == "bf16"
    assert any(note == "efsignsgd does not run today: efsignsgd is not one of psgc's codecs" for note in found["notes"])


def test_codecs_that_cost_quality_under_adam_are_advised_under_sgd_alone() -> None:
    assert is_sound("int8/onebit", adam=False)
    assert not is_sound("int8/onebit", adam=True)
    assert is_sound("int4:rotate=1", adam=True)
    profile = replace(computed_profile("gpt2", "a100"), codecs={**hosts("int8", 200.0), **hosts("onebit", 200.0)})
    where = cluster_of("a100", 4, 1, 1.0, 50.0, 2)
    assert [advise(profile, where, standard=one, codecs=("int8", "onebit"))["choice"] for one in (SAFELY, LENIENTLY)] == ["int8", "onebit"]
    assert advice(25, standard=LENIENTLY)["in_any_version"]["choice"] == "onebit"
    assert advice(25)["in_any_version"]["choice"] != "onebit"


def test_one_node_has_no_link_to_save() -> None:
    found = advice(1, nodes=1)
    assert "nothing goes between nodes" in found["why"]
    assert found["verdict"] in ("none", "bf16")


def test_gradients_that_are_all_ready_at_once_have_no_backward_to_hide_behind() -> None:
    at_once = replace(LLAMA, tensors=tuple(replace(tensor, ready_us=0.0) for tensor in LLAMA.tensors))
    where = cluster_of("h100", 8, 8, 25.0, 20.0)
    found = advise(at_once, where, memory_gbps=3350.0)
    assert found["why"].startswith(
        "All gradients are ready at once: a bf16 all-reduce takes 8,994 ms, and there is no backward to hide it behind. "
    )
    assert found["needed_ratio_over_bf16"] is None
    assert not {"inf", "nan"} & set(re.findall(r"\w+", found["why"]))


def test_estimates_are_labelled_and_measured_times_used() -> None:
    measured = replace(LLAMA, codecs={"int8": {**hosts("int8", 1000.0)["int8"], "gpu": CostCurve((1.0, 1e9), (1.0, 1e5), (1.0, 1e5))}})
    found = advise(measured, cluster_of("h100", 8, 8, 100.0, 20.0), memory_gbps=3350.0)
    assert {one["name"]: one["times"] for one in found["candidates"] if one["kind"] == "compress"} == {
        "int8": "measured", "int4": "estimated", "onebit": "estimated", "topk": "estimated", "powersgd": "estimated",
    }  # fmt: skip
    assert any(
        "codec times of int4, onebit, powersgd, topk are estimates: bytes moved at 70% of the 3350 GB/s" in note for note in found["notes"]
    )
    assert any("codec times of int4, onebit, powersgd, topk on CPUs are estimates" in note for note in found["notes"])


def test_codecs_without_times_are_left_out_and_named() -> None:
    odd = replace(computed_profile("gpt2", "h100"), codecs={"dithering": {}})
    found = advise(odd, cluster_of("h100", 8, 8, 100.0, 20.0))
    assert [one["name"] for one in found["candidates"]][:2] == ["none", "bf16"]
    with pytest.raises(UsageError, match="codec dithering: the profile has no times for it"):
        advise(LLAMA, cluster_of("h100", 8, 8, 100.0, 20.0), codecs=["dithering"])


def test_times_on_cpus_that_nobody_measured_are_estimates_and_said_to_be() -> None:
    found = advice(100)
    assert {one["times"] for one in found["candidates"] if one["kind"] == "compress"} == {"estimated"}
    assert any(
        note.startswith("codec times of int4, int8, onebit, powersgd, topk on CPUs are estimates: what one core") for note in found["notes"]
    )


def test_the_profiles_own_codecs_are_looked_at_too_but_for_those_that_are_not_psgcs() -> None:
    assert considered(computed_profile("gpt2", "v100")) == ("int8", "int4", "onebit", "topk", "randomk", "powersgd:rank=4")


def test_a_gain_is_taken_in_one_corner_at_a_time() -> None:
    found = gain_over(rung("compress", 80, 0.1), rung("bf16", 100))
    assert found.gain == pytest.approx(0.2)
    assert found.margin == pytest.approx(0.08)
    assert str(found) == "20% +-8%"
    assert gain_over(rung("compress", 80, 0.1), rung("bf16", 100, 0.1)).margin == pytest.approx(0)
    assert {corner.codec for corner in CORNERS if corner.host == 1} == {-1, 1}
    assert {corner.host for corner in CORNERS} == {0.9, 1.0, 1.1}


@pytest.mark.parametrize(
    ("rungs", "highest"),
    [
        ([rung("none", 100), rung("bf16", 99.5)], "none"),  # not enough
        ([rung("none", 100), rung("bf16", 98)], "bf16"),
        ([rung("none", 100), rung("bf16", 90), rung("compress", 87)], "bf16"),  # three percent do not pay for a codec
        ([rung("none", 100), rung("bf16", 90), rung("compress", 80)], "compress"),
        ([rung("none", 100), rung("bf16", 90), rung("compress", 80, 0.5)], "bf16"),  # within its margin
        ([rung("none", 100), rung("bf16", 110), rung("compress", 80)], "compress"),
        ([rung("none", 100, 0.1), rung("bf16", 95), rung("compress", 94, 0.1)], "none"),  # next to bf16 it is nothing
        ([rung("compress", 100), rung("infrequent", 85)], "compress"),
        ([rung("compress", 100), rung("infrequent", 75)], "infrequent"),
    ],
)
def test_a_rung_is_taken_for_more_than_its_margin_and_what_it_gives_up(rungs: list[Candidate], highest: str) -> None:
    assert climb(rungs).kind == highest


def test_the_answer_has_the_memory_that_residuals_take() -> None:
    """4 bytes for each of the elements that a plan encodes, in each worker; codecs without error feedback keep nothing."""
    profile = computed_profile("llama-8b", "h100")
    found = advise(profile, cluster_of("h100", 8, 8, 100, 20), memory_gbps=3350, codecs=("int8", "int8:ef=0", "onebit"))
    kept = {one["name"]: one["residual_bytes"] for one in found["candidates"]}
    shares = {one["name"]: one["compressed_share"] for one in found["candidates"]}
    assert kept["int8"] == pytest.approx(4 * profile.numel * shares["int8"]) and shares["int8"] > 0.9
    assert kept["none"] == kept["bf16"] == kept["int8:ef=0"] == 0
    assert any(note.startswith("memory: ") and "32.1 GB in each worker" in note for note in found["notes"])


def test_powersgd_is_advised_from_the_shapes_that_a_profile_keeps() -> None:
    """Rank 4 of a 1024 x 1024 matrix: P and Q of 1024 x 4, so 8192 of 1,048,576 elements travel, each way; vectors travel whole. Without shapes
    it is left out. It runs by psgc run --codec, tensors uncut."""
    square = tuple(TensorProfile(f"w{number}", 1 << 20, 100.0 * number, (1024, 1024)) for number in range(8))
    profile = Profile("eight", square, forward_us=500.0, codecs={**hosts("powersgd", 50.0), **hosts("int8", 200.0)})
    where = replace(cluster_of("a100", 4, 1, 0.1, 50.0, 1), collectives="")
    found = advise(profile, where, standard=LENIENTLY, codecs=("int8", "powersgd:rank=4"))
    (low_rank,) = (one for one in found["candidates"] if one["name"].startswith("powersgd"))
    assert low_rank["ratio_fp32"] == pytest.approx(128, rel=0.02)
    assert low_rank["carried"] and low_rank["sound"] and low_rank["times"] == "measured"
    assert found["choice"] == low_rank["name"], found["why"]
    assert low_rank["residual_bytes"] == 4 * profile.numel
    under_adam = advise(profile, where)
    assert not under_adam["choice"].startswith("powersgd")
    vectors = replace(profile, tensors=tuple(replace(tensor, shape=(1 << 20,)) for tensor in square))
    (whole,) = (one for one in advise(vectors, where, standard=LENIENTLY)["candidates"] if one["name"].startswith("powersgd"))
    assert whole["ratio_fp32"] == pytest.approx(1, rel=0.02)
    shapeless = replace(profile, tensors=tuple(replace(tensor, shape=None) for tensor in square))
    assert not any(one["name"].startswith("powersgd") for one in advise(shapeless, where, standard=LENIENTLY)["candidates"])


def test_powersgd_is_encoded_where_gradients_lie() -> None:
    """A job keeps PowerSGD's state on the GPU where gradients lie there: only P and Q cross the link to the host."""
    square = tuple(TensorProfile(f"w{number}", 1 << 20, 100.0 * number, (1024, 1024)) for number in range(8))
    quick = CostCurve((1.0, 1e9), (20.0, 20.0), (20.0, 20.0))
    profile = Profile(
        "eight",
        square,
        device="cuda",
        forward_us=500.0,
        codecs={"powersgd": {**hosts("powersgd", 5000.0)["powersgd"], "server": quick, "gpu": quick}},
    )
    where = cluster_of("a100", 4, 1, 10.0, 50.0, 1)
    at_hosts = replace(where, host=None, collectives="")
    measured, estimated, on_hosts = (
        advise(given, of, memory_gbps=2039.0, standard=LENIENTLY, codecs=("powersgd:rank=4",))
        for given, of in ((profile, where), (replace(profile, codecs={}), where), (replace(profile, device="cpu"), at_hosts))
    )
    ms = [one["iteration_ms"] for found in (measured, estimated, on_hosts) for one in found["candidates"] if one["kind"] == "compress"]
    assert ms[0] < ms[1] < 0.5 * ms[2], ms
    assert any("codec times of powersgd are estimates: bytes moved at 70% of the 2039 GB/s" in note for note in estimated["notes"])


def test_powersgd_knows_the_shapes_of_well_known_models_and_is_refused_without_shapes() -> None:
    """Rank 4 of gpt2's matrices: an embedding of 50257 x 768 sends 4 x (50257 + 768) elements of 38.6 M; in all some hundred times fewer bytes."""
    gpt2, where = computed_profile("gpt2", "a100"), cluster_of("a100", 4, 1, 1.0, 50.0, 1)
    found = advise(gpt2, where, standard=LENIENTLY, codecs=("powersgd:rank=4",))
    (low_rank,) = (one for one in found["candidates"] if one["kind"] == "compress")
    matrices = [tensor.shape for tensor in gpt2.tensors if tensor.shape is not None and len(tensor.shape) > 1]
    sent = sum(4 * (rows + columns) for rows, columns in matrices) + sum(
        t.numel for t in gpt2.tensors if t.shape is not None and len(t.shape) == 1
    )
    assert low_rank["ratio_fp32"] == pytest.approx(gpt2.numel / sent, rel=0.02)
    shapeless = replace(gpt2, tensors=tuple(replace(tensor, shape=None) for tensor in gpt2.tensors))
    with pytest.raises(
        UsageError, match="codec powersgd:rank=4: its payload depends on the tensors' shapes, and the profile has none of '"
    ):
        advise(shapeless, where, standard=LENIENTLY, codecs=("powersgd:rank=4",))
