"""benchmarks/cpu_per_gigabyte.py: what it refuses, whose time it takes, and that wrong sums end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load

script = load("cpu_per_gigabyte")


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--mb", "0"]])
def test_nothing_to_measure_is_wrong_usage_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_per_gigabyte.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert " ".join(flags) in capsys.readouterr().err


def test_bare_sockets_take_time_in_the_kernel() -> None:
    row = script.bare(mb=8.0, rounds=20)
    assert row.worker_system_s > 0
    assert (row.server_user_s, row.server_system_s) == (row.worker_user_s, row.worker_system_s)


def played(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    """In place of a job: what its first worker writes."""

    def run(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--work") + 1]).write_text(json.dumps({"right": right, "figures": [0.1, 0.2, -1.0, -1.0]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)


def test_a_job_whose_sums_are_wrong_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, right=True)
    assert script.measure("groups, shared memory", "none", 1.0, 1) == script.Row("groups, shared memory", 0.1, 0.2)
    played(monkeypatch, right=False)
    with pytest.raises(SystemExit, match="groups, shared memory: sums are wrong with none"):
        script.measure("groups, shared memory", "none", 1.0, 1)
