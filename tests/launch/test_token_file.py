"""A job's token is replaced while it runs: nothing of the job changes, processes that die are followed under the new one, and the old one lets nobody in."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from psgc.launch.observing.scheduler_view import config_of
from psgc.transport.control.dealer import Dealer
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import Header, Kind
from tests.launch.killing import Victims, children
from tests.ports import free_port

JOBS = Path(__file__).parent.parent / "jobs"
SAYS_WHERE = """
import json, os, runpy, sys
print(json.dumps({name: os.environ[name] for name in ("DMLC_PS_ROOT_PORT", "PSGC_JOB")}), flush=True)
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def admits(port: int, job: int, *tokens: str) -> bool:
    """Whether the scheduler lets a stranger in who holds these."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = Dealer(context, f"tcp://127.0.0.1:{port}", b"stranger", 15.0, JobKeys(job, tokens))
    try:
        for _ in range(3000):
            dealer.send(Header(Kind.HEARTBEAT, job=job, payload_bytes=1), b"x")
            dealer.socket.poll(20)
            if "up" in dealer.events():
                return True
            dealer.tick(time.monotonic())
            if "does not take this member's token" in dealer.turned_away():
                return False
    finally:
        dealer.close()
        context.destroy(0)
    raise AssertionError("neither let in nor refused")


def until_admitted(port: int, job: int, token: str) -> None:
    for _ in range(100):
        if admits(port, job, token):
            return
        time.sleep(0.1)
    raise AssertionError("the new token is not taken")


def kill_and_await(victims: Victims, rng: random.Random) -> None:
    """Until the process that is killed is followed by another."""
    before = set(children(victims.popen))
    killed = victims.kill_one(rng)
    for _ in range(3000):
        now = set(children(victims.popen))
        if killed not in now and now - before:
            return
        time.sleep(0.02)
    raise AssertionError("it is not started again")


def until_sealed(scheduler: int) -> None:
    """Until the scheduler has looked at the file, and its journal says so."""
    for _ in range(3000):
        journal = [fd for fd in Path(f"/proc/{scheduler}/fd").iterdir() if "journal" in str(fd.readlink())]
        if any(b"Sealed" in fd.read_bytes() for fd in journal):
            return
        time.sleep(0.02)
    raise AssertionError("the journal is not sealed anew")


def replaced(path: Path, text: str) -> None:
    """As a secret's file is: at once, by a name that leads to another."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.parametrize("meanwhile", [True, False], ids=["old and new for a while", "at once"])
def test_a_token_is_replaced_while_servers_and_the_scheduler_die(launched: Any, tmp_path: Path, meanwhile: bool) -> None:
    file, rng = tmp_path / "token", random.Random(7)
    file.write_text("the first\n")
    job = ["-c", SAYS_WHERE, str(JOBS / "sums.py"), "--say", "--steps", "1000000", "--codec", "onebit", "none"]
    options = ("--no-prefix", "--workers", "2", "--servers", "2")
    popen = launched.psgc("run", *options, "--", sys.executable, *job, PSGC_TOKEN_FILE=str(file))
    at = json.loads(launched.read_until(popen, "{"))
    port, number = int(at["DMLC_PS_ROOT_PORT"]), int(at["PSGC_JOB"])
    assert admits(port, number, "the first")
    assert not admits(port, number, "the second")
    servers, scheduler = Victims(popen, 2, 2), Victims(popen, 2, 2, roles=("scheduler",))
    if meanwhile:
        replaced(file, "# rotated in November\nthe second\n\nthe first  # until every machine has the other\n")
        until_admitted(port, number, "the first")
        assert admits(port, number, "the second", "the first")
        until_sealed(children(popen)[1])
        kill_and_await(servers, rng)
        scheduler.others |= set(children(popen)) - {children(popen)[1]}
    replaced(file, "the second\n")
    if meanwhile:  # most likely before it has looked at the file again
        kill_and_await(scheduler, rng)
    until_admitted(port, number, "the second")
    assert not admits(port, number, "the first")
    if not meanwhile:
        file.rename(tmp_path / "away")  # a volume that is mounted again: who follows waits for it
    kill_and_await(servers, rng)
    if not meanwhile:
        (tmp_path / "away").rename(file)
        kill_and_await(scheduler, rng)
    for _ in range(200):
        launched.read_until(popen, "step")
    until_admitted(port, number, "the second")
    popen.send_signal(signal.SIGTERM)
    status, out, err = launched.end(popen)
    assert status == 128 + signal.SIGTERM, err
    assert err.count("it is started again and goes on from") == (3 if meanwhile else 2), err
    assert "wrong" not in out


def test_a_machine_that_has_missed_the_new_token_says_so_and_goes_on_once_it_has_it(launched: Any, tmp_path: Path) -> None:
    here, there, over = tmp_path / "here", tmp_path / "there", tmp_path / "over"
    for file in (here, there):
        file.write_text("the first\n")
    job = {
        "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
    }  # fmt: skip
    command = (sys.executable, str(JOBS / "steps.py"), "--steps", "1000000", "--pause-s", "1", "--until", str(over))
    services = launched.psgc_launch(**job, DMLC_ROLE="scheduler,server", PSGC_TOKEN_FILE=str(here))
    worker = launched.psgc_launch(*command, **job, DMLC_ROLE="worker", DMLC_WORKER_ID="0", PSGC_TOKEN_FILE=str(there))
    launched.read_until(worker, "step 1:")
    replaced(here, "the second\n")
    assert any("does not take this member's token" in line and "it is asked again" in line for line in worker.stderr)
    replaced(there, "the second\n")
    over.touch()
    for popen in (worker, services):
        status, _, err = launched.end(popen)
        assert status == 0, err


def test_who_looks_at_a_job_by_one_of_its_processes_has_the_tokens_of_its_file(tmp_path: Path) -> None:
    """psgc run draws a token for each job, which the file goes before."""
    file = tmp_path / "token"
    file.write_text("newer\nolder\n")
    env = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
        "PSGC_TOKEN": "drawn",
        "PSGC_TOKEN_FILE": str(file),
    }
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], env=env, stdin=subprocess.PIPE) as member:
        try:
            assert config_of(member.pid).tokens == ("newer", "older")
        finally:
            member.communicate(b"\n")
