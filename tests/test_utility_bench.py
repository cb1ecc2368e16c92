"""benchmarks/utility.py: what is asked of ``psgc whatif``, and when a verdict counts as right."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.inputs.cluster import Link
from psgc.plan.inputs.profile import Profile, TensorProfile
from tests.benchmark_scripts import load

utility = load("utility")
# 4 MB of gradient after 100 ms of backward; one tensor of 1000 x 1000
PROFILE = Profile(
    "one", (TensorProfile("a", 1_000_000, 0.0), TensorProfile("b", 1_000, 100_000.0)), forward_us=50_000.0, links={"loopback": Link(20.0, 0.0)}
)  # fmt: skip


def row(predicted: float, measured: float, low: float, high: float, margin: float = 0.05) -> Any:
    return utility.Row("1 Gbit/s", "ddp fp16", 100.0, 100.0, predicted, margin, measured, low, high, "")


def test_a_verdict_is_judged_only_beyond_the_noise_and_its_own_margin() -> None:
    assert row(0.3, 0.2, 0.1, 0.3).judged == "right"
    assert row(-0.3, -0.2, -0.3, -0.1).judged == "right"
    assert row(0.3, -0.2, -0.3, -0.1).judged == "wrong"
    assert row(-0.3, 0.2, 0.1, 0.3).judged == "wrong"
    assert row(0.3, 0.0, -0.1, 0.1).judged == "within the noise"
    assert row(0.04, -0.2, -0.3, -0.1).judged == "called a tie"


def test_a_link_that_is_done_is_not_measured_again_and_one_that_was_cut_off_is(tmp_path: Path) -> None:
    whole = [replace(row(0.3, 0.2, 0.1, 0.3), system=system) for system in utility.BASELINE]
    lines = [json.dumps({**asdict(one), "judged": one.judged}) for one in (*whole, *(replace(one, link="unlimited") for one in whole[:-1]))]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + '\n{"link": "unlim')
    assert utility.done_before(tmp_path / "rows.jsonl") == {utility.link_title(1.0): whole}
    assert utility.done_before(tmp_path / "none.jsonl") == utility.done_before(None) == {}


def test_the_interval_holds_the_gain_and_is_narrow_where_iterations_are_alike() -> None:
    gain, low, high = utility.interval([100.0, 101.0, 99.0] * 10, [50.0, 50.5, 49.5] * 10)
    assert gain == pytest.approx(0.5)
    assert 0.48 < low <= gain <= high < 0.52
    _, low, high = utility.interval([50.0, 150.0] * 10, [60.0, 140.0] * 10)
    assert low < 0 < high


def test_fp16_halves_what_the_closed_model_sends(tmp_path: Path) -> None:
    """A ring of two sends each byte once: 4.004 MB over 1 Gbit/s are 32.032 ms, half of that 16.016; backward is 100 ms, a bucket is never hidden,
    and the casts' 4 ms are part of it."""
    known = utility.Known(PROFILE, tmp_path / "none.json", {"ddp fp16": 4.0})
    gain, margin, told = utility.predict_hook("ddp fp16", 1.0, known, tmp_path)
    without, cast = 107 + 32.032, 107 + 4 + 16.016
    assert gain == pytest.approx((without - cast) / (without + 50))
    assert 0.005 <= margin < 0.03
    assert told == "139 ms without, 127 ms with"


def test_powersgd_sends_its_factors_and_encodes_after_backward(tmp_path: Path) -> None:
    """No tensor here has a shape of two dimensions, so all travels as it is: as long as without, but not overlapped, and encoded."""
    known = utility.Known(PROFILE, tmp_path / "none.json", {"ddp powersgd": 30.0})
    gain, _, _ = utility.predict_hook("ddp powersgd", 1.0, known, tmp_path)
    without, encoded = 107 + 32.032, 100 + 30 + 32.032
    assert gain == pytest.approx((without - encoded) / (without + 50))
