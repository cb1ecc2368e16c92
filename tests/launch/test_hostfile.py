"""Hosts' files of other launchers are read as these read them, and what each host then runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import UsageError
from psgc.launch.job.hostfile import Host, read_hosts
from psgc.launch.job.hosts import Way, _elsewhere, _shared, ssh_command
from psgc.launch.job.placing import Place, place, with_ssh_port
from tests.plan.commands import psgc


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=8\nb slots=4 max_slots=8\n", [Host("a", 8), Host("b", 4)]),  # Open MPI, Horovod, DeepSpeed
        ("# all\n\n  a   # the first\nb\t slots=2\n", [Host("a"), Host("b", 2)]),
        ("a slots=2\nb\na slots=3\n", [Host("a", 5), Host("b")]),
        ("a\na\n", [Host("a", 2)]),
        ("me@a port=2222\n", [Host("a", 0, "me", 2222)]),
        ("fd00::1 slots=2\n[fd00::2]\n", [Host("fd00::1", 2), Host("fd00::2")]),
        ("a\nserver b slots=2\nserver a\n", [Host("a"), Host("b", 2, servers=True), Host("a", servers=True)]),
        ("a slots=2\nspare b\nspare c slots=2\n", [Host("a", 2), Host("b", spare=True), Host("c", 2, spare=True)]),
        ("spare slots=2\n", [Host("spare", 2)]),
        ("server\n", [Host("server")]),  # a host of that name
        ("server slots=2\r\n", [Host("server", 2)]),
    ],
)
def test_lines_are_read_as_people_have_them(hostfile: Path, text: str, hosts: list[Host]) -> None:
    hostfile.write_text(text)
    assert read_hosts(str(hostfile)) == hosts


def test_bytepss_files_name_the_port_of_ssh(hostfile: Path) -> None:
    hostfile.write_text("10.0.0.1:2222\n10.0.0.2\n[fd00::1]:22\n")
    assert read_hosts(str(hostfile), byteps=True) == [Host("10.0.0.1", port=2222), Host("10.0.0.2"), Host("fd00::1", port=22)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb:8\n", r"line 2: 'b:8' has a number after its colon: write slots=8 if it counts workers, port=8 if it is ssh's port"),
        ("a slots=0\n", "line 1: slots=0: expected a whole number from 1 to 65535"),
        ("a slots=x\n", "line 1: slots=x"),
        ("a slot=2\n", "line 1: 'slot=2' is not understood; a host has slots=N and port=N"),
        ("a b\n", "line 1: 'b' is not understood"),
        ("-oProxyCommand=x\n", "line 1: '-oProxyCommand=x' is no host"),
        ("@a\n", "line 1: '@a' has no user before @"),
        ("a port=22\na port=23\n", "host a is there with different users or ports"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_wrong_line_is_named(hostfile: Path, text: str, said: str) -> None:
    hostfile.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_hosts(str(hostfile))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hosts' file .*/none cannot be read: No such file"):
        read_hosts(str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_hosts(str(tmp_path / "bytes"))


A, B, C = Host("a", 2), Host("b", 2), Host("c")


def test_each_host_gets_its_slots_and_a_server_and_the_first_the_scheduler() -> None:
    assert place([A, B, C], None, None) == [Place(A, 0, 2, 1, 0, True), Place(B, 1, 2, 1, 1), Place(C, 2, 1, 1, 2)]
    assert [one.roles for one in place([A, B], None, None)] == ["scheduler,server,worker", "server,worker"]


def test_without_slots_a_host_finds_its_workers_itself() -> None:
    assert [one.workers for one in place([C, Host("d")], None, None)] == [0, 0]


def test_workers_fill_one_host_after_the_other() -> None:
    assert [(one.host.name, one.workers) for one in place([A, B, C], 3, None)] == [("a", 2), ("b", 1)]
    with pytest.raises(UsageError, match="--workers 6, but the hosts' file has 5 slots"):
        place([A, B, C], 6, None)


@pytest.mark.parametrize(("servers", "shares"), [(0, [0, 0]), (1, [1, 0]), (3, [2, 1])])
def test_hosts_share_the_servers(servers: int, shares: list[int]) -> None:
    assert [one.servers for one in place([A, B], None, servers)] == shares


def test_server_lines_have_all_servers_and_a_host_of_both_runs_both() -> None:
    places = place([A, B, Host("s", 2, servers=True), Host("b", servers=True)], None, None)
    assert places == [Place(A, 0, 2, 0, 0, True), Place(B, 1, 2, 1, 0), Place(Host("s", 2, servers=True), servers=2, first_server=1)]
    assert [one.roles for one in places] == ["scheduler,worker", "server,worker", "server"]
    with pytest.raises(UsageError, match="--servers 2, but the `server` lines have 1 slot;"):
        place([A, Host("s", servers=True)], None, 2)


def test_the_scheduler_is_where_it_is_asked_for() -> None:
    assert [one.scheduler for one in place([A, B], None, None, "b")] == [False, True]
    assert place([A], None, None, "d")[-1] == Place(Host("d"), scheduler=True)


def test_the_schedulers_host_is_reached_at_the_port_that_is_asked_for() -> None:
    hosts = [Host("a"), Host("b", port=2222)]
    assert [one.host.port for one in with_ssh_port(place(hosts, None, None), 2200)] == [2200, 2222]
    assert [one.host.port for one in with_ssh_port(place(hosts, None, None, "c"), 2200)] == [0, 2222, 2200]
    assert [one.host.port for one in with_ssh_port(place(hosts, None, None, "b"), 2222)] == [0, 2222]
    with pytest.raises(UsageError, match="--scheduler-ssh-port 22, but the hosts' file has port 2222 for b; a host has one connection"):
        with_ssh_port(place(hosts, None, None, "b"), 22)


def test_a_job_needs_a_host_with_workers() -> None:
    for other in (Host("s", servers=True), Host("s", spare=True)):
        with pytest.raises(UsageError, match="hosts of servers, or spare ones, only"):
            place([other], None, None)


def test_spare_hosts_come_last_and_have_nothing_to_run() -> None:
    spare = Host("e", spare=True)
    assert place([spare, A, B], None, None) == [Place(A, 0, 2, 1, 0, True), Place(B, 1, 2, 1, 1), Place(spare, spare=True)]
    assert place([A, spare], None, None, "d")[-1] == Place(spare, spare=True)
    with pytest.raises(UsageError, match=r"e is a spare host, but nothing says how many workers each other host has; write slots=N"):
        place([C, Host("d"), spare], None, None)
    assert place([C, Host("d"), spare], 2, None)[-1].spare


def test_bytepss_flags_become_settings_of_the_hosts_whose_interfaces_this_machine_need_not_have(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile.write_text("a\n")
    ways = []

    def started(command: Sequence[str], places: Sequence[Place], way: Way, **_: Any) -> int:
        ways.append((places, way))
        shared = _shared(places, way, None, None, None)
        assert shared["DMLC_INTERFACE"] == "nosuch0"
        Config.from_env({**_elsewhere(shared), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"})
        return 0

    monkeypatch.setattr("psgc.launch.job.hosts.run_hosts", started)
    flags = ("--interface", "nosuch0", "--scheduler-ssh-port", "2200", "-i", "key", "--env", "DMLC_INTERFACE:eth1")
    done = psgc("run", "-WH", str(hostfile), "-SH", str(hostfile), "--scheduler-ip", "10.0.0.1", *flags, "true")
    assert done.returncode == 0, done.stderr
    ((places, way),) = ways
    assert [(one.host.name, one.host.port) for one in places] == [("a", 0), ("10.0.0.1", 2200)]
    assert ssh_command(places[1].host, way)[:3] == ["ssh", "-i", "key"]
