"""Real jobs whose steps do not wait for every rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import run_and_kill

JOB = str(Path(__file__).parent.parent / "jobs" / "backup.py")


def found(out: str) -> list[tuple[str, float, int]]:
    """Of each rank: the digest of its parameters, how far they are from what all gradients make of them, and how many sums by push_pull were wrong."""
    lines = re.findall(r"^rank \d found (\w+) off by (\S+) wrong (\d+)$", out, re.M)
    return [(digest, float(off), int(wrong)) for digest, off, wrong in lines]


@pytest.mark.parametrize(("backup", "kills", "transport"), [(1, 0, "shm"), (1, 0, "tcp"), (3, 0, "shm"), (1, 3, "shm"), (2, 3, "tcp")])
def test_parameters_are_what_all_gradients_make_of_them_to_the_bit_whoever_was_late(
    launched: Any, backup: int, kills: int, transport: str
) -> None:
    env = {"PSGC_BACKUP_WORKERS": str(backup), "PSGC_TRANSPORT": transport, "PSGC_PART_BYTES": "65536"}  # several slices a bucket
    status, out, err = run_and_kill(launched, [JOB, "40", "none", "0.05"], kills, seed=backup, workers=4, servers=1, **env)
    assert status == 0, err
    ranks = found(out)
    assert len(ranks) == 4
    assert {digest for digest, _, _ in ranks} == {ranks[0][0]}, "all ranks have the same parameters"
    assert all(off == 0 and wrong == 0 for _, off, wrong in ranks), ranks
    assert err.count("it is started again and goes on from what it had committed") == kills


@pytest.mark.parametrize("codec", ["onebit", "int8"])
def test_servers_with_residuals_save_them_between_two_steps_though_ranks_are_late(launched: Any, codec: str) -> None:
    status, out, err = run_and_kill(launched, [JOB, "30", codec, "0.05"], 2, seed=5, workers=3, servers=2, PSGC_BACKUP_WORKERS="1")
    assert status == 0, err
    ranks = found(out)
    assert len(ranks) == 3
    assert {digest for digest, _, _ in ranks} == {ranks[0][0]}
    assert all(wrong == 0 for _, _, wrong in ranks)


@pytest.mark.parametrize(
    ("env", "codec", "line"),
    [
        ({"PSGC_BACKUP_WORKERS": "1"}, "powersgd", "PSGC_BACKUP_WORKERS=1: codec .*powersgd.* of 'optimizer0' takes several rounds"),
        ({"PSGC_BACKUP_WORKERS": "1"}, "randomk:k=0.1", "draws the same random places on all ranks"),
        ({"PSGC_BACKUP_WORKERS": "1"}, "onebit/relay", "has workers add up what servers forward"),
        ({"PSGC_BACKUP_WORKERS": "1"}, "onebit/none", "has workers take back what a step that was not applied had of them"),
        ({"PSGC_BACKUP_WORKERS": "1"}, "auto", 'DistributedOptimizer by "auto".*: PSGC_BACKUP_WORKERS=1 is for gradients that'),
        ({"PSGC_BACKUP_WORKERS": "1", "PSGC_ON_WORKER_LOSS": "shrink"}, "none", "PSGC_BACKUP_WORKERS=1 and PSGC_ON_WORKER_LOSS=shrink: a worker that dies"),
    ],
)  # fmt: skip
def test_what_cannot_be_late_is_refused_in_a_line(launched: Any, env: dict[str, str], codec: str, line: str) -> None:
    status, _, err = launched.end(launched.psgc("run", "--no-prefix", "--workers", "2", "--", sys.executable, JOB, "3", codec, "0", **env))
    assert status != 0
    assert re.search(line, err), err


def test_as_many_as_there_are_workers_are_refused_before_anything_starts(launched: Any) -> None:
    status, out, err = launched.end(
        launched.psgc("run", "--workers", "2", "--", sys.executable, JOB, "3", "none", "0", PSGC_BACKUP_WORKERS="2")
    )
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert "PSGC_BACKUP_WORKERS=2, but the job has 2 workers: a step waits for at least one; expected less than 2" in err


def test_a_job_without_servers_is_refused(launched: Any) -> None:
    popen = launched.psgc("run", "--workers", "2", "--servers", "0", "--", sys.executable, JOB, "3", "none", "0", PSGC_BACKUP_WORKERS="1")
    status, _, err = launched.end(popen)
    assert status != 0
    assert "PSGC_BACKUP_WORKERS=1 and DMLC_NUM_SERVER=0: workers that exchange among themselves await each other" in err


def test_a_rank_that_is_always_late_is_named_once(launched: Any, tmp_path: Path) -> None:
    script = Path(JOB).with_name("slow_rank.py")
    popen = launched.psgc("run", "--workers", "3", "--", sys.executable, str(script), "110", str(tmp_path), PSGC_BACKUP_WORKERS="1")
    said = ""
    while "held up" not in said:
        said += (line := popen.stderr.readline())
        assert line, said
    (tmp_path / "enough").touch()
    status, _, err = launched.end(popen)
    assert status == 0, err
    named = set(re.findall(r"rank (\d) held up \d+% of the last steps", said + err))
    assert named == {"2"}, said + err
