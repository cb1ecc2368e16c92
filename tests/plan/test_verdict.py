"""Verdicts of the closed model: what is said fits the figures, and what nobody could have run is warned of."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.model.vary import Change
from psgc.plan.whatif.closed_form import Scenario, time_ms
from psgc.plan.whatif.closed_model import ClosedTimes, Question, ruled_out
from psgc.plan.whatif.pictures import picture
from psgc.plan.whatif.verdict import TRADES, gain, verdict

RESNET = Question("resnet50", None, "powersgd", 64, 10.0, 122.0, 45.0, 4, 0.01, 2.0, 0.0)


def answer(**change: object) -> dict[str, Any]:
    return verdict(ClosedTimes(replace(RESNET, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth_gbps": 1.0}, "pays: 88% less time, +-1%; it would with up to"),
        ({}, "on 64 GPUs is a tie: 1% slower, +-6%; measure before you choose"),
        ({"bandwidth_gbps": 40.0}, "does not pay: 20% slower, +-4%; it must encode and decode in under 17.2 ms, and takes 45"),
        ({"bandwidth_gbps": 40.0, "method": "signsgd", "encode_ms": 20.0}, "would not if it encoded in no time; leave compression off"),
    ],
)
def test_the_sentence_says_what_the_figures_do(change: dict[str, object], words: str) -> None:
    found = answer(**change)
    assert words in found["verdict"]
    sync, method = ClosedTimes(replace(RESNET, **change)).scenarios  # type: ignore[arg-type]
    assert found["gain"] == pytest.approx(1 - time_ms(method) / time_ms(sync))
    assert found["encode_budget_ms"] - found["codec_ms"] == pytest.approx(time_ms(sync) - time_ms(method))


def test_nothing_is_gained_over_a_step_that_takes_no_time() -> None:
    for method in ("powersgd", "signsgd", "sync_compressed"):
        found = answer(backward_ms=0.0, gpus=1, method=method)
        assert (found["sync_ms"], found["gain"], found["gain_over_bf16"]) == (0, 0, 0)
        assert {one["gain"] for one in (*found["trade_off"], *found["faster_compute"])} == {0}
        assert "does not pay: a step takes no time without it" in found["verdict"]


def test_bf16_gradients_are_set_beside_fp32_with_both_numbers() -> None:
    """ResNet-50's 97.5 MiB are 4 buckets of 25 MiB and a rest; bf16 sends half of each."""
    found = answer(bandwidth_gbps=1.0)
    sync, method = ClosedTimes(replace(RESNET, bandwidth_gbps=1.0)).scenarios
    half = time_ms(replace(sync, method="sync_compressed", ratio=2.0))
    assert found["bf16_ms"] == pytest.approx(half) == pytest.approx(found["sync_ms"] / 2, rel=0.01)
    assert found["gain_over_bf16"] == pytest.approx(1 - time_ms(method) / half)
    assert f"; bf16 gradients take {half:.3g} ms uncompressed, and powersgd saves 7" in found["verdict"]
    assert f"{found['method_ms']:.3g} ms in place of {found['sync_ms']:,.0f} uncompressed" in found["verdict"]


def test_somebody_whose_gain_is_all_from_bf16_is_told_so() -> None:
    """Half the bytes, encoded for nothing, is what bf16 is."""
    found = answer(method="sync_compressed", ratio=2.0, encode_ms=0.0, bandwidth_gbps=1.0)
    assert found["gain"] > found["margin"] and found["gain_over_bf16"] == pytest.approx(0, abs=1e-9)
    assert f"in place of {found['sync_ms']:,.0f}" in found["verdict"]
    assert f"; bf16 gradients take {found['bf16_ms']:.3g} ms uncompressed, so all of the gain is bf16's" in found["verdict"]


def test_faster_computers_make_compression_pay() -> None:
    found = answer()
    gains = [one["gain"] for one in found["faster_compute"]]
    assert found["gain"] < gains[0] < gains[1]
    sync, method = ClosedTimes(RESNET).scenarios
    assert gains[0] == pytest.approx(1 - time_ms(method.with_faster_compute(2)) / time_ms(sync.with_faster_compute(2)))


@pytest.mark.parametrize("method", ["powersgd", "mstopk", "signsgd", "sync_compressed"])
def test_a_codec_that_were_faster_or_smaller_would_gain_more(method: str) -> None:
    found = answer(method=method, bandwidth_gbps=2.0)
    gains = {(one["codec_factor"], one["payload_factor"]): one["gain"] for one in found["trade_off"]}
    assert gains[1.0, 1.0] == pytest.approx(found["gain"])
    for factor, larger in itertools.pairwise(TRADES):
        assert gains[1.0, factor] > gains[1.0, larger]
        assert gains[factor, 1.0] >= gains[larger, 1.0]


def test_other_bandwidths_are_the_scenarios_at_them() -> None:
    sync, method = ClosedTimes(RESNET).scenarios
    assert gain(ClosedTimes(RESNET), Change(link=0.5)) == pytest.approx(1 - time_ms(method.at(5)) / time_ms(sync.at(5)))


def test_a_latency_that_nobody_runs_with_is_warned_of_with_the_arithmetic() -> None:
    assert answer()["warnings"] == []
    (warning,) = answer(alpha_us=1000.0)["warnings"]
    assert "latency alone is 504 ms: 2 x 1000 us x 63 messages x 4 buckets" in warning


def test_a_latency_that_the_measured_time_rules_out_is_warned_of_with_the_most_it_can_be() -> None:
    # ResNet-101 on 96 GPUs at 10 Gbit/s took 262 ms (Agarwal et al. 2022, section 1), which section 2.2's 0.5 to 1 ms cannot be
    published = Scenario("sync", 186.7, 96, 10, grad_bytes=178196640, alpha_us=500)
    (warning,) = ruled_out(published, 262)
    assert "a latency of 500 us is ruled out by the measured 262 ms: one of 7 buckets waits 2 x 500 us x 95 messages = 95 ms" in warning
    most = float(warning.partition("it is ")[2].split()[0])
    assert time_ms(replace(published, alpha_us=most).at(1e12)) == pytest.approx(262, rel=0.01)
    assert ruled_out(replace(published, alpha_us=0), 262) == []


def test_a_measured_time_that_is_another_set_ups_is_said_to_be() -> None:
    (short,) = answer(measured_ms=100.0)["warnings"]
    assert short == "the measured 100 ms are less than backward alone takes (122 ms)"
    (long,) = answer(measured_ms=400.0)["warnings"]
    assert "where 400 ms were measured: a verdict from these inputs is about another set-up" in long
    assert answer(measured_ms=ClosedTimes(RESNET).sync_ms(Change()))["warnings"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "give --model or --grad-mib"),
        ({"model": None, "grad_mib": 100.0}, "powersgd needs --model"),
        ({"method": "zip"}, "unknown method 'zip'"),
        ({"method": "sync"}, "is what others are compared with"),
        ({"gpus": 0}, "gpus is 0"),
        ({"rank": 0}, "--rank 0: expected at least 1"),
        ({"bandwidth_gbps": -1.0}, "bandwidth_gbps is -1.0"),
    ],
)
def test_what_cannot_be_answered_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        answer(**change)
    assert words in str(caught.value)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = ClosedTimes(replace(RESNET, method="mstopk"))
    picture(times, verdict(times), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match="--plot"):
        picture(times, verdict(times), tmp_path / "no" / "such" / "folder.png")
