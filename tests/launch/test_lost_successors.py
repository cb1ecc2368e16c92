"""A process in a dead worker's place that is killed itself, before it has joined: it is followed like the first."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = str(Path(__file__).parent.parent / "jobs" / "shrinking.py")

# Rank 1's first process dies in step 5, the second while it imports, the third in init(): of all, as many as may end within a minute.
BEFORE_THEY_JOIN = f"""
import os, runpy, signal, sys
def die():
    os.kill(os.getpid(), signal.SIGKILL)
incarnation = os.environ["PSGC_INCARNATION"]
if incarnation == "2":
    die()
from psgc.diagnostics.report import Launcher
tell = Launcher.tell
def dying(self, event, *args, **kwargs):
    told = tell(self, event, *args, **kwargs)
    if incarnation == "3" and event == "joining":
        die()
    return told
Launcher.tell = dying
sys.argv = [{JOB!r}, *sys.argv[1:]]
sys.path[0] = os.path.dirname({JOB!r})
runpy.run_path({JOB!r}, run_name="__main__")
"""


@pytest.mark.parametrize(("policy", "steps"), [("wait", "30"), ("shrink", "1000000")])
def test_a_process_that_is_killed_before_it_has_joined_is_followed(launched: Any, tmp_path: Path, policy: str, steps: str) -> None:
    """Under shrink the job ends once everyone is there again, so nobody comes before rank 1 was missing."""
    script, gate = tmp_path / "dies.py", tmp_path / "gate"
    script.write_text(BEFORE_THEY_JOIN)
    command = (sys.executable, str(script), steps, "5", str(gate), "0")
    popen = launched.psgc("run", "--no-prefix", "--", *command, PSGC_ON_WORKER_LOSS=policy)
    for _ in ("everyone", "rank 0 alone") if policy == "shrink" else ():
        launched.read_until(popen, "rank 0 members")
    gate.touch()
    status, out, err = launched.end(popen)
    assert status == 0, err
    assert err.count("; another process takes its place") == 3, err
    found = re.findall(r"rank (\d) found (\S+)", out)
    assert sorted(rank for rank, _ in found) == ["0", "1"] and len({value for _, value in found}) == 1, out
