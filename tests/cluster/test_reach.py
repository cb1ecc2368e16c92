"""A server that a worker cannot reach is named with its address and the remedy, and ends the job within its limit, on every rank."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load
from tests.conftest import HANG_S, Process
from tests.ports import free_port

Make = Callable[..., Any]
# Of workers, whose scheduler is there before them. They then wait for a server for at least ten seconds, however long the job took to form.
SOON = {"PSGC_REGISTER_TIMEOUT_S": "20"}
testbed = load("testbed")
LACKING = testbed.why_not()


@contextlib.contextmanager
def mute() -> Iterator[int]:
    """A port whose connections are accepted by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def full() -> Iterator[int]:
    """A port where packets that ask for a connection are dropped, as a firewall drops them: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held = [socket.socket() for _ in range(4)]
        for each in held:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for each in held:
            each.close()


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_init_names_the_server_and_why_and_gives_up_at_its_limit(make_job: Make) -> None:
    """Three jobs at once: each waits for its limit."""
    kinds = {nobody: "nobody listens there", full: "nothing comes back from there; open port", mute: "does not answer as that server"}
    with contextlib.ExitStack() as there:
        jobs = {there.enter_context(kind()): (words, make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp"})) for kind, words in kinds.items()}
        for port, (_, job) in jobs.items():
            job.scheduler()
            job.server(PSGC_ADVERTISE=f"127.0.0.1:{port}")
        for _, job in jobs.values():
            job.processes[0].read_until("here: .*server")
            for node in range(2):
                job.worker(node, job="steps.py", **SOON)
        ended = [job.end() for _, job in jobs.values()]
    for (port, (words, job)), statuses in zip(jobs.items(), ended, strict=True):
        assert set(statuses.values()) == {1}, job.text()
        text = rf"rank \d cannot reach server 0 at tcp://127\.0\.0\.1:{port}, for \d+ s so far: .*{words}.*PSGC_ADVERTISE"
        for process in job.processes:
            assert re.search(rf"{text}.*PSGC_REGISTER_TIMEOUT_S", process.last_line), job.text()
            assert "step 1:" not in process.text, "init() must not return before every server has answered"
            assert "Traceback" not in process.text, job.text()
        for process in (job.processes[0], *job.processes[2:]):
            assert re.search(text, process.text.rsplit("\n", 2)[0]), f"{process.name}: named while it is tried, too\n{job.text()}"


class Door:
    """Forwards connections until it is shut; then there is nobody."""

    def __init__(self, target: int) -> None:
        self._target, self._open = target, [socket.create_server(("127.0.0.1", 0))]
        self.port = self._open[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._open[0].accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def shut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_server_that_is_lost_later_ends_the_job_at_the_limit_of_a_step(make_job: Make) -> None:
    port = free_port()
    door = Door(port)
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": "tcp", "PSGC_STEP_TIMEOUT_S": "20"})
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{door.port}")
    workers = [job.worker(node, "--steps", "100000", job="steps.py") for node in range(2)]
    workers[0].read_until("step 3:")
    door.shut()
    statuses = job.end()
    assert set(statuses.values()) == {1}, job.text()
    for process in job.processes:
        assert "PSGC_STEP_TIMEOUT_S" in process.last_line, job.text()
    assert re.search(rf"rank \d cannot reach server 0 at tcp://127\.0\.0\.1:{door.port}, .*nobody listens there", job.text()), job.text()


@pytest.mark.skipif(bool(LACKING), reason=f"no testbed here: {LACKING}")
def test_on_other_hosts_a_wrong_address_is_told_from_a_firewall() -> None:
    """Scheduler on host 0, server on host 1, worker on host 2; a job for each address. 10.77.0.99 is nobody's: nothing comes back but, after a while,
    no route."""
    expected = {
        "127.0.0.1": "that is this machine itself, and the server runs on another one; set DMLC_NODE_HOST",
        "10.77.0.99": "(nothing comes back from there; open port|No route to host; is there a route)",
    }
    own = {k: v for k, v in testbed.os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "PSGC_"))}
    worker = [sys.executable, str(Path(__file__).parents[1] / "jobs" / "steps.py")]
    number = secrets.randbits(60) | 1
    with testbed.Testbed(3) as bed:
        jobs: dict[str, list[Process]] = {}
        for host, role in enumerate(("scheduler", "server", "worker")):
            for port, wrong in enumerate(expected, 9000):
                env = {
                    **own, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": bed.addresses[0], "DMLC_PS_ROOT_PORT": str(port),
                    "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_JOB": str(number + port), "PSGC_TOKEN": "secret", "PSGC_SILENCE_S": "1",
                    **({}, {"DMLC_NODE_HOST": wrong}, SOON)[host],
                }  # fmt: skip
                command = worker if role == "worker" else [sys.executable, "-m", "psgc.launch.job.role", role]
                popen = bed.run(host, command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                jobs.setdefault(wrong, []).append(Process(role, popen, HANG_S))
            for members in jobs.values() if role == "server" else ():
                members[0].read_until("here: .*server")
        for members in jobs.values():
            for member in members:
                member.end()
    for wrong, members in jobs.items():
        said = [member.text for member in members]
        assert [member.popen.returncode for member in members] == [1, 1, 1], said
        for member in members:
            assert re.search(rf"rank 0 cannot reach server 0 at tcp://{re.escape(wrong)}:\d+, .*{expected[wrong]}", member.last_line), said
        assert ("which on every other machine is that machine itself" in said[0]) == (wrong == "127.0.0.1"), said[0]
