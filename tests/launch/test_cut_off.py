"""A worker whose machine was cut off for PSGC_DEAD_S, and is connected again: its process ends, and its launcher starts another in its place, which takes part.

Machines are network namespaces."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load
from tests.launch.conftest import HANG_S

JOB = str(Path(__file__).parent.parent / "jobs" / "shrinking.py")
LAUNCH = [sys.executable, "-c", "from psgc.launch.job.bpslaunch import main; main()"]
SOON_S, LATE_S = "10", "1000"  # of silence

testbed = load("testbed")
needs_namespaces = pytest.mark.skipif(bool(testbed.why_not()), reason=f"no testbed here: {testbed.why_not()}")


def wait_for(words: str, log: Path) -> None:
    deadline = time.monotonic() + HANG_S
    while words not in log.read_text():
        assert time.monotonic() < deadline, (words, log.read_text())
        time.sleep(0.1)


@needs_namespaces
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("policy", "its_dead_s", "steps", "cut_until", "why"),
    [
        ("wait", SOON_S, "40", (1, "another process takes its place"), "the scheduler at tcp://"),
        ("shrink", LATE_S, "1000000", (0, "the others go on without it"), "worker 1 (node 1, "),
    ],
    ids=["gives the scheduler up", "is turned away"],
)
def test_its_place_is_taken_by_another_process(
    launched: Any, tmp_path: Path, policy: str, its_dead_s: str, steps: str, cut_until: tuple[int, str], why: str
) -> None:
    gate, (place, words) = tmp_path / "gate", cut_until
    gate.touch()
    with testbed.Testbed(2) as bed:
        common = {
            **launched.env, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": bed.addresses[0], "DMLC_PS_ROOT_PORT": "9000",
            "PSGC_ON_WORKER_LOSS": policy, "BYTEPS_FORCE_DISTRIBUTED": "1",
        }  # fmt: skip
        logs = [tmp_path / f"log{node}" for node in range(2)]

        def node(number: int, roles: str, dead_s: str) -> Any:
            env = {**common, "DMLC_ROLE": roles, "DMLC_WORKER_ID": str(number), "PSGC_DEAD_S": dead_s}
            with logs[number].open("w") as log:
                return bed.run(
                    number,
                    [*LAUNCH, sys.executable, JOB, steps, "-1", str(gate), "0"],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )

        nodes = [node(0, "scheduler,server,worker", SOON_S), node(1, "worker", its_dead_s)]
        launched.read_until(nodes[1], "rank 1 step 5 ")
        with bed.cut_off(1):
            wait_for(words, logs[place])
        outs = [one.communicate(timeout=2 * HANG_S)[0] for one in nodes]
        errs = [log.read_text() for log in logs]
    assert [one.returncode for one in nodes] == [0, 0], errs
    assert re.search(rf"^psgc-launch: rank 1 was cut off: {re.escape(why)}.*; another process takes its place$", errs[1], re.M), errs[1]
    found = [re.findall(r"rank \d found (\S+)", out) for out in outs]
    assert len(found[0]) == 1 and found[0] == found[1], outs
