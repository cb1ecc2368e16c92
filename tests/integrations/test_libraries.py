"""Libraries that wrap models in DistributedDataParallel, with psgc's one line and without: the same training, other bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
NEEDS = {"ddp_trainer": "transformers", "ddp_lightning": "lightning", "ddp_accelerate": "accelerate", "ddp_plain": "torch"}
COMPILER = "inductor" if shutil.which("g++") else "aot_eager"  # both cut the graph at DDP's buckets, here two
CASES = {
    "trainer": ("ddp_trainer", {}),
    "trainer, accumulating and clipping": ("ddp_trainer", {"accumulate": 2, "clip": 0.1}),
    "lightning, clipping": ("ddp_lightning", {"clip": 0.1}),
    "accelerate, accumulating and clipping": ("ddp_accelerate", {"clip": 0.1}),
    "ddp, accumulating and clipping": ("ddp_plain", {"clip": 0.1}),
    "ddp under torch.compile": ("ddp_plain", {"compiler": COMPILER, "width": 600}),
}
# Small models: small parts, so that there are several; small buckets, too, are compressed; libraries ask nobody on the network.
SETTINGS = {
    "PSGC_MIN_COMPRESS_BYTES": "0", "PSGC_PART_BYTES": "16384", "PSGC_FUSE_BYTES": "30000", "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def run(*command: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "psgc.launch", "run", "--workers", "2", "--servers", "1", *command]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # jobs import tests.torch
    env = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    return subprocess.run(whole, env=env, capture_output=True, text=True, timeout=300, check=False)


def needs(example: str) -> None:
    if importlib.util.find_spec(NEEDS[example]) is None:
        pytest.skip(f"lacks {NEEDS[example]}: make test-integrations installs it")


@pytest.mark.parametrize("case", CASES)
def test_training_is_stock_ddps_and_psgc_carries_every_gradient(case: str) -> None:
    example, options = CASES[case]
    needs(example)
    done = run("--no-prefix", "--", sys.executable, str(Path(__file__).parent / "job.py"), example, json.dumps(options), "none", "int8")
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"codec"')]
    seen: dict[str, list[dict[str, Any]]] = {codec: [s for s in said if s["codec"] == codec] for codec in ("stock", "none", "int8")}
    stock = {s["rank"]: s for s in seen["stock"]}
    assert set(stock) == {0, 1}
    for codec in ("none", "int8"):
        assert seen[codec][0]["digest"] == seen[codec][1]["digest"], "ranks end with the same weights, bit by bit"
    for none in seen["none"]:
        assert none["losses"] == stock[none["rank"]]["losses"]
        assert none["digest"] == stock[none["rank"]]["digest"]
        assert none["carried"] == 2 * none["gradient_bytes"], "each gradient's bytes went up, the mean's came down"
    for int8 in seen["int8"]:
        assert int8["losses"] == pytest.approx(stock[int8["rank"]]["losses"], rel=0.05)
        assert int8["losses"] != stock[int8["rank"]]["losses"]
        assert 0 < 3.5 * int8["carried"] < 2 * int8["gradient_bytes"]
    for mine in (*seen["none"], *seen["int8"]):
        assert mine["gradient_bytes"] == mine["steps"] * mine["parameter_bytes"], "every gradient of every step"
        assert mine["steps"] == 8
        assert stock[mine["rank"]]["reduced"] >= mine["gradient_bytes"], "the count sees gradients where gloo carries them"
        assert mine["reduced"] < mine["parameter_bytes"] / 50, "not even one step's gradients"


def test_lightnings_manual_optimization_trains_though_parameters_are_toggled_before_the_first_backward() -> None:
    needs("ddp_lightning")
    job = str(Path(__file__).parent / "job.py")
    done = run("--no-prefix", "--", sys.executable, job, "manual_lightning", "{}", "none", "int8")
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"codec"')]
    seen = {codec: sorted((s for s in said if s["codec"] == codec), key=lambda s: s["rank"]) for codec in ("stock", "none", "int8")}
    for stock, none, int8 in zip(*seen.values(), strict=True):
        assert none["digest"] == stock["digest"] and none["losses"] == stock["losses"] and len(none["losses"]) == 8
        assert int8["losses"] == pytest.approx(stock["losses"], rel=0.05)
    assert seen["int8"][0]["digest"] == seen["int8"][1]["digest"]


@pytest.mark.parametrize("example", NEEDS)
def test_examples_run_as_their_first_line_says(example: str) -> None:
    needs(example)
    source = ROOT / "examples" / f"{example}.py"
    assert f"psgc run --workers 2 --servers 1 --codec int8 -- python examples/{source.name}" in source.read_text().replace("\n", " ")
    done = run("--codec", "int8", "--", sys.executable, str(source))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("losses [") == 2, done.stdout
    assert "codec int8" in done.stderr
