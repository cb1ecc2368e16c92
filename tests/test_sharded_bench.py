"""benchmarks/sharded.py: what it refuses, and that a copy that differs from torch's own is seen."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmark_scripts import load

script = load("sharded")


class Shard:
    def __init__(self, *values: float) -> None:
        self._local = torch.tensor(values)

    def to_local(self) -> torch.Tensor:
        return self._local


def copy(*values: float) -> Any:
    return SimpleNamespace(model=SimpleNamespace(parameters=lambda: [Shard(*values)]))


def test_a_copy_that_differs_in_a_bit_of_a_shard_is_not_equal() -> None:
    assert script.equal(copy(1.0, 2.0), copy(1.0, 2.0))
    assert not script.equal(copy(1.0, 2.0), copy(1.0, 2.0000002))


@pytest.mark.parametrize("flags", [["--mode", "pigeon"], ["--systems", "ddp"], ["--steps", "9"]])
def test_what_it_does_not_know_is_wrong_usage_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sharded.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert f"{flags[-1]}: expected" in capsys.readouterr().err
