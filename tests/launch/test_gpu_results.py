"""What `benchmarks/gpu.py` measured is read and cited, and the script itself takes all its steps without a GPU, in a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.launch import gpu_results
from psgc.launch.gpu_results import result_for
from psgc.launch.observing.traces import _predicted
from tests.benchmark_scripts import load
from tests.launch.killing import until_gone
from tests.plan.commands import psgc
from tests.preloaded import run_preloaded

ROOT = Path(__file__).parent.parent.parent


def document(**change: Any) -> dict[str, Any]:
    rows = [
        {"codec": codec, "implementation": by, "op": op, "numel": numel, "seconds": seconds * numel, "moved_bytes": 4 * numel, "gbps": 1.0, "of_copy": 0.85}
        for codec, by, op, seconds in (
            ("onebit", "psgc", "encode", 1e-12), ("onebit", "psgc", "decode", 2e-12), ("onebit", "psgc", "commit", 3e-12), ("onebit", "torch", "encode", 1.0),
        )
        for numel in (1 << 20, 1 << 16)
    ]  # fmt: skip
    return {
        "version": 1,
        "device": "NVIDIA H100 PCIe",
        "date": "2026-12-01",
        "dry_run": False,
        "steps": {"kernels": {"rows": rows}},
        **change,
    }


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_results, "FOLDER", tmp_path)
    for function in (gpu_results.gpu_results, gpu_results.result_for):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    path = tmp_path / "nvidia-h100-pcie.json"
    path.write_text(json.dumps(document()))
    return path


def test_a_gpus_curves_are_found_by_its_short_name(planted: Path) -> None:
    result = result_for("h100")
    assert result is not None and result_for("NVIDIA H100 PCIe") is not None and result_for("h200") is None
    curve = result.curve("onebit")
    assert curve is not None and curve.numel == (65536.0, 1048576.0)
    assert curve.encode(1 << 20) == pytest.approx(1.048576) and curve.decode(1 << 20) == pytest.approx(5 * 1.048576)
    assert result.curve("int8") is None


def test_codecs_and_advise_cite_what_was_measured(planted: Path) -> None:
    words = "measured on NVIDIA H100 PCIe, 2026-12-01 (docs/results/nvidia-h100-pcie.json)"
    found = {entry["name"]: entry for entry in json.loads(psgc("codecs", "--json").stdout)}
    assert found["onebit"]["gpu"]["NVIDIA H100 PCIe"]["source"] == words and "gpu" not in found["int8"]
    assert "nvidia-h100-pcie.json" in psgc("codecs").stdout
    asked = ("advise", "--model", "gpt2", "--gpu", "h100", "--nodes", "4", "--link", "10", "--codecs", "onebit", "--json")
    with_file = json.loads(psgc(*asked).stdout)
    assert f"times of onebit on the GPU are {words}, not estimates" in with_file["notes"]
    planted.unlink()
    assert "not estimates" not in " ".join(json.loads(psgc(*asked).stdout)["notes"])


@pytest.mark.parametrize("named", ["by the profile", "by --gpu"])
def test_every_verb_that_prices_a_plan_takes_what_was_measured(planted: Path, tmp_path: Path, named: str) -> None:
    """plan, simulate, whatif, verify and trace, of a profile whose GPU is named. Estimated, the codec would be quicker."""
    folder = tmp_path / "asked"
    folder.mkdir()
    hardware, gpu = ("NVIDIA H100 PCIe, AMD EPYC", None) if named == "by the profile" else ("", "h100")
    profile, cluster, plan, job = (folder / name for name in ("p.json", "c.toml", "plan.json", "job.json"))
    rows = [{**row, "seconds": 100 * row["seconds"]} for row in document()["steps"]["kernels"]["rows"]]
    planted.write_text(json.dumps(document(steps={"kernels": {"rows": rows}})))
    tensors = [{"name": name, "numel": 1 << 22, "ready_us": ready} for name, ready in (("b", 0), ("a", 1000))]
    profile.write_text(
        json.dumps({"version": 1, "model": "m", "hardware": hardware, "device": "cuda", "forward_us": 500, "tensors": tensors})
    )
    cluster.write_text(
        'nodes = 2\ngpus_per_node = 1\nservers = 1\ncollectives = "nccl"\nintra = {gbps = 100, latency_us = 5}\ninter = {gbps = 1, latency_us = 20}\n'
    )
    of = ("--profile", str(profile), *(("--gpu", gpu) if gpu else ()))
    asked = (*of, "--cluster", str(cluster), "--codec", "onebit")
    words = "times of onebit on the GPU are measured on NVIDIA H100 PCIe, 2026-12-01"

    def answer(*arguments: str) -> dict[str, Any]:
        done = psgc(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def steps() -> list[float]:
        """Of plan, simulate, verify and trace."""
        planned = answer("plan", *asked, "--runnable", "--force", "-o", str(plan))
        assert any("comp@gpu" in bucket["option"] for bucket in planned["buckets"]), "the plan encodes where the codec's times are measured"
        simulated = answer("simulate", *of, "--plan", str(plan))
        windows = [{"step_us": 1e5, "forward_us": 500.0, "backward_us": 1000.0, "layouts": ["optimizer0"]}] * 3
        job.write_text(
            json.dumps({"version": 1, "candidates": [{"name": "plan", "plan": json.loads(plan.read_text()), "windows": windows}]})
        )
        found = answer("verify", str(plan), *of, "--measured", str(job), "-o", str(folder / "corrected.json"))
        verified = found["candidates"][0]["predicted_ms"] - 0.5
        traced = _predicted("trace show", str(plan), str(profile), None, gpu)["step_us"] / 1e3
        return [planned["step_ms"], simulated["step_ms"], verified, traced]

    with_file = steps()
    assert with_file == pytest.approx([with_file[0]] * 4)
    assert words in " ".join(answer("whatif", *asked)["notes"])
    assert words in " ".join(psgc("simulate", *of, "--plan", str(plan)).stdout.split())
    planted.unlink()
    estimated = steps()
    assert estimated == pytest.approx([estimated[0]] * 4)
    assert estimated[0] != pytest.approx(with_file[0], rel=1e-3)


def test_a_file_that_is_no_result_is_named_and_dry_runs_do_not_count(planted: Path) -> None:
    planted.write_text(json.dumps(document(dry_run=True)))
    assert gpu_results.gpu_results() == []
    planted.write_text("{}")
    with pytest.raises(UsageError, match=r"nvidia-h100-pcie.json: not what benchmarks/gpu.py writes \(KeyError: 'dry_run'\)"):
        gpu_results.gpu_results()


@pytest.mark.timeout(300)
def test_the_gpu_benchmark_takes_its_steps_in_a_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    steps = "machine,kernels,two_ranks,many_tensors,gpt,sanitizer"
    command = (str(ROOT / "benchmarks" / "gpu.py"), "--dry-run", "--out", str(out), "--steps", steps)
    done = run_preloaded(*command, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["steps"]
    assert found["two_ranks"]["int8"]["same_sums"] is True
    assert {row["op"] for row in found["kernels"]["rows"]} >= {"encode", "decode", "finish", "commit"}
    for codec in ("int8", "onebit:momentum=nesterov", "powersgd:rank=4"):
        assert found["gpt"]["codecs"][codec]["with_s"] > 0
    assert found["two_ranks"]["int8"]["parts_a_launch"] >= 1 and found["many_tensors"]["int8"]["ratio"] > 0


def test_a_step_that_fails_keeps_what_it_had_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = load("gpu")

    def failing(run: Any) -> dict[str, Any]:
        run.keep({"rows": [1, 2]})
        raise ValueError("no such\nkernel")

    monkeypatch.setitem(gpu.STEPS, "kernels", failing)
    assert gpu.step("kernels", "60", str(tmp_path / "found.json"), dry=True) == 1
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": [1, 2], "failed": "ValueError: no such kernel"}


def test_a_command_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = load("gpu")
    started = tmp_path / "started"

    class Popen(subprocess.Popen[str]):
        """Its time begins once its child has begun."""

        def wait(self, timeout: float | None = None) -> int:
            while not (started.exists() and started.read_text()):
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import subprocess, sys, time; print('begins', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    )
    done = gpu.ran([sys.executable, "-c", code], 1.0, {})
    assert done == (None, "begins\n")
    until_gone(int(started.read_text()))


def test_a_step_that_is_cut_off_does_not_keep_others_from_being_taken(tmp_path: Path) -> None:
    gpu = load("gpu")
    found = gpu.taken("machine", 0.0, True)
    assert found["failed"].startswith("it was not done after 0 s")
    assert sum(gpu.LIMITS.values()) < 8 * 60 and list(gpu.LIMITS) == list(gpu.STEPS)
