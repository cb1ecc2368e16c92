"""``psgc top`` beside a real job: it finds the scheduler by the environment or a process, shows what the job does, and disturbs nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from psgc.launch.observing.live_table import headline
from psgc.observe.figures import Figures
from psgc.observe.live import view
from psgc.wire.reports import Observed, Report, ReportOf
from tests.plan.commands import psgc
from tests.ports import free_port


def be_outside(monkeypatch: pytest.MonkeyPatch, job: Any, token: str = "secret") -> dict[str, str]:
    """Set what identifies the job for whoever is no member, and who waits for its scheduler for as long as a busy machine may take."""
    monkeypatch.setattr("psgc.launch.observing.scheduler_view.PATIENCE_S", 100.0)
    for name in ("DMLC_NUM_SERVER", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    env = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(job.port), "PSGC_JOB": job.job_id, "PSGC_TOKEN": token}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.mark.timeout(300)
def test_a_running_job_is_shown_and_goes_on_as_if_nobody_looked(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = make_job(env={"PSGC_CODEC": "int8"})
    job.whole("--until", str(tmp_path / "enough"), "--slow-rank", "1", job="trains.py")
    env = be_outside(monkeypatch, job)
    found: dict[str, Any] = {}
    until = time.monotonic() + 100
    while not (found.get("complete") and all(row["steps"] for row in found["workers"]) and found["servers"][0]["load"] is not None):
        assert time.monotonic() < until, found
        done = psgc("top", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        time.sleep(0.3)
    assert [row["index"] for row in found["workers"]] == [0, 1]
    assert found["ratio"] > 3
    for name in env:
        monkeypatch.delenv(name)
    # a launcher's own environment does not say which job it has started; its children's does
    launcher = subprocess.Popen(["sh", "-c", "DMLC_ROLE=worker sleep 100; :"], env={**os.environ, **env}, start_new_session=True)
    try:
        while (table := psgc("top", "--pid", str(launcher.pid), "--once")).returncode == 2:  # it has not started its child yet
            assert time.monotonic() < until, table.stderr
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert table.returncode == 0, table.stderr
    for text in ("rank 0", "rank 1", "server 0", r"step \d+", "x fewer bytes than uncompressed"):
        assert re.search(text, " ".join(table.stdout.split())), table.stdout
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()
    assert "refused" not in job.text()


def test_before_the_job_is_complete_a_holder_of_its_token_sees_that_and_a_stranger_nothing(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    job.scheduler()
    be_outside(monkeypatch, job)
    until = time.monotonic() + 60
    while (done := psgc("top", "--once")).returncode:
        assert time.monotonic() < until, done.stderr
    assert "0 members are there; others are awaited" in done.stdout
    be_outside(monkeypatch, job, token="another")
    stranger = psgc("top", "--json")
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert "does not take this member's token" in stranger.stderr


def test_without_a_job_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    idle = subprocess.Popen(["sleep", "100"], env={})
    for arguments, text in (
        ((), "which job? Set DMLC_PS_ROOT_URI"),
        (("--pid", str(idle.pid)), "neither that process nor one that it has started is a job's"),
        (("--interval", "0"), "--interval 0: expected at least 0.2"),
    ):
        done = psgc("top", "--once", *arguments)
        assert done.returncode == 2
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    idle.kill()
    idle.wait()
    monkeypatch.setattr("psgc.launch.observing.scheduler_view.PATIENCE_S", 0.3)
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(free_port()))
    done = psgc("top", "--once")
    assert done.returncode == 1
    assert "no scheduler answers at tcp://127.0.0.1:" in done.stderr


def test_the_jobs_step_is_not_that_of_a_process_that_has_followed_another() -> None:
    reports = Report(9_000_000, 1, steps=10_012), Report(9_000, 1, steps=12)
    members = tuple(ReportOf("worker", rank, "here", 1, False, 0, asdict(report)) for rank, report in enumerate(reports))
    assert headline(view(Observed(1, "v", 2, 0, True, members))) == "step 10012"


def test_figures_count_what_followed_the_first_step() -> None:
    figures = Figures(0.0)
    figures.submitted(1.0)
    figures.means_came(0.5, 3.0, counts=False)
    figures.step_over(None)
    for began in (10.0, 20.0):
        figures.submitted(began)
        figures.submitted(began + 1)
        figures.means_came(0.5, began + 2, counts=True)
        figures.step_over(began / 10)
    assert (figures.steps, figures.exchange_s, figures.waited_s, figures.step_s) == (3, 4.0, 1.0, 1.5)
