"""The six models of examples/espresso: they are the paper's, and both scripts of each train them alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.plan.inputs.architectures import architecture
from tests.over_gloo import run_over_gloo

FOLDER = Path(__file__).parent.parent / "examples" / "espresso"
MODELS = sorted(path.name for path in FOLDER.iterdir() if (path / "run_psgc.sh").is_file())
WAIT_S = 240


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("models", None)
    import models

    yield models
    sys.modules.pop("models", None)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script's command: what the two ranks measured in one step."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")  # it says what it would run
    python.chmod(0o755)

    def run(script: str, **env: str) -> list[dict[str, Any]]:
        every = {**os.environ, "PYTHON": str(python), **env}
        command = [str(FOLDER / script), "--steps", "1", "--json"]
        told = subprocess.run(command, env=every, capture_output=True, text=True, check=True).stdout.splitlines()
        return measured([sys.executable if word == str(python) else word for word in told], every)

    return run


def measured(command: list[str], env: dict[str, str]) -> list[dict[str, Any]]:
    done = run_over_gloo(command, env, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"rank"' in line]
    return sorted(found, key=lambda each: each["rank"])


def test_all_six_are_there(models: Any) -> None:
    assert sorted(models.TASKS) == MODELS
    assert len(MODELS) == 6


@pytest.mark.parametrize("model", MODELS)
def test_the_full_model_has_the_tensors_of_the_papers(models: Any, model: str) -> None:
    with torch.device("meta"):
        task = models.TASKS[model](True, lambda module: module)
    assert Counter(tuple(p.shape) for p in task.parameters()) == Counter(weight.shape for weight in architecture(model).weights)
    moved = [id(parameter) for _, parameters in task.phases for parameter in parameters]
    assert sorted(moved) == sorted(map(id, task.parameters())), "each parameter is moved by one phase"


@pytest.mark.parametrize(
    "model", [model if model in ("lstm", "gpt2") else pytest.param(model, marks=pytest.mark.long) for model in MODELS]
)  # a job each way for each model: two of six for every change
def test_a_step_by_psgc_without_a_codec_is_ddps(train: Callable[..., list[dict[str, Any]]], model: str) -> None:
    baseline = train(f"{model}/run_baseline.sh")
    ours = train(f"{model}/run_psgc.sh", CODEC="none")
    assert [each["rank"] for each in baseline] == [each["rank"] for each in ours] == [0, 1]
    assert ours[0]["wire_bytes"] > 4 * ours[0]["parameters"]
    assert ours[0]["weights"] == ours[1]["weights"]
    for a, b in zip(baseline, ours, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5), (
            "of the first step, and of the second phase after the first one's update"
        )
        assert a["weights"] == pytest.approx(b["weights"], rel=1e-6)


def test_the_papers_codec_is_the_default(train: Callable[..., list[dict[str, Any]]]) -> None:
    (rank, _) = train("vgg16/run_psgc.sh")
    assert 0 < rank["wire_bytes"] < 4 * rank["parameters"], "1 % of the values, both ways"


@pytest.mark.parametrize("model", MODELS)
def test_each_script_names_its_model_and_a_codec_that_there_is(model: str) -> None:
    found = re.search(r"run\.sh\" psgc (\S+) (\S+) ", (FOLDER / model / "run_psgc.sh").read_text())
    assert found is not None
    assert found[1] == model
    parse_scheme(found[2], BucketContext("float32"))
    assert f'run.sh" baseline {model} none ' in (FOLDER / model / "run_baseline.sh").read_text()


def test_the_readme_has_the_sizes(models: Any) -> None:
    text = (FOLDER / "README.md").read_text()
    for model in MODELS:
        small = models.TASKS[model](False, lambda module: module)
        sizes = architecture(model).numel, sum(parameter.numel() for parameter in small.parameters())
        assert re.search(rf"\[{model}\]\(\S+\) \| {sizes[0]:,} \| {sizes[1]:,} \|", text), (model, f"{sizes[1]:,}")
