"""benchmarks/far_apart.py: what it refuses, and what it leaves out where it is not installed."""

from __future__ import annotations

import sys

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

    def measure(system: str, steps: int, *_: float) -> object:
        asked.append(system)
        return script.Row(system, steps, 1.0, 2_000_000, 3.0, 4_000_000)

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["far_apart.py", "--json"])
    script.main()
    told = capsys.readouterr()
    assert "torchft is not installed, and left out" in told.err
    assert asked == ["ddp", "psgc none", "psgc bf16", "psgc int4", "psgc streaming"]
    assert '"system": "psgc int4"' in told.out
