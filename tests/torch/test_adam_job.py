"""OneBitAdam and ZeroOneAdam over real jobs: processes, a server, and one bit both ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def run(make_job: Callable[..., Any]) -> Callable[..., dict[str, float]]:
    """Runs tests/jobs/adam.py with two workers and 1-bit both ways; its figures by case. The ranks' digests must agree."""

    def work(*cases: str) -> dict[str, float]:
        job = make_job(env={"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "16384"})
        workers = job.whole(*cases, job="adam.py")
        assert set(job.end().values()) == {0}, job.text()
        said = [re.findall(r"^([\w-]+) (\w{64}) (\S+)$", worker.text, re.MULTILINE) for worker in workers]
        assert said[0] == said[1] and len(said[0]) == len(cases)
        return {case: float(figure) for case, _, figure in said[0]}

    return work


def test_over_a_real_job_with_one_bit_both_reach_what_adamw_reaches(run: Callable[..., dict[str, float]]) -> None:
    loss = run("onebit", "zero-one", "adamw")
    assert max(loss["onebit"], loss["zero-one"]) < 1.1 * loss["adamw"]


def test_over_a_real_job_a_token_first_seen_after_the_warm_up_is_not_thrown_far(run: Callable[..., dict[str, float]]) -> None:
    """Sent as bare momentum, its row would reach thousands."""
    assert run("late-token")["late-token"] < 4.5
