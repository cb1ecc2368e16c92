"""``psgc verify`` with a real job: its plan, plain codec, bf16 and none take turns in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile, load_profile
from psgc.plan.model.options import OVER_SERVERS
from psgc.plan.model.plan import JobShape, Plan, PlannedBucket
from tests.preloaded import run_preloaded

JOB = Path(__file__).parents[1] / "jobs" / "tiny.py"
HANG_S = 240.0  # a busy machine may take long to start processes
NUMEL = {"2.weight": 4_000, "0.weight": 32_000, "0.bias": 4_000}


def files(folder: Path) -> tuple[Path, Path]:
    """A profile of the job, and a plan of it: two buckets, one of them encoded."""
    curve = CostCurve((1e3, 1e6), (10.0, 1e3), (10.0, 1e3))
    tensors = tuple(TensorProfile(name, numel, 100.0 * place) for place, (name, numel) in enumerate(NUMEL.items()))
    profile = Profile(
        "tiny", tensors, forward_us=500.0, device="cpu", codecs={name: {"cpu": curve, "server": curve} for name in ("none", "bf16", "int8")},
        carriers={name: CarrierCosts(100.0, 30.0) for name in ("tcp", "shm", "sockets", "memory")}, compute_threads=1,
    )  # fmt: skip
    cluster = Cluster("here", 2, 1, Link(20, 50), Link(20, 50), servers=1, cores=os.cpu_count() or 1, one_machine=True)
    buckets = (
        PlannedBucket(("2.weight",), 4_000, 1, 0, "none", OVER_SERVERS[0]),
        PlannedBucket(("0.weight", "0.bias"), 36_000, 2, -1, "int8", OVER_SERVERS[1]),
    )
    paths = folder / "profile.json", folder / "plan.json"
    for path, document in zip(paths, (profile, Plan("tiny", "here", buckets, machines=cluster, shape=JobShape(2, 1))), strict=True):
        path.write_text(json.dumps(document.to_json()))
    return paths


def test_a_plan_is_measured_in_its_job_beside_its_plain_codec_bf16_and_none_and_the_profile_is_corrected(tmp_path: Path) -> None:
    profile, plan = files(tmp_path)
    page = tmp_path / "page.html"
    asked = (
        "verify",
        str(plan),
        "--profile",
        str(profile),
        "--steps",
        "10",
        "--report",
        str(page),
        "--json",
        "--",
        sys.executable,
        str(JOB),
        "1000000000",
    )
    done = run_preloaded("-m", "psgc.launch", *asked, env=dict(os.environ), timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["candidates"]] == ["plan", "int8", "bf16", "none"]
    for one in found["candidates"]:
        assert len(one["windows_ms"]) == 2 and min(one["windows_ms"]) > 0 and one["predicted_ms"] > 0
        lanes = {lane["lane"]: lane["measured_ms"] for lane in one["lanes"]}
        assert lanes["compute"] > 0 and lanes["cpu"] > 0 and lanes["inter-send"] > 0, "the job's timelines tell of lanes"
        assert f"<h3>{one['name']}</h3>" in page.read_text() and f"{one['measured_ms']:,.1f}" in page.read_text()
    correction = load_profile(str(profile)).correction
    assert correction is not None and correction.cluster == "here"
    assert [step["name"] for step in correction.steps] == ["plan", "int8", "bf16", "none"]


def test_a_job_that_ends_too_soon_is_a_failure_that_says_so_and_leaves_the_profile_alone(tmp_path: Path) -> None:
    profile, plan = files(tmp_path)
    before = profile.read_text()
    asked = ("verify", str(plan), "--profile", str(profile), "--", sys.executable, str(JOB), "4")
    done = run_preloaded("-m", "psgc.launch", *asked, env=dict(os.environ), timeout=HANG_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("psgc verify: the job ended before it was measured: let it run for longer")
    assert profile.read_text() == before
