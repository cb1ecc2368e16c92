"""What chaos does to processes, with a job of small ones: a launcher that starts its worker again when that is killed."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from psgc.launch.chaos.running import Outcome, Running
from psgc.launch.chaos.schedule import Event

# It ends once there is a file.
WORKER = (
    "import itertools, os, sys, time\nfor step in itertools.count():\n    print('step', step, flush=True)\n    time.sleep(0.02)\n"
    "    if os.path.exists(sys.argv[1]): break\nprint('rank 0 found it')\n"
)
LAUNCHER = f"""
import os, subprocess, sys, time
env = dict(os.environ, DMLC_ROLE="worker", RANK="0", PSGC_LAUNCHER="1")
BEFORE
while subprocess.run([sys.executable, "-c", {WORKER!r}, sys.argv[1]], env=env, start_new_session=True).returncode:
    time.sleep(0.1)
"""


def run(over: Path, *events: Event, blows: int, before: str = "") -> Outcome:
    """Until there have been so many blows, and the job has gone on after the last one."""
    said: list[str] = []
    command: Sequence[str] = [sys.executable, "-c", LAUNCHER.replace("BEFORE", before), str(over)]
    running = Running(command, re.compile(r"\bstep\b"), 300.0, said.append)

    def end_it() -> None:
        struck = running._outcome.blows
        while running._goes_on() and (len(struck) < blows or any(blow.recovered_s is None for blow in struck[-1:])):
            time.sleep(0.02)
        over.touch()

    ending = threading.Thread(target=end_it)
    ending.start()
    outcome = running.through(events)
    ending.join()
    return outcome


def test_the_process_in_a_killed_ones_place_is_killed_too_before_the_event_is_over(tmp_path: Path) -> None:
    outcome = run(tmp_path / "over", Event(0, "kill", "worker", 0.0, 0.0, False, again="worker", again_s=0.2), blows=2)
    first, again = outcome.blows
    assert (first.again, again.again, again.name, again.done) == (False, True, "worker 0", {"kind": "kill", "role": "worker"})
    assert first.recovered_s is None and again.recovered_s is not None and again.at_s >= first.at_s + 0.2
    assert outcome.run.status == 0 and list(outcome.run.killed) == ["0"] and not outcome.run.left
    assert set(outcome.killed) == {"worker"} and outcome.run.said[-1] == "rank 0 found it"


def test_without_somebody_to_be_killed_with_it_an_event_is_over_as_others_are(tmp_path: Path) -> None:
    outcome = run(tmp_path / "over", Event(0, "kill", "worker", 0.0, 0.0, False, again="scheduler", again_s=0.1), blows=1)
    assert [blow.again for blow in outcome.blows] == [False] and outcome.blows[0].recovered_s is not None


def test_whatever_process_of_a_job_is_left_is_seen_and_ended(tmp_path: Path) -> None:
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    before = f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True, {quiet})"
    outcome = run(tmp_path / "over", blows=0, before=before)
    (left,) = outcome.run.left
    assert "time.sleep(1000)" in left and outcome.run.status == 0 and not outcome.blows


def test_policies_are_those_of_the_killed_process_and_output_need_not_be_text(tmp_path: Path) -> None:
    before = r"env['PSGC_ON_WORKER_LOSS'] = 'wait'; sys.stdout.buffer.write(b'caf\xe9\n'); sys.stdout.flush()"
    outcome = run(tmp_path / "over", Event(0, "kill", "worker", 0.0, 0.0, False), blows=1, before=before)
    assert outcome.killed["worker"]["PSGC_ON_WORKER_LOSS"] == "wait"
    assert (outcome.run.status, outcome.run.said[0], outcome.run.said[-1]) == (0, "caf\ufffd", "rank 0 found it")


def test_a_job_without_a_line_of_progress_is_given_up_for_that() -> None:
    job = [sys.executable, "-c", "import time; time.sleep(1000)"]
    assert "no line in that time fits --progress 'epoch'" in Running(job, re.compile("epoch"), 0.1, print).through(()).stuck
