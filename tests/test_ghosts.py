"""Ghosts beside real workers, few enough for every day: benchmarks/ghosts.py measures up to a thousand."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.wire.frames import Header, Kind
from tests.benchmark_scripts import FOLDER, load
from tests.preloaded import run_preloaded

WAIT_S = 240


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_preloaded(str(FOLDER / "ghosts.py"), *arguments, env=os.environ, timeout=WAIT_S)


@pytest.mark.parametrize(("codec", "servers"), [("none", "1"), pytest.param("onebit", "2", marks=pytest.mark.long)])
def test_ghosts_and_real_workers_get_the_right_sums(codec: str, servers: str) -> None:
    """The script itself checks every element, on both sides."""
    done = run(
        "--workers", "5,12", "--codec", codec, "--servers", servers, "--tensors", "300", "--keys", "4", "--contributions", "200", "--json"
    )
    assert done.returncode == 0, done.stderr
    few, more = json.loads(done.stdout)["sizes"]
    assert (few["workers"], more["workers"]) == (5, 12)
    for each in (few, more):
        assert each["declarations_read"] == 1, "the ghosts' digests are the real workers'"
        assert each["steps"] > 2
        assert min(each["server_mib"], each["start_s"], each["layout_s"], each["messages"]) > 0


def test_a_wrong_result_is_seen() -> None:
    ghosts = load("ghosts")
    job: Any = object.__new__(ghosts.GhostJob)
    job.ranks, job.options, job._right = 5, ghosts.argparse.Namespace(codec="none"), {}

    class Part:
        key, offset, numel = 7, 0, 100

    class Bucket:
        index, numel = 0, 100

    job._parts = {7: (Bucket, Part)}
    right = ghosts.mean("none", 0, 5, 2, 100)
    header = Header(Kind.RESULT, key=7, step=2, contributors=5)
    job.check(header, right.tobytes())
    wrong = right.copy()
    wrong[99] += np.float32(1 / 5)
    for other, of in (
        (wrong.tobytes(), header),
        (right.tobytes(), header._replace(contributors=4)),
        (right.tobytes(), header._replace(step=3)),
    ):
        with pytest.raises(ghosts.Failed, match="not the mean of 5 ranks"):
            job.check(of, other)


def test_a_record_is_the_same_once_it_is_saved_and_read_and_its_last_steps_come_again(tmp_path: Path) -> None:
    ghosts = load("ghosts")
    record = ghosts.Record()
    record.opening.append((Kind.DECLARE, b"name", {"plan": 1}))
    for step in range(1, 7):
        record.steps[step].append(ghosts.Push(0.5 * step, 0, Header(Kind.PUSH, key=3, step=step), bytes([step]) * 4))
    record.save(tmp_path / "0.json")
    read = ghosts.Record.load(tmp_path / "0.json")
    assert (read.opening, dict(read.steps)) == (record.opening, dict(record.steps))
    assert [read.of_step(step)[0].header.step for step in range(1, 12)] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3]


def test_sizes_that_leave_no_ghost_are_refused() -> None:
    done = run("--workers", "2")
    assert (done.returncode, done.stderr) == (1, "ghosts: --workers 2: each number must be more than the 2 real workers\n")
