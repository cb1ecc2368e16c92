"""benchmarks/vs_peers.py: what it refuses, and that it sees a copy that trains wrongly."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark_scripts import load

vs_peers = load("vs_peers")


def copy(system: str, *values: float) -> SimpleNamespace:
    return SimpleNamespace(system=system, model=torch.nn.ParameterList([torch.tensor(values)]))


def test_a_lossless_copy_that_differs_from_ddps_is_named_and_a_lossy_one_may_differ() -> None:
    assert vs_peers.differences([copy("ddp none", 1.0, 2.0), copy("psgc none", 1.0, 2.0), copy("psgc int8", 1.0, 3.0)]) == []
    assert vs_peers.differences([copy("ddp none", 1.0, 2.0), copy("psgc none", 1.0, 2.001)]) == ["psgc none"]


def test_models_have_the_sizes_that_the_help_tells() -> None:
    for name, tensors, millions in (("large", 12, 25.2), ("many", 400, 8.9)):
        parameters = list(vs_peers.model_of(name)[0].parameters())
        assert len(parameters) == tensors
        assert round(sum(parameter.numel() for parameter in parameters) / 1e6, 1) == millions


@pytest.mark.parametrize("flags", [["--modes", "pigeon"], ["--models", "huge"], ["--systems", "horovod none"], ["--steps", "0"]])
def test_what_it_does_not_know_is_wrong_usage_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vs_peers.py", *flags])
    with pytest.raises(SystemExit) as ended:
        vs_peers.main()
    assert ended.value.code == 2
    assert f"{flags[-1]}: expected" in capsys.readouterr().err


def test_the_chart_has_a_line_for_each_system(tmp_path: Path) -> None:
    rows = [
        vs_peers.Row("many", "tcp", gbps, system, 0.1 / gbps, 0.1, 0.1, 1.0, 2.0)
        for gbps in (0.1, 1.0)
        for system in ("ddp none", "psgc none")
    ]
    vs_peers.draw_chart(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[1:4] == b"PNG"
