"""Real trainings over real jobs: the same seed gives the same losses, bit for bit, run after run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_digits.py", ("--codec", "topk:k=0.01", "--steps", "12")),
        ("train_gpt.py", ("--codec", "int8", "--steps", "4", "--layers", "1", "--context", "64")),
    ],
)
def test_the_same_seed_gives_the_same_losses_on_any_transport(
    script: str, flags: tuple[str, ...], make_job: Callable[..., Any], tmp_path: Path
) -> None:
    def train(transport: str) -> dict[str, Any]:
        out = tmp_path / f"{transport}.json"
        make_job(env={"PSGC_TRANSPORT": transport}).said(*flags, "--out", str(out), job=str(EXAMPLES / script))
        record: dict[str, Any] = json.loads(out.read_text())
        return record

    first, again = train("shm"), train("tcp")
    for key in ("losses", "final_train_loss", "final_val_loss", "val_accuracy"):
        assert first[key] == again[key], key
    assert first["wire_bytes_per_step_per_worker"] == again["wire_bytes_per_step_per_worker"], "whatever the transport"


@pytest.mark.timeout(300)
def test_what_travels_is_fewer_bytes_headers_included(make_job: Callable[..., Any], tmp_path: Path) -> None:
    least = {"none": 1, "onebit": 25, "topk:k=0.01": 40, "int8": 3.5, "bf16": 1.9}
    make_job().said(str(tmp_path), "4", *least, job="digits.py")
    wire = [json.loads((tmp_path / f"{number}.json").read_text())["wire_bytes_per_step_per_worker"] for number in range(len(least))]
    for (codec, ratio), travelled in zip(least.items(), wire, strict=True):
        assert wire[0] / travelled >= ratio, codec


@pytest.mark.timeout(300)
def test_gradients_that_are_a_step_late_train_as_well(make_job: Callable[..., Any], tmp_path: Path) -> None:
    found = []
    for backup in ("0", "1"):
        out = tmp_path / f"{backup}.json"
        env = {"PSGC_BACKUP_WORKERS": backup}
        make_job(nodes=3, env=env).said("--codec", "none", "--steps", "150", "--out", str(out), job=str(EXAMPLES / "train_digits.py"))
        found.append(json.loads(out.read_text()))
    waiting, late = found
    assert min(waiting["val_accuracy"], late["val_accuracy"]) > 0.93, found
    assert late["wire_bytes_per_step_per_worker"] == pytest.approx(waiting["wire_bytes_per_step_per_worker"], rel=0.01)
