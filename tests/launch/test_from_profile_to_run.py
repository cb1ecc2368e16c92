"""From a profile to a run: a real job runs a plan made with --runnable as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.plan.model.options import OVER_SERVERS, over_groups
from psgc.plan.planfile.reading import load_plan
from tests.plan.commands import psgc

JOBS = Path(__file__).parents[1] / "jobs"
READY_US = {"2.weight": (4000, 0.0), "0.weight": (32000, 900.0), "0.bias": (4000, 1000.0)}  # of the job "tiny": elements, and when
CURVE = {"numel": [4096, 65536], "encode_us": [5, 60], "decode_us": [5, 60]}
PROFILE = {
    "version": 1, "model": "tiny", "tensors": [{"name": name, "numel": n, "ready_us": at} for name, (n, at) in READY_US.items()],
    "codecs": {"int8": {"cpu": CURVE}},
}  # fmt: skip
CLUSTER = "nodes = 2\ngpus_per_node = 1\nservers = 1\nintra = {gbps = 100, latency_us = 5}\ninter = {gbps = 0.1, latency_us = 100}\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("among_workers", [False, True])
def test_a_plan_that_is_to_be_run_is_run_as_it_stands(launched: Any, tmp_path: Path, among_workers: bool) -> None:
    profile, cluster, plan, used, constraints = (
        tmp_path / name for name in ("profile.json", "cluster.toml", "plan.json", "used.json", "c.toml")
    )
    profile.write_text(json.dumps(PROFILE))
    cluster.write_text(CLUSTER.replace("servers = 1\n", "") if among_workers else CLUSTER)
    constraints.write_text('devices = ["cpu"]\n')
    only = ("--constraints", str(constraints)) if among_workers else ("--runnable",)
    planning = psgc("plan", "--profile", str(profile), "--cluster", str(cluster), *only, "-o", str(plan), "--json")
    assert planning.returncode == 0, planning.stderr
    assert json.loads(planning.stdout)["runnable"] is True
    planned = load_plan(str(plan))
    assert all(over_groups(bucket.option) if among_workers else bucket.option in OVER_SERVERS for bucket in planned.buckets)
    assert {bucket.codec for bucket in planned.buckets} == {"int8"}, "over so slow a link all is worth encoding"
    running = ("run", "--workers", "2", "--plan", str(plan), "--layout-out", str(used), "--", sys.executable, str(JOBS / "tiny.py"), "3")
    status, _, err = launched.end(launched.psgc(*running))
    assert status == 0, err
    shape = [(bucket.tensors, bucket.parts, bucket.codec, bucket.option, bucket.part_numel) for bucket in planned.buckets]
    assert [
        (bucket.tensors, bucket.parts, bucket.codec, bucket.option, bucket.part_numel) for bucket in load_plan(str(used)).buckets
    ] == shape
