"""Signals of a batch system: the script's reach the script, and SIGTERM ends the job through its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

PREEMPTED = str(Path(__file__).parent.parent / "jobs" / "preempted.py")
ONE_NODE = {"DMLC_NUM_WORKER": "1", "BYTEPS_LOCAL_SIZE": "2"}
OBEYS = """
import os, signal, sys, time
from psgc.launch.job.batch_signals import ignore_scripts, obey_the_launcher_alone
ignore_scripts()
obey_the_launcher_alone(os.environ)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("ready", flush=True)
sys.stdin.read()
os._exit(8)
"""


@pytest.mark.parametrize("program", ["psgc run", "psgc-launch"])
def test_sigusr1_to_a_launcher_reaches_the_script_and_ends_nothing_else(launched: Any, tmp_path: Path, program: str) -> None:
    command = (sys.executable, PREEMPTED, str(tmp_path), "0", "1000000", "end")
    popen = launched.psgc("run", "--no-prefix", "--", *command) if program == "psgc run" else launched.psgc_launch(*command, **ONE_NODE)
    begun = 0
    while begun < 2:
        begun += "begins at step 0" in popen.stdout.readline()
    popen.send_signal(signal.SIGUSR1)
    status, out, err = launched.end(popen)
    assert status == 0, err
    assert out.count("heard ['SIGUSR1']") == 2 and (tmp_path / "checkpoint").exists(), out


def two_nodes(launched: Any, folder: Path, port: int, seconds: float, **env: str) -> list[subprocess.Popen[str]]:
    """Two launchers, as on two nodes, each with a worker and a server."""
    common = {
        "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "PSGC_TOKEN": "secret", **env,
    }  # fmt: skip
    command = (sys.executable, PREEMPTED, str(folder), str(seconds), "1000000", "end")
    roles = ("scheduler,server,worker", "server,worker")
    return [launched.psgc_launch(*command, **common, DMLC_ROLE=role, DMLC_WORKER_ID=str(node)) for node, role in enumerate(roles)]


@pytest.mark.parametrize(("env", "ended_with"), [({}, 128 + signal.SIGTERM), ({"SLURM_STEP_ID": "0"}, 1)])
def test_servers_serve_until_the_workers_that_got_sigterm_have_saved(
    launched: Any, tmp_path: Path, env: dict[str, str], ended_with: int
) -> None:
    """Both launchers get it at once, as from Slurm; the script agrees with its other ranks, through servers, and saves. In a Slurm step the launchers' status
    is no higher than any failure's: srun takes the highest."""
    nodes = two_nodes(launched, tmp_path, free_port(), 1, **env)
    for popen in nodes:
        while "begins at step 0" not in popen.stdout.readline():  # type: ignore[union-attr]
            pass
    for popen in nodes:
        popen.send_signal(signal.SIGTERM)
    ended = [launched.end(popen) for popen in nodes]
    assert (tmp_path / "checkpoint").exists(), ended
    for status, out, err in ended:
        assert status == ended_with and "heard ['SIGTERM']" in out, (out, err)
        assert err.splitlines()[-1] == "psgc-launch: ended by SIGTERM"


STEP = """
import os, signal
from psgc.launch.job.batch_signals import run_in_step
def run():
    if {when} == "while":
        os.kill(os.getpid(), signal.SIGTERM)
    return {status}
status = run_in_step(run, {{"SLURM_STEP_ID": "0"}}, "launcher")
os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(status)
"""


@pytest.mark.parametrize(
    ("when", "returned", "status", "said"),
    [
        ("while", 0, 1, "launcher: ended by SIGTERM\n"),
        ("after", 3, 3, ""),
        ("after", 0, 0, ""),
        ("after", 143, 1, ""),
        ("after", 137, 137, ""),
    ],
)
def test_in_a_slurm_step_sigterm_never_outbids_a_failed_ranks_status(when: str, returned: int, status: int, said: str) -> None:
    """Nor does one that comes when the status is known: while the interpreter ends, in the worst case."""
    done = subprocess.run(
        [sys.executable, "-c", STEP.format(when=repr(when), status=returned)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize(("under_slurm", "status"), [(True, 8), (False, 7)])
def test_under_slurm_a_service_heeds_its_launchers_sigterm_alone(under_slurm: bool, status: int) -> None:
    """Slurm may signal every process of a step."""
    slurm = {"SLURM_JOB_ID": "1", "PSGC_LAUNCHER": "x"} if under_slurm else {}
    child = subprocess.Popen(
        [sys.executable, "-c", OBEYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **slurm}
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGUSR1)
    subprocess.run(["sh", "-c", f"kill -TERM {child.pid}"], check=True)
    if under_slurm:
        time.sleep(0.2)
    child.stdin.close()
    assert child.wait(100) == status
    child.stdout.close()


def test_under_slurm_the_launchers_sigterm_is_heeded() -> None:
    slurm = {"SLURM_JOB_ID": "1", "PSGC_LAUNCHER": "x"}
    child = subprocess.Popen(
        [sys.executable, "-c", OBEYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **slurm}
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(100) == 7
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize(("node", "written"), [("0", "3"), ("1", "")])
def test_the_first_nodes_launcher_writes_down_what_became_of_the_job(node: str, written: str, tmp_path: Path) -> None:
    code = "import os, sys; from psgc.launch.job.batch_signals import run_in_step; sys.exit(run_in_step(lambda: 3, os.environ, 'x'))"
    (file := tmp_path / "status").touch()
    env = {**os.environ, "SLURM_STEP_ID": "0", "SLURM_NODEID": node, "PSGC_STATUS_FILE": str(file)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 3
    assert file.read_text().strip() == written
