"""Training over a real scheduler, servers and workers: every rank ends with the same weights, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import for_each

pytestmark = pytest.mark.timeout(300)  # the job is the first test's set-up
CODECS = ("none", "bf16", "int8", "onebit", "topk:k=0.01", "onebit/int8", "powersgd")
CASES = [f"{codec}+{how}" for codec in CODECS for how in ("plain", "branches", "amp")]
CROSSED = ["none+barrier", "none+crossing"]


@pytest.fixture(scope="module")
def output(make_shared_job: Callable[..., Any]) -> str:
    """Of two workers that train every case."""
    env = {"PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000"}
    return "\n".join(make_shared_job(servers=2, env=env).said(*CASES, *CROSSED, job=str(Path(__file__).parent / "job_train.py")))


@pytest.fixture(scope="module")
def digests(output: str) -> dict[str, list[str]]:
    """Of each case, the digests that two workers printed."""
    return {case: re.findall(rf"(?<!\S){re.escape(case)} (\w+)", output) for case in CASES}


@for_each(case=CASES)
def test_ranks_end_with_the_same_weights(digests: dict[str, list[str]], case: str) -> None:
    first, second = digests[case]
    assert first == second


def test_losses_and_weights_without_a_barrier_are_those_with_one_bit_for_bit(output: str) -> None:
    digests = [digest for case in CROSSED for digest in re.findall(rf"(?<!\S){re.escape(case)} (\w+)", output)]
    assert len(digests) == 4 and len(set(digests)) == 1


def test_codecs_make_a_difference(digests: dict[str, list[str]]) -> None:
    assert len({digests[f"{codec}+plain"][0] for codec in CODECS}) == len(CODECS)


@for_each(
    call_said=[
        (
            "rank after shutdown",
            r"psgc has been shut down in this process, which has left its job; call psgc\.torch\.init\(\) to join the next one",
        ),
        ("forked init", r"init\(\) in a process forked from one that had joined the job: only that one is a member; .*"),
        ("forked rank", r"psgc is not initialized in this process; call psgc\.torch\.init\(\) first"),
    ]
)
def test_a_job_is_joined_by_one_process(output: str, call_said: tuple[str, str]) -> None:
    call, said = call_said
    lines = [line.removeprefix(f"{call}: ") for line in output.splitlines() if line.startswith(f"{call}: ")]
    assert len(lines) == 2
    assert all(re.fullmatch(said, line) for line in lines), lines
