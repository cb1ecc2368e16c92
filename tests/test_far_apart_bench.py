"""benchmarks/far_apart.py: what it refuses, and what it leaves out where it is not installed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load

script = load("far_apart")


@pytest.mark.parametrize(
    "flags", [["--systems", "horovod"], ["--every", "0"], ["--systems", "psgc none", "--every", "300"], ["--every", "9"], ["--lr", "nan"]]
)
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
    assert asked == [system for system in script.SYSTEMS.split(",") if not system.startswith("torchft")]
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


def test_one_learner_of_each_disturbed_system_is_slow_or_killed() -> None:
    found = {system: [script.disturbed(system, learner) for learner in range(2)] for system in script.SYSTEMS.split(",")}
    for system, (first, second) in found.items():
        assert first == (False, False)
        assert second == (system.endswith("slow"), system.endswith("killed"))
    assert sum(any(second) for _, second in found.values()) == 4


def stored(
    system: str,
    seed: int = 0,
    mbit: float = 0.0,
    *,
    loss: float,
    seconds: float = 30.0,
    sent: int = 5_000_000,
    lr: float = 3e-3,
    again: int = 0,
) -> str:
    job = script.Job(steps=300, every=50, mbit=mbit, delay_ms=50.0 if mbit else 0.0, seed=seed, curve=100, lr=lr, again=again)
    row = script.Row(system, 300, seconds, sent, loss, 7_000_000, ((1024.0, 0.5, 4.0), (2048.0, 1.0, 3.0)))
    return json.dumps({"of": json.dumps([system, job.named(), "a machine"]), "row": asdict(row)})


def test_the_report_has_means_over_seeds_and_seconds_over_each_link_or_their_least(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "far.jsonl"
    lines = [stored("torchft", 0, loss=9.0), *(stored("torchft", seed, loss=loss) for seed, loss in enumerate((2.0, 3.0, 4.0)))]
    lines += [stored("torchft", mbit=10.0, loss=9.0, seconds=91.0), stored("torchft", mbit=100.0, loss=9.0, seconds=40.0)]
    lines += [stored("psgc int4", loss=2.5, sent=25_000_000), stored("psgc int4", 1, loss=2.7, sent=25_000_000)]
    lines.append(stored("psgc int4", mbit=100.0, loss=9.0, seconds=33.0, sent=20_000_000))
    lines += [stored("torchft", mbit=10.0, loss=9.0, seconds=seconds, again=again) for again, seconds in ((1, 95.0), (2, 70.0))]
    lines.append(stored("torchft", loss=8.0, lr=1e-4))
    lines += [stored(system, loss=2.5, sent=50_000_000) for system in ("torchft streaming", "psgc streaming", "psgc decoupled slow")]
    lines.append(stored("psgc decoupled", mbit=100.0, loss=9.0, seconds=31.0))
    lines.append(stored("psgc decoupled", loss=2.4))
    results.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["far_apart.py", "--results", str(results), "--report"])
    script.main()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "2 learners, 300 steps, every 50, lr 0.003; 3 seeds:"
    assert told[2] == "| | seconds | at 100 Mbit/s | at 10 Mbit/s | sent by a host, MB | a learner's memory, MB | validation loss |"
    assert told[4:10] == [
        "| torchft's DiLoCo, as by default | 30 | 40 | 91 | 5 | 7 | 3.000 ± 1.000 |",
        "| torchft's, buckets, 5 fragments, delay 5, mix 0.5 | 30 | ≥ 30 | ≥ 40 | 50 | 7 | 2.500 (1 seed) |",
        "| int4 | 30 | 33 | ≥ 46 | 25 | 7 | 2.600 ± 0.141 (2 seeds) |",
        "| int4, 5 fragments, delay 5, mix 0.5 | 30 |  |  | 50 | 7 | 2.500 (1 seed) |",
        "| learners around a syncer, int4 | 30 | 31 |  | 5 | 7 | 2.400 (1 seed) |",
        "| the same, one learner ten times slower | 30 |  |  | 50 | 7 | 2.500 (1 seed) |",
    ]
    assert told[11] == "2 learners, 300 steps, every 50, lr 0.0001; 1 seed:", "another rate is another table"
    assert told[15:] == ["| torchft's DiLoCo, as by default | 30 | ≥ 30 | ≥ 34 | 5 | 7 | 8.000 |"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--report"], "--report: expected --results and a file of finished runs, got None"),
        (["--report", "--results", "none.jsonl"], "got none.jsonl"),
        (["--report", "--results", "far.jsonl", "--plot", "far.svg", "--learners", "4"], "--plot: no run with 4 learners has a curve"),
    ],
)
def test_what_cannot_be_reported_is_wrong_usage_in_one_line(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far.jsonl").write_text(stored("torchft", loss=2.0))
    monkeypatch.setattr(sys, "argv", ["far_apart.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_documented_table_is_that_of_the_stored_results() -> None:
    results = Path(script.__file__).with_name("far_apart.jsonl")
    found = script.tables(script.runs_of(results.read_text()))
    page = (results.parent.parent / "docs" / "far-apart.md").read_text()
    rows = [line for line in found.splitlines() if line.startswith("| ")]
    missing = [row for row in rows if row not in page]
    assert not missing, (
        f"python benchmarks/far_apart.py --results benchmarks/far_apart.jsonl --report; docs/far-apart.md lacks {missing[0]}"
    )
