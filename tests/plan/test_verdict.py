"""Verdicts: what is said fits the figures, and what nobody could run is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psgc.errors import UsageError
from psgc.plan.utility import time_ms
from psgc.plan.verdict import Question, picture, scenarios, verdict

RESNET = Question("resnet50", None, "powersgd", 64, 10.0, 122.0, 45.0, 4, 0.01, 2.0, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth_gbps": 1.0}, "pays: 88% less time"),
        ({}, "a tie: 1% slower, +-6%; measure before you choose"),
        ({"bandwidth_gbps": 40.0}, "does not pay: 20% slower, +-4%; it must encode and decode in under 17.2 ms, and takes 45"),
        ({"bandwidth_gbps": 40.0, "method": "signsgd", "encode_ms": 20.0}, "would not if it encoded in no time; leave compression off"),
    ],
)
def test_the_sentence_says_what_the_figures_do(change: dict[str, object], words: str) -> None:
    question = replace(RESNET, **change)  # type: ignore[arg-type]
    found = verdict(question)
    assert words in found["verdict"]
    sync, method = scenarios(question)
    assert found["gain"] == pytest.approx(1 - time_ms(method) / time_ms(sync))
    assert found["encode_budget_ms"] - question.encode_ms == pytest.approx(time_ms(sync) - time_ms(method))


def test_a_latency_that_nobody_runs_with_is_warned_of_with_the_arithmetic() -> None:
    assert verdict(RESNET)["warnings"] == []
    (warning,) = verdict(replace(RESNET, alpha_us=1000.0))["warnings"]
    assert "latency alone is 504 ms: 2 x 1000 us x 63 messages x 4 buckets" in warning


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
        verdict(replace(RESNET, **change))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture(replace(RESNET, method="mstopk"), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UsageError, match="--plot"):
        picture(RESNET, tmp_path / "no" / "such" / "folder.png")
