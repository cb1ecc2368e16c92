"""Launchers as processes, for tests: each test's processes carry a mark, and none of them may be left at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.preloaded import Preloaded, fixed_by_imports

if TYPE_CHECKING:
    from tests.launch.ssh_hosts import Sshd

JOBS = Path(__file__).parent.parent / "jobs"
MARK = "PSGC_TEST_FAULT"
SETTINGS = ("DMLC_", "PSGC_", "BYTEPS_")
HANG_S = 250.0  # a process that has not ended by then hangs
SUPERVISED = """
import os, sys
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
with Supervisor("launcher", {prefix}, Patience(fault_s={grace_s}, save_s={save_s}, grace_s={grace_s}, service_s={grace_s}, term_s={term_s})) as supervisor:
    for name, command, service in {children}:
        supervisor.start(name, command, os.environ, service=service)
    status = supervisor.run()
sys.exit(status)
"""


class Launched:
    """Starts ``python ARGUMENTS`` with a clean environment and the test's mark: a variable, and a pipe that forked processes keep open."""

    def __init__(self) -> None:
        self.mark = f"{MARK}={os.urandom(8).hex()}".encode()
        self.pipe = os.pipe()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        limits = {"PSGC_HEARTBEAT_S": "0.3", "PSGC_SILENCE_S": "1", "PSGC_ABORT_GRACE_S": "2"}
        name, _, value = self.mark.decode().partition("=")
        self.env = {**clean, **limits, name: value}

    def python(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments], env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def preloaded(self, *arguments: str, output: IO[str] | int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
        """The same, forked from a process that has imported everything, as are the Python processes that it starts. output: stdout and stderr."""
        if fixed_by_imports(env):
            assert output == subprocess.PIPE
            return self.python(*arguments, **env)
        return Preloaded(arguments, {**self.env, **env}, self.pipe[1], stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def psgc(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.preloaded("-m", "psgc.launch", *arguments, **env)

    def job(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """``psgc run`` of a job that trains until it is stopped; returns once it does."""
        popen = self.psgc("run", "--no-prefix", *arguments, "--", sys.executable, str(JOBS / "steps.py"), "--steps", "100000", **env)
        self.read_until(popen, "step 1:")
        return popen

    def psgc_launch(self, *command: str, **env: str) -> subprocess.Popen[str]:
        return self.preloaded("-c", "from psgc.launch.job.bpslaunch import main; main()", *command, **env)

    def supervised(
        self, *children: tuple[str, str, bool], prefix: bool = True, grace_s: float = 100, save_s: float = 60, term_s: float = 1
    ) -> subprocess.Popen[str]:
        """A supervisor over children that are plain Python code: (name, code, service). What is not about its patience is not ended for being slow."""
        return self.supervised_with("", *children, prefix=prefix, grace_s=grace_s, save_s=save_s, term_s=term_s)

    def supervised_with(
        self, first: str, *children: tuple[str, str, bool], prefix: bool = True, grace_s: float = 100, save_s: float = 60, term_s: float = 1
    ) -> subprocess.Popen[str]:
        """The same. first: what its process does before."""
        rows = [(name, [sys.executable, "-c", code], service) for name, code, service in children]
        code = f"import os\n{first}\n" + SUPERVISED
        return self.python("-c", code.format(prefix=prefix, grace_s=grace_s, save_s=save_s, term_s=term_s, children=rows))

    @staticmethod
    def end(popen: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Wait for a launcher: its status, stdout and stderr (of each what was not read yet)."""
        out, err = popen.communicate(timeout=HANG_S)
        return popen.returncode, out, err

    @staticmethod
    def read_until(popen: subprocess.Popen[str], words: str) -> str:
        """The first line of stdout that begins with ``words``."""
        assert popen.stdout is not None
        for line in popen.stdout:
            if line.startswith(words):
                return line
        raise AssertionError(f"it ended without saying {words!r}: {popen.communicate()[1]}")

    def left(self) -> set[int]:
        """Processes of this test that run now."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark in (entry / "environ").read_bytes().split(b"\0") or self._holds_the_pipe(entry):
                        found.add(int(entry.name))
                except OSError:
                    continue
        return found

    def _holds_the_pipe(self, process: Path) -> bool:
        pipe = os.readlink(f"/proc/self/fd/{self.pipe[1]}")
        return int(process.name) != os.getpid() and any(os.readlink(fd) == pipe for fd in (process / "fd").iterdir())

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a command in this process: none of the shell's settings."""
    for name in os.environ:
        if name.startswith(SETTINGS):
            monkeypatch.delenv(name)


@pytest.fixture
def launched() -> Iterator[Launched]:
    launcher = Launched()
    yield launcher
    deadline = time.monotonic() + 100
    while launcher.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = launcher.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    launcher.close()
    assert not left, "processes were left behind"


@pytest.fixture
def sshd(launched: Launched, tmp_path: Path) -> Iterator[Sshd]:
    from tests.launch.ssh_hosts import Sshd

    made = Sshd(launched, tmp_path)
    yield made
    made.close()
