"""``psgc-launch``: one machine's part of a job, from the environment; what is missing or wrong is named, and never ends with status 0."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.errors import ConfigError
from psgc.launch.job.bpslaunch import launch
from psgc.launch.job.cores import visible_cores
from psgc.launch.job.part import servers_of
from psgc.launch.job.threads import shared_cores
from psgc.launch.topology.devices import local_size
from tests.ports import free_port

STEPS = (sys.executable, str(Path(__file__).parent.parent / "jobs" / "steps.py"), "--steps")
TWO_NODES = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
ALONE = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"}


@pytest.mark.parametrize(
    ("env", "command", "said"),
    [
        ({}, "true", "DMLC_ROLE is not set: expected worker, server, scheduler or joint"),
        ({"DMLC_NUM_WORKERS": "2"}, "true", "DMLC_NUM_WORKERS=2 is set, but psgc knows no such name; did you mean DMLC_NUM_WORKER?"),
        ({"DMLC_ROLE": "helper"}, "true", "DMLC_ROLE='helper'"),
        ({"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "2"}, "true", "missing DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT"),
        ({"DMLC_ROLE": "scheduler"}, "true", "missing DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT"),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}, "true", "DMLC_PS_ROOT_PORT, DMLC_WORKER_ID"),
        ({**TWO_NODES, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "2"}, "true", "nodes are numbered 0 to 1"),
        ({**TWO_NODES, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0"}, "no-such-command", "'no-such-command' is not found"),
        ({**TWO_NODES, "DMLC_ROLE": "server", "DMLC_NUM_WORKER": "two"}, "true", "DMLC_NUM_WORKER='two'"),
        ({**TWO_NODES, "DMLC_ROLE": "server", "DMLC_NUM_SERVER": "0"}, "true", "DMLC_NUM_SERVER=0: this job has no servers"),
        ({**ALONE, "BYTEPS_LOCAL_SIZE": "two"}, "true", "BYTEPS_LOCAL_SIZE='two'"),
        ({**ALONE, "BYTEPS_LOCAL_SIZE": "2", "BYTEPS_FORCE_DISTRIBUTED": "1"}, "true", "missing DMLC_NUM_SERVER, DMLC_PS_ROOT_URI"),
        ({**ALONE, "NVIDIA_VISIBLE_DEVICES": "0,1"}, "no-such-command", "'no-such-command' is not found"),
        ({**ALONE, "NVIDIA_VISIBLE_DEVICES": "0,1", "DMLC_WORKER_ID": "1"}, "true", "nodes are numbered 0 to 0"),
        (ALONE, "python 'train.py", 'command "python \'train.py" is no command line: No closing quotation'),
        ({**ALONE, "DMLC_NUM_WORKER": "", "NVIDIA_VISIBLE_DEVICES": "0,1"}, "true", "missing DMLC_NUM_WORKER"),
        ({**ALONE, "DMLC_NUM_WORKER": "", "DMLC_NUM_WORKERS": "1"}, "true", "did you mean DMLC_NUM_WORKER?"),
        ({**ALONE, "BYTEPS_VISIBLE_CPU_CORES": "x"}, "true", "BYTEPS_VISIBLE_CPU_CORES='x'"),
        ({**ALONE, "BYTEPS_ENABLE_GDB": "1", "PATH": "/no/folder"}, sys.executable, "BYTEPS_ENABLE_GDB=1, but there is no gdb here"),
        ({**ALONE, "PSGC_RESTARTS": "x"}, "true", "PSGC_RESTARTS='x': expected how many times"),
        ({**ALONE, "PSGC_TRACE": "/proc/no/folder"}, "true", "the folder of timelines /proc/no/folder cannot be made"),
        (
            {**TWO_NODES, "DMLC_ROLE": "server", "DMLC_INTERFACE": "nosuch0"},
            "true",
            "DMLC_INTERFACE=nosuch0: no interface 'nosuch0' with an IPv4",
        ),
        ({**TWO_NODES, "DMLC_ROLE": "joint"}, "true", "worker: missing DMLC_WORKER_ID"),
        (
            {**TWO_NODES, "DMLC_ROLE": "server,helper"},
            "true",
            "DMLC_ROLE='server,helper': expected worker, server, scheduler or joint, or several",
        ),
        (
            {**TWO_NODES, "DMLC_ROLE": "server", "PSGC_LOCAL_SERVERS": "2"},
            "true",
            "PSGC_LOCAL_SERVERS='2': expected how many of the job's servers",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(launched: Any, env: dict[str, str], command: str, said: str) -> None:
    status, out, err = launched.end(launched.psgc_launch(command, **env))
    assert status == 2
    assert said in err
    assert (len(err.strip().splitlines()), out) == (1, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo 'one two'  three", "one two three"), ('cd / && echo "$PWD $DMLC_ROLE"', "/ worker"), ("X=5 sh -c 'echo x$X'", "x5")],
)
def test_a_command_may_be_one_text_as_bpslaunch_takes_it(launched: Any, text: str, said: str) -> None:
    status, out, err = launched.end(launched.psgc_launch(text, **ALONE))
    assert (status, out.strip()) == (0, said), err


def test_a_job_runs_role_by_role_whatever_the_case_of_their_names(launched: Any) -> None:
    port = free_port()
    job = {**ALONE, "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "BYTEPS_LOCAL_SIZE": "2"}
    job["BYTEPS_FORCE_DISTRIBUTED"] = "1"  # else a single node would start its own
    members = [launched.psgc_launch(*STEPS, "3", **{**job, "DMLC_ROLE": role}) for role in ("Scheduler", "SERVER", "worker")]
    ends = [launched.end(popen) for popen in members]
    assert [status for status, _, _ in ends] == [0, 0, 0], ends
    for rank in range(2):
        assert f"[worker {rank}] step 3: nan 0 of 5000, first 3.0" in ends[2][1]


@pytest.mark.parametrize("more", [
    {"NVIDIA_VISIBLE_DEVICES": "0,1"},
    {**ALONE, "BYTEPS_LOCAL_SIZE": "2", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "1234"},
])  # fmt: skip
def test_on_one_machine_workers_get_a_scheduler_and_servers_as_in_bytepss_tutorial(launched: Any, more: dict[str, str]) -> None:
    status, out, err = launched.end(launched.psgc_launch(*STEPS, "3", **{"DMLC_NUM_WORKER": "1", "PSGC_SILENCE_S": "60", **more}))
    assert status == 0, err
    for rank in range(2):
        assert f"[worker {rank}] step 3: nan 0 of 5000, first 3.0" in out
    told = [line for line in err.splitlines() if line.startswith("psgc-launch: ")]
    assert len(told) == ("DMLC_PS_ROOT_URI" in more) and all("DMLC_PS_ROOT_URI=10.0.0.1 is not used" in line for line in told)


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_one_machine_needs_no_scheduler_and_no_server_of_its_own(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
    assert launch([], {**job, "DMLC_ROLE": role}) == 0
    assert f"DMLC_NUM_WORKER=1 needs no {role}: " in capsys.readouterr().err


def test_arguments_reach_the_command_as_they_were_given(launched: Any) -> None:
    code = "import sys, json; print(json.dumps(sys.argv[1:]))"
    given = ["a b", "$HOME", "", "--help", "quote'd"]
    status, out, err = launched.end(launched.psgc_launch(sys.executable, "-c", code, *given, **ALONE))
    assert (status, json.loads(out)) == (0, given), err


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import no_such_module", 1, r"ended with ModuleNotFoundError: No module named 'no_such_module'"),
        ("", 0, r"ended with status 0"),
    ],
)
def test_a_worker_that_ends_without_joining_ends_the_job_on_the_other_machines_at_once(
    launched: Any, tmp_path: Path, code: str, status: int, said: str
) -> None:
    port = str(free_port())
    job = {**TWO_NODES, "DMLC_PS_ROOT_PORT": port, "PSGC_REGISTER_TIMEOUT_S": "10000", "PSGC_SILENCE_S": "60", "PSGC_DEAD_S": "1000"}
    waiting = [
        launched.psgc_launch(**{**job, "PSGC_SILENCE_S": "0.5"}, DMLC_ROLE="scheduler"),  # it soon says who is missing
        launched.psgc_launch(**job, DMLC_ROLE="server"),
        launched.psgc_launch(*STEPS, "1", **job, DMLC_ROLE="worker", DMLC_WORKER_ID="0"),
    ]
    until = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'all the others wait')!r}): time.sleep(0.05)\n"
    absent = launched.psgc_launch(sys.executable, "-c", until + code, **job, DMLC_ROLE="worker", DMLC_WORKER_ID="1")
    while "waiting for node 1 (DMLC_WORKER_ID=1) to register" not in waiting[0].stderr.readline():
        assert waiting[0].poll() is None
    (tmp_path / "all the others wait").touch()
    ended, _, err = launched.end(absent)
    assert ended == status
    assert "never joined the job" in err.splitlines()[-1] or status
    for popen in waiting:
        ended, _, err = launched.end(popen)
        assert ended == 1
        assert re.search(rf"node 1 \(.*\): worker 0 {said}, before it joined the job$", err.splitlines()[-1]), err


def test_servers_of_one_machine_get_ports_and_numbers_one_after_the_other() -> None:
    env = {**TWO_NODES, "DMLC_NUM_SERVER": "4", "PSGC_LOCAL_SERVERS": "2"}
    named = {"DMLC_SERVER_ID": "2", "DMLC_PORT": "4000", "PSGC_ADVERTISE": "[::1]:5000"}
    assert servers_of({**env, **named}) == [named, {"DMLC_SERVER_ID": "3", "DMLC_PORT": "4001", "PSGC_ADVERTISE": "[::1]:5001"}]
    assert servers_of(env) == [{}, {}]


def test_a_machine_of_workers_and_servers_has_a_server_for_each_named_interface_if_the_job_has_as_many() -> None:
    env = {**TWO_NODES, "DMLC_ROLE": "joint", "DMLC_WORKER_ID": "0", "DMLC_NUM_SERVER": "4", "PSGC_INTERFACES": "127.0.0.2,127.0.0.3"}
    assert [each["DMLC_NODE_HOST"] for each in servers_of(env)] == ["127.0.0.2", "127.0.0.3"]
    for other in ({"DMLC_NUM_SERVER": "2"}, {"DMLC_ROLE": "server"}, {"PSGC_LOCAL_SERVERS": "1"}, {"PSGC_INTERFACES": "auto"}):
        assert len(servers_of({**env, **other})) == 1


def test_a_status_of_2_stays_2(launched: Any) -> None:
    status, _, err = launched.end(launched.psgc_launch(sys.executable, "-c", "import sys; sys.exit(2)", **ALONE, PSGC_RESTARTS="3"))
    assert (status, err.count("restart")) == (2, 0), err


def test_a_worker_that_fails_fails_its_launcher(launched: Any) -> None:
    code = "raise ValueError('no such data set')"
    status, _, err = launched.end(launched.psgc_launch(sys.executable, "-c", code, **ALONE))
    assert status == 1
    assert err.strip().splitlines()[-1].endswith("ended with ValueError: no such data set")


def test_a_server_ends_on_sigterm_and_leaves_nothing(launched: Any) -> None:
    popen = launched.psgc_launch(**TWO_NODES, DMLC_ROLE="server", PSGC_LOG_LEVEL="info")
    assert popen.stderr is not None
    assert "start Config" in popen.stderr.readline()
    popen.send_signal(signal.SIGTERM)
    assert launched.end(popen)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,2", "BYTEPS_LOCAL_SIZE": "1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,2", "BYTEPS_LOCAL_SIZE": " 2 "}, 2),
    ],
)
def test_there_is_a_worker_for_each_visible_device_unless_told_otherwise(env: dict[str, str], size: int) -> None:
    assert local_size(env) == size


def test_each_local_rank_stays_on_the_cores_it_is_given(launched: Any) -> None:
    core = str(min(os.sched_getaffinity(0)))
    code = "import os; print(os.sched_getaffinity(0))"
    status, out, err = launched.end(launched.psgc_launch(sys.executable, "-c", code, **ALONE, BYTEPS_VISIBLE_CPU_CORES=core))
    assert (status, out) == (0, f"{{{core}}}\n"), err


def test_cores_are_written_as_bytep_s_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert visible_cores({"BYTEPS_VISIBLE_CPU_CORES": "1,4-5:20-22"}, 2) == [[1, 4, 5], [20, 21, 22]]
    assert visible_cores({}, 3) == [[], [], []]
    with pytest.raises(ConfigError, match="each of the 3 local ranks"):
        visible_cores({"BYTEPS_VISIBLE_CPU_CORES": "1,4-5:20-22"}, 3)
    with pytest.raises(ConfigError, match="no core 40"):
        visible_cores({"BYTEPS_VISIBLE_CPU_CORES": "40"}, 1)


def test_workers_share_the_cores_and_their_idle_threads_sleep_unless_the_user_says_otherwise(launched: Any) -> None:
    code = "import os, json; print(json.dumps([os.environ.get('OMP_WAIT_POLICY'), os.environ.get('OMP_NUM_THREADS')]))"
    mine = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3"}
    for env, wanted in (({"OMP_WAIT_POLICY": "", "OMP_NUM_THREADS": ""}, ["passive", ""]), (mine, ["active", "3"])):
        status, out, err = launched.end(launched.psgc_launch(sys.executable, "-c", code, **ALONE, **env))
        assert (status, json.loads(out)) == (0, wanted), err
    cores = len(os.sched_getaffinity(0))
    assert shared_cores({}, cores) == {"OMP_WAIT_POLICY": "passive", **({"OMP_NUM_THREADS": "1"} if cores > 1 else {})}
    assert shared_cores({}, 4 * cores)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in shared_cores({"BYTEPS_VISIBLE_CPU_CORES": "0:1"}, 2)
