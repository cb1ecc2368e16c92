"""Real jobs, whose members are killed, stopped, cut off and slowed: promises are kept, and where one is broken that is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.chaos.running import can_touch_connections
from tests.launch.conftest import Launched
from tests.launch.killing import Pace

JOB = [sys.executable, str(Path(__file__).parent.parent / "jobs" / "lost_server.py")]


def chaos(
    launched: Launched, *arguments: str, job: list[str], run: tuple[str, ...] = (), least: int = 0, each: int = 0, **env: str
) -> tuple[int, dict[str, Any], str]:
    """least: so many events happen before the disturbed job has ended, which takes at most ``each`` steps for each of them."""
    with Pace() as pace:
        pace.over()
        words = ("chaos", "--json", *arguments, "--", sys.executable, "-m", "psgc.launch", "run", *run, "--", *job)
        popen = launched.preloaded("-m", "psgc.launch", *words, **env, **pace.env)
        said, seen = list[str](), 0
        assert popen.stderr is not None
        for line in popen.stderr:
            said.append(line)
            if least and ": the run with " in line:
                pace.hold(each)
            elif least and ": event " in line:
                seen += 1
                pace.allow((seen + 1) * each) if seen < least else pace.over()
        status, out, _ = launched.end(popen)
    return status, json.loads(out) if out else {}, "".join(said)


@pytest.mark.skipif(bool(can_touch_connections()), reason=f"no duplicates of sockets: {can_touch_connections()}")
def test_a_job_keeps_its_promises_whatever_happens_to_its_services(launched: Launched) -> None:
    status, report, err = chaos(
        launched, "--seed", "7", "--events", "8", "--every", "0.2", job=[*JOB, "500", "int8", "optimizer", "0.01"], least=4, each=60, PSGC_TRANSPORT="tcp"
    )  # fmt: skip
    assert status == 0, err
    assert report["broken"] == []
    assert report["happened"] >= 4
    assert {blow["kind"] for blow in report["blows"]} > {"kill"}
    assert sum(found["count"] for found in report["recovery"].values()) >= 3


@pytest.mark.long
def test_a_job_that_ends_by_its_policy_is_one_that_keeps_it(launched: Launched) -> None:
    status, report, err = chaos(
        launched, "--seed", "1", "--events", "3", "--every", "0.2", "--kinds", "kill", "--roles", "server", job=[*JOB, "300", "none", "optimizer", "0.01"],
        PSGC_ON_SERVER_LOSS="stop",
    )  # fmt: skip
    assert status == 0, err
    assert report["ends"] == "PSGC_ON_SERVER_LOSS=stop"
    assert report["happened"] == 1


def test_a_worker_that_is_killed_ends_the_job_and_that_is_kept_too(launched: Launched) -> None:
    status, report, err = chaos(
        launched, "--events", "1", "--every", "0.2", "--kinds", "kill", "--roles", "worker", job=[*JOB, "300", "none", "optimizer", "0.01"], least=1,
        each=100,
    )  # fmt: skip
    assert status == 0, err
    assert report["ends"] == "a worker's death ends the job"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_spare_in_a_dead_workers_place_is_a_member_like_any(launched: Launched) -> None:
    job = [sys.executable, str(Path(JOB[1]).with_name("lost_worker.py")), "400", "none", "0.02"]
    flags = ("--seed", "1", "--events", "2", "--every", "0.2", "--kinds", "kill", "--roles", "worker", "--result", r"found \w+")
    status, report, err = chaos(
        launched, *flags, job=job, run=("--no-prefix", "--workers", "2", "--spares", "1"), PSGC_ON_WORKER_LOSS="wait"
    )
    assert status == 0, err
    assert report["broken"] == []
    assert [blow["recovered_s"] is not None for blow in report["blows"]] == [True, True]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_a_process_that_is_killed_while_it_comes_into_a_killed_ones_place_is_followed_too(launched: Launched, policy: str) -> None:
    """Seed 26: a worker is killed and then its successor, another worker and then the scheduler."""
    job = [sys.executable, str(Path(JOB[1]).with_name("lost_worker.py")), "600", "none", "0.05"]
    flags = ("--seed", "26", "--events", "2", "--every", "0.5", "--kinds", "kill", "--roles", "worker,scheduler", "--result", r"found \w+")
    status, report, err = chaos(launched, *flags, job=job, run=("--no-prefix", "--workers", "3"), PSGC_ON_WORKER_LOSS=policy)
    assert status == 0, err
    assert report["broken"] == [] and report["again"] >= 1
    first, again, *_ = report["blows"]
    assert (first["kind"], first["role"], again["name"]) == ("kill", "worker", first["name"]), report


UNSTEADY = """
import os, sys
from pathlib import Path
sys.path[0] = os.path.dirname(%r)
sys.argv = ["job", "100", "none", "optimizer", "0.01"]
import psgc.torch as psgc
mark = Path(os.environ["ONCE"])
exec(Path(%r).read_text().replace('found = hashlib.sha256()', 'found = hashlib.sha256(b"other" if mark.exists() else b"")'))
mark.touch()
"""


def test_results_that_differ_are_a_broken_promise(launched: Launched, tmp_path: Path) -> None:
    script = tmp_path / "unsteady.py"
    script.write_text(UNSTEADY % (JOB[1], JOB[1]))
    status, report, err = chaos(
        launched, "--events", "1", "--every", "0.1", "--kinds", "stop", job=[sys.executable, str(script)], ONCE=str(tmp_path / "mark")
    )
    assert status == 1, err
    assert report["broken"][0].startswith("results differ: undisturbed found ")
    assert err.strip().splitlines()[-1].startswith("psgc chaos: seed 0: results differ")


LEAVES = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
time.sleep(1)
sys.path[0] = os.path.dirname(%r)
sys.argv = ["job", "60", "none", "optimizer", "0.01"]
exec(Path(%r).read_text())
"""


def test_what_a_script_has_started_and_left_is_a_broken_promise(launched: Launched, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES % (JOB[1], JOB[1]))
    status, report, err = chaos(
        launched, "--events", "1", "--every", "0.1", "--kinds", "stop", "--roles", "server", job=[sys.executable, str(script)]
    )
    assert status == 1, err
    assert any("a process was left: pid" in text and "time.sleep(600)" in text for text in report["broken"]), report


def test_a_job_to_which_nothing_was_done_has_kept_nothing(launched: Launched) -> None:
    status, report, err = chaos(launched, "--events", "2", "--every", "1000", job=[*JOB, "20", "none", "optimizer", "0.01"])
    assert (status, report["happened"], report["broken"]) == (1, 0, []), err
    assert "none of the 2 events happened, so nothing was tried" in err.strip().splitlines()[-1]


def test_what_is_no_job_to_check_is_wrong_usage(launched: Launched) -> None:
    status, _, err = chaos(launched, job=[sys.executable, "-c", "print('step 1')"])
    assert status == 2, err
    assert "fits no line of the job's output" in err
    for arguments, words in (
        (("--every", "0"), "--every 0: expected more than 0"),
        (("--result", "(", "--", "true"), "no regular expression"),
        ((), "no job given"),
    ):
        popen = launched.preloaded("-m", "psgc.launch", "chaos", *arguments)
        status, _, err = launched.end(popen)
        assert (status, words in err) == (2, True), err


def test_the_schedule_alone_is_printed_on_request(launched: Launched) -> None:
    status, out, _ = launched.end(launched.preloaded("-m", "psgc.launch", "chaos", "--schedule", "--seed", "7", "--events", "3"))
    assert status == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == ["event 0", "event 1", "event 2"]
