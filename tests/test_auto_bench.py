"""The benchmark of ``auto`` reads what a job says of its choices, and what its own measuring costs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmark_scripts import load
from tests.preloaded import popen_preloaded

bench = load("auto")
SAID = """
[node 0] INFO psgc.run: optimizer0: auto, step 9: trying int4, bf16: a step takes 743.6 ms by none, as over links of 0.239 Gbit/s; predicted, in ms: int4 381.6
[node 0] INFO psgc.run: optimizer0: auto, step 30: int4 from now on; measured, in ms a step: none 743.6, int4 353.4, bf16 720.7
"""
STAYS = "[node 0] INFO psgc.run: optimizer0: auto, step 42: bf16 stays, since nothing else would save 5 %: a step takes 752.0 ms by bf16\n"


def test_what_a_job_ended_with_is_the_last_that_it_says() -> None:
    assert bench.kept("nothing") == "?"
    assert bench.kept(SAID) == "int4"
    assert bench.kept(SAID + STAYS) == "bf16"


def test_what_measuring_costs_is_measured() -> None:
    assert bench.measuring_ns() > 0
    text = str(bench.Measured(measuring_ms=9.0, planning_ms=500.0, plans=1, steps=90, lasted_ms=9000.0))
    assert text == "measuring took 100 us of a step of 100.0 ms, 0.10 % (90 steps); 1 plan(s) took 500 ms"


@pytest.mark.timeout(300)
def test_a_job_is_clocked_by_what_auto_takes_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert not options.pop("check")
        with popen_preloaded(command, **options) as process:
            out, _ = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out)

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT))
    script = str(Path(__file__).parent.parent / "examples" / "train_gpt.py")
    found = bench.measured([script, "--steps", "12", "--width", "32", "--layers", "1", "--context", "16"], workers=2, servers=1)
    assert (found.steps, found.plans) == (12, 1)
    assert 0 < found.measuring_ms < found.lasted_ms
    assert found.planning_ms > 0
