"""The benchmark that counts what the simulation survives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmark_scripts import load

script = load("simulated_chaos")


def test_every_kind_of_job_is_run_and_counted_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SLICE", 3)
    results = tmp_path / "simulated.jsonl"
    monkeypatch.setattr(sys, "argv", ["simulated_chaos.py", "--events", "1", "--results", str(results)])
    script.main()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["kind"] for line in lines] == list(script.KINDS)
    events = sum(sum(line["events"].values()) for line in lines)
    assert capsys.readouterr().out.startswith(f"18 jobs, {events:,} events (") and events >= 18
    monkeypatch.setattr(script, "job_of", lambda kind: pytest.fail("it was run before"))
    script.main()
    monkeypatch.setattr(sys, "argv", ["simulated_chaos.py", "--kinds", "rain", "--results", str(results)])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "--kinds rain: expected one or more of servers," in capsys.readouterr().err
