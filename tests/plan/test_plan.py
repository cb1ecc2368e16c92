"""Plans as JSON: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.model.plan import Plan, PlannedBucket, check_fits, load_plan, read_plan

PLAIN = ("flat.all_reduce",)
PLAN = Plan(
    "m", "c",
    (
        PlannedBucket(("b", "a"), 30, 2, 0, "onebit/int8", ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")),
        PlannedBucket(("c",), 5, 1, -1, "none", PLAIN),
    ),
    {"step_ms": 1.5},
)  # fmt: skip


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    assert load_plan(str(path)) == PLAN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numel": -1}, r"buckets\[0\]: field numel is -1"),
        ({"parts": 0}, "field parts is 0"),
        ({"parts": 31}, "field parts is 31, expected no more than its 30 elements"),
        ({"numel": 10**9, "parts": 10**6}, "field parts is 1000000, expected .* 65,536 at most"),
        ({"priority": "high"}, "field priority is 'high'"),
        ({"codec": ""}, "field codec is ''"),
        ({"tensors": []}, r"field tensors is \[\]"),
        ({"tensors": "a"}, "field tensors is 'a'"),
        ({"option": ["flat.all_reduced"]}, "unknown action 'flat.all_reduced'"),
        ({"option": ["flat.all_reduce", "flat.all_reduce"]}, "'flat.all_reduce' cannot stand after flat.all_reduce"),
        ({"option": ["decomp@gpu"]}, "'decomp@gpu' cannot stand at the beginning"),
        ({"option": ["comp@gpu", "flat.all_gather.c"]}, "ends before every rank has the sum"),
        ({"option": []}, "no action ends before"),
        ({"tensors": ["c"]}, "tensor 'c' stands in two places"),
    ],
)
def test_what_is_wrong_in_a_bucket_is_named(change: dict[str, Any], said: str) -> None:
    document = PLAN.to_json()
    document["buckets"][0].update(change)
    with pytest.raises(UsageError, match=said):
        read_plan(document, "p.json")


def test_another_version_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="field version is 2, expected 1"):
        read_plan({**PLAN.to_json(), "version": 2}, "p")
    (tmp_path / "x").write_text("{")
    with pytest.raises(UsageError, match="no valid JSON"):
        load_plan(str(tmp_path / "x"))
    with pytest.raises(UsageError, match="No such file"):
        load_plan(str(tmp_path / "y"))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"a": 10, "b": 20}, "it has a tensor 'c', model m2 has none such; the plan is for another model .m. or another version"),
        ({"a": 10, "b": 21, "c": 5}, "the bucket of 'b' has 30 elements, in model m2 it has 31"),
        ({"a": 10, "b": 20, "c": 5, "d": 1}, "no bucket has tensor 'd'"),
    ],
)
def test_a_plan_for_another_model_names_the_tensor(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_fits(PLAN, sizes, "model m2")


def test_a_plan_for_this_model_fits() -> None:
    check_fits(PLAN, {"a": 10, "b": 20, "c": 5}, "model m")
