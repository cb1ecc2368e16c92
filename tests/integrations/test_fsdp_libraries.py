"""Libraries that shard models by FSDP2, as two nodes of two ranks: the same training with psgc between the nodes as with FSDP's own average, to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


@pytest.mark.parametrize("which", ["lightning", "accelerate"])
def test_training_is_hsdps_and_psgc_carries_the_gradients_between_nodes(which: str) -> None:
    for library in {"lightning": ("lightning",), "accelerate": ("accelerate", "transformers")}[which]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"lacks {library}: make test-integrations installs it")
    job = [sys.executable, str(Path(__file__).parent / "job_fsdp.py"), which, "none", "int8"]
    command = [sys.executable, "-m", "psgc.launch", "run", "--workers", "4", "--servers", "1", "--no-prefix", "--", *job]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "PSGC_MIN_COMPRESS_BYTES": "0", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[dict[str, Any]]] = {"stock": [], "none": [], "int8": []}
    for line in done.stdout.splitlines():
        if line.startswith('{"codec"'):
            told = json.loads(line)
            said[told["codec"]].append(told)
    stock, none, int8 = (sorted(said[codec], key=lambda told: told["rank"]) for codec in ("stock", "none", "int8"))
    assert len(stock) == len(none) == len(int8) == 4
    assert [(told["losses"], told["digest"]) for told in none] == [(told["losses"], told["digest"]) for told in stock]
    for mine, other, its in zip(int8, none, stock, strict=True):
        assert its["carried"] == 0 < 3 * mine["carried"] < other["carried"]
        assert mine["losses"] == pytest.approx(its["losses"], rel=0.05)
    for codec in (stock, none, int8):
        assert codec[0]["digest"] == codec[2]["digest"] != codec[1]["digest"] == codec[3]["digest"], "each shard is held by two nodes"
