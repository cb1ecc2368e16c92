"""``psgc run --hostfile``: a host is lost in the middle of a job, and the job goes on, with the same sums.

In short tests a host is an sshd of its own with all that runs behind it, and kill -9 takes it away; in long ones it has a network of its own, and is cut off.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_scripts import load
from tests.launch.killing import Pace
from tests.launch.ssh_hosts import Sshd, needs_sshd

JOBS = Path(__file__).parent.parent / "jobs"
testbed = load("testbed")
needs_namespaces = pytest.mark.skipif(bool(testbed.why_not()), reason=f"no testbed here: {testbed.why_not()}")
TRAINS = (sys.executable, str(JOBS / "lost_worker.py"))
SERVED = (sys.executable, str(JOBS / "lost_server.py"))
SHRINKS = (sys.executable, str(JOBS / "shrinking.py"))
WAIT = {"PSGC_REPLICAS": "1", "PSGC_ON_WORKER_LOSS": "wait", "PSGC_DEAD_S": "20"}  # of silence of a launcher, too, which may be slow
SHRINK = {**WAIT, "PSGC_ON_WORKER_LOSS": "shrink"}
STOP = {**WAIT, "PSGC_ON_WORKER_LOSS": "stop"}
SOON = "-o ServerAliveInterval=1"  # what ssh is told first counts


def found(out: str) -> list[str]:
    return sorted(re.findall(r"(rank \d found \w+)", out))


def take_away(sshd: Sshd, name: str) -> None:
    """kill -9 all that ssh has started there."""
    port = str(sshd.addresses[name][1])
    for pid in sshd.launched.left():
        with contextlib.suppress(OSError):
            settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(text.startswith(b"SSH_CONNECTION=") and text.split()[-1].decode() == port for text in settings):
                os.kill(pid, signal.SIGKILL)


def run(popen: subprocess.Popen[str], lose: Callable[[], None], when: str) -> tuple[int, str, str]:
    """To the job's end. lose: called once a line has these words."""
    assert popen.stdout is not None and popen.stderr is not None
    out, err = list[str](), list[str]()
    reader = threading.Thread(target=lambda: err.extend(popen.stderr))  # type: ignore[arg-type]
    reader.start()
    ended = threading.Timer(500, popen.kill)
    ended.start()
    waiting = True
    for line in popen.stdout:
        out.append(line)
        if waiting and when in line:
            waiting = False
            lose()
    status = popen.wait()
    ended.cancel()
    reader.join()
    popen.stdout.close()
    popen.stderr.close()
    assert not waiting, ("".join(out), "".join(err))
    return status, "".join(out), "".join(err)


@needs_sshd
@pytest.mark.timeout(600)
def test_a_spare_host_and_a_standby_take_a_lost_hosts_places(sshd: Sshd) -> None:
    """It had a worker, a server, and the other server's standby. All ranks have the same parameters; a long test compares them with an undisturbed job's."""
    for name in ("alpha", "beta", "gamma"):
        sshd.listen([name])
    with Pace(ahead=10) as pace:
        popen = sshd.run(
            ["alpha slots=1", "beta slots=1", "spare gamma"], *(f"--env={name}" for name in pace.env), command=(*TRAINS, "20", "none", "0.02"), **WAIT,
            **pace.env,
        )  # fmt: skip
        status, out, err = run(popen, lambda: (take_away(sshd, "beta"), pace.over()), "rank 1 step 5 ")  # type: ignore[func-returns-value]
    assert status == 0, (out, err)
    assert len(found(out)) == 2 and len({text.split()[-1] for text in found(out)}) == 1
    assert len(set(re.findall(r"step \d+ loss \S+", out))) == 20, "one mean of each step"
    assert "psgc run: gamma takes the place of beta (node 1)" in err
    assert "[gamma] rank 1 found" in out and "takes its place (PSGC_REPLICAS=1)" in err


@pytest.fixture
def bed(sshd: Sshd) -> Iterator[Any]:
    """Hosts alpha, beta, gamma and delta; the launcher is on the first."""
    with testbed.Testbed(5) as made:
        for number, name in enumerate(("alpha", "beta", "gamma", "delta"), 1):
            sshd.listen([name], made.addresses[number], made.command(number, []))
        yield made


def started(bed: Any, sshd: Sshd, hosts: Sequence[str], job: Sequence[str], **env: str) -> subprocess.Popen[str]:
    words = ["run", "--ssh", f"{sshd.ssh} {SOON}", "--start-timeout", "200", "--hostfile", sshd.hosts(*hosts), "--", *job]
    return bed.run(
        0, [sys.executable, "-m", "psgc.launch", *words], env={**sshd.launched.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def undisturbed(bed: Any, sshd: Sshd, hosts: Sequence[str], job: Sequence[str], **env: str) -> list[str]:
    popen = started(bed, sshd, hosts, job, **env)
    out, err = popen.communicate(timeout=500)
    assert popen.returncode == 0, err
    return found(out)


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["lost", "cut off"])
def test_a_host_with_a_worker_and_a_server_is_followed_by_a_spare_host_and_a_standby(bed: Any, sshd: Sshd, how: str) -> None:
    """A host that is only cut off ends what it runs by itself."""
    hosts, job = ["alpha slots=1", "beta slots=1", "spare gamma", "spare delta"], (*TRAINS, "60", "none", "0.02")
    plain = undisturbed(bed, sshd, hosts, job, **WAIT)
    popen = started(bed, sshd, hosts, job, **WAIT)
    with contextlib.ExitStack() as cut:
        lose = (lambda: bed.lose(2)) if how == "lost" else (lambda: cut.enter_context(bed.cut_off(2)))
        status, out, err = run(popen, lose, "rank 1 step 9 ")
        assert status == 0, (out, err)
        assert found(out) == plain and len(plain) == 2
        assert "psgc run: gamma takes the place of beta (node 1)" in err and "takes its place (PSGC_REPLICAS=1)" in err


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_under_shrink_the_others_go_on_without_a_lost_hosts_worker_and_its_server_is_elsewhere(
    bed: Any, sshd: Sshd, tmp_path: Path
) -> None:
    hosts, job = ["alpha slots=2", "beta slots=1"], (*SHRINKS, "400", "-1", str(tmp_path / "gate"), "0")
    popen = started(bed, sshd, hosts, job, **SHRINK)
    status, out, err = run(popen, lambda: bed.lose(2), "rank 2 step 9 ")
    assert status == 0, (out, err)
    assert set(re.findall(r"rank [01] step 399 mean (\S+)", out)) == {"1.5"}, "of gradients 1 and 2"
    assert len(set(re.findall(r"rank [01] found (\S+)", out))) == 1
    assert "1 of 3 ranks are missing now" in err and "takes its place (PSGC_REPLICAS=1)" in err


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_under_shrink_a_spare_host_brings_a_lost_hosts_rank_back(bed: Any, sshd: Sshd, tmp_path: Path) -> None:
    hosts, job = ["alpha slots=2", "beta slots=1", "spare gamma"], (*SHRINKS, "100000", "-1", str(tmp_path / "gate"), "0")
    (tmp_path / "gate").touch()
    popen = started(bed, sshd, hosts, job, **SHRINK)
    status, out, err = run(popen, lambda: bed.lose(2), "rank 2 step 9 ")  # it ends some steps after everyone is there again
    assert status == 0, (out, err)
    weights = re.findall(r"rank \d found (\S+)", out)
    assert len(weights) == 3 and len(set(weights)) == 1, weights
    assert "psgc run: gamma takes the place of beta (node 1)" in err


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["lost", "cut off"])
def test_a_host_of_servers_alone_may_be_lost_under_any_policy(bed: Any, sshd: Sshd, how: str) -> None:
    hosts, job = ["alpha slots=2", "server beta", "server gamma"], (*SERVED, "80", "int8", "optimizer", "0.02")
    plain = undisturbed(bed, sshd, hosts, job, **STOP)
    popen = started(bed, sshd, hosts, job, **STOP)
    with contextlib.ExitStack() as cut:
        lose = (lambda: bed.lose(3)) if how == "lost" else (lambda: cut.enter_context(bed.cut_off(3)))
        status, out, err = run(popen, lose, " step 20")
        assert status == 0, (out, err)
        assert found(out) == plain and len(plain) == 2
        assert "gamma ended with status 255" in err and "the others go on without it" in err


@needs_sshd
@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("hosts", "env", "lost", "why"),
    [
        (["alpha slots=1", "beta slots=1"], WAIT, 2, "no spare host can take its place"),
        (["alpha slots=1", "beta slots=1", "spare gamma"], WAIT, 1, "it had the scheduler"),
        (["alpha slots=1", "beta slots=1"], STOP, 2, "a worker's death ends the job"),
        (["alpha slots=1", "beta slots=1", "spare gamma"], {**WAIT, "PSGC_REPLICAS": "0"}, 2, "what its servers had kept is lost with it"),
    ],
)
def test_a_loss_that_the_job_cannot_survive_ends_it_everywhere_with_a_line(
    bed: Any, sshd: Sshd, hosts: Sequence[str], env: dict[str, str], lost: int, why: str
) -> None:
    popen = started(bed, sshd, hosts, (*TRAINS, "100000", "none", "0.02"), **env)
    status, _, err = run(popen, lambda: bed.lose(lost), "rank 1 step 9 ")
    name = ("", "alpha", "beta")[lost]
    assert status == 255 and f"\npsgc run: the job ends with {name}: {why}" in err, err
    assert err.splitlines()[-1].startswith(f"psgc run: {name} ended with status 255"), err
