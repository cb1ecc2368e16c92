"""The verbs that ask, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def psgc(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "psgc.launch", *arguments], capture_output=True, text=True, check=False)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_options_are_counted_and_listed() -> None:
    found = json.loads(psgc("options", "--json").stdout)
    assert {key: found[key] for key in ("count", "gpu_only", "uncompressed")} == {"count": 4341, "gpu_only": 174, "uncompressed": 9}
    assert len({tuple(option) for option in found["options"]}) == 4341
    assert json.loads(psgc("options", "--gpu-only", "--json").stdout)["count"] == 174
    assert "flat.push  flat.pull" in psgc("options", "--most-encodes", "0", "--servers").stdout


def test_a_question_gets_a_verdict() -> None:
    command = ("whatif", "--model", "resnet50", "--method", "powersgd", "--backward-ms", "122", "--encode-ms", "45", "--bandwidth", "1")
    done = psgc(*command)
    assert done.returncode == 0, done.stderr
    assert "pays" in done.stdout
    assert json.loads(psgc(*command, "--json").stdout)["gain"] > 0.8


def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"cases": [{"id": "A7", "quantity": "time_ms", "inputs": {"run": {"method": "sync"}}, "expect": {}}]}')
    for arguments, words in (
        (("whatif", "--cases", str(bad)), "case A7: field inputs.run.t_backward_ms: missing"),
        (("whatif", "--cases", str(tmp_path / "none.json")), "No such file"),
        (("whatif", "--model", "resnet50"), "--backward-ms is missing"),
        (("options", "--most-encodes", "-1"), "expected at least 0"),
    ):
        refused(psgc(*arguments), words)


CLUSTER = "nodes = 2\ngpus_per_node = 1\nintra = {gbps = 100, latency_us = 5}\ninter = {gbps = 1, latency_us = 20}\n"
TABLE = "name,numel,ready_us\nlast.weight,4000000,0\nlast.bias,1000,50\nfirst.weight,1000000,9000\n"


def planned(*buckets: dict[str, Any]) -> str:
    plain = {"numel": 5001000, "parts": 2, "priority": 0, "codec": "none", "option": ["flat.all_reduce"]}
    return json.dumps({"version": 1, "model": "table", "cluster": "two", "buckets": [plain | bucket for bucket in buckets]})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a profile, a cluster, and a plan of one bucket for them."""
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "two.toml").write_text(CLUSTER)
    (tmp_path / "plan.json").write_text(planned({"tensors": ["last.weight", "last.bias", "first.weight"]}))
    return tmp_path


def simulate(job: Path, *arguments: str, plan: str = "plan.json") -> subprocess.CompletedProcess[str]:
    files = ("--profile", str(job / "table.csv"), "--cluster", str(job / "two.toml"), "--plan", str(job / plan))
    return psgc("simulate", *files, *arguments)


def test_a_plans_step_is_predicted_lane_by_lane(job: Path) -> None:
    found = json.loads(simulate(job, "--trace", str(job / "trace.json"), "--json").stdout)
    assert set(found) == {"step_ms", "lanes", "overlap"}
    # one bucket of 20 MB, there and back over a 1 Gbit/s link, when the last gradient is ready
    assert found["step_ms"] == pytest.approx(9 + 20.004 * 8 + 2 * 2 * 0.02)
    assert {lane["lane"]: lane["busy_ms"] for lane in found["lanes"]}["backward"] == 9
    assert found["overlap"] == 0
    events = json.loads((job / "trace.json").read_text())["traceEvents"]
    assert {"0/0/flat.all_reduce", "0/1/flat.all_reduce"} <= {event["name"] for event in events}
    assert "backward hides 0% of communication" in simulate(job).stdout


def test_what_a_simulation_cannot_take_is_one_line_and_status_2(job: Path) -> None:
    everything = ["last.weight", "last.bias", "first.weight"]
    encoded = ["comp@gpu", "flat.all_gather.c", "decomp@gpu"]
    plans = {
        "other": ({"tensors": ["decoder.weight"]}, "tensor 'decoder.weight' is none of model table"),
        "cyclic": ({"tensors": everything, "option": ["flat.all_reduce"] * 2}, "'flat.all_reduce' cannot stand after flat.all_reduce"),
        "unknown": ({"tensors": everything, "option": ["flat.sum"]}, "unknown action 'flat.sum'"),
        "nameless": ({"tensors": everything, "option": encoded}, "is encoded, but its codec is none"),
        "unheard": ({"tensors": everything, "option": encoded, "codec": "int8"}, "codec int8: the profile has no times for it"),
    }
    for name, (bucket, words) in plans.items():
        (job / f"{name}.json").write_text(planned(bucket))
        refused(simulate(job, "--json", plan=f"{name}.json"), words)
    refused(simulate(job, "--trace", str(job / "nowhere" / "trace.json")), "--trace", "No such file")
    refused(psgc("simulate", "--profile", "vgg16", "--cluster", "mars", "--plan", str(job / "plan.json")), "cluster 'mars' is neither")
