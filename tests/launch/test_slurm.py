"""``psgc slurm`` writes a batch script and submits it; on a real Slurm, where one runs here, the script's job trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plan.commands import psgc

JOB = str(Path(__file__).parent.parent / "jobs" / "sums_in_jobs.py")


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


def why_no_slurm() -> str:
    if not os.environ.get("SLURM_CONF"):
        return "SLURM_CONF names no running Slurm of two nodes"
    done = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no Slurm answers: {done.stderr.strip()}"


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())
def test_a_real_slurm_runs_the_scripts_job(tmp_path: Path, launched: Any) -> None:
    script = tmp_path / "job.sh"
    script.write_text(script_of("-N", "2", "--servers", "1").replace("python train.py --text 'a b'", f"{sys.executable} {JOB} 1 3"))
    done = subprocess.run(
        ["sbatch", "--wait", "--output", str(tmp_path / "log"), str(script)], env=launched.env, capture_output=True, text=True, check=False
    )
    text = (tmp_path / "log").read_text()
    assert done.returncode == 0, text
    assert text.count("joined job 0 as rank") == 2 and "PSGC_TOKEN is not set" not in text, text
