"""A server's process that is killed in the middle of a real job is followed by another, and nothing of the training changes."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import Victims, children, run_and_kill

JOBS = Path(__file__).parent.parent / "jobs"
TRANSPORTS = {"shared memory": {}, "TCP": {"PSGC_TRANSPORT": "tcp"}, "encrypted": {"PSGC_TRANSPORT": "tcp", "PSGC_ENCRYPT": "1"}}


@pytest.mark.parametrize(
    ("transport", "codecs"), [("shared memory", ["onebit", "none"]), ("TCP", ["int8", "none"]), ("encrypted", ["topk:k=0.1", "shared"])]
)
def test_sums_are_right_to_the_bit_while_servers_are_killed(launched: Any, transport: str, codecs: list[str]) -> None:
    job = [str(JOBS / "sums.py"), "--say", "--steps", "40", "--codec", *codecs]
    status, out, err = run_and_kill(launched, job, 4, seed=len(transport), **TRANSPORTS[transport])
    assert status == 0, err
    assert out.count(" 0 wrong") == 2 * len(codecs)
    assert err.count("it is started again and goes on from what it had committed") == 4


@pytest.mark.parametrize(("codec", "front"), [("onebit", "optimizer"), ("int8", "ddp")])
def test_a_training_has_the_losses_and_parameters_of_one_whose_servers_live(launched: Any, codec: str, front: str) -> None:
    job = [str(JOBS / "lost_server.py"), "40", codec, front, "0.01"]
    found = []
    for kills in (0, 3):
        status, out, err = run_and_kill(launched, job, kills, seed=3, servers=1)
        assert status == 0, err
        found.append(sorted(re.findall(r"^rank \d found \w+$", out, re.M)))
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_a_server_that_ends_again_and_again_without_a_step_ends_the_job_with_its_line(launched: Any) -> None:
    popen = launched.job()
    *_, worker = children(popen)
    servers = Victims(popen, 1, 2)
    os.kill(worker, signal.SIGSTOP)  # so that no step is completed in between
    servers.kill_all()
    status, _, err = launched.end(popen)
    assert status == 128 + signal.SIGKILL
    assert re.search(r"server 0 has ended \d+ times in \d+ s and completed no step in between, so it is not started again$", err, re.M), err
    assert re.search(r"psgc run: server 0 was killed by SIGKILL \(pid \d+\)$", err.strip()), err


@pytest.mark.long  # a server that has nothing to do counts as well once it has been there for two heartbeats of .3 s
def test_a_server_that_holds_no_part_may_die_as_often_as_others(launched: Any) -> None:
    popen = launched.psgc("run", "--no-prefix", "--workers", "2", "--servers", "3", "--", sys.executable, str(JOBS / "lost_server.py"), "100000", "none",
                          "optimizer", "0.01")  # fmt: skip
    launched.read_until(popen, "step")
    victims, rng = Victims(popen, 3, 2), random.Random(0)
    for _ in range(14):  # more than four of each: the model is two parts
        for _ in range(200):
            launched.read_until(popen, "step")
        time.sleep(3)
        victims.kill_one(rng)
    for _ in range(2000):
        launched.read_until(popen, "step")
    popen.terminate()
    err = launched.end(popen)[2]
    assert err.count("it is started again and goes on from what it had committed") == 14, err


@pytest.mark.parametrize(
    ("kind", "transport"), [("rounds", "shared memory"), ("counts", "shared memory"), ("counts", "TCP"), ("outer", "TCP")]
)
def test_tensors_that_servers_hold_are_those_of_a_job_whose_servers_live(launched: Any, kind: str, transport: str) -> None:
    job = [str(JOBS / "lost_weights.py"), kind, "40", "0.01"]
    found = []
    for kills in (0, 4):
        status, out, err = run_and_kill(launched, job, kills, seed=len(kind), **TRANSPORTS[transport])
        assert status == 0, err
        found.append(sorted(re.findall(r"^rank \d found \w+$", out, re.M)))
    assert err.count("it is started again and goes on from what it had committed") == 4
    assert len(found[0]) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("staleness", ["0", "unbounded"])
def test_asynchronous_training_goes_on_after_its_servers_were_killed(launched: Any, staleness: str) -> None:
    bound = {} if staleness == "unbounded" else {"PSGC_STALENESS": staleness}
    job = [str(JOBS / "lost_server.py"), "40", "topk:k=0.1", "optimizer", "0.01"]
    status, out, err = run_and_kill(launched, job, 3, seed=5, PSGC_ASYNC="1", **bound)
    assert status == 0, err
    assert len(re.findall(r"^rank \d found \w+$", out, re.M)) == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_hundreds_of_kills_change_no_sum(launched: Any, seed: int) -> None:
    rng = random.Random(seed)
    codecs = rng.sample(["none", "onebit", "int8", "topk:k=0.1", "shared", "fp16"], 2)
    servers, workers = rng.choice([(1, 2), (2, 2), (3, 2), (2, 3)])
    transport = rng.choice(list(TRANSPORTS))
    job = [str(JOBS / "sums.py"), "--say", "--steps", "400", "--codec", *codecs]
    status, out, err = run_and_kill(launched, job, 25, seed, servers, workers, most=20, **TRANSPORTS[transport])
    assert status == 0, err
    assert out.count(" 0 wrong") == workers * len(codecs)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(9))
def test_hundreds_of_kills_change_nothing_of_what_servers_hold(launched: Any, seed: int) -> None:
    rng = random.Random(seed)
    kind = ("rounds", "counts", "outer")[seed % 3]
    servers, workers = rng.choice([(1, 2), (2, 2), (3, 2), (2, 3)])
    transport = rng.choice(list(TRANSPORTS))
    job = [str(JOBS / "lost_weights.py"), kind, "400", "0.01"]
    found = []
    for kills in (0, 25):
        status, out, err = run_and_kill(launched, job, kills, seed, servers, workers, most=20, **TRANSPORTS[transport])
        assert status == 0, err
        found.append(sorted(re.findall(r"^rank \d found \w+$", out, re.M)))
    assert len(found[0]) == workers
    assert found[0] == found[1]
