"""What a job cannot have is one line and status 2 before anything starts, whichever launcher is to start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from psgc.config import Config
from psgc.errors import CodecError, ConfigError, PsgcError
from psgc.launch.job import bpslaunch
from psgc.launch.job.checks import canonical, check_job
from tests.plan.commands import psgc

Said = tuple[int, str]  # the exit status, and what was written to both streams
Launcher = Callable[[Mapping[str, str], Path, pytest.CaptureFixture[str]], Said]
COMMAND = (sys.executable, "train.py")  # there is no such script: nothing may start
TOLD = {
    "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_WORKER_ID": "0", "PSGC_TOKEN": "of this test",
}  # fmt: skip


def _verb(*words: str) -> Said:
    done = psgc(*words, "--", *COMMAND)
    return done.returncode, done.stdout + done.stderr


def psgc_run(env: Mapping[str, str], folder: Path, _: pytest.CaptureFixture[str]) -> Said:
    return _verb("run", "--workers", "2", "--servers", "2")


def hostfile(env: Mapping[str, str], folder: Path, _: pytest.CaptureFixture[str]) -> Said:
    (folder / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    return _verb("run", "--ssh", "/no/ssh", "--hostfile", str(folder / "hosts"))


def slurm(env: Mapping[str, str], folder: Path, _: pytest.CaptureFixture[str]) -> Said:
    return _verb("slurm", "-N", "2", "--workers-per-node", "1", "--dry-run")


def kubernetes(env: Mapping[str, str], folder: Path, _: pytest.CaptureFixture[str]) -> Said:
    return _verb("k8s", "render", "-N", "2", *(word for name, text in env.items() for word in ("--env", f"{name}={text}")))


def psgc_launch(env: Mapping[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    status = bpslaunch.launch(list(COMMAND), {"PATH": os.environ["PATH"], **TOLD, "DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker", **env})
    return status, "".join(capsys.readouterr())


def psgc_launch_alone(env: Mapping[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    status = bpslaunch.launch(
        list(COMMAND), {**os.environ, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "BYTEPS_LOCAL_SIZE": "2", **env}
    )
    return status, "".join(capsys.readouterr())


LAUNCHERS: list[Launcher] = [psgc_run, hostfile, slurm, kubernetes, psgc_launch, psgc_launch_alone]
REFUSED = {
    "as many backup workers as there are workers": (
        {"PSGC_BACKUP_WORKERS": "2"}, "PSGC_BACKUP_WORKERS=2, but the job has 2 workers"),
    "backup workers that may die": (
        {"PSGC_BACKUP_WORKERS": "1", "PSGC_ON_WORKER_LOSS": "wait"}, "PSGC_BACKUP_WORKERS=1 and PSGC_ON_WORKER_LOSS=wait"),
    "workers that are followed, with servers that hold the weights": (
        {"PSGC_ASYNC": "1", "PSGC_ON_WORKER_LOSS": "wait"}, "PSGC_ON_WORKER_LOSS=wait and PSGC_ASYNC=1"),
    "replicas of servers whose death ends the job": (
        {"PSGC_REPLICAS": "1", "PSGC_ON_SERVER_LOSS": "stop"}, "PSGC_REPLICAS=1 and PSGC_ON_SERVER_LOSS=stop"),
    "spare processes where a death ends the job": (
        {"PSGC_SPARES": "1"}, "1 spares have no effect where a worker's death ends the job"),
    "no number of spare processes": (
        {"PSGC_SPARES": "some"}, "PSGC_SPARES=some: expected how many processes are to wait"),
    "an unknown codec": (
        {"PSGC_CODEC": "no-such"}, "unknown codec 'no-such'"),
}  # fmt: skip


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
@pytest.mark.parametrize("what", REFUSED)
def test_every_launcher_refuses(
    launcher: Launcher, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env, words = REFUSED[what]
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    status, said = launcher(env, tmp_path, capsys)
    assert status == 2, said
    assert words in said and len(said.splitlines()) == 1, said


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("launcher", LAUNCHERS[1:5], ids=lambda launcher: launcher.__name__)
def test_a_job_without_servers_refuses_codecs_that_need_one(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if launcher is kubernetes:
        done = psgc("k8s", "render", "--servers", "0", "--codec", "shared", "--", *COMMAND)
        status, said = done.returncode, done.stdout + done.stderr
    else:
        env = {"PSGC_CODEC": "shared", "DMLC_NUM_SERVER": "0"}
        for name, text in env.items():
            monkeypatch.setenv(name, text)
        if launcher is hostfile:
            (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
            status, said = _verb("run", "--servers", "0", "--ssh", "/no/ssh", "--hostfile", str(tmp_path / "hosts"))
        else:
            status, said = launcher(env, tmp_path, capsys)
    assert status == 2 and "codec shared needs servers, and this job has none" in said and len(said.splitlines()) == 1, said


def test_where_the_workers_are_counted_by_an_assumption_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"PATH": os.environ["PATH"], **TOLD, "DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker", "PSGC_BACKUP_WORKERS": "2"}
    assert bpslaunch.launch(list(COMMAND), env) == 2
    assert "has 2 workers (2 nodes of 1; where they differ, set PSGC_NODE_SIZES): a step waits for" in capsys.readouterr().err
    config = Config.from_env({**TOLD, "DMLC_NUM_WORKER": "2", "PSGC_BACKUP_WORKERS": "2"})
    check_job(config, workers=4)
    check_job(config)  # nobody knows how many there are


def test_servers_that_could_not_all_be_kept_elsewhere_are_refused_where_machines_are_known() -> None:
    config = Config.from_env({**TOLD, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3", "PSGC_REPLICAS": "1"})
    check_job(config, shares={"a": 1, "b": 1, "c": 1})
    with pytest.raises(
        ConfigError, match="PSGC_REPLICAS=1, but 2 of 3 servers are on b: what they keep cannot all be kept elsewhere; have at most half"
    ):
        check_job(config, shares={"a": 1, "b": 2})


def test_a_codec_is_written_canonically_or_refused() -> None:
    assert canonical("", 0) == ""
    assert canonical("onebit", 1) == canonical("onebit", 0) == "onebit"
    with pytest.raises(CodecError, match="codec powersgd needs servers"):
        canonical("powersgd", 0)


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("slurm", "-N", "2"), {"PSGC_REPLICAS": "1"}, "slurm: PSGC_REPLICAS=1 and PSGC_ON_WORKER_LOSS=stop: every node has workers"),
        (
            ("k8s", "render", "--servers", "2", "--env", "PSGC_REPLICAS=1"),
            {},
            "k8s render: PSGC_REPLICAS=1: a pod that is lost fails its Job",
        ),
    ],
)
def test_replicas_are_refused_where_a_lost_machine_ends_the_job_all_the_same(
    words: tuple[str, ...], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    status, heard = _verb(*words)
    assert status == 2 and said in heard and len(heard.splitlines()) == 1, heard


@pytest.mark.usefixtures("clean_environment")
def test_a_job_on_ray_refuses_them_too() -> None:
    from psgc.launch.on_ray.launching import _check

    for env, kind, said in (
        ({"PSGC_BACKUP_WORKERS": "2"}, ConfigError, "the job has 2 workers"),
        ({"PSGC_REPLICAS": "1"}, ConfigError, "psgc.ray.launch: PSGC_REPLICAS=1: no launcher keeps what servers have there"),
        ({"PSGC_CODEC": "no-such"}, CodecError, "unknown codec"),
    ):
        error: type[PsgcError] = kind
        with pytest.raises(error, match=said):
            _check({"PSGC_TOKEN": "of this test", **env}, 2, 2)


@pytest.mark.usefixtures("clean_environment")
def test_spare_hosts_need_workers_that_may_be_followed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=1\nspare beta\n")
    status, said = _verb("run", "--ssh", "/no/ssh", "--hostfile", str(tmp_path / "hosts"))
    assert status == 2 and "the hosts' file has 1 spare host, which take the places of hosts whose workers are lost" in said, said


@pytest.mark.usefixtures("clean_environment")
def test_slurm_keeps_a_job_that_outlives_a_node_and_ends_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = _verb("slurm", "-N", "2", "--dry-run")
    assert "--no-kill" not in plain and "srun --kill-on-bad-exit=1" in plain
    monkeypatch.setenv("PSGC_ON_WORKER_LOSS", "shrink")
    _, shrinks = _verb("slurm", "-N", "2", "--dry-run")
    assert "#SBATCH --no-kill\n" in shrinks and "srun --no-kill --kill-on-bad-exit=0" in shrinks
