"""A job whose services' processes are killed now and then while it says each step."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def children(popen: subprocess.Popen[str]) -> list[int]:
    """The launcher's, as they were started; those that have ended count until they are reaped."""
    return [int(pid) for pid in Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split()]


class Victims:
    """The processes of a job's roles that may be killed: of its launcher's first children those of ``roles``, and all that came after the workers."""

    def __init__(self, popen: subprocess.Popen[str], servers: int, workers: int, roles: Sequence[str] = ("server",)) -> None:
        self.popen = popen
        guardian, scheduler, *members = children(popen)
        assert len(members) == servers + workers
        self.others = {guardian, *members[servers:]}
        self.others |= {scheduler} if "scheduler" not in roles else set()
        self.others |= set(members[:servers]) if "server" not in roles else set()
        self.killed: set[int] = set()

    def kill_one(self, rng: random.Random) -> int:
        """kill -9 one, once there is one that was not killed. Returns its pid."""
        for _ in range(3000):
            if living := [pid for pid in children(self.popen) if pid not in self.others | self.killed]:
                victim = rng.choice(living)
                self.killed.add(victim)
                os.kill(victim, signal.SIGKILL)
                return victim
            time.sleep(0.01)
        raise AssertionError("none is started again")


def run_and_kill(
    launched: Any, job: list[str], kills: int, seed: int, servers: int = 2, workers: int = 2, least: int = 2, most: int = 9,
    roles: Sequence[str] = ("server",), **env: str,
) -> tuple[int, str, str]:  # fmt: skip
    """Run a job that says each step, and kill a process of these roles now and then, each time after some steps more. Returns status, stdout, stderr."""
    options = ("--no-prefix", "--workers", str(workers), "--servers", str(servers))
    popen = launched.psgc("run", *options, "--", sys.executable, *job, **env)
    rng = random.Random(seed)
    assert popen.stdout is not None
    out, wait, found = [], rng.randint(least, most), None
    for line in popen.stdout:
        out.append(line)
        if not line.startswith("step") or kills == 0:
            continue
        found = found or Victims(popen, servers, workers, roles)
        wait -= 1
        if wait <= 0:
            time.sleep(rng.random() * 0.03)
            found.kill_one(rng)
            kills, wait = kills - 1, workers * rng.randint(least, most)
    status, _, err = launched.end(popen)
    assert kills == 0, (kills, "".join(out[-3:]), err)
    return status, "".join(out), err
