"""Somebody without the job's token changes nothing, learns nothing and stops nothing, and each kind of attack is logged in one line."""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from psgc.transport.security.handshake import CHALLENGE
from psgc.transport.security.refusals import FORGOTTEN_S
from tests.attacks import strangers
from tests.attacks.mutations import resident
from tests.ports import free_port
from tests.preloaded import run_preloaded

GROWTH_BYTES = 24 << 20  # of the server under attack; early frames were once taken by the gigabyte


class Attacked:
    """A job of one worker whose sums are checked, at rest in the steps between attacks."""

    def __init__(self, make_job: Callable[..., Any], folder: Path) -> None:
        self.port = free_port()
        self.recorder = strangers.Recorder(self.port)
        self.job = make_job(nodes=1, env={"PSGC_SERVER_THREADS": "1"})
        self.number = int(self.job.job_id)
        self.scheduler = self.job.scheduler()
        # It listens on loopback and on its Unix socket; its worker comes over TCP, and through the recorder.
        self.server = self.job.server(DMLC_PORT=str(self.port), PSGC_ADVERTISE=f"127.0.0.1:{self.recorder.port}")
        self.over = folder / "over"
        arguments = ("--steps", "1000000", "--numel", "5000", "--pause-s", "0.05", "--check-sums", "--until", str(self.over))
        self.worker = self.job.worker(0, *arguments, job="steps.py", PSGC_TRANSPORT="tcp")
        self.worker.read_until("step 3:")
        self.before = resident(self.server.popen.pid)
        threading.Thread(target=self.worker.popen.stdout.read, daemon=True).start()

    def end(self) -> str:
        """After the attacks: every step of the worker had the right sum, everybody ended in order; what the server said."""
        assert resident(self.server.popen.pid) - self.before < GROWTH_BYTES
        self.over.touch()
        assert self.worker.popen.wait(200) == 0, "the sums are the worker's own all along"
        statuses = {p.name: p.end() for p in (self.scheduler, self.server)}
        self.recorder.close()
        assert set(statuses.values()) == {0}, self.job.text()
        assert "Traceback" not in self.server.text + self.scheduler.text
        return str(self.server.text)


def lines(text: str, kind: str) -> int:
    return len(re.findall(rf"payload connection .*refused: .*{kind}", text))


def said_once(text: str, refusal: str) -> int:
    """How many lines there are of a kind of refusal: one, and others only where it had been forgotten since, as on a machine that does much else."""
    times = [datetime.fromisoformat(line[:23].replace(",", ".")) for line in text.splitlines() if re.search(refusal, line)]
    apart = [later - former for former, later in pairwise(times)]
    assert times and all(each > timedelta(seconds=FORGOTTEN_S / 2) for each in apart), (refusal, text)
    return len(times)


def test_eleven_attacks_by_strangers_change_nothing_and_each_kind_is_one_line(make_job: Callable[..., Any], tmp_path: Path) -> None:
    attacked = Attacked(make_job, tmp_path)
    port, number = attacked.port, attacked.number
    deadline = time.monotonic() + 60
    while not attacked.recorder.said:
        assert time.monotonic() < deadline, "the worker's handshake has been recorded"
        time.sleep(0.05)
    with ThreadPoolExecutor(len(strangers.ATTACKS)) as crowd:
        told = list(crowd.map(lambda attack: attack(port, number), strangers.ATTACKS))
    told.append(strangers.replays(port, attacked.recorder.said))
    told.append(strangers.floods(port, 400))
    for heard in told:
        for words in (b"rank", str(number).encode(), number.to_bytes(8, "little")):
            assert words not in heard, "a stranger is told nothing of the job"
        assert len(heard) <= 4 * CHALLENGE.size, heard
    assert strangers.speaks_to_the_scheduler(attacked.job.port, number, "guess") == []
    assert strangers.speaks_to_the_scheduler(attacked.job.port, number, "") == []
    if os.getuid() == 0:
        assert not strangers.comes_as_another_user(strangers.local_address(number))
    said = attacked.end()
    kinds = ["cannot prove it", "which is not psgc", "has not proved within 10 s", *(["is of user 65534"] if os.getuid() == 0 else [])]
    found = sum(said_once(said, f"payload connection .*refused: .*{kind}") for kind in kinds)
    assert said.count("payload connection") == said.count("payload connections: ") + found + lines(said, "others waited") + lines(
        said, "closed by the peer"
    ) + lines(said, "reset"), said
    said_once(attacked.scheduler.text, "control connection refused")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_connections_keep_no_worker_out_and_fill_no_log(make_job: Callable[..., Any], tmp_path: Path) -> None:
    attacked = Attacked(make_job, tmp_path)
    strangers.floods(attacked.port, 10_000)
    said = attacked.end()
    assert said.count("payload connection") < 30, said


def test_a_job_of_psgc_run_listens_on_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "listeners.py"
    script.write_text(
        "import os, re, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from psgc.config import Config\n"
        "from psgc.worker.cluster import ClusterSession\n"
        "session = ClusterSession.open(Config.from_env())\n"
        "job = ('PSGC_JOB=' + os.environ['PSGC_JOB']).encode()\n"
        "inodes = set()\n"
        "for entry in Path('/proc').iterdir():\n"
        "    try:\n"
        "        if entry.name.isdigit() and job in (entry / 'environ').read_bytes().split(b'\\0'):\n"
        "            for fd in (entry / 'fd').iterdir():\n"
        "                found = re.match(r'socket:\\[(\\d+)\\]', os.readlink(fd))\n"
        "                inodes |= {found[1]} if found else set()\n"
        "    except OSError: pass\n"
        "for table in ('tcp', 'tcp6'):\n"
        "    for row in Path('/proc/net/' + table).read_text().splitlines()[1:]:\n"
        "        fields = row.split()\n"
        "        if fields[3] == '0A' and fields[9] in inodes: print('LISTENS', fields[1].split(':')[0], flush=True)\n"
        "session.close()\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}
    env["PSGC_TOKEN"] = secrets.token_hex(8)
    command = ["-m", "psgc.launch", "run", "--workers", "1", "--no-prefix", "--", sys.executable, str(script)]
    done = run_preloaded(*command, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    addresses = re.findall(r"LISTENS (\w+)", done.stdout)
    assert len(addresses) >= 2, done.stdout  # the scheduler and the server
    assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}, addresses
