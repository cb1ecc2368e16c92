"""``psgc slurm`` writes a batch script and submits it; on a real Slurm, where one runs here, the script's job trains."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm_cluster import Slurm, why_not
from tests.plan.commands import psgc

ROOT = Path(__file__).parent.parent.parent
JOB = str(ROOT / "tests" / "jobs" / "sums_in_jobs.py")
SHRINKING = str(ROOT / "tests" / "jobs" / "shrinking.py")
PREEMPTED = str(ROOT / "tests" / "jobs" / "preempted.py")
STEPS = str(ROOT / "tests" / "jobs" / "steps.py")
DIGITS = str(ROOT / "examples" / "train_digits.py")


def script_of(*flags: str) -> str:
    done = psgc("slurm", *flags, "--dry-run", "--", "python", "train.py", "--text", "a b")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_asks_for_one_launcher_a_node_and_draws_the_secret_when_it_runs() -> None:
    text = script_of(
        "-N",
        "4",
        "--servers",
        "2",
        "--workers-per-node",
        "8",
        "--codec",
        "int8",
        "-p",
        "gpu",
        "--sbatch",
        "account=physics",
        "--sbatch",
        "exclusive",
    )
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("nodes=4", "ntasks-per-node=1", "partition=gpu", "account=physics", "exclusive"):
        assert f"#SBATCH --{option}" in lines
    for setting in ("DMLC_NUM_SERVER=2", "BYTEPS_LOCAL_SIZE=8", "PSGC_CODEC=int8"):
        assert f"export {setting}" in lines
    assert lines[-1] == f"exec srun --kill-on-bad-exit=1 {Path(sys.executable).parent}/psgc-launch python train.py --text 'a b'"
    assert "/dev/urandom" in text


def test_the_script_runs_with_a_secret_of_its_own_each_time_and_keeps_the_users(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$PSGC_TOKEN $*"\n')
    srun.chmod(0o755)

    def run(**more: str) -> list[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PSGC_")}
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        return subprocess.run(["bash"], input=script_of(), env=env, capture_output=True, text=True, check=True).stdout.split()

    first, second = run(), run()
    assert len(first[0]) == 64 and first[0] != second[0]
    assert run(PSGC_TOKEN="ours")[0] == "ours"
    assert first[-4:] == ["train.py", "--text", "a", "b"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-N", "0", "--", "true"), "--nodes 0: at least 1"),
        (("--servers", "-1", "--", "true"), "--servers -1: at least 0"),
        (("-N", "2"), "no command given"),
        (("--codec", "no-such", "--", "true"), "no-such"),
        (("-p", "--x", "--", "true"), "'--x' is no option of sbatch"),
    ],
)
def test_wrong_usage_is_a_line_and_status_2(flags: tuple[str, ...], said: str) -> None:
    done = psgc("slurm", *flags)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert said in done.stderr


def test_what_sbatch_refuses_and_a_machine_without_slurm_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = psgc("slurm", "--", "true")
    assert (done.returncode, done.stderr) == (
        2,
        "psgc slurm: there is no sbatch here; log into a machine of the cluster, or print the script with --dry-run\n",
    )
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nowhere' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    done = psgc("slurm", "-p", "nowhere", "--", "true")
    assert (done.returncode, done.stderr) == (1, "psgc slurm: sbatch refuses: sbatch: error: invalid partition specified: nowhere\n")


@pytest.fixture(scope="module", params=["pgid", "linuxproc"])
def slurm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Four nodes of this machine. As Slurm finds a step's processes, by groups or by parents, its signals reach the launchers alone, or every process."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), 4, request.param)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


SOON = {
    "PSGC_ON_SERVER_LOSS": "stop",
    "PSGC_ON_SCHEDULER_LOSS": "stop",
    "PSGC_HEARTBEAT_S": "0.3",
    "PSGC_SILENCE_S": "1",
    "PSGC_ABORT_GRACE_S": "2",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.long
def test_a_real_slurm_trains_the_digits_to_the_losses_of_psgc_run_bit_for_bit(slurm: Slurm, launched: Any, tmp_path: Path) -> None:
    job = (sys.executable, DIGITS, "--steps", "30", "--codec", "int8", "--out")
    status, _, err = launched.end(launched.psgc("run", "--nodes", "2", "--", *job, str(tmp_path / "run.json"), OMP_NUM_THREADS="1"))
    assert status == 0, err
    number = slurm.submit(tmp_path / "log", "-N", "2", "--", *job, str(tmp_path / "slurm.json"), **SOON)
    assert slurm.await_end(number) == "COMPLETED", (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert "psgc-launch: from Slurm:" in text and "PSGC_TOKEN is not set" not in text, text
    assert record(tmp_path / "slurm.json") == record(tmp_path / "run.json") != {}


@pytest.mark.long
def test_scancel_ends_a_real_job_everywhere_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    number = slurm.submit(tmp_path / "log", "-N", "4", "--", sys.executable, JOB, "1", "1000000", **SOON)
    slurm.await_text(tmp_path / "log", "joined job 0 as rank", 4)
    slurm.do("scancel", number)
    assert slurm.await_end(number) == "CANCELLED"
    assert "psgc-launch: ended by SIGTERM" in (tmp_path / "log").read_text()
    assert left_of(slurm, JOB) == []


@pytest.mark.long
def test_a_rank_that_fails_ends_a_real_job_with_its_status_and_a_line(slurm: Slurm, tmp_path: Path) -> None:
    number = slurm.submit(tmp_path / "log", "-N", "2", "--", sys.executable, JOB, "1", "3", "1", **SOON)
    assert slurm.await_end(number) == "FAILED"
    assert "ended with ValueError: bad batch" in (tmp_path / "log").read_text()
    assert slurm.shown(number)["ExitCode"] == "1:0" and left_of(slurm, JOB) == []


@pytest.mark.long
def test_at_its_time_limit_a_job_writes_its_checkpoint_though_that_takes_longer_than_the_launchers_patience(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Slurm's SIGTERM comes at the limit, and SIGKILL after KillWait."""
    job = (sys.executable, PREEMPTED, str(tmp_path), "14", "1000000", "end")
    number = slurm.submit(tmp_path / "log", "-N", "2", "-t", "1", "--", *job, **SOON)
    assert slurm.await_end(number) == "TIMEOUT"
    text = (tmp_path / "log").read_text()
    assert "rank 0 heard ['SIGTERM']" in text and "written" in text and (tmp_path / "checkpoint").exists(), text
    assert left_of(slurm, PREEMPTED) == []


@pytest.mark.long
def test_sigusr1_before_the_time_limit_reaches_the_script_alone(slurm: Slurm, tmp_path: Path) -> None:
    job = (sys.executable, PREEMPTED, str(tmp_path), "1", "1000000", "end")
    number = slurm.submit(tmp_path / "log", "-N", "2", "-t", "1", "--sbatch", "signal=USR1@50", "--", *job, **SOON)
    assert slurm.await_end(number) == "COMPLETED", (tmp_path / "log").read_text()
    assert "heard ['SIGUSR1']" in (tmp_path / "log").read_text() and (tmp_path / "checkpoint").exists()


@pytest.mark.long
def test_a_job_that_is_preempted_saves_and_goes_on_from_there_when_it_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = (sys.executable, PREEMPTED, str(tmp_path), "12", "1000000", "stay")
    number = slurm.submit(tmp_path / "log", "-N", "4", "--sbatch", "requeue", "--", *job, PSGC_RESTARTS="2", **SOON)
    slurm.await_text(tmp_path / "log", "begins at step 0", 4)
    urgent = slurm.do("sbatch", "-p", "urgent", "-N", "4", "--output", str(tmp_path / "urgent"), "--wrap", "sleep 3").split()[-1]
    assert slurm.await_end(urgent) == "COMPLETED"
    slurm.await_text(tmp_path / "log", "begins at step 1 {'PSGC_RESTART': '0', 'SLURM_RESTART_COUNT': '1'}", 4)
    slurm.do("scancel", number)
    assert slurm.await_end(number) == "CANCELLED"
    text = (tmp_path / "log").read_text()
    assert "heard ['SIGTERM']" in text and "written" in text and "restart 1 of 2" not in text, text
    assert left_of(slurm, PREEMPTED) == []


@pytest.mark.long
def test_a_job_that_is_cancelled_is_not_started_again_though_its_script_has_no_handler(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm's SIGTERM may end the workers before their launcher hears of it."""
    number = slurm.submit(tmp_path / "log", "-N", "2", "--", sys.executable, STEPS, "--steps", "1000000", PSGC_RESTARTS="2", **SOON)
    slurm.await_text(tmp_path / "log", "step 1:", 2)
    slurm.do("scancel", number)
    assert slurm.await_end(number) == "CANCELLED"
    assert "(PSGC_RESTARTS)" not in (tmp_path / "log").read_text() and left_of(slurm, STEPS) == []


@pytest.mark.long
def test_a_job_that_fails_is_started_again_within_its_allocation(slurm: Slurm, tmp_path: Path) -> None:
    job = (sys.executable, PREEMPTED, str(tmp_path), "0", "1000000", "end")
    number = slurm.submit(tmp_path / "log", "-N", "2", "--sbatch", "requeue", "--", *job, PSGC_RESTARTS="1", **SOON)
    slurm.await_text(tmp_path / "log", "begins at step 0", 2)
    os.kill(left_of(slurm, PREEMPTED, f"{sys.executable} {PREEMPTED}")[0], signal.SIGKILL)
    slurm.await_text(tmp_path / "log", "'PSGC_RESTART': '1', 'SLURM_RESTART_COUNT': ''", 2)
    slurm.do("scancel", number)
    assert slurm.await_end(number) == "CANCELLED"
    assert "restart 1 of 1 (PSGC_RESTARTS)" in (tmp_path / "log").read_text() and left_of(slurm, PREEMPTED) == []


@pytest.mark.long
def test_a_job_goes_on_without_a_node_that_is_lost_with_a_worker_and_a_server(slurm: Slurm, tmp_path: Path) -> None:
    job = (sys.executable, SHRINKING, "600", "-1", str(tmp_path / "gate"), "0")
    env = {**SOON, "PSGC_ON_SERVER_LOSS": "restart", "PSGC_ON_WORKER_LOSS": "shrink", "PSGC_REPLICAS": "1", "PSGC_DEAD_S": "3"}
    number = slurm.submit(tmp_path / "log", "-N", "3", "--", *job, **env)
    try:
        slurm.await_text(tmp_path / "log", "rank 2 step 9 ")
        slurm.lose(3)
        assert slurm.await_end(number) == "COMPLETED", (tmp_path / "log").read_text()
    finally:
        slurm.come_back(3)
    text = (tmp_path / "log").read_text()
    assert set(re.findall(r"rank [01] step 599 mean (\S+)", text)) == {"1.5"}, text
    assert "takes its place (PSGC_REPLICAS=1)" in text and left_of(slurm, SHRINKING) == []


@pytest.mark.long
def test_another_partition_runs_and_a_wrong_one_is_a_line(slurm: Slurm, tmp_path: Path) -> None:
    number = slurm.submit(tmp_path / "log", "-N", "2", "-p", "urgent", "--", sys.executable, JOB, "1", "3", **SOON)
    assert slurm.await_end(number) == "COMPLETED" and slurm.shown(number)["Partition"] == "urgent"
    done = subprocess.run(
        [sys.executable, "-m", "psgc.launch", "slurm", "-p", "nowhere", "--", "true"],
        env=slurm.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "invalid partition specified: nowhere" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_kills_on_a_real_slurm_end_the_job_everywhere_and_leave_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """Twenty, over both ways to find processes."""
    took = []
    for seed in range(10):
        rng, log, before = random.Random(f"{slurm.track} {seed}"), tmp_path / f"log{seed}", shared_memory()
        number = slurm.submit(log, "-N", "2", "--workers-per-node", "2", "--", sys.executable, JOB, "1", "1000000", **SOON)
        slurm.await_text(log, "joined job 0 as rank", 4)
        launcher = f"{sys.executable} {Path(sys.executable).parent}/psgc-launch"
        victim = rng.choice([f"{sys.executable} {JOB}", f"{sys.executable} -m psgc.launch.job.role", launcher, "guardian.py"])
        os.kill(rng.choice(left_of(slurm, victim, victim if victim != "guardian.py" else "")), signal.SIGKILL)
        began = time.monotonic()
        if victim == "guardian.py":  # the launcher starts another, and the job goes on
            slurm.await_text(log, "another was started")
            slurm.do("scancel", number)
        assert slurm.await_end(number) == ("CANCELLED" if victim == "guardian.py" else "FAILED"), (victim, log.read_text())
        took.append((round(time.monotonic() - began, 1), victim.rpartition("/")[2]))
        assert left_of(slurm, JOB) == [] and shared_memory() <= before, (victim, log.read_text())
    print("from the kill to the end of the job:", sorted(took))


def left_of(slurm: Slurm, what: str, first: str = "") -> list[int]:
    """Processes of jobs of this Slurm, and of no other: those whose command line has ``what``, and begins with ``first``."""
    found, own = [], f"SLURM_CONF={slurm.env['SLURM_CONF']}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if what in line and line.startswith(first) and own in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "psgc" in name}


def record(path: Path) -> Any:
    return {name: value for name, value in json.loads(path.read_text()).items() if name in ("losses", "validation_loss", "accuracy")}
