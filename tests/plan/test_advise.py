"""Advice: the right regime on the right link, a ladder that is climbed only for what it saves, and words that fit the figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.inputs.estimates import cluster_of
from psgc.plan.inputs.profile import CostCurve, computed_profile
from psgc.plan.model.quality import is_sound
from psgc.plan.whatif.advise import advise, climb, gain_over
from psgc.plan.whatif.candidates import CORNERS, Candidate, Corner, considered

LLAMA = computed_profile("llama-8b", "h100")  # 8192 tokens


def advice(gbps: float, nodes: int = 8, **options: Any) -> dict[str, Any]:
    return advise(LLAMA, cluster_of("h100", nodes, 8, gbps, 20.0), memory_gbps=3350.0, **options)


def rung(kind: str, us: float, spread: float = 0.0) -> Candidate:
    """Takes ``us``, and more or less of it where a codec is slow or fast."""

    def iteration_us(corner: Corner) -> float:
        return us * (1 + spread * corner.codec)

    return Candidate(kind, kind, 4.0, True, "", iteration_us, 1.0)


@pytest.mark.parametrize(
    ("gbps", "verdict", "choice"),
    [(3200, "none", "none"), (400, "bf16", "bf16"), (100, "compress", "int4"), (10, "infrequent", "local-300"), (1, "infrequent", "local-500")],
)  # fmt: skip
def test_each_link_has_its_regime(gbps: float, verdict: str, choice: str) -> None:
    found = advice(gbps)
    assert (found["verdict"], found["choice"]) == (verdict, choice)
    assert found["gain"] >= 0
    assert found["needed_ratio_over_bf16"] == pytest.approx(max(1, 3.2e6 / 8192 / gbps), rel=0.05)


def test_candidates_are_of_all_four_kinds_and_add_up() -> None:
    found = advice(25)
    kinds = [one["kind"] for one in found["candidates"]]
    assert kinds == ["none", "bf16", *["compress"] * 4, "infrequent"]
    none, bf16 = found["candidates"][:2]
    for one in found["candidates"]:
        assert one["gain"] == pytest.approx(1 - one["iteration_ms"] / none["iteration_ms"])
        assert one["gain_over_bf16"] == pytest.approx(1 - one["iteration_ms"] / bf16["iteration_ms"])
        assert one["ratio_fp32"] == pytest.approx(2 * one["ratio_bf16"])
        assert one["margin"] >= 0
    chosen = next(one for one in found["candidates"] if one["name"] == found["choice"])
    assert (found["gain"], found["margin"]) == (chosen["gain"], chosen["margin"])


def test_what_psgc_does_not_carry_comes_with_what_it_does() -> None:
    found = advice(10)
    assert [one["name"] for one in found["candidates"] if not one["carried"]] == [found["choice"]]
    assert found["best_that_psgc_carries"] == "int4"
    assert "psgc carries no local steps yet; of what it carries take int4" in found["why"]


def test_codecs_that_cost_quality_under_adam_are_advised_under_sgd_alone() -> None:
    assert is_sound("int8/onebit", adam=False)
    assert not is_sound("int8/onebit", adam=True)
    assert is_sound("int4:rotate=1", adam=True)
    under_sgd = advice(25, adam=False)
    assert under_sgd["verdict"] == "compress"
    assert under_sgd["choice"] == "onebit"
    assert advice(25)["best_that_psgc_carries"] == "int4"


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
    measured = replace(LLAMA, codecs={"int8": {"gpu": CostCurve((1.0, 2.0**30), (20.0, 1e4), (10.0, 5e3))}})
    found = advise(measured, cluster_of("h100", 8, 8, 100.0, 20.0), memory_gbps=3350.0)
    assert {one["name"]: one["times"] for one in found["candidates"] if one["kind"] == "compress"} == {
        "int8": "measured", "int4": "estimated", "onebit": "estimated", "topk": "estimated",
    }  # fmt: skip
    assert any("codec times of int4, onebit, topk are estimates: bytes moved at 70% of the 3350 GB/s" in note for note in found["notes"])


def test_codecs_without_times_are_left_out_and_named() -> None:
    found = advise(LLAMA, cluster_of("h100", 8, 8, 100.0, 20.0))
    assert [one["name"] for one in found["candidates"]] == ["none", "bf16", "local-100"]
    assert any(note.startswith("left out: int8, int4, onebit, topk, without times") for note in found["notes"])
    with pytest.raises(UsageError, match="codec int8: the profile has no times for it"):
        advise(LLAMA, cluster_of("h100", 8, 8, 100.0, 20.0), codecs=["int8"])


def test_the_profiles_own_codecs_are_looked_at_too_but_for_those_that_are_not_psgcs() -> None:
    assert considered(computed_profile("gpt2", "v100")) == ("int8", "int4", "onebit", "topk", "randomk")


def test_a_gain_is_taken_in_one_corner_at_a_time() -> None:
    found = gain_over(rung("compress", 80, 0.1), rung("bf16", 100))
    assert found.gain == pytest.approx(0.2)
    assert found.margin == pytest.approx(0.08)
    assert str(found) == "20% +-8%"
    assert gain_over(rung("compress", 80, 0.1), rung("bf16", 100, 0.1)).margin == pytest.approx(0)
    assert {corner.codec for corner in CORNERS} == {-1, 1}


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
