"""Jobs of real processes for tests: started one by one, so that a test can leave one out, kill one, or give one another environment."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kernels import compile_all
from tests.ports import free_port
from tests.preloaded import DERIVED, Preloaded, derived_root, fixed_by_imports
from tests.rewritten import compile_sources

settings.register_profile("psgc", deadline=None)  # a loaded machine is no failure
settings.load_profile("psgc")
for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # `make test &` or nohup: launchers under test would leave these ignored, too
        signal.signal(_signal, _handler)
SETTINGS = ("DMLC_", "BYTEPS_", "PSGC_")
JOBS = Path(__file__).parent / "jobs"
LIMITS = {  # low where that shows a failure within seconds; what is asserted is what is said, never how long it took
    "PSGC_HEARTBEAT_S": "0.3",
    "PSGC_SILENCE_S": "1",
    "PSGC_REGISTER_TIMEOUT_S": "150",  # a test that waits for a limit sets it lower itself: a busy machine may take long to start processes
    "PSGC_STEP_TIMEOUT_S": "150",
    "PSGC_ABORT_GRACE_S": "3",
}
# Of a worker among others that exchange by themselves. One that finds a collective broken waits four heartbeats for the scheduler to say why, since that knows
# more; then its own words end the job. On a busy machine the scheduler may take longer to find out.
ASKS_SCHEDULER = {"PSGC_HEARTBEAT_S": "4"}
HANG_S = 250.0  # a process that has not ended by then hangs; a loaded machine takes a sixth of that for the longest job


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """What starts a session or a command in this process sets up logging; the next test's records are heard as ever."""
    loggers = [logging.getLogger(name) for name in (None, "psgc", "psgc.run")]
    before = [(logger, logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    for logger, level, propagate, disabled in before:
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled


def pytest_configure(config: pytest.Config) -> None:
    """Before several processes run tests, as many as there are cores share the kernels' compilation, and the sources'."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        compile_all(meanwhile=lambda: compile_sources(config))


def pytest_collection() -> None:
    """What is collected lives as long as the process: the garbage collector need not look at it, neither now nor later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each reason for which tests were skipped, with their number: where a library is missing, hundreds have the same reason."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason}")


_derived = functools.lru_cache(maxsize=16)(derived_root)


@dataclass
class Process:
    name: str
    popen: subprocess.Popen[str]
    hang_s: float
    text: str = ""

    def read_until(self, words: str) -> None:
        """Read what it says, into ``text``, up to a line in which the regular expression is found."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.text += line
            if re.search(words, line):
                return
        pytest.fail(f"{self.name} ended without saying {words!r}:\n{self.text}")

    def end(self) -> int:
        """Wait for it; everything it said is then in ``text``."""
        # Not by ``communicate``, which leaves out what ``read_until`` has read ahead.
        reader, deadline = threading.Thread(target=self._read, daemon=True), time.monotonic() + self.hang_s
        reader.start()
        try:
            reader.join(self.hang_s)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.name, self.hang_s)
            self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            reader.join(10)
            self.popen.wait()
            pytest.fail(f"{self.name} hangs; it said:\n{self.text}")
        return self.popen.returncode

    def _read(self) -> None:
        if self.popen.stdout is not None and not self.popen.stdout.closed:
            with self.popen.stdout as said:
                self.text += said.read()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else ""


@dataclass
class Job:
    """A job under construction. Members start as they are asked for; nothing is left when the test ends."""

    nodes: int = 2
    servers: int = 1
    env: dict[str, str] = field(default_factory=dict)
    hang_s: float = HANG_S
    port: int = field(default_factory=free_port)
    collectives_port: int = field(default_factory=free_port)  # of torch.distributed
    processes: list[Process] = field(default_factory=list)
    job_id: str = field(default_factory=lambda: str(secrets.randbits(62) | 1))

    def start(self, name: str, command: list[str], **env: str) -> Process:
        full = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        full.update(LIMITS)
        full.update(
            DMLC_NUM_WORKER=str(self.nodes), DMLC_NUM_SERVER=str(self.servers), DMLC_PS_ROOT_URI="127.0.0.1",
            DMLC_PS_ROOT_PORT=str(self.port), BYTEPS_FORCE_DISTRIBUTED="1", PSGC_JOB=self.job_id, PSGC_TOKEN="secret", OMP_NUM_THREADS="1",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.collectives_port),
        )  # fmt: skip
        full.update(self.env)
        full.update(env)
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True,
        }  # fmt: skip
        popen: subprocess.Popen[str]
        if command[0] == sys.executable and not fixed_by_imports({**self.env, **env}):
            if full["PSGC_TOKEN"] and full["PSGC_JOB"].isdigit():
                full[DERIVED] = _derived(full["PSGC_JOB"], full["PSGC_TOKEN"])
            popen = Preloaded(command[1:], full, **options)
        else:
            popen = subprocess.Popen(command, env=full, text=True, **options)
        process = Process(name, popen, self.hang_s)
        self.processes.append(process)
        return process

    def scheduler(self, **env: str) -> Process:
        return self.start("scheduler", [sys.executable, "-m", "psgc.launch.job.role", "scheduler"], **env)

    def server(self, index: int = 0, **env: str) -> Process:
        env = {"DMLC_SERVER_ID": str(index), **env}
        return self.start(f"server {index}", [sys.executable, "-m", "psgc.launch.job.role", "server"], **env)

    def worker(self, node: int, *arguments: str, job: str = "sums.py", **env: str) -> Process:
        env = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(node), **env}
        return self.start(f"worker {node}", [sys.executable, str(JOBS / job), *arguments], **env)

    def whole(self, *arguments: str, job: str = "sums.py", **env: str) -> list[Process]:
        """Scheduler, all servers, all workers; returns the workers."""
        self.scheduler(**env)
        for index in range(self.servers):
            self.server(index, **env)
        return [self.worker(node, *arguments, job=job, **env) for node in range(self.nodes)]

    def said(self, *arguments: str, job: str = "sums.py", **env: str) -> list[str]:
        """What each worker says, once the whole job has run and ended well."""
        workers = self.whole(*arguments, job=job, **env)
        assert set(self.end().values()) == {0}, self.text()
        return [worker.text for worker in workers]

    def end(self) -> dict[str, int]:
        """Wait for everyone; exit statuses by name."""
        return {process.name: process.end() for process in self.processes}

    def text(self) -> str:
        return "\n".join(f"--- {p.name}: status {p.popen.returncode}\n{p.text}" for p in self.processes)

    def clean_up(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                with suppress(ProcessLookupError):  # which leads no session yet
                    os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.kill()
                process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    """Builds Jobs; whatever is left of them is killed at the test's end, and it is an error if something could not be."""
    with making_jobs() as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_job() -> Iterator[Callable[..., Job]]:
    """The same for a job that several of a file's tests look at."""
    with making_jobs() as make:
        yield make


@contextmanager
def making_jobs() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**fields: Any) -> Job:
        job = Job(**fields)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.clean_up()
    for job in jobs:
        sessions = [process.popen.pid for process in job.processes]
        assert not remains(job.job_id, sessions), f"processes left behind: {remains(job.job_id, sessions)}"


def remains(job_id: str, sessions: Sequence[int] = (), patience_s: float = 60.0) -> list[int]:
    """Processes that still carry the job's id in the environment they started with, or belong to one of the sessions."""
    wanted = f"PSGC_JOB={job_id}".encode()
    deadline = time.monotonic() + patience_s
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    in_session = os.getsid(int(entry.name)) in sessions
                    if in_session or wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
