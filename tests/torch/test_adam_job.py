"""OneBitAdam and ZeroOneAdam over real jobs: processes, a server, and one bit both ways."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def test_over_a_real_job_with_one_bit_both_reach_what_adamw_reaches(make_job: Callable[..., Any]) -> None:
    """And a token first seen after the warm-up is not thrown far: sent as bare momentum, its row would reach thousands."""
    job, cases = make_job(env={"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "16384"}), ("onebit", "zero-one", "adamw", "late-token")
    workers = job.whole(*cases, job="adam.py")
    assert set(job.end().values()) == {0}, job.text()
    said = [re.findall(r"^([\w-]+) (\w{64}) (\S+)$", worker.text, re.MULTILINE) for worker in workers]
    assert said[0] == said[1] and len(said[0]) == len(cases)
    figures = {case: float(figure) for case, _, figure in said[0]}
    assert max(figures["onebit"], figures["zero-one"]) < 1.1 * figures["adamw"]
    assert figures["late-token"] < 4.5
