"""Processes that wait, with imports done, to take dead workers' places (``psgc run --spares``, PSGC_SPARES)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.chaos.members import members_of
from tests.launch.killing import Pace, children, told_of
from tests.launch.test_worker_loss import JOB, SAYS, WAIT
from tests.ports import free_port

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


# The same job, in a script that imports byteps.
AS_BYTEPS = """
import os, runpy, sys
import byteps.torch
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
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


def train(launched: Any, folder: Path, kills: Sequence[int], launcher: str) -> tuple[set[tuple[str, str]], set[str], str]:
    """Steps and losses, what was found at the end, and stderr. kills: steps after which rank 1 is killed."""
    command, pace = (sys.executable, JOB, "30", "none", "0.01"), Pace()
    if launcher in ("psgc run", "--as-byteps"):
        more, script = ([launcher], [str(folder / "script.py")]) if launcher == "--as-byteps" else ([], [])
        for path in script:
            Path(path).write_text(AS_BYTEPS)
        popen = launched.psgc(
            "run", *more, "--no-prefix", "--spares", "1", "--workers", "2", "--", command[0], *script, *command[1:], **WAIT, **pace.env
        )
    elif launcher == "--hostfile":
        (folder / "hosts").write_text("localhost slots=2\n")
        near = ("--ssh", "/no/ssh", "--start-timeout", "200", "--hostfile", str(folder / "hosts"), *(f"--env={name}" for name in pace.env))
        popen = launched.psgc("run", *near, "--spares", "1", "--", *command, **WAIT, **pace.env)
    else:
        machine = {"DMLC_ROLE": "scheduler,server,worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_SIZE": "2",
                   "BYTEPS_FORCE_DISTRIBUTED": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}  # fmt: skip
        popen = launched.psgc_launch(*command, PSGC_SPARES="1", **machine, **WAIT, **pace.env)
    said, found, left, names = set(), set(), list(kills), dict[int, str]()
    with pace:
        for line in popen.stdout:
            if match := SAYS.match(re.sub(r"^(\[[^]]*\] )*", "", line)):
                said.add((match[2], match[3]))
                names[int(match[4])] = f"worker {match[1]}"
                if match[2] in ("12", "25"):
                    here = [member.name for member in members_of([int(match[4])])]
                    assert here in ([], [names[int(match[4])]]), "a spare in a dead worker's place, too; unless it has ended meanwhile"
                if left and match[1] == "1" and int(match[2]) >= left[0]:
                    os.kill(int(match[4]), signal.SIGKILL)
                    left.pop(0)
                pace.heard(int(match[2]) + 1)
            elif " found " in line:
                found.add(line.split(" found ")[1].split()[0])
        status, _, err = launched.end(popen)
    assert status == 0, err
    assert not left
    return said, found, err


@pytest.mark.parametrize("launcher", ["psgc run", "--hostfile", "psgc-launch"])
def test_spares_take_dead_workers_places_one_after_the_other_and_change_nothing(launched: Any, tmp_path: Path, launcher: str) -> None:
    plain, killed = train(launched, tmp_path, (), launcher), train(launched, tmp_path, (5, 16), launcher)
    assert killed[2].count("; a spare process takes its place") == 2, killed[2]
    assert plain[:2] == killed[:2] and len(killed[1]) == 1
    assert "spare" not in plain[2], "those that were not needed end with the job"


def test_a_spare_finds_byteps_as_the_worker_did(launched: Any, tmp_path: Path) -> None:
    err = train(launched, tmp_path, (5,), "--as-byteps")[2]
    assert err.count("; a spare process takes its place") == 1, err
    assert "; another process takes its place" not in err, "as where the spare has died of an import"


def test_a_spare_that_dies_ends_nothing(launched: Any) -> None:
    popen = launched.job("--spares", "1", **WAIT)
    waiting = children(popen)[-1]
    os.kill(waiting, signal.SIGKILL)
    told_of(popen, f"psgc run: spare 0 was killed by SIGKILL (pid {waiting}); the job goes on without it")
    for _ in range(20):
        launched.read_until(popen, "step")
    popen.send_signal(signal.SIGINT)
    launched.end(popen)


@pytest.mark.parametrize(
    ("spares", "command", "env", "words"),
    [
        ("1", (sys.executable, JOB), {}, "1 spares have no effect where a worker's death ends the job; set PSGC_ON_WORKER_LOSS to wait or shrink"),
        ("1", ("sh", "-c", "true"), WAIT, "expected a command that a waiting Python can become, `python SCRIPT.py ...` or `python -m MODULE ...`, got `sh`"),
        ("-1", (sys.executable, JOB), WAIT, "run: --spares -1: expected how many processes are to wait, 0 or more"),
        ("", (sys.executable, JOB), {**WAIT, "PSGC_SPARES": "some"}, "PSGC_SPARES=some: expected how many processes are to wait on each machine, 0 or more"),
    ],
)  # fmt: skip
def test_what_spares_cannot_do_is_refused_before_anything_starts(
    launched: Any, spares: str, command: Sequence[str], env: dict[str, str], words: str
) -> None:
    asked = ("--spares", spares) if spares else ()
    status, _, err = launched.end(launched.psgc("run", *asked, "--", *command, **env))
    assert status == 2 and words in err and len(err.strip().splitlines()) == 1, err
