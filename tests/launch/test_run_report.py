"""A job logs how gradients are sent, and at its end how long that took; it logs neither if it sent nothing or failed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parent.parent / "jobs" / "trains.py"


def run_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "psgc.run" in line]


@pytest.mark.timeout(180)
def test_rank_0_says_once_how_gradients_travel_and_at_the_end_what_they_took(launched: Any) -> None:
    status, _, err = launched.end(
        launched.psgc("run", "--codec", "int8", "--", sys.executable, str(JOB), "--steps", "40", "--slow-rank", "1")
    )
    assert status == 0, err
    start, end = run_lines(err)
    assert re.fullmatch(
        r"\[worker 0\] .* INFO psgc\.run: optimizer0: 2 tensors \(65,792 elements\) in 1 bucket, codec int8; each worker sends and receives "
        r"134 kB a step, 3\.9x less than fp32, 2\.0x less than bf16", start,
    )  # fmt: skip
    said = re.fullmatch(
        r"\[worker 0\] .* INFO psgc\.run: 40 steps, [\d.]+ m?s each \(median\); gradients took 5\.35 MB instead of 21\.1 MB uncompressed "
        r"\(saved 75 %\); rank 0 waited (.*)", end,
    )  # fmt: skip
    assert said, end
    assert "slower ranks (rank 1 was the slowest)" in said[1], "rank 1 sleeps in every step"


@pytest.mark.timeout(180)
def test_after_a_failure_nothing_is_summed_up(launched: Any) -> None:
    status, _, err = launched.end(launched.psgc("run", "--", sys.executable, str(JOB), "--steps", "5", "--fail-at", "3"))
    assert status == 1
    assert len(run_lines(err)) == 1, err
    *before, last = err.splitlines()
    assert re.fullmatch(r"psgc run: rank 0 ended with ValueError: as the test wants it \(tests/jobs/trains\.py:\d+\)", last), err
    told = [line for line in before if ": as the test wants it" in line]
    assert told == ["[worker 0] ValueError: as the test wants it"], "its consequences on others are not told"


def test_what_is_overridden_or_synchronises_nothing_is_told_once_and_at_log_level_error_nothing_is(launched: Any) -> None:
    for steps, level in (("0", "warning"), ("3", "error")):
        script = (sys.executable, str(JOB), "--steps", steps, "--compression", "none")
        status, _, err = launched.end(launched.psgc("run", "--codec", "int8", "--", *script, PSGC_LOG_LEVEL=level))
        assert (status, run_lines(err)) == (0, []), err
        warned = [line.partition("psgc.torch.session.without_effect: ")[2] for line in err.splitlines() if "without_effect" in line]
        assert warned == ([] if level == "error" else [
            "PSGC_CODEC=int8 (--codec) has no effect on DistributedOptimizer: the script gives it 'none'; leave that out to use the setting",
            "rank 0: the script synchronised nothing: no gradient was sent, and each rank trained by itself; wrap its optimizer in "
            "psgc.torch.DistributedOptimizer, or its model by psgc.torch.ddp_hook",
        ]), err  # fmt: skip
