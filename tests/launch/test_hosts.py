"""``psgc run --hostfile``: one command starts a job on several hosts over ssh, and ends it everywhere.

Hosts are names of a real sshd on this machine, or sshds in network namespaces.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from psgc import __version__
from tests.benchmark_scripts import load
from tests.launch.conftest import Launched
from tests.launch.ssh_hosts import Sshd, await_line, needs_sshd
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
JOB = [sys.executable, str(ROOT / "tests" / "jobs" / "sums_in_jobs.py")]
FOREVER = ("1", "1000000")
PLAIN = [
    sys.executable,
    str(ROOT / "tests" / "jobs" / "steps.py"),
    "--steps",
    "1000000",
]  # the same without torch, which each host would import
DIGITS = [sys.executable, str(ROOT / "examples" / "train_digits.py"), "--steps", "30", "--codec", "int8", "--out"]
testbed = load("testbed")
needs_namespaces = pytest.mark.skipif(bool(testbed.why_not()), reason=f"no testbed here: {testbed.why_not()}")


@pytest.fixture
def hosts(sshd: Sshd) -> Sshd:
    sshd.listen(["alpha", "beta", "gamma"])
    return sshd


def record(path: Path) -> Any:
    return {name: value for name, value in json.loads(path.read_text()).items() if name in ("losses", "validation_loss", "accuracy")}


@needs_sshd
@pytest.mark.timeout(600)
def test_two_hosts_train_the_digits_to_the_losses_of_one_bit_for_bit(hosts: Sshd, launched: Launched, tmp_path: Path) -> None:
    status, _, err = launched.end(launched.psgc("run", "--nodes", "2", "--", *DIGITS, str(tmp_path / "run.json")))
    assert status == 0, err
    status, out, err = hosts.ended(["alpha", "beta", "server gamma"], command=[*DIGITS, str(tmp_path / "ssh.json")])
    assert status == 0, (out, err)
    assert re.search(r"^\[alpha\] \[worker 0\] ", out + err, re.MULTILINE)
    assert record(tmp_path / "ssh.json") == record(tmp_path / "run.json") != {}


@needs_sshd
@pytest.mark.timeout(600)
def test_settings_and_what_env_names_reach_every_host(hosts: Sshd) -> None:
    names = ("PSGC_TOKEN", "PSGC_LOG_STEPS", "MINE", "YOURS", "OTHER")
    code = f"import os; print(*map(os.environ.get, {names}), os.getcwd(), flush=True); input()"
    popen = hosts.run(
        ["alpha slots=2", "beta"], "--no-prefix", "--env", "MINE", "--env", "YOURS:a:b", "--chdir", "/usr", command=["python", "-c", code],
        PSGC_TOKEN="a very secret text", PSGC_LOG_STEPS="7", MINE="x=y", OTHER="o",
    )  # fmt: skip
    status, out, _ = hosts.launched.end(popen)
    assert status == 1  # input() has nothing to read
    assert out.splitlines().count("a very secret text 7 x=y a:b None /usr") >= 1, out


@needs_sshd
@pytest.mark.timeout(600)
def test_no_command_line_shows_the_secret(hosts: Sshd) -> None:
    popen = hosts.run(["alpha", "beta"], command=PLAIN, PSGC_TOKEN="a-very-secret-text")
    await_line(popen, "step 1:", 2)
    shown = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # others' processes come and go
            shown.append(path.read_bytes())
    assert not [line for line in shown if b"a-very-secret-text" in line]
    popen.send_signal(signal.SIGINT)
    assert hosts.launched.end(popen)[0] == 130


@needs_sshd
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_and_a_lost_terminal_end_everything_everywhere(hosts: Sshd, number: int, status: int) -> None:
    popen = hosts.run(["alpha", "beta"], command=PLAIN, PSGC_ON_SERVER_LOSS="stop", PSGC_ON_SCHEDULER_LOSS="stop")
    await_line(popen, "step 1:", 2)
    popen.send_signal(number)
    ended, _, err = hosts.launched.end(popen)
    assert ended == status, err
    assert err.splitlines()[-1] == f"psgc run: ended by {signal.Signals(number).name}"


def processes(launched: Launched, what: str) -> list[int]:
    found = []
    for pid in launched.left():
        try:
            if what in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(pid)
        except OSError:
            continue
    return found


VICTIMS = {
    "worker": "tests/jobs/",
    "server": "role server",
    "scheduler": "role scheduler",
    "host": "launch.job.remote",
    "ssh": "ssh -F",
}


def kill_one(hosts: Sshd, victim: str, seed: int, job: Sequence[str], first: str) -> tuple[int, str, float]:
    """The launcher's status and last words, and the seconds from the kill until nothing was left on any host. first: what a worker says when it runs."""
    popen = hosts.run(["alpha slots=2", "beta slots=2"], command=job, PSGC_ON_SERVER_LOSS="stop", PSGC_ON_SCHEDULER_LOSS="stop")
    await_line(popen, first, 4)
    began = time.monotonic()
    if victim == "launcher":
        os.kill(popen.pid, signal.SIGKILL)
    else:
        own = {pid for pid in processes(hosts.launched, VICTIMS[victim]) if pid != popen.pid}
        if victim == "ssh":  # not sshd's own process, nor the launcher, whose words contain the same
            own = {pid for pid in own if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "ssh"}
        os.kill(random.Random(seed).choice(sorted(own)), signal.SIGKILL)
    status, _, err = hosts.launched.end(popen)
    deadline = time.monotonic() + 100
    while hosts.launched.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not hosts.launched.left()
    return status, err, time.monotonic() - began


@needs_sshd
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [
    "worker", "ssh", "launcher", *(pytest.param(name, marks=pytest.mark.long) for name in ("server", "scheduler", "host")),
])  # fmt: skip
def test_any_process_killed_ends_the_job_everywhere_with_a_line(hosts: Sshd, victim: str) -> None:
    status, err, _ = kill_one(hosts, victim, 0, PLAIN, "step 1:")
    assert status not in (0, 2), err
    if victim != "launcher":
        assert re.search(r"psgc run: (alpha|beta)\b.*$", err.splitlines()[-1]), err


@needs_sshd
@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_leave_nothing(hosts: Sshd, seed: int) -> None:
    victim = random.Random(seed).choice([*VICTIMS, "launcher"])
    status, _, took_s = kill_one(hosts, victim, seed, [*JOB, *FOREVER], "joined job 0")
    assert status != 0
    print(f"{victim} killed: nothing is left after {took_s:.1f} s")


@needs_sshd
@pytest.mark.timeout(600)
def test_the_first_failure_gives_the_reason_and_the_status(hosts: Sshd) -> None:
    code = "import sys, time, psgc.torch as psgc; psgc.init(); psgc.rank() == 1 and sys.exit(3); time.sleep(1000)"
    status, _, err = hosts.ended(["alpha", "beta"], command=["python", "-c", code])
    assert (status, err.splitlines()[-1]) == (3, "psgc run: beta: rank 1 ended with status 3"), err


@needs_sshd
@pytest.mark.timeout(600)
def test_hosts_that_cannot_be_reached_are_named_before_anything_starts(hosts: Sshd, tmp_path: Path) -> None:
    hosts.start_s = 4.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with (tmp_path / "config").open("a") as config:
            config.write(
                f"Host dead\n  HostName 127.0.0.1\n  Port {free_port()}\nHost silent\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n"
            )
        status, out, err = hosts.ended(["dead", "alpha", "silent"], command=["touch", str(tmp_path / "started")])
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert re.match("psgc run: (dead cannot be reached by ssh: .*Connection refused|dead has not answered)", line)
    assert re.search("; silent (cannot be reached by ssh: .*timed out|has not answered ssh within 4 s)", line)
    assert not (tmp_path / "started").exists()


@needs_sshd
@pytest.mark.timeout(600)
def test_hosts_without_psgc_or_with_another_version_are_named(hosts: Sshd, tmp_path: Path) -> None:
    other = tmp_path / "python"
    hello = json.dumps({"event": "hello", "version": "0.0.1", "connection": "", "port": 1, "python": "/opt/python"})
    other.write_text(f"#!/bin/sh\nprintf '\\036psgc %s\\n' '{hello}' >&2\nread line\n")
    other.chmod(0o755)
    lacking = "psgc does not start on alpha: .*No such file or directory; .*for that Python. \\(--remote-python\\); psgc does not start on beta: .*"
    for python, said in (
        ("/no/python", lacking),
        (str(other), f"alpha has psgc 0.0.1 \\(for /opt/python\\), but this machine {__version__}: install one version .*"),
    ):
        status, out, err = hosts.ended(["alpha", "beta"], "--remote-python", python, command=["true"])
        assert (status, out) == (1, "")
        assert re.fullmatch(f"psgc run: {said}\n", err), err


@needs_sshd
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "command", "said"),
    [
        ((), "no-such-command", "worker: command 'no-such-command' is not found or not executable"),
        (
            ("--chdir", "/no/folder"),
            "true",
            "no folder /no/folder there (No such file or directory); start the job from one that every host has",
        ),
    ],
)
def test_what_a_host_cannot_do_is_a_line(hosts: Sshd, flags: tuple[str, ...], command: str, said: str) -> None:
    status, out, err = hosts.ended(["alpha"], *flags, command=[command])
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith(f"psgc run: alpha: {said}"), err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hostfile", "/no/hosts"), "hosts' file /no/hosts cannot be read: No such file or directory"),
        (("--hostfile", "HOSTS", "--workers", "9"), "--workers 9, but the hosts' file has 2 slots"),
        (("--hostfile", "HOSTS", "--nodes", "2"), "--nodes 2 is for jobs on this machine alone"),
        (("--hostfile", "HOSTS", "-WH", "HOSTS"), "--hostfile names all hosts; leave out --worker-hostfile"),
        (("--hostfile", "HOSTS", "--env", "NO_SUCH_NAME"), "--env NO_SUCH_NAME: there is no such variable in this shell"),
        (("--hostfile", "HOSTS", "--env", "a b=c"), "--env a b=c: expected NAME, NAME=VALUE or NAME:VALUE"),
        (("--hostfile", "HOSTS", "--codec", "no-such"), "no-such"),
        (("--hostfile", "HOSTS", "--start-timeout", "nan"), "--start-timeout nan: expected seconds, more than 0"),
        (("--hostfile", "HOSTS", "--start-timeout", "inf"), "--start-timeout inf: expected seconds, more than 0"),
        (("--interface", "eth0"), "--interface is for jobs on several hosts; give --hostfile"),
        (("--username", "me"), "--username is for jobs on several hosts; give --hostfile"),
    ],
)
def test_wrong_usage_is_a_line_and_status_2(launched: Launched, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    words = [str(tmp_path / "hosts") if word == "HOSTS" else word for word in flags]
    status, out, err = launched.end(launched.psgc("run", *words, "--", "true"))
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert said in err


@pytest.mark.timeout(600)
def test_this_machine_needs_no_ssh_to_itself(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    status, out, err = launched.end(
        launched.psgc("run", "--ssh", "/no/ssh", "--start-timeout", "200", "--hostfile", str(tmp_path / "hosts"), "--", *JOB, "1", "3")
    )
    assert status == 0, err
    assert out.count("joined job 0 as rank") == 2 and "[localhost] [worker 1] done" in out


@needs_sshd
@pytest.mark.timeout(600)
def test_bytepss_launch_line_works(hosts: Sshd, tmp_path: Path) -> None:
    address, port = hosts.addresses["alpha"]
    (tmp_path / "workers").write_text(f"{address}:{port}\n")
    (tmp_path / "servers").write_text(f"{address}:{port}\n")
    words = (
        "-WH",
        str(tmp_path / "workers"),
        "-SH",
        str(tmp_path / "servers"),
        "--scheduler-ip",
        address,
        "--scheduler-port",
        str(free_port()),
        "--scheduler-ssh-port",
        str(port),
        "--interface",
        "lo",
        "-i",
        f"{tmp_path}/key",
    )
    options = (
        "--username",
        getpass.getuser(),
        "--env",
        "NVIDIA_VISIBLE_DEVICES:0,1",
        "--ssh",
        f"{hosts.ssh} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
    )
    status, out, err = hosts.launched.end(hosts.launched.psgc("run", *words, *options, *JOB, "1", "3"))
    assert status == 0, err
    assert out.count("joined job 0 as rank") == 2, out


@needs_sshd
@needs_namespaces
@pytest.mark.long
def test_hosts_on_a_network_of_their_own_train_and_one_that_is_cut_off_ends_the_job(sshd: Sshd, tmp_path: Path) -> None:
    with testbed.Testbed(3) as bed:
        for number, name in ((1, "alpha"), (2, "beta")):
            sshd.listen([name], bed.addresses[number], bed.command(number, []))
        launcher = [
            sys.executable,
            "-m",
            "psgc.launch",
            "run",
            "--ssh",
            sshd.ssh,
            "--start-timeout",
            "200",
            "--hostfile",
            sshd.hosts("alpha", "beta"),
            "--",
        ]
        env = {**sshd.launched.env, "PSGC_DEAD_S": "20"}
        for jobs, steps in (("1", "3"), FOREVER):
            popen = bed.run(0, [*launcher, *JOB, jobs, steps], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if steps == "3":
                out, err = popen.communicate(timeout=200)
                assert (popen.returncode, out.count("done in attempt 0")) == (0, 2), err
                continue
            await_line(popen, "joined job 0", 2)
            with bed.cut_off(2):
                _, err = popen.communicate(timeout=200)
                assert popen.returncode in (1, 255) and err.splitlines()[-1].startswith("psgc run: "), err  # 255: ssh notices it first
                deadline = time.monotonic() + 100
                while sshd.launched.left() and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert not sshd.launched.left()


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(900)
def test_collect_brings_what_every_host_of_a_network_has_and_names_one_that_is_cut_off(sshd: Sshd, tmp_path: Path) -> None:
    """Over real ssh; a host that was cut off costs its part, not the archive."""
    with testbed.Testbed(3) as bed:
        for number, name in ((1, "alpha"), (2, "beta")):
            sshd.listen([name], bed.addresses[number], bed.command(number, []))
        env = {**sshd.launched.env, "PSGC_TOKEN": "a-very-secret-text", "PSGC_DEAD_S": "600"}
        psgc = [sys.executable, "-m", "psgc.launch"]
        way = ["--ssh", sshd.ssh, "--hostfile", sshd.hosts("alpha", "beta")]
        log = tmp_path / "log"
        with log.open("w") as output:
            job = bed.run(0, [*psgc, "run", *way, "--start-timeout", "200", "--", *JOB, *FOREVER], env=env, stdout=output, stderr=output)
        deadline = time.monotonic() + 200
        while log.read_text().count("joined job 0") < 2:
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

        def collected(name: str) -> tuple[dict[str, bytes], str]:
            words = [*psgc, "collect", *way, "--pid", str(job.pid), "-o", str(tmp_path / name)]
            done = bed.run(0, words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            _, err = done.communicate(timeout=250)
            assert done.returncode == 0, err
            with tarfile.open(tmp_path / name) as opened:
                return {entry.name: file.read() for entry in opened if (file := opened.extractfile(entry)) is not None}, err

        files, err = collected("all.tar.gz")
        assert "alpha" not in err and "beta" not in err, err
        for host in ("alpha", "beta"):
            assert json.loads(files[f"hosts/{host}/versions.json"])["packages"]["torch"]
            words = [each["command"] for each in json.loads(files[f"hosts/{host}/configuration.json"])]
            assert any("sums_in_jobs.py" in word for command in words for word in command), words
        assert not [name for name, content in files.items() if b"a-very-secret-text" in content]
        with bed.cut_off(2):
            files, err = collected("some.tar.gz")
        assert re.search(r"^psgc collect: beta: .+$", err, re.MULTILINE), err
        assert "hosts/alpha/versions.json" in files and not [name for name in files if name.startswith("hosts/beta/")]
        job.send_signal(signal.SIGINT)
        job.wait(200)
        deadline = time.monotonic() + 100
        while sshd.launched.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not sshd.launched.left()
