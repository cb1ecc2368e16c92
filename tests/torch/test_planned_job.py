"""Plans over a real scheduler, server and workers: mixed codecs, cuts and priorities; and the layout of a job, run as a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.planfile.reading import load_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN

JOB = str(Path(__file__).parent / "job_planned.py")
SIZES = {"0.weight": 19200, "0.bias": 300, "2.weight": 60000, "2.bias": 200, "4.weight": 20000, "4.bias": 100}
# in no order of readiness; fused, cut unevenly, and each codec of another kind
MIXED: tuple[tuple[tuple[str, ...], int, int, str], ...] = (
    (("0.bias", "4.weight"), 3, -7, "none"),
    (("2.weight",), 4, 40, "int8"),
    (("4.bias", "0.weight"), 2, 5, "onebit/int8"),
    (("2.bias",), 1, 40, "none"),
)


def bucket(tensors: tuple[str, ...], parts: int, priority: int, codec: str) -> dict[str, Any]:
    return {
        "tensors": list(tensors), "numel": sum(SIZES[name] for name in tensors), "parts": parts, "priority": priority, "codec": codec,
        "option": list(PLAIN if codec == "none" else ENCODED),
    }  # fmt: skip


@pytest.fixture
def run(make_job: Callable[..., Any]) -> Callable[..., dict[str, list[str]]]:
    """Of each thing that the two workers print, its digests."""

    def digests(**env: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for text in make_job(env=env).said(job=JOB):
            for what, digest in re.findall(r"(weights|gradient \S+) (\w+)$", text, re.MULTILINE):
                found.setdefault(what, []).append(digest)
        return found

    return digests


@pytest.mark.timeout(500)
def test_a_plan_of_mixed_codecs_cuts_and_priorities_trains_and_its_plain_sums_are_the_plain_ones(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "model": "m", "cluster": "", "buckets": [bucket(*each) for each in MIXED], "prediction": {}}))
    default = run()
    planned = run(PSGC_PLAN=str(path), PSGC_LAYOUT_OUT=str(tmp_path / "used"))
    assert planned.keys() == default.keys()
    assert all(first == second for first, second in planned.values())
    same = {what.removeprefix("gradient ") for what in planned if planned[what] == default[what]}
    assert same == {"0.bias", "4.weight", "2.bias"}, "those without a codec, and no others"
    used = {tuple(b["tensors"]): b for b in load_plan(str(tmp_path / "used")).to_json()["buckets"]}
    for each in MIXED:
        assert used[each[0]] == bucket(*each)


@pytest.mark.timeout(500)
def test_the_layout_of_a_job_run_as_a_plan_gives_the_same_layout_and_sums(run: Callable[..., Any], tmp_path: Path) -> None:
    small = {"PSGC_PART_BYTES": "65536", "PSGC_FUSE_BYTES": "100000", "PSGC_MIN_COMPRESS_BYTES": "2000"}
    first = run(PSGC_CODEC="topk:k=0.02", PSGC_LAYOUT_OUT=str(tmp_path / "first"), **small)
    again = run(PSGC_PLAN=str(tmp_path / "first"), PSGC_LAYOUT_OUT=str(tmp_path / "again"))
    assert again == first
    assert (tmp_path / "again").read_text() == (tmp_path / "first").read_text()
    assert {b.codec for b in load_plan(str(tmp_path / "first")).buckets} == {"topk:k=0.02"}
