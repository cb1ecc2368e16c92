"""A scheduler that is killed in the middle of a real job is followed by another, and nothing of the training changes."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import Pace, Victims, children, run_and_kill, told_of
from tests.ports import free_port

JOBS = Path(__file__).parent.parent / "jobs"
GOES_ON = "it is started again and goes on from its journal"
ROLE = [sys.executable, "-m", "psgc.launch.job.role"]


@pytest.mark.parametrize(
    ("servers", "codecs", "env"),
    [
        (2, ["onebit", "none"], {}),
        (1, ["int8", "none"], {"PSGC_TRANSPORT": "tcp"}),
        (1, ["topk:k=0.1"], {"PSGC_TRANSPORT": "tcp", "PSGC_ENCRYPT": "1"}),
    ],
)
def test_sums_are_right_to_the_bit_while_the_scheduler_is_killed(
    launched: Any, servers: int, codecs: list[str], env: dict[str, str]
) -> None:
    job = [str(JOBS / "sums.py"), "--say", "--steps", "40", "--codec", *codecs]
    status, out, err = run_and_kill(launched, job, 3, servers, servers, roles=("scheduler",), **env)
    assert status == 0, err
    assert out.count(" 0 wrong") == 2 * len(codecs)
    assert err.count(GOES_ON) == 3


@pytest.mark.parametrize(("codec", "front"), [("onebit", "optimizer"), ("int8", "ddp")])
def test_a_training_has_the_losses_and_parameters_of_one_whose_scheduler_lives(launched: Any, codec: str, front: str) -> None:
    job = [str(JOBS / "lost_server.py"), "40", codec, front, "0.01"]
    found = []
    for kills in (0, 3):
        status, out, err = run_and_kill(launched, job, kills, seed=len(codec), servers=1, roles=("scheduler",))
        assert status == 0, err
        found.append(sorted(re.findall(r"^rank \d found \w+$", out, re.M)))
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_servers_and_the_scheduler_may_die_in_one_job(launched: Any) -> None:
    job = [str(JOBS / "lost_server.py"), "60", "int8", "optimizer", "0.02"]
    found = []
    for kills in (0, 5):
        status, out, err = run_and_kill(launched, job, kills, seed=4, servers=1, roles=("scheduler", "server"))
        assert status == 0, err
        found.append(sorted(re.findall(r"^rank \d found \w+$", out, re.M)))
    assert err.count("it is started again and goes on from") == 5
    assert found[0] == found[1]


def test_steps_go_on_while_there_is_no_scheduler(launched: Any) -> None:
    """It is stopped for good; steps that are under way need none."""
    popen = launched.job(PSGC_HEARTBEAT_S="0.3")
    _guardian, scheduler, *_ = children(popen)
    os.kill(scheduler, signal.SIGSTOP)
    steps = [int(launched.read_until(popen, "step").split()[1].rstrip(":")) for _ in range(60)]
    assert max(steps) > 10
    os.kill(scheduler, signal.SIGKILL)
    said = told_of(popen, GOES_ON)
    for _ in range(60):
        launched.read_until(popen, "step")
    popen.send_signal(signal.SIGTERM)
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGTERM
    assert GOES_ON in said + err


def test_stop_ends_the_job_at_its_death(launched: Any) -> None:
    popen = launched.job(PSGC_ON_SCHEDULER_LOSS="stop")
    Victims(popen, 1, 2, ("scheduler",)).kill_one(random.Random(0))
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGKILL
    assert re.search(r"psgc run: scheduler was killed by SIGKILL \(pid \d+\)$", err.strip()), err
    assert GOES_ON not in err


def test_one_whose_journal_was_given_up_is_not_followed(launched: Any) -> None:
    popen = launched.job()
    _guardian, scheduler, server, *_ = children(popen)
    resource.prlimit(scheduler, resource.RLIMIT_FSIZE, (0, 0))  # as a disk that is full
    os.kill(server, signal.SIGKILL)  # which is written down
    told_of(popen, "if this scheduler dies from now on, the job ends")
    os.kill(scheduler, signal.SIGKILL)
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGKILL
    assert re.search(rf"psgc run: scheduler was killed by SIGKILL \(pid {scheduler}\)$", err.strip()), err
    assert GOES_ON not in err


def test_one_that_ends_again_and_again_ends_the_job_with_its_line(launched: Any) -> None:
    popen = launched.job(PSGC_HEARTBEAT_S="60")  # so that none of them hears of everyone again
    Victims(popen, 1, 2, ("scheduler",)).kill_all()
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGKILL
    assert re.search(
        r"scheduler has ended \d+ times in \d+ s and did not hear of everyone again in between, so it is not started again$", err, re.M
    ), err


def test_psgc_launch_starts_its_scheduler_again_too(launched: Any) -> None:
    port = str(free_port())
    env = {
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }
    with Pace(ahead=20) as pace:
        scheduler = launched.psgc_launch(**env, DMLC_ROLE="scheduler")
        joint = launched.psgc_launch(
            sys.executable, str(JOBS / "lost_server.py"), "60", "int8", "optimizer", "0.02", **env, **pace.env, DMLC_ROLE="joint", DMLC_WORKER_ID="0",
            BYTEPS_LOCAL_SIZE="2",
        )  # fmt: skip
        launched.read_until(joint, "[worker 0] step 9")
        os.kill(children(scheduler)[-1], signal.SIGKILL)
        pace.over()
        status, out, err = launched.end(joint)
    assert status == 0, err
    assert len(re.findall(r"rank \d found \w+$", out, re.M)) == 2
    status, _, err = launched.end(scheduler)
    assert status == 0, err
    assert GOES_ON in err


class ByHand:
    """A scheduler without a launcher, whose journal is a file."""

    def __init__(self, launched: Any, journal: Path, port: str, **env: str) -> None:
        self.launched = launched
        self.env = {
            "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "BYTEPS_FORCE_DISTRIBUTED": "1",
            "PSGC_JOB": "4711", "PSGC_JOURNAL": str(journal), **env,
        }  # fmt: skip

    def start(self, **env: str) -> subprocess.Popen[str]:
        popen: subprocess.Popen[str] = self.launched.preloaded(*ROLE[1:], "scheduler", **{**self.env, **env})
        return popen


def test_a_named_journal_serves_whoever_starts_the_scheduler_again_and_is_of_one_job(launched: Any, tmp_path: Path) -> None:
    journal, port = tmp_path / "journal", str(free_port())
    hand = ByHand(launched, journal, port)
    first = hand.start()
    with Pace(ahead=20) as pace:
        joint = launched.psgc_launch(
            sys.executable, str(JOBS / "lost_server.py"), "60", "int8", "optimizer", "0.05", **hand.env, **pace.env, DMLC_ROLE="joint",
            DMLC_WORKER_ID="0", BYTEPS_LOCAL_SIZE="2",
        )  # fmt: skip
        launched.read_until(joint, "[worker 0] step 9")
        first.kill()
        launched.end(first)
        pace.over()
        with journal.open("ab") as file:
            file.write(b"\x20\0\0\0torn")  # the beginning of a record
        other = hand.start(PSGC_JOB="4712")
        status, _, err = launched.end(other)
        assert status == 1
        assert re.fullmatch(
            r"psgc scheduler: the journal \S+ is of job 4711 .* this is job 4712 .*; remove it if that job is over, .*\n", err
        ), err
        time.sleep(2)  # members see that nobody listens
        second = hand.start()
        status, out, err = launched.end(joint)
        assert status == 0, err
        assert len(re.findall(r"rank \d found \w+$", out, re.M)) == 2
        status, _, err = launched.end(second)
        assert status == 0, err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_tens_of_kills_of_any_service_change_no_sum(launched: Any, seed: int) -> None:
    rng = random.Random(seed)
    codecs = rng.sample(["none", "onebit", "int8", "topk:k=0.1", "shared", "fp16"], 2)
    servers, workers = rng.choice([(1, 2), (2, 2), (2, 3)])
    job = [str(JOBS / "sums.py"), "--say", "--steps", "400", "--codec", *codecs]
    status, out, err = run_and_kill(launched, job, 25, seed, servers, workers, most=20, roles=("scheduler", "server"))
    assert status == 0, err
    assert out.count(" 0 wrong") == workers * len(codecs)
