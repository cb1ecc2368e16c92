"""Processes that wait, with imports done, to take dead workers' places (``psgc run --spares``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import children
from tests.launch.test_worker_loss import JOB, SAYS, WAIT

SCRIPT = """
import os, pickle, sys
from dataclasses import dataclass
@dataclass
class Point:
    x: int
assert pickle.loads(pickle.dumps(Point(3))) == Point(3), "as in a data loader's process"
print(__name__, os.path.basename(__file__), sys.argv[1:], os.environ.get("OWN"), os.environ.get("GONE"), sorted(os.sched_getaffinity(0)))
print(os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)), sys.stdin.read() == "")
"""


def spare(task: dict[str, Any] | None, **env: str) -> subprocess.CompletedProcess[str]:
    told = "" if task is None else json.dumps(task) + "\n"
    return subprocess.run(
        [sys.executable, "-m", "psgc.launch.job.spare"], input=told, env={**os.environ, **env}, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip


def test_a_spare_becomes_what_the_command_would_have_made(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    core = min(os.sched_getaffinity(0))
    done = spare({"words": [str(script), "-x", "1"], "env": {**os.environ, "OWN": "yes"}, "cores": [core]}, GONE="away")
    assert done.stdout.splitlines() == [f"__main__ script.py ['-x', '1'] yes None [{core}]", "True True"], done.stderr


def test_a_module_and_an_error_are_those_of_the_command(tmp_path: Path) -> None:
    done = spare({"words": ["-m", "json.tool", "--help"], "env": dict(os.environ), "cores": []})
    assert done.returncode == 0 and "usage:" in done.stdout
    script = tmp_path / "raises.py"
    script.write_text("\nraise ValueError('no such shard')\n")
    done = spare({"words": [str(script)], "env": dict(os.environ), "cores": []})
    assert done.returncode == 1 and done.stderr.strip().endswith("ValueError: no such shard")
    assert f'File "{script}", line 2, in <module>' in done.stderr


def test_a_spare_that_is_told_nothing_ends_without_a_word() -> None:
    done = spare(None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def train(launched: Any, kills: Sequence[int], **env: str) -> tuple[set[tuple[str, str]], set[str], str]:
    """Steps and losses, what was found at the end, and stderr. kills: steps after which rank 1 is killed."""
    command = (sys.executable, JOB, "30", "none", "0.01")
    popen = launched.psgc("run", "--no-prefix", "--spares", "1", "--workers", "2", "--", *command, **WAIT, **env)
    said, found, left = set(), set(), list(kills)
    for line in popen.stdout:
        if match := SAYS.match(line):
            said.add((match[2], match[3]))
            if left and match[1] == "1" and int(match[2]) >= left[0]:
                os.kill(int(match[4]), signal.SIGKILL)
                left.pop(0)
        elif " found " in line:
            found.add(line.split(" found ")[1].split()[0])
    status, _, err = launched.end(popen)
    assert status == 0, err
    assert not left
    return said, found, err


def test_spares_take_dead_workers_places_one_after_the_other_and_change_nothing(launched: Any) -> None:
    plain, killed = train(launched, ()), train(launched, (5, 16))
    assert killed[2].count("; a spare process takes its place") == 2, killed[2]
    assert plain[:2] == killed[:2] and len(killed[1]) == 1
    assert "spare" not in plain[2], "those that were not needed end with the job"


def test_a_spare_that_dies_ends_nothing(launched: Any) -> None:
    popen = launched.job("--spares", "1", **WAIT)
    waiting = children(popen)[-1]
    os.kill(waiting, signal.SIGKILL)
    launched.read_until(popen, "step 30:")
    popen.send_signal(signal.SIGINT)
    _, _, err = launched.end(popen)
    assert f"psgc run: spare 0 was killed by SIGKILL (pid {waiting}); the job goes on without it" in err


@pytest.mark.parametrize(
    ("command", "env", "words"),
    [
        (
            (sys.executable, JOB),
            {},
            "--spares 1 has no effect where a worker's death ends the job; set PSGC_ON_WORKER_LOSS to wait or shrink",
        ),
        (("sh", "-c", "true"), WAIT, "expected a number, at least 0, and a command `python SCRIPT.py ...` or `python -m MODULE ...`"),
    ],
)
def test_what_spares_cannot_do_is_refused_before_anything_starts(
    launched: Any, command: Sequence[str], env: dict[str, str], words: str
) -> None:
    status, _, err = launched.end(launched.psgc("run", "--spares", "1", "--", *command, **env))
    assert status == 2 and words in err and len(err.strip().splitlines()) == 1, err
