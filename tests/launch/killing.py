"""A job whose services' processes are killed now and then while it says each step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.jobs.pace import ALLOWED


def children(popen: subprocess.Popen[str]) -> list[int]:
    """The launcher's, as they were started; those that have ended count until they are reaped."""
    return [int(pid) for pid in Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split()]


def until_gone(pid: int) -> None:
    """Until a process that somebody has killed, or will kill, runs no more."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")


def told_of(popen: subprocess.Popen[str], words: str) -> str:
    """What the launcher says up to a line that has these words, while what the job says is read, too."""
    said, told = list[str](), threading.Event()

    def listen() -> None:
        for line in popen.stderr or ():
            said.append(line)
            if words in line:
                break
        told.set()

    listening = threading.Thread(target=listen)
    listening.start()
    for _ in popen.stdout or ():
        if told.is_set():
            break
    listening.join()
    assert said and words in said[-1], "".join(said)
    return "".join(said)


class Pace:
    """How far a job of `tests/jobs` may go that is to be struck at a step: however late the test reads what it says, it has not come to its end meanwhile. A
    context manager; ``env`` is the job's. ahead: steps that it may be beyond what was heard."""

    def __init__(self, ahead: int = 6) -> None:
        self._ahead, self._allowed = ahead, ahead
        self._file = tempfile.NamedTemporaryFile(prefix="psgc-pace-")  # noqa: SIM115
        self._file.truncate(ahead)
        self.env = {ALLOWED: self._file.name}

    def heard(self, step: int) -> None:
        """It has said that it has taken this step, from 1."""
        self.allow(step + self._ahead)

    def allow(self, step: int) -> None:
        if step > self._allowed:
            self._allowed = step
            self._file.truncate(step)

    def hold(self, step: int) -> None:
        """Another run of the job may go so far."""
        self._allowed = step
        self._file.truncate(step)

    def over(self) -> None:
        """Nothing is to be done to the job any more."""
        self.allow(1 << 30)

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


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

    def until_noticed(self, victim: int) -> None:
        """Until the launcher has found out that it is dead, and done what is due. Steps may not need a server that holds none of their parts."""
        for _ in range(10_000):
            if victim not in children(self.popen):
                return
            time.sleep(0.01)
        raise AssertionError("its death is not noticed")

    def kill_all(self) -> None:
        """kill -9 each that there is, until the job has ended. What its workers say meanwhile is dropped."""
        reading = threading.Thread(target=self.popen.stdout.read)  # type: ignore[union-attr]
        reading.start()
        while self.popen.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in set(children(self.popen)) - self.others:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        reading.join()


def run_and_kill(
    launched: Any, job: list[str], kills: int, seed: int, servers: int = 2, workers: int = 2, least: int = 2, most: int = 9,
    roles: Sequence[str] = ("server",), **env: str,
) -> tuple[int, str, str]:  # fmt: skip
    """Run a job that says each step, and kill a process of these roles now and then, each time after some steps more. Returns status, stdout, stderr."""
    options = ("--no-prefix", "--workers", str(workers), "--servers", str(servers))
    with Pace() as pace:
        popen = launched.psgc("run", *options, "--", sys.executable, *job, **(env | pace.env if kills else env))
        rng = random.Random(seed)
        assert popen.stdout is not None
        out, said, wait, found = [], 0, rng.randint(least, most), None
        for line in popen.stdout:
            out.append(line)
            if not line.startswith("step") or kills == 0:
                continue
            found = found or Victims(popen, servers, workers, roles)
            said, wait = said + 1, wait - 1
            if wait <= 0:
                time.sleep(rng.random() * 0.03)
                victim = found.kill_one(rng)
                kills, wait = kills - 1, workers * rng.randint(least, most)
                if not kills:
                    found.until_noticed(victim)
            pace.heard(said // workers) if kills else pace.over()
        status, _, err = launched.end(popen)
    assert kills == 0, (kills, "".join(out[-3:]), err)
    return status, "".join(out), err
