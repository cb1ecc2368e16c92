"""The testbed: hosts reach one another, links are as slow as asked, and nothing of it outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import FOLDER, load

SOURCE = FOLDER / "testbed.py"

# Host 0 takes in what host 1 sends, and answers when it has it all; prints seconds from the first byte sent to the answer.
TAKE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("listening", flush=True)
    peer, _ = listener.accept()
    with peer:
        while peer.recv(1 << 20): pass
        peer.send(b"all")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    start = time.monotonic()
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(3)
    print(time.monotonic() - start)
"""


testbed = load("testbed")
LACKING = testbed.why_not()
needs_hosts = pytest.mark.skipif(bool(LACKING), reason=f"no testbed here: {LACKING}")


def transfer_s(bed: Any, size: int) -> float:
    """How long ``size`` bytes take from host 1 to host 0, and an answer back."""
    taker = bed.run(0, [sys.executable, "-c", TAKE, bed.addresses[0]], stdout=subprocess.PIPE, text=True)
    with taker.stdout:
        assert taker.stdout.readline() == "listening\n"
        sender = bed.run(1, [sys.executable, "-c", SEND, bed.addresses[0], str(size)], stdout=subprocess.PIPE, text=True)
        return float(sender.communicate(timeout=300)[0])


def limit_of(bed: Any, host: str, device: str) -> str:
    """The rate at which something leaves a device, as tc prints it."""
    shown = subprocess.run(["tc", "-n", bed._namespace(host), "qdisc", "show", "dev", device], capture_output=True, text=True, check=True)
    return shown.stdout.partition(" rate ")[2].split()[0]


def left() -> list[str]:
    return [name for name in os.listdir(testbed.NAMESPACES) if name.startswith(f"{testbed.PREFIX}{os.getpid()}-")]


@needs_hosts
@pytest.mark.parametrize("gbps", [0.05, 0.2])
def test_a_link_carries_what_it_is_limited_to(gbps: float) -> None:
    size = round(gbps * 1e9 / 8 * 0.4)  # 0.4 s of it
    with testbed.Testbed(2, gbps) as bed:
        achieved = size * 8e-9 / transfer_s(bed, size)
        limits = [limit_of(bed, "h0", "eth0"), limit_of(bed, "switch", "port1")]
    assert achieved <= 1.05 * gbps
    assert limits == [f"{round(gbps * 1000)}Mbit"] * 2  # what a busy machine reaches of it is not the testbed's


@needs_hosts
def test_links_get_another_rate_while_they_are_used() -> None:
    with testbed.Testbed(2, 1.0) as bed:
        bed.set_gbps(0.02)
        for host in (0, 1):
            shown = bed.run(host, ["tc", "qdisc", "show", "dev", "eth0"], stdout=subprocess.PIPE, text=True).communicate()[0]
            assert "rate 20Mbit" in shown
    with testbed.Testbed(2) as bed, pytest.raises(testbed.WrongTestbed, match="links that have had a limit from the start"):
        bed.set_gbps(1.0)


@needs_hosts
def test_delay_is_added_each_way() -> None:
    with testbed.Testbed(2, delay_ms=60) as bed:
        assert transfer_s(bed, 1) >= 0.120


@needs_hosts
def test_what_is_lost_is_sent_again() -> None:
    with testbed.Testbed(2, loss=0.05) as bed:
        transfer_s(bed, 300_000)
        totals = bed.run(1, ["cat", "/proc/net/snmp"], stdout=subprocess.PIPE, text=True).communicate()[0]
    names, values = (line.split() for line in totals.splitlines() if line.startswith("Tcp:"))
    assert int(values[names.index("RetransSegs")]) > 0


@needs_hosts
def test_hosts_have_networks_of_their_own() -> None:
    with testbed.Testbed(2) as bed:
        seen = [
            bed.run(host, ["readlink", "/proc/self/ns/net"], stdout=subprocess.PIPE, text=True).communicate()[0].strip() for host in (0, 1)
        ]
    assert len({*seen, os.readlink("/proc/self/ns/net")}) == 3


@needs_hosts
def test_nothing_is_left_after_an_error() -> None:
    sleepers = []

    def fail(bed: Any) -> None:
        sleepers.append(bed.run(1, ["sh", "-c", "echo begun; exec sleep 1000"], stdout=subprocess.PIPE, text=True))
        assert sleepers[0].stdout.readline() == "begun\n"
        assert left()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), testbed.Testbed(2) as bed:
        fail(bed)
    assert sleepers[0].returncode == -signal.SIGKILL
    sleepers[0].stdout.close()
    assert not left()


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(number: int) -> None:
    command, prefix = sleeping_testbed()
    command.send_signal(number)
    command.wait(200)
    assert command.returncode != 0
    assert not [name for name in os.listdir(testbed.NAMESPACES) if name.startswith(prefix)]


@needs_hosts
def test_the_next_testbed_removes_what_a_killed_one_left() -> None:
    command, prefix = sleeping_testbed()
    host = next(name for name in os.listdir(testbed.NAMESPACES) if name.startswith(prefix) and name.endswith("-h0"))
    listed = subprocess.run(["ip", "netns", "pids", host], stdout=subprocess.PIPE, text=True, check=True)
    pids = [int(pid) for pid in listed.stdout.split()]
    assert pids
    command.kill()
    command.wait()
    with testbed.Testbed(1):
        assert not [name for name in os.listdir(testbed.NAMESPACES) if name.startswith(prefix)]
        assert not any(testbed._runs(pid) for pid in pids)


def sleeping_testbed() -> tuple[subprocess.Popen[bytes], str]:
    """The command, once its two hosts sleep, and how its namespaces' names begin."""
    command = subprocess.Popen([sys.executable, str(SOURCE), "--hosts", "2", "--", "sleep", "1000"], stderr=subprocess.DEVNULL)
    prefix, deadline = f"{testbed.PREFIX}{command.pid}-", time.monotonic() + 200
    while time.monotonic() < deadline:
        hosts = [name for name in os.listdir(testbed.NAMESPACES) if name.startswith(prefix) and name.endswith(("-h0", "-h1"))]
        listed = [subprocess.run(["ip", "netns", "pids", host], capture_output=True, check=False).stdout.split() for host in hosts]
        if len(hosts) == 2 and all(listed):
            return command, prefix
        time.sleep(0.05)
    command.kill()
    pytest.fail("the testbed did not come up")


@needs_hosts
def test_a_testbed_leaves_the_living_ones_alone() -> None:
    with testbed.Testbed(2) as first:
        names = set(left())
        with testbed.Testbed(2):
            assert names < set(left())
        assert set(left()) == names
        assert transfer_s(first, 10) > 0


@needs_hosts
def test_a_command_runs_on_every_host_and_is_told_where_it_is() -> None:
    words = [sys.executable, str(SOURCE), "--hosts", "2", "--per-host", "2", "--", "sh", "-c", "echo $TESTBED_HOST of $TESTBED_ADDRESSES"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert sorted(done.stdout.splitlines()) == [f"[host {host}.{copy}] {host} of 10.77.0.1,10.77.0.2" for host in (0, 1) for copy in (0, 1)]


@needs_hosts
def test_the_status_is_that_of_the_command() -> None:
    words = [sys.executable, str(SOURCE), "--hosts", "1", "--", "false"]
    assert subprocess.run(words, capture_output=True, timeout=300, check=False).returncode == 1


@needs_hosts
def test_a_job_over_hosts_sums() -> None:
    """Workers on two hosts, the server on a third; the job itself compares its sums with what they must be."""
    job = Path(__file__).parent / "jobs" / "sums.py"
    words = [sys.executable, str(SOURCE), "--hosts", "3", "--gbps", "1", "--job", "--", sys.executable, str(job)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(testbed.TestbedError, match="not root") as caught, testbed.Testbed():
        pass
    assert "\n" not in str(caught.value)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert testbed.why_not() == "no ip and no tc and no nsenter and no taskset here: install iproute2 and util-linux"


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"hosts": 65}, {"gbps": 0.0}, {"gbps": -1.0}, {"delay_ms": -1.0}, {"loss": 1.0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(testbed.TestbedError, match="expected"):
        testbed.Testbed(**wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", "0"), "--hosts 0: expected 1 to 64"),
        (("--per-host", "0"), "expected a command after --, and --per-host and --servers of at least 1"),
        (("--servers", "1"), "--servers 1 without --job: nothing but a psgc job has servers; give both or neither"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([sys.executable, str(SOURCE), *words, "--", "true"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (2, f"testbed: {said}\n")


def test_hosts_get_cores_of_their_own_where_there_are_enough() -> None:
    assert testbed.share_cores([0, 1, 4, 5, 6], 2) == (((0, 1), (4, 5)), "")


def test_hosts_that_share_cores_say_so() -> None:
    cores, note = testbed.share_cores([0, 1], 3)
    assert cores == ((), (), ())
    assert note == "3 hosts share 2 cores: a host's work slows the others"


def test_a_job_has_its_services_on_host_0_and_a_node_on_each_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_ROLE", "server")
    members = testbed.psgc_job(testbed.Testbed(3), ["python", "train.py"], per_host=2, servers=2, extra={"PSGC_CODEC": "int8"})
    assert [(m.name, m.host, m.env["DMLC_ROLE"], m.service) for m in members] == [
        ("scheduler", 0, "scheduler", True), ("server 0", 0, "server", True), ("server 1", 0, "server", True),
        ("node 0", 1, "worker", False), ("node 1", 2, "worker", False),
    ]  # fmt: skip
    assert {(m.env["DMLC_NUM_WORKER"], m.env["BYTEPS_LOCAL_SIZE"], m.env["PSGC_CODEC"]) for m in members} == {("2", "2", "int8")}
    assert "DMLC_WORKER_ID" not in members[0].env
