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
from tests.launch.test_worker_loss import TRAINS

JOB = str(Path(__file__).parent.parent / "jobs" / "shrinking.py")
LAUNCH = [sys.executable, "-c", "from psgc.launch.job.bpslaunch import main; main()"]
SOON_S, LATE_S = "25", "1000"  # of silence

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


# Once both ranks are there again, rank 0 holds the training until the file is there.
HELD = (
    TRAINS
    + """
import pathlib, sys, time
known = []
psgc.on_membership(lambda members: known.append((members.step, len(members.ranks))))
for step in psgc.Elastic(model=model, optimizer=optimizer).steps(1_000_000):
    whole = len(known) > 1 and known[-1][1] == 2
    while psgc.rank() == 0 and whole and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.1)
    optimizer.zero_grad()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    print(f"rank {psgc.rank()} step {step} ", flush=True)
    if whole and step >= known[-1][0] + 5:
        break
    time.sleep(0.05)
"""
)


@needs_namespaces
@pytest.mark.timeout(1000)
def test_it_does_not_oust_the_process_that_another_launcher_has_started_in_its_place(launched: Any, tmp_path: Path) -> None:
    """The launcher that was cut off has started its worker again, too, which is refused; the job goes on with the other."""
    script, refused, logs = tmp_path / "held.py", tmp_path / "refused", [tmp_path / f"log{number}" for number in range(3)]
    script.write_text(HELD)
    with testbed.Testbed(3) as bed:
        common = {
            **launched.env, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": bed.addresses[0], "DMLC_PS_ROOT_PORT": "9000",
            "PSGC_ON_WORKER_LOSS": "shrink", "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_DEAD_S": SOON_S,
        }  # fmt: skip

        def node(host: int, roles: str, number: int) -> Any:
            env = {**common, "DMLC_ROLE": roles, "DMLC_WORKER_ID": str(number)}
            with logs[host].open("w") as log:
                command = [*LAUNCH, sys.executable, str(script), str(refused)]
                return bed.run(host, command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)

        first, lost = node(0, "scheduler,server,worker", 0), node(1, "worker", 1)
        launched.read_until(lost, "rank 1 step 5 ")
        with bed.cut_off(1):
            wait_for("the others go on without it", logs[0])
            wait_for("another process takes its place", logs[1])
            second = node(2, "worker", 1)
            launched.read_until(second, "rank 1 step ")
        lost.communicate(timeout=HANG_S)
        refused.touch()
        for one in (first, second):
            one.communicate(timeout=2 * HANG_S)
    errs = [log.read_text() for log in logs]
    assert [one.returncode for one in (first, lost, second)] == [0, 1, 0], errs
    assert "which another launcher has started with the same DMLC_WORKER_ID" in errs[1].strip().splitlines()[-1], errs[1]
    assert errs[1].count("another process takes its place") == 1, errs[1]
