"""The benchmark of plans that are kept when workers are missing."""

from __future__ import annotations

import pytest

from tests.benchmark_scripts import load


def test_a_plan_for_as_many_workers_loses_nothing_and_a_kept_one_little_on_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = load("fewer_workers")
    monkeypatch.setattr(fewer, "MODELS", ("bert-base",))
    monkeypatch.setattr(fewer, "GBPS", (1.0,))
    monkeypatch.setattr(fewer, "LOST", ((4, 0), (4, 1)))
    none, one = fewer.losses("a100")
    assert none.longer == 0.0
    assert one.kept_us < none.kept_us, "fewer payloads for each server"
    assert -0.05 < one.longer < 0.1
    (line,) = fewer.said([none, one])
    assert line.startswith("1 Gbit/s: 2 jobs; ")
