"""benchmarks/far_apart.py: what it refuses, and what it leaves out where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load

script = load("far_apart")


@pytest.mark.parametrize("flags", [["--systems", "horovod"], ["--every", "0"], ["--every", "300"]])
def test_what_does_not_fit_is_wrong_usage_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["far_apart.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert f"{flags[-1]}: expected" in capsys.readouterr().err


def test_a_system_that_is_not_installed_is_left_out_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(system: str, job: Any) -> object:
        asked.append(system)
        return script.Row(system, job.steps, 1.0, 2_000_000, 3.0, 4_000_000, ((1024.0, 0.5, 4.0),))

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["far_apart.py", "--json"])
    script.main()
    told = capsys.readouterr()
    assert "torchft is not installed, and left out" in told.err
    assert asked == [system for system in script.SYSTEMS.split(",") if system != "torchft"]
    assert '"system": "psgc int4"' in told.out


def test_it_goes_on_where_an_earlier_start_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def measure(system: str, job: Any) -> object:
        asked.append(system)
        if len(asked) == 2:
            raise script.TestbedError("the machine was needed")
        return script.Row(system, job.steps, 1.0, 2_000_000, 3.0, 4_000_000, ((1024.0, 0.5, 4.0),))

    monkeypatch.setattr(script, "measure", measure)
    flags = ["--systems", "psgc none,psgc int4", "--results", str(tmp_path / "far.jsonl"), "--json"]
    monkeypatch.setattr(sys, "argv", ["far_apart.py", *flags])
    with pytest.raises(SystemExit, match="the machine was needed"):
        script.main()
    script.main()
    assert asked == ["psgc none", "psgc int4", "psgc int4"], "what is finished is not repeated"
    assert '"curve": [[1024.0, 0.5, 4.0]]' in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["far_apart.py", *flags, "--seed", "1"])
    script.main()
    assert asked[3:] == ["psgc none", "psgc int4"], "another seed is another run"
