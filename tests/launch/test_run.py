"""``psgc run`` and ``psgc-launch``: one command's processes live and die together, and the last line says why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

JOBS = Path(__file__).parent.parent / "jobs"
PYTHON = sys.executable
MARK = "PSGC_TEST_FAULT"  # carried by every process of a test's job


def processes(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """A name for this test's processes; none may be left at its end."""
    name = os.urandom(8).hex()
    yield name
    deadline = time.monotonic() + 20
    while processes(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


def start(mark: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}
    full = {**clean, MARK: mark, "PSGC_HEARTBEAT_S": "0.3", "PSGC_SILENCE_S": "1", "PSGC_ABORT_GRACE_S": "2", **env}
    return subprocess.Popen([PYTHON, "-m", "psgc.launch", *arguments], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(mark: str, *arguments: str, **env: str) -> tuple[int, str, str]:
    popen = start(mark, *arguments, **env)
    out, err = popen.communicate(timeout=90)
    return popen.returncode, out, err


def test_a_whole_job_runs_and_every_line_says_whose_it_is(mark: str) -> None:
    status, out, err = run(
        mark, "run", "--workers", "3", "--servers", "2", "--nodes", "2", "--", PYTHON, str(JOBS / "steps.py"), "--steps", "3"
    )
    assert status == 0, err
    for rank in range(3):
        assert f"[worker {rank}] step 3: nan 0 of 5000, first 3.0" in out


def test_without_prefix_lines_come_as_they_are(mark: str) -> None:
    status, out, _ = run(mark, "run", "--no-prefix", "--", PYTHON, str(JOBS / "steps.py"), "--steps", "1")
    assert (status, out.splitlines()[0]) == (0, "step 1: nan 0 of 5000, first 1.0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--", "no-such-command"), "no-such-command"),
        (("run",), "no command given"),
        (("run", "--codec", "onebitt", "--", "true"), "unknown codec 'onebitt'; there are none"),
        (("run", "--codec", "topk:k=0", "--", "true"), "topk"),
        (("run", "--nodes", "3", "--", "true"), "every node needs a worker"),
        (("bench", "pushpull", "--bytes", "3"), "multiple of 4"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(mark: str, arguments: tuple[str, ...], said: str) -> None:
    status, out, err = run(mark, *arguments)
    assert status == 2
    assert said in err
    assert (len(err.strip().splitlines()), out) == (1, "")


def test_a_worker_that_fails_ends_the_job_and_the_last_line_says_so(mark: str) -> None:
    code = "import os,sys,time; sys.exit(3) if os.environ['BYTEPS_LOCAL_RANK'] == '1' else time.sleep(100)"
    status, _, err = run(mark, "run", "--", PYTHON, "-c", code)
    assert status == 1
    assert re.fullmatch(r"psgc run: worker 1 \(pid \d+\) ended with status 3", err.strip().splitlines()[-1]), err


def test_a_killed_worker_is_named_by_its_signal(mark: str) -> None:
    status, _, err = run(mark, "run", "--", PYTHON, str(JOBS / "steps.py"), "--steps", "1000", "--die-at", "4")
    assert status == 1
    assert re.search(r"psgc run: worker \d \(pid \d+\) was killed by SIGKILL$", err.strip()), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(mark: str, number: signal.Signals) -> None:
    popen = start(mark, "run", "--no-prefix", "--", PYTHON, str(JOBS / "steps.py"), "--steps", "100000")
    assert popen.stdout is not None
    assert popen.stdout.readline().startswith("step 1:")
    popen.send_signal(number)
    _, err = popen.communicate(timeout=60)
    assert popen.returncode == 128 + number
    assert err.strip().splitlines()[-1] == f"psgc run: ended by {number.name}"


def test_a_worker_that_ignores_sigterm_is_killed(mark: str) -> None:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
    popen = start(mark, "run", "--no-prefix", "--workers", "1", "--", PYTHON, "-c", code)
    assert popen.stdout is not None
    assert popen.stdout.readline() == "up\n"
    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=60)
    assert popen.returncode == 128 + signal.SIGTERM


def test_nothing_outlives_a_killed_launcher(mark: str) -> None:
    popen = start(mark, "run", "--no-prefix", "--", PYTHON, str(JOBS / "steps.py"), "--steps", "100000")
    assert popen.stdout is not None
    assert popen.stdout.readline().startswith("step 1:")
    popen.kill()
    popen.communicate(timeout=60)  # the fixture checks that nothing is left


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "DMLC_ROLE"),
        ({"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "1"}, "missing DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT"),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}, "DMLC_WORKER_ID"),
    ],
)
def test_psgc_launch_names_what_is_missing_and_does_not_exit_0(env: dict[str, str], said: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}
    code = "from psgc.launch.bpslaunch import main; main()"
    done = subprocess.run([PYTHON, "-c", code, "true"], env={**clean, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_psgc_launch_runs_a_job_role_by_role(mark: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "PSGC_", "BYTEPS_"))}
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **clean,
        MARK: mark,
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
    }
    common.update(BYTEPS_FORCE_DISTRIBUTED="1", BYTEPS_LOCAL_SIZE="2", DMLC_WORKER_ID="0")
    command = [PYTHON, "-c", "from psgc.launch.bpslaunch import main; main()", PYTHON, str(JOBS / "steps.py"), "--steps", "3"]
    roles = [
        subprocess.Popen(command, env={**common, "DMLC_ROLE": role}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for role in ("Scheduler", "server", "worker")
    ]
    texts = [popen.communicate(timeout=90)[0] for popen in roles]
    assert [popen.returncode for popen in roles] == [0, 0, 0], texts
    assert "[worker 1] step 3: nan 0" in texts[2]
