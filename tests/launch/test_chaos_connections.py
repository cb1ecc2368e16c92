"""Another process's connections are cut and slowed from outside, and only those that are a job's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from psgc.launch.chaos import connections
from psgc.launch.chaos.connections import connections_of, cut, slow
from psgc.launch.chaos.members import Member, Process, descendants, members_of
from psgc.launch.chaos.running import can_touch_connections
from psgc.transport.host import pid_started

SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
accepted = listener.accept()[0]
own = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
accepted.recv(1)
print("ended", flush=True)
sys.stdin.read()
"""
needs_duplicates = pytest.mark.skipif(bool(can_touch_connections()), reason=f"no duplicates of sockets: {can_touch_connections()}")


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], socket.socket, socket.socket]]:
    """A process that has accepted a connection (its other end is the second), and made another (the third)."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        command = [sys.executable, "-c", SERVER, str(elsewhere.getsockname()[1])]
        env = {**os.environ, "DMLC_ROLE": "server", "DMLC_SERVER_ID": "3", "PSGC_LAUNCHER": "x"}
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env)
        assert popen.stdout is not None
        with socket.create_connection(("127.0.0.1", int(popen.stdout.readline()))) as end, elsewhere.accept()[0] as other:
            assert popen.stdout.readline() == "there\n"
            yield popen, end, other
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # whoever else holds a duplicate
        popen.communicate("")


def member(popen: subprocess.Popen[str], role: str = "server") -> Member:
    return Member(Process(popen.pid, pid_started(popen.pid)), role, role)


@needs_duplicates
def test_what_a_server_has_accepted_is_cut_and_nothing_else(served: tuple[subprocess.Popen[str], socket.socket, socket.socket]) -> None:
    popen, end, other = served
    assert cut(connections_of(member(popen), [])) == 1
    end.settimeout(60)
    assert end.recv(1) == b""
    assert popen.stdout is not None
    assert popen.stdout.readline() == "ended\n"
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)


@needs_duplicates
def test_a_workers_connections_are_those_to_services(served: tuple[subprocess.Popen[str], socket.socket, socket.socket]) -> None:
    popen, end, _ = served
    own = Member(Process(os.getpid(), pid_started(os.getpid())), "worker", "worker 0")
    found = connections_of(own, [member(popen)])
    assert {each.getsockname() for each in found} == {end.getsockname()}  # a process that looks at itself may find its own duplicates
    assert slow(found, 1000) >= 1
    assert end.getsockopt(socket.SOL_SOCKET, connections._PACING) == 1000
    assert slow(connections_of(own, [member(popen)]), None) >= 1
    assert end.getsockopt(socket.SOL_SOCKET, connections._PACING) in (-1, 0xFFFFFFFF)


def test_members_are_found_below_their_launcher_by_what_they_were_started_with(
    served: tuple[subprocess.Popen[str], socket.socket, socket.socket],
) -> None:
    popen, _, _ = served
    pids = descendants(os.getpid())
    assert popen.pid in pids
    found = [each for each in members_of(pids) if each.process.pid == popen.pid]
    assert [(each.role, each.name, each.process.runs) for each in found] == [("server", "server 3", True)]
    assert members_of([os.getpid()]) == []


def test_a_pid_that_is_used_again_is_another_process() -> None:
    assert not Process(os.getpid(), pid_started(os.getpid()) - 1).runs
    assert Process(os.getpid(), pid_started(os.getpid())).runs
