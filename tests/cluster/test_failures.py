"""Never a silent hang: whatever is missing, wrong or dead is named, and every process ends with status 1 and one line that says it."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.programs import program

Make = Callable[..., Any]
GIVE_UP_SOON = {"PSGC_REGISTER_TIMEOUT_S": "20"}  # those who are there come sooner, even if one of them is not run for a while
# Who comes to the scheduler of a job that has ended finds nobody there. So whoever ends a job before it begins comes last.
ALL_BUT_NODE_1 = r"waiting for node 1 \(DMLC_WORKER_ID=1\) to register"


def ends_everyone(job: Any, *said: str) -> None:
    """All that still ran ended with status 1, and each one's last line says what happened."""
    statuses = job.end()
    for process in job.processes:
        if statuses[process.name] == -signal.SIGKILL:
            continue
        assert statuses[process.name] == 1, job.text()
        for words in said:
            assert re.search(words, process.text.strip().splitlines()[-1]), (
                f"{process.name}: {words!r} is not in its last line\n{job.text()}"
            )
        assert "Traceback" not in process.text, job.text()


def test_whoever_is_missing_is_named_and_waited_for_only_so_long(make_job: Make) -> None:
    """Three jobs at once, which all wait for the limit: without a worker, without a server, and without a scheduler. Where there is one, only its limit can end
    the job, and the others wait for it when its time begins."""
    no_worker, no_server, no_scheduler = (make_job(nodes=nodes) for nodes in (2, 1, 1))
    members = [no_worker.server(), *(job.worker(0, job="steps.py") for job in (no_worker, no_server))]
    no_scheduler.server(**GIVE_UP_SOON)
    no_scheduler.worker(0, job="steps.py", **GIVE_UP_SOON)
    for member in members:
        member.read_until("waiting for the scheduler")
    scheduler, _ = (job.scheduler(**GIVE_UP_SOON) for job in (no_worker, no_server))
    ends_everyone(no_worker, r"gave up.*node 1 \(DMLC_WORKER_ID=1\)")
    assert scheduler.text.count("gave up after") == 1, "the scheduler says once why the job failed"
    assert re.search(r"waiting for .*node 1 \(DMLC_WORKER_ID=1\)", scheduler.text), "named while it is waited for, too"
    ends_everyone(no_server, r"1 of 1 server")
    ends_everyone(no_scheduler, rf"the scheduler at tcp://127\.0\.0\.1:{no_scheduler.port}")


def test_two_opinions_on_the_number_of_nodes_end_the_job(make_job: Make) -> None:
    job = make_job(nodes=2)
    scheduler = job.scheduler()
    job.server()
    job.worker(0, job="steps.py")
    scheduler.read_until(ALL_BUT_NODE_1)
    job.worker(1, job="steps.py", DMLC_NUM_WORKER="3")
    ends_everyone(job, r"DMLC_NUM_WORKER=3.*2")


def test_two_nodes_with_one_id_are_both_named(make_job: Make) -> None:
    job = make_job(nodes=2)
    scheduler = job.scheduler()
    job.server()
    first = job.worker(0, job="steps.py")
    scheduler.read_until(ALL_BUT_NODE_1)
    second = job.worker(0, job="steps.py")
    ends_everyone(job, r"DMLC_WORKER_ID=0", str(first.popen.pid), str(second.popen.pid))


def test_a_shape_that_differs_names_the_tensor_and_the_ranks(make_job: Make) -> None:
    job = make_job(nodes=2)
    job.scheduler()
    job.server()
    job.worker(0, "--numel", "5000", job="steps.py")
    job.worker(1, "--numel", "5001", job="steps.py")
    ends_everyone(job, r"layer\.weight.*rank 0.*5000.*rank 1.*5001")


def test_a_port_in_use_is_said_at_once(make_job: Make) -> None:
    job = make_job()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", job.port))
        taken.listen()
        scheduler = job.scheduler()
        assert scheduler.end() == 1
    assert re.search(rf"{job.port}.*in use", scheduler.last_line), scheduler.text


def test_a_stranger_with_a_wrong_token_is_refused_and_ends_nothing(make_job: Make) -> None:
    job = make_job(nodes=1)
    job.scheduler()
    job.server()
    stranger = job.worker(0, job="steps.py", PSGC_TOKEN="guess")
    assert stranger.end() == 1
    assert "does not take this member's token: set the same PSGC_TOKEN" in stranger.last_line, stranger.text
    member = job.worker(0, "--steps", "3", job="steps.py")
    assert member.end() == 0, job.text()
    scheduler = job.processes[0]
    assert scheduler.end() == 0, job.text()
    assert scheduler.text.count("control connection refused: it does not hold this job's token") == 1, scheduler.text


def test_a_wrong_port_ends_worker_and_server_with_the_name_of_what_listens_there(make_job: Make) -> None:
    """Also where nothing can be said of it: then a signal ends them."""
    job = make_job(nodes=1)
    with program(b"SSH-2.0-OpenSSH_9.6\r\n") as job.port:
        members = [job.server(), job.worker(0, job="steps.py")]
        assert [member.end() for member in members] == [1, 1], job.text()
    for member in members:
        assert "no scheduler of psgc (it says 'SSH-2.0-OpenSSH_9.6'): check DMLC_PS_ROOT_URI" in member.last_line, member.text
    with program(b"", b"") as job.port:
        server = job.server()
        server.read_until("waiting for the scheduler")
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 1
    assert "ended by SIGTERM" in server.last_line


def test_a_worker_killed_in_mid_step_ends_the_job_and_is_named(make_job: Make) -> None:
    job = make_job(nodes=3)
    job.scheduler()
    job.server()
    job.worker(0, "--steps", "1000", job="steps.py")
    dying = job.worker(1, "--steps", "1000", "--die-at", "5", job="steps.py")
    job.worker(2, "--steps", "1000", job="steps.py")
    ends_everyone(job, rf"worker 1 .*pid {dying.popen.pid}.* died")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_server_killed_in_mid_step_ends_the_job_and_is_named(make_job: Make, transport: str) -> None:
    job = make_job(nodes=2, env={"PSGC_TRANSPORT": transport})
    workers = job.whole("--steps", "1000", job="steps.py")
    workers[0].read_until("step 5:")
    job.processes[1].kill()
    ends_everyone(job, rf"server 0 .*pid {job.processes[1].popen.pid}.* died")


def test_a_scheduler_killed_ends_the_job(make_job: Make) -> None:
    job = make_job(nodes=2)
    workers = job.whole("--steps", "1000", job="steps.py")
    workers[0].read_until("step 3:")
    job.processes[0].kill()
    ends_everyone(job, r"scheduler at tcp://127\.0\.0\.1:\d+ (is gone|has said nothing)")


def test_a_rank_that_leaves_early_is_named(make_job: Make) -> None:
    job = make_job(nodes=2)
    job.scheduler()
    job.server()
    job.worker(0, "--steps", "10", job="steps.py")
    leaver = job.worker(1, "--steps", "10", "--leave-at", "4", job="steps.py")
    statuses = job.end()
    assert leaver.popen.returncode == 0, job.text()
    assert statuses["worker 0"] == statuses["scheduler"] == statuses["server 0"] == 1, job.text()
    assert re.search(r"rank\(s\) 1 left the job, but step 4 .*same number of steps", job.processes[2].last_line), job.text()


def test_a_stalled_step_is_named_and_fails_at_its_limit(make_job: Make) -> None:
    job = make_job(nodes=2, env={"PSGC_STEP_TIMEOUT_S": "20"})
    job.scheduler()
    server = job.server()
    job.worker(0, job="steps.py")
    job.worker(1, "--stall-at", "3", job="steps.py")
    statuses = job.end()
    assert set(statuses.values()) == {1}, job.text()
    assert re.search(r"step 3 of key .*layer\.weight.* has awaited rank\(s\) 1", server.text), job.text()
    assert "PSGC_STEP_TIMEOUT_S" in job.processes[2].last_line, job.text()


def test_nan_is_passed_on_to_every_rank_by_default(make_job: Make) -> None:
    for codec in ("none", "onebit"):
        job = make_job(nodes=2)
        job.scheduler()
        job.server()
        workers = [
            job.worker(0, "--steps", "5", "--codec", codec, "--nan-at", "3", job="steps.py"),
            job.worker(1, "--steps", "5", "--codec", codec, job="steps.py"),
        ]
        assert set(job.end().values()) == {0}, job.text()
        wanted = 1 if codec == "none" else 5000  # without compression NaN travels by element, else it poisons the part
        for worker in workers:
            assert f"step 3: nan {wanted} of 5000" in worker.text, worker.text
            assert "step 4: nan 0 of 5000, first 4.0" in worker.text, "training goes on, and the residual is as it was"


@pytest.mark.parametrize("codec", ["none", "bf16", "onebit"])
def test_nan_ends_the_job_under_the_policy_raise_naming_tensor_and_rank(make_job: Make, codec: str) -> None:
    job = make_job(nodes=2, env={"PSGC_NONFINITE": "raise"})
    job.scheduler()
    job.server()
    job.worker(0, "--codec", codec, job="steps.py")
    job.worker(1, "--codec", codec, "--nan-at", "3", job="steps.py")
    ends_everyone(job, r"rank 1: gradient of 'layer\.weight' holds NaN")
