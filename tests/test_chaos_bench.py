"""benchmarks/chaos.py goes on where it was interrupted, and adds up what was promised."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load


def ran(broken: list[str]) -> Any:
    def run(command: list[str], _: dict[str, str]) -> tuple[int, str]:
        seed = int(command[command.index("--seed") + 1])
        blows = [{"kind": "kill", "role": "server", "recovered_s": 0.5 + seed}, {"kind": "stop", "role": "server", "recovered_s": None}]
        report = {"broken": broken if seed == 2 else [], "happened": 2, "blows": blows}
        return int(bool(report["broken"])), json.dumps(report)

    return run


@pytest.mark.parametrize("broken", [[], ["rank 0 found something else"]])
def test_what_is_in_the_file_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: list[str]
) -> None:
    chaos, results = load("chaos"), tmp_path / "chaos.jsonl"
    results.write_text(
        '{"seed": 0, "job": "gradients", "status": 0, "report": {"broken": [], "happened": 9, "blows": []}}\n{"seed": 1, "jo'
    )  # interrupted
    monkeypatch.setattr(chaos.RUNNING, "run", ran(broken))
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--events", "40", "--results", str(results)])
    assert chaos.main() == int(bool(broken))
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("seed")][:3] == ["seed 1", "seed 2", "seed 3"]
    assert f"4 jobs, 15 events, {len(broken)} promises broken" in said
    assert "went on after 2.5 s (median)" in said
    assert "  kill server: 3 times, went on after 2.5 s (median), 3.5 s at most" in said and "stop server" not in said
    assert chaos.main() == int(bool(broken)), "nothing is run any more"
    assert "seed 1: " not in capsys.readouterr().out
    assert sorted(chaos.read(results)) == [(0, "gradients"), (1, "rounds"), (2, "outer"), (3, "workers")]
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--events", "20", "--results", str(results), "--jobs", "workers"])
    assert chaos.main() == 0
    said = capsys.readouterr().out
    assert "seed 0: workers" in said and "seed 1: workers" in said, "those were other jobs"
    assert "2 jobs, 4 events, 0 promises broken" in said, "of these, and not of all that the file has"


def test_its_jobs_are_there() -> None:
    chaos = load("chaos")
    for name in chaos.JOBS:
        command = chaos.command(3, name)
        assert Path(command[command.index("--no-prefix") + 7]).is_file(), command


def test_a_job_that_it_does_not_know_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--results", "none", "--jobs", "gradients,weights"])
    with pytest.raises(SystemExit) as ended:
        load("chaos").main()
    assert ended.value.code == 2
    assert "--jobs weights: expected one or more of gradients,rounds,outer,workers,spares" in capsys.readouterr().err
