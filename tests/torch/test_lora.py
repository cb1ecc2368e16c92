"""LoRA over a real job: A, whose first gradient is zero as B is, moves under PowerSGD as it does uncompressed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import for_each

pytestmark = pytest.mark.timeout(300)  # the job is the first test's set-up
OPTIMIZERS, CODECS = ("sgd", "adamw"), ("none", "powersgd")
CASES = [f"{optimizer}+{codec}" for optimizer in OPTIMIZERS for codec in CODECS]
MATRICES = ("0.a", "0.b", "2.a", "2.b")


@pytest.fixture(scope="module")
def said(make_shared_job: Callable[..., Any]) -> dict[str, list[list[str]]]:
    """Of each case, what two workers printed: four distances and a digest."""
    texts = make_shared_job(env={"PSGC_MIN_COMPRESS_BYTES": "0"}).said(*CASES, job=str(Path(__file__).parent / "job_lora.py"))
    return {case: [line.split() for text in texts for line in re.findall(rf"(?<!\S){re.escape(case)} (.+)", text)] for case in CASES}


@for_each(optimizer=OPTIMIZERS)
def test_a_and_b_move_under_powersgd_as_uncompressed_to_5_percent(said: dict[str, list[list[str]]], optimizer: str) -> None:
    (plain, _), (first, second) = said[f"{optimizer}+none"], said[f"{optimizer}+powersgd"]
    assert plain[-1] != first[-1] == second[-1], "what travels is not the same, but ranks end with the same weights"
    for name, wanted, got in zip(MATRICES, plain[:-1], first[:-1], strict=True):
        assert float(wanted) > 0.5
        assert float(got) == pytest.approx(float(wanted), rel=0.05), name
