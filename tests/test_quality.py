"""The quality study: rates are tuned, finished runs are not repeated, and differences are in units of the seeds' spread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a training whose loss is least at a rate of 0.001 and grows with the seed; ``calls`` has its flags."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load("quality")
    module.calls = []

    def train(script: str, flags: dict[str, Any], record: Path, progressed: Any) -> dict[str, Any]:
        module.calls.append(flags)
        if flags["codec"] == "topk":
            raise module.TrainingFailed("it said much\nand failed with status 1")
        loss = 1 + abs(flags["lr"] - 0.001) + 0.01 * flags["seed"] + (0.05 if flags["codec"] == "onebit" else 0.0)
        return {"final_val_loss": loss, "val_accuracy": 0.9, "wire_bytes_per_step_per_worker": 1000}

    monkeypatch.setattr(module, "train", train)
    return module


def variant(quality: Any, codec: str) -> Any:
    return next(v for v in quality.variants() if v.codec == codec and v.optimizer is None)


def test_a_rate_is_sought_until_the_best_is_not_at_the_end_of_the_grid(quality: Any, tmp_path: Path) -> None:
    results = quality.Results(tmp_path / "results")
    assert results.tuned(quality.TASKS[0], variant(quality, "none")) == pytest.approx(0.00075)  # of 0.006 * 2**n
    assert [flags["lr"] for flags in quality.calls] == [0.003, 0.006, 0.012, 0.0015, 0.00075, 0.000375]
    assert {flags["seed"] for flags in quality.calls} == {100}


def test_a_training_that_diverges_is_not_the_best(quality: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(script: str, flags: dict[str, Any], record: Path, progressed: Any) -> dict[str, Any]:
        loss = float("nan") if flags["lr"] > 0.004 else 1.0
        return {"final_val_loss": loss, "val_accuracy": None, "wire_bytes_per_step_per_worker": 1000}

    monkeypatch.setattr(quality, "train", diverges)
    assert quality.Results(tmp_path / "results").tuned(quality.TASKS[0], variant(quality, "none")) <= 0.003


def test_finished_runs_are_not_repeated(quality: Any, tmp_path: Path) -> None:
    for expected in (6, 6, 7):
        results = quality.Results(tmp_path / "results")
        results.tuned(quality.TASKS[0], variant(quality, "none"))
        if expected == 7:
            results.record(quality.TASKS[0], variant(quality, "none"), 0.003, 1)
        assert len(quality.calls) == expected


def test_the_table_says_how_far_from_none_and_what_failed(quality: Any, tmp_path: Path) -> None:
    chosen = [variant(quality, codec) for codec in ("none", "int8", "onebit", "topk")]
    cells = {(v, task.name): cell for v, task, cell in quality.study(quality.Results(tmp_path / "results"), chosen)}
    rows = quality.table(cells).splitlines()
    assert all(row.count("|") == rows[0].count("|") for row in rows)
    assert len(rows) == 2 + len(chosen)  # what was neither chosen nor done before is left out
    none, int8, onebit, topk = ([text.strip() for text in row.split("|")[1:-1]] for row in rows[2:])
    assert none[:5] == ["`none`", "5", "0.00075", "1.0303 ± 0.0158", ""]
    assert int8[1:5] == ["5", "0.00075", "1.0303 ± 0.0158", "+0.0 sd"]
    assert onebit[1:5] == ["3", "0.00075", "1.0703 ± 0.0100", "+3.2 sd"]  # 0.05 above none's loss under the same seeds
    assert topk[2] == "failed"


def test_every_registered_codec_and_scheme_takes_part(quality: Any) -> None:
    assert {v.codec.partition(":")[0] for v in quality.variants()} == {*quality.registered_codecs(), *quality.registered_schemes()}


def test_a_slice_begins_no_run_that_would_end_too_late_and_the_next_goes_on(
    quality: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    train = quality.train

    def takes_a_while(*arguments: Any) -> dict[str, Any]:
        now[0] += 30
        return train(*arguments)

    monkeypatch.setattr(quality, "train", takes_a_while)
    monkeypatch.setattr(quality.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(quality.time, "perf_counter", lambda: now[0])
    chosen = [variant(quality, "none"), variant(quality, "bf16")]
    slices = []
    for _ in range(20):
        results = quality.Results(tmp_path / "results", until=now[0] + 100)
        before = len(quality.calls)
        cells = {(of.codec, task.name): cell for of, task, cell in quality.study(results, chosen)}
        if len(quality.calls) == before:
            break
        slices.append(len(quality.calls) - before)
    assert set(slices[:-1]) == {3}, "100 s have room for three runs of 30 s"
    assert len(quality.calls) == len(results.done) and "goes on from here" in capsys.readouterr().out
    for codec, seeds in (("none", 5), ("bf16", 3)):
        assert [len(cells[codec, task.name].records) for task in quality.TASKS] == [seeds, seeds]


def test_what_a_stopped_study_has_done_is_on_the_page_with_its_number_of_seeds(quality: Any, tmp_path: Path) -> None:
    results = quality.Results(tmp_path / "results")
    none, bf16 = variant(quality, "none"), variant(quality, "bf16")
    list(quality.study(results, [none]))
    for task in quality.TASKS:
        results.record(task, bf16, results.tuned(task, bf16), 1)
    assert [results.left(task, bf16) for task in quality.TASKS] == [2, 2]
    cells = {(of, task.name): cell for of, task, cell in quality.study(results, [none])}
    row = next(line for line in quality.table(cells).splitlines() if line.startswith("| `bf16`"))
    assert row.split("|")[2].strip() == "1", row


def test_what_is_left_is_counted_and_timed_by_the_runs_that_were(quality: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = quality.Results(tmp_path / "results")
    quality.say_left(results, [variant(quality, "none")])
    assert "16 runs are not done (gpt 8, digits 8), about 6 minutes" in capsys.readouterr().out
    assert quality.calls == []
