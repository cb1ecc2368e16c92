"""Descriptors are few, however many names a job has, and psgc's processes may open as many as they are allowed."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = str(Path(__file__).parent.parent / "jobs" / "steps.py")
NAMES = str(Path(__file__).parent.parent / "jobs" / "names.py")
LIMITED = 'ulimit -S -n "$1"; ulimit -H -n "$2"; shift 2; exec "$@"'
LIMITED_PSGC = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512)); from psgc.launch.cli import main; main()"
RAISED = (
    "import resource; from psgc.processes.descriptors import raise_limit; raise_limit(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
)


def limited(soft: int, hard: int, *command: str) -> tuple[str, ...]:
    return ("bash", "-c", LIMITED, "-", str(soft), str(hard), *command)


@pytest.mark.parametrize("names", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_job_of_many_names_needs_few_descriptors(launched: Any, names: int) -> None:
    popen = launched.preloaded("-c", LIMITED_PSGC, "run", "--", sys.executable, NAMES, "--names", str(names))
    out, err = popen.communicate(timeout=900)
    assert popen.returncode == 0, err
    told = [re.fullmatch(r"\[worker \d\] limit 512, (\d+) more descriptors", line) for line in out.splitlines()]
    assert len(told) == 2 and all(each is not None and int(each[1]) < 10 for each in told), out


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    hard = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    done = subprocess.run(limited(100, hard, sys.executable, "-c", RAISED), capture_output=True, text=True, check=True)
    assert done.stdout == f"({hard}, {hard})\n"


def test_every_process_of_a_job_may_open_as_many_as_it_is_allowed(launched: Any) -> None:
    popen = launched.preloaded("-c", LIMITED_PSGC, "run", "--no-prefix", "--", sys.executable, STEPS, "--steps", "100000")
    launched.read_until(popen, "step 1:")
    limits = {pid: Path(f"/proc/{pid}/limits").read_text() for pid in launched.left()}
    popen.send_signal(signal.SIGTERM)
    launched.end(popen)
    assert len(limits) == 6, "launcher, guardian, scheduler, server and two workers"
    for limit in limits.values():
        assert re.search(r"^Max open files +512 +512 ", limit, re.MULTILINE), limit
