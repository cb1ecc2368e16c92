"""Real trainings over real jobs: the same seed gives the same losses, bit for bit, run after run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def train(script: str, codec: str, out: Path, steps: int, **env: str) -> dict[str, object]:
    command = [
        sys.executable, "-m", "psgc.launch", "run", "--workers", "2", "--", sys.executable, str(EXAMPLES / script),
        "--steps", str(steps), "--codec", codec, "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record: dict[str, object] = json.loads(out.read_text())
    return record


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "codec", "steps"), [("train_digits.py", "topk:k=0.01", 12), ("train_gpt.py", "int8", 4)])
def test_the_same_seed_gives_the_same_losses_on_any_transport(script: str, codec: str, steps: int, tmp_path: Path) -> None:
    first = train(script, codec, tmp_path / "first.json", steps, PSGC_TRANSPORT="shm")
    again = train(script, codec, tmp_path / "again.json", steps, PSGC_TRANSPORT="tcp")
    for key in ("losses", "final_train_loss", "final_val_loss", "val_accuracy"):
        assert first[key] == again[key], key
    assert first["wire_bytes_per_step_per_worker"] == again["wire_bytes_per_step_per_worker"], "whatever the transport"


@pytest.mark.parametrize(("codec", "least"), [("onebit", 25), ("topk:k=0.01", 40), ("int8", 3.5), ("bf16", 1.9)])
def test_what_travels_is_fewer_bytes_headers_included(codec: str, least: float, tmp_path: Path) -> None:
    plain = train("train_digits.py", "none", tmp_path / "none.json", 4)["wire_bytes_per_step_per_worker"]
    small = train("train_digits.py", codec, tmp_path / "codec.json", 4)["wire_bytes_per_step_per_worker"]
    assert isinstance(plain, int)
    assert isinstance(small, int)
    assert plain / small >= least
