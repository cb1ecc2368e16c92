"""The benchmark of faults: what it measures, with psgc's jobs alone."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.benchmark_scripts import FOLDER, load
from tests.preloaded import popen_preloaded


def test_unknown_systems_and_faults_are_named_in_a_line() -> None:
    found = subprocess.run(
        [sys.executable, str(FOLDER / "faults.py"), "--systems", "horovod", "--faults", "flood"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert (
        "horovod, flood: expected systems out of psgc wait, psgc wait spare, psgc shrink, psgc stop, torchft and faults out of"
        in found.stderr
    )


@pytest.mark.parametrize(("system", "again"), [("psgc wait", (0, 2)), pytest.param("psgc stop", (2, 60), marks=pytest.mark.long)])
def test_a_killed_worker_costs_a_step_or_those_since_the_checkpoint_and_no_contribution(
    monkeypatch: pytest.MonkeyPatch, system: str, again: tuple[int, int]
) -> None:
    faults = load("faults")
    monkeypatch.setattr(faults, "subprocess", SimpleNamespace(Popen=popen_preloaded, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(faults, "LIMIT_S", 250.0)
    row, (killed,) = faults.measure(system, "kill worker", 60)
    _, (plain,) = faults.measure(system, "", 60)
    assert killed == plain
    assert row.absent == 0 and row.started >= 1
    assert again[0] <= row.again <= again[1], "each of two ranks takes those since the last checkpoint again"
