"""The benchmark of pauses: its model, and a small job of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.benchmark_scripts import FOLDER, load
from tests.preloaded import run_preloaded


def test_the_model_waits_for_the_slowest_without_backup_and_never_beats_the_bound() -> None:
    stragglers = load("stragglers")
    jitter = stragglers.Jitter(3, 0.05, 0.05, 0.3)
    steps, workers = 200, 5
    waiting = sum(max(jitter.own_s(rank, step) for rank in range(workers)) for step in range(steps))
    found = [stragglers.model_of(jitter, workers, steps, backup) for backup in range(workers)]
    assert found[0] == (pytest.approx(waiting), 0.0)
    assert all(later <= earlier + 1e-9 for (earlier, _), (later, _) in pairwise(found)), found
    assert all(seconds >= stragglers.bound_of(jitter, workers, steps) - 1e-9 for seconds, _ in found)
    assert all(share <= backup / workers for backup, (_, share) in enumerate(found))


def test_a_rank_that_is_always_slower_is_waited_for_whatever_the_rule() -> None:
    stragglers = load("stragglers")

    class Slow(stragglers.Jitter):  # type: ignore[misc, name-defined]
        def own_s(self, rank: int, step: int) -> float:
            return 0.2 if rank == 0 else 0.05

    seconds, _ = stragglers.model_of(Slow(0, 0.05, 0.0, 0.0), 4, 100, 2)
    assert seconds == pytest.approx(100 * 0.2)


def test_without_a_job_there_are_no_figures_of_one() -> None:
    command = [str(FOLDER / "stragglers.py"), "--rounds", "0", "--steps", "20"]
    found = run_preloaded(*command, "--json", env=os.environ, timeout=240)
    assert found.returncode == 0, found.stderr

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON: {found.stdout}")

    rows = json.loads(found.stdout, parse_constant=refuse)["rows"]
    assert [(row["step_ms"], row["loss"], row["accuracy"]) for row in rows] == [(None, None, None)] * 3
    assert all(row["model_ms"] > 0 for row in rows)
    table = run_preloaded(*command, env=os.environ, timeout=240)
    assert table.returncode == 0 and table.stdout and "nan" not in table.stdout, table.stderr


@pytest.mark.long
def test_jobs_with_and_without_backup_end_with_equal_parameters_on_all_ranks() -> None:
    command = [
        sys.executable,
        str(FOLDER / "stragglers.py"),
        "--workers",
        "2",
        "--backup",
        "0",
        "1",
        "--steps",
        "10",
        "--rounds",
        "1",
        "--json",
    ]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    rows = json.loads(found.stdout)["rows"]
    assert [row["backup"] for row in rows] == [0, 1]
    assert all(row["step_ms"] > 0 for row in rows)
