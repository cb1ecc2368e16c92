"""A failed job is started again up to PSGC_RESTARTS times; a job that ended in order, was told to end or was called wrongly is not."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.launch.job import restarts
from psgc.launch.job.restarts import restarts_of, run_again
from psgc.launch.supervision.supervisor import Unrepeated
from tests.launch.conftest import JOBS
from tests.ports import free_port


def ends(*statuses: int, most: int) -> tuple[int, list[dict[str, str]]]:
    """The last status of a job that ends with these, and what each start was told."""
    left, told = list(statuses), []

    def run(more: dict[str, str]) -> int:
        told.append(more)
        return left.pop(0)

    return run_again(run, most, "test"), told


def test_a_fault_is_followed_by_another_start_up_to_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(1, 137, 0, most=5) == (0, [{"PSGC_RESTART": str(number)} for number in range(3)])
    assert capsys.readouterr().err.splitlines()[1] == "test: the job failed with status 137; restart 2 of 5 (PSGC_RESTARTS)"
    assert ends(1, 1, 3, most=2)[0] == 3
    assert ends(1, most=0) == (1, [{}])


@pytest.mark.parametrize("status", [0, 2, Unrepeated(1), Unrepeated(128 + signal.SIGTERM)])
def test_these_ends_are_final(status: int) -> None:
    assert ends(status, most=3)[0] == status


ENDS_ONCE = """
import os, signal
print("start", os.environ["PSGC_RESTART"], flush=True)
if os.environ["PSGC_RESTART"] == "0":
    os.kill(os.getpid(), signal.{0})
    signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_to_a_worker_is_a_fault(launched: Any, name: str) -> None:
    """As from earlyoom, or from somebody who kills a process by its number."""
    command = (sys.executable, "-c", ENDS_ONCE.format(name))
    status, out, err = launched.end(launched.psgc_launch(*command, DMLC_ROLE="worker", DMLC_NUM_WORKER="1", PSGC_RESTARTS="2"))
    assert (status, out) == (0, "start 0\nstart 1\n"), err
    assert f"the job failed with status {128 + signal.Signals[name]}; restart 1 of 2 (PSGC_RESTARTS)" in err


def test_a_signal_to_the_launcher_is_final(launched: Any) -> None:
    popen = launched.job("--workers", "1", PSGC_RESTARTS="2")
    popen.send_signal(signal.SIGTERM)
    status, _, err = launched.end(popen)
    assert (status, err.splitlines()[-1]) == (128 + signal.SIGTERM, "psgc run: ended by SIGTERM")
    assert "(PSGC_RESTARTS)" not in err


def test_a_machine_waits_until_the_scheduler_of_the_last_start_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its members would meet that one, and hear that the job has failed."""
    slept: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        config = Config(root_host="127.0.0.1", root_port=scheduler.getsockname()[1])

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                scheduler.close()

        monkeypatch.setattr(restarts.time, "sleep", sleep)
        restarts.await_the_end(config, runs_scheduler=False)
    assert slept == [restarts.POLL_S] * 3
    restarts.await_the_end(config, runs_scheduler=True)
    assert slept[3:] == [restarts.GAP_S]


def test_the_setting_is_a_number() -> None:
    assert (restarts_of({}), restarts_of({"PSGC_RESTARTS": "4"})) == (0, 4)
    with pytest.raises(ConfigError, match=r"^PSGC_RESTARTS='often': expected how many times"):
        restarts_of({"PSGC_RESTARTS": "often"})


def test_a_job_whose_output_nobody_reads_is_not_started_again(launched: Any) -> None:
    popen = launched.job(PSGC_RESTARTS="2")
    popen.stdout.close()
    assert popen.wait(timeout=300) == 1
    err = popen.stderr.read()
    popen.stderr.close()
    assert err.endswith("psgc run: nobody reads the output any more\n"), err
    assert "(PSGC_RESTARTS)" not in err


@pytest.mark.parametrize("which", ["scheduler,server", "worker"])
def test_a_job_that_is_interrupted_on_one_machine_is_not_started_again_on_the_others(launched: Any, which: str) -> None:
    job = {
        "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "PSGC_RESTARTS": "3",
        "PSGC_TOKEN": "t", "PSGC_SILENCE_S": "100",
    }  # fmt: skip
    command = (sys.executable, str(JOBS / "steps.py"), "--steps", "100000")
    workers = [launched.psgc_launch(*command, **job, DMLC_ROLE="worker", DMLC_WORKER_ID=str(node)) for node in range(2)]
    services = launched.psgc_launch(**job, DMLC_ROLE="scheduler,server")
    for worker in workers:
        launched.read_until(worker, "step 1:")
    interrupted, *others = [*workers, services] if which == "worker" else [services, *workers]
    interrupted.send_signal(signal.SIGTERM)
    assert launched.end(interrupted)[0] == 128 + signal.SIGTERM
    for popen in others:
        status, _, err = launched.end(popen)
        assert status == 1, err
        assert (
            err.count(
                "another machine's part of the job was told to end, by a signal or because nobody reads its output: it is not started again"
            )
            == 1
        ), err
        assert "(PSGC_RESTARTS)" not in err
