"""Training over a real scheduler, servers and workers: every rank ends with the same weights, bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # the job is the first test's set-up
CODECS = ("none", "bf16", "int8", "onebit", "topk:k=0.01", "onebit/int8", "powersgd")
CASES = [f"{codec}+{how}" for codec in CODECS for how in ("plain", "branches", "amp")]


@pytest.fixture(scope="module")
def digests() -> dict[str, list[str]]:
    """Of each case, the digests that two workers printed."""
    env = {**os.environ, "PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000"}
    command = [sys.executable, "-m", "psgc.launch", "run", "--workers", "2", "--servers", "2", "--",
               sys.executable, str(Path(__file__).parent / "job_train.py"), *CASES]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {case: re.findall(rf"(?<!\S){re.escape(case)} (\w+)", done.stdout) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_the_same_weights(digests: dict[str, list[str]], case: str) -> None:
    first, second = digests[case]
    assert first == second


def test_codecs_make_a_difference(digests: dict[str, list[str]]) -> None:
    assert len({digests[f"{codec}+plain"][0] for codec in CODECS}) == len(CODECS)
