"""Real trainings over real jobs: the same seed gives the same losses, bit for bit, run after run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = Path(__file__).parents[1] / "jobs"


def run_job(*command: str, **env: str) -> None:
    words = [sys.executable, "-m", "psgc.launch", "run", "--workers", "2", "--", sys.executable, *command]
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def train(script: str, out: Path, flags: tuple[str, ...], **env: str) -> dict[str, object]:
    run_job(str(EXAMPLES / script), *flags, "--out", str(out), **env)
    record: dict[str, object] = json.loads(out.read_text())
    return record


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_digits.py", ("--codec", "topk:k=0.01", "--steps", "12")),
        ("train_gpt.py", ("--codec", "int8", "--steps", "4", "--layers", "1", "--context", "64")),
    ],
)
def test_the_same_seed_gives_the_same_losses_on_any_transport(script: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    first = train(script, tmp_path / "first.json", flags, PSGC_TRANSPORT="shm")
    again = train(script, tmp_path / "again.json", flags, PSGC_TRANSPORT="tcp")
    for key in ("losses", "final_train_loss", "final_val_loss", "val_accuracy"):
        assert first[key] == again[key], key
    assert first["wire_bytes_per_step_per_worker"] == again["wire_bytes_per_step_per_worker"], "whatever the transport"


@pytest.mark.timeout(300)
def test_what_travels_is_fewer_bytes_headers_included(tmp_path: Path) -> None:
    least = {"none": 1, "onebit": 25, "topk:k=0.01": 40, "int8": 3.5, "bf16": 1.9}
    run_job(str(JOBS / "digits.py"), str(tmp_path), "4", *least)
    wire = [json.loads((tmp_path / f"{number}.json").read_text())["wire_bytes_per_step_per_worker"] for number in range(len(least))]
    for (codec, ratio), travelled in zip(least.items(), wire, strict=True):
        assert wire[0] / travelled >= ratio, codec
