"""From a profile to a run: a real job runs a plan made with --runnable as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
    planning = psgc("plan", "--profile", str(profile), "--cluster", str(cluster), "--codec", "int8", *only, "-o", str(plan), "--json")
    assert planning.returncode == 0, planning.stderr
    assert json.loads(planning.stdout)["runnable"] is True
    planned = load_plan(str(plan))
    assert all(over_groups(bucket.option) or (not among_workers and bucket.option in OVER_SERVERS) for bucket in planned.buckets)
    assert {bucket.codec for bucket in planned.buckets} == {"int8"}, "over so slow a link all is worth encoding"
    running = ("run", "--workers", "2", "--plan", str(plan), "--layout-out", str(used), "--", sys.executable, str(JOBS / "tiny.py"), "3")
    status, _, err = launched.end(launched.psgc(*running))
    assert status == 0, err
    shape = [(bucket.tensors, bucket.parts, bucket.codec, bucket.option, bucket.part_numel) for bucket in planned.buckets]
    assert [
        (bucket.tensors, bucket.parts, bucket.codec, bucket.option, bucket.part_numel) for bucket in load_plan(str(used)).buckets
    ] == shape


def traced(path: Path) -> None:
    """A trace of torch's profiler, of the job "tiny" trained without psgc."""
    model = nn.Sequential(nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    profiler.export_chrome_trace(str(path))


@pytest.mark.timeout(300)
def test_a_plan_from_a_trace_runs_with_its_tensors_matched_by_shape(launched: Any, tmp_path: Path) -> None:
    trace, profile, cluster, plan, used = (
        tmp_path / name for name in ("trace.json", "profile.json", "cluster.toml", "plan.json", "used.json")
    )
    traced(trace)
    cluster.write_text(CLUSTER)
    for step in (
        ("profile", "--trace", str(trace), "--no-codecs", "-o", str(profile)),
        ("plan", "--profile", str(profile), "--cluster", str(cluster), "--codec", "int8", "--force", "--runnable", "-o", str(plan)),
    ):
        done = psgc(*step)
        assert done.returncode == 0, done.stderr
    planned = load_plan(str(plan))
    assert {name for bucket in planned.buckets for name in bucket.tensors} == {"4000x8.0", "4000.0", "1x4000.0"}
    running = ("run", "--workers", "2", "--plan", str(plan), "--layout-out", str(used), "--", sys.executable, str(JOBS / "tiny.py"), "3")
    status, _, err = launched.end(launched.psgc(*running))
    assert status == 0, err
    names = {"4000x8.0": "0.weight", "4000.0": "0.bias", "1x4000.0": "2.weight"}
    shape = [(tuple(names[name] for name in b.tensors), b.parts, b.codec, b.option, b.part_numel) for b in planned.buckets]
    assert [(b.tensors, b.parts, b.codec, b.option, b.part_numel) for b in load_plan(str(used)).buckets] == shape
