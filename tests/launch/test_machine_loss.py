"""A server's machine is lost in the middle of a real job: with replicas another process takes its place, and nothing of the training changes.

A machine is a launcher with all that it has started and keeps; kill -9 takes it away at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import Pace, children
from tests.ports import free_port

JOBS = Path(__file__).parent.parent / "jobs"
TRANSPORTS = {"shared memory": {}, "TCP": {"PSGC_TRANSPORT": "tcp"}, "encrypted": {"PSGC_TRANSPORT": "tcp", "PSGC_ENCRYPT": "1"}}


class Machines:
    """Launchers of one job: a scheduler's, the workers', and one for each server and its standby."""

    def __init__(self, launched: Any, job: Sequence[str], servers: int = 2, workers: int = 2, **env: str) -> None:
        self.launched, self.pace, self._each = launched, Pace(), workers
        common = {
            "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
            "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_TOKEN": "a token of this test", "PSGC_DEAD_S": "3", "PSGC_REPLICAS": "1", "PSGC_JOB": "77",
            **self.pace.env, **env,
        }  # fmt: skip
        self.scheduler = launched.psgc_launch(**{**common, "DMLC_ROLE": "scheduler"})
        self.servers = [launched.psgc_launch(**{**common, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(index)}) for index in range(servers)]
        worker = {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_SIZE": str(workers)}
        self.workers = launched.psgc_launch(sys.executable, *job, **worker)
        self.lost: set[int] = set()

    def lose(self, index: int) -> None:
        """The machine of a server, with its standby: nothing of it is left, neither processes nor memory."""
        self.lost.add(index)
        popen = self.servers[index]
        groups = children(popen)
        os.kill(popen.pid, signal.SIGKILL)
        for pid in groups:
            _kill_group(pid)

    def kill(self, index: int, child: int) -> None:
        """One process of a server's launcher: 0 its guardian, 1 the server, 2 the standby."""
        os.kill(children(self.servers[index])[child], signal.SIGKILL)

    def run(self, faults: dict[int, Any]) -> tuple[str, str, str]:
        """To the job's end. faults: what to do once workers have said so many steps. Returns the workers' output, their stderr and the scheduler's."""
        assert self.workers.stdout is not None
        out, steps = [], 0
        with self.pace:
            if not faults:
                self.pace.over()
            for line in self.workers.stdout:
                out.append(line)
                if " step " in line:
                    steps += 1
                    if (fault := faults.pop(steps, None)) is not None:
                        fault(self)
                    self.pace.heard(steps // self._each) if faults else self.pace.over()
        ended = {name: self.launched.end(popen) for name, popen in self._others().items()}
        self.status = ended["workers"][0]
        errors = "\n".join(f"{name}: {err}" for name, (_, _, err) in ended.items())
        assert not faults, ("".join(out[-3:]), errors)
        self.statuses = {name: status for name, (status, _, _) in ended.items()}
        self.errors = {name: err for name, (_, _, err) in ended.items()}
        return "".join(out), ended["workers"][2], ended["scheduler"][2]

    def _others(self) -> dict[str, subprocess.Popen[str]]:
        servers = {f"server {index}": popen for index, popen in enumerate(self.servers)}
        return {"workers": self.workers, "scheduler": self.scheduler, **servers}


def _kill_group(pid: int) -> None:
    """Its process group is gone, or is killed: a child may have been about to start when its launcher was killed."""
    for _ in range(500):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def found(out: str) -> list[str]:
    return sorted(re.findall(r"rank \d found \w+$", out, re.M))


CASES = [
    ("TCP", "none", "optimizer"), ("shared memory", "int8", "ddp"), ("encrypted", "onebit", "optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("transport", "codec", "front"), CASES)
def test_a_training_whose_servers_machine_is_lost_has_the_losses_of_one_that_goes_undisturbed(
    launched: Any, transport: str, codec: str, front: str
) -> None:
    job, results = [str(JOBS / "lost_server.py"), "40", codec, front, "0.01"], []
    for faults in ({}, {25: lambda machines: machines.lose(1)}):
        machines = Machines(launched, job, **TRANSPORTS[transport])
        out, err, scheduler = machines.run(dict(faults))
        assert machines.status == 0, err + scheduler
        results.append(found(out))
    assert len(results[0]) == 2
    assert results[0] == results[1]
    assert "takes its place (PSGC_REPLICAS=1)" in scheduler
    assert "goes on without a standby" in scheduler


@pytest.mark.parametrize("kind", ["rounds", "counts", pytest.param("outer", marks=pytest.mark.long)])
def test_tensors_that_servers_hold_are_those_of_a_job_whose_machines_stay(launched: Any, kind: str) -> None:
    job, results = [str(JOBS / "lost_weights.py"), kind, "40", "0.01"], []
    for faults in ({}, {25: lambda machines: machines.lose(0)}):
        machines = Machines(launched, job)
        out, err, scheduler = machines.run(dict(faults))
        assert machines.status == 0, err + scheduler
        results.append(found(out))
    assert len(results[0]) == 2
    assert results[0] == results[1]


def test_processes_that_die_on_machines_that_stay_are_followed_before_and_after_a_loss(launched: Any) -> None:
    """A standby's process, a server's, and one that has taken a server's place. The next process of each has time to be heard, on a busy machine, too."""
    job, results = [str(JOBS / "lost_server.py"), "60", "onebit", "optimizer", "0.01"], []
    faults = {
        15: lambda machines: machines.kill(0, 2), 30: lambda machines: machines.kill(1, 1), 50: lambda machines: machines.lose(1),
        80: lambda machines: machines.kill(0, -1),
    }  # fmt: skip
    for planned in ({}, faults):
        machines = Machines(launched, job, PSGC_DEAD_S="20")
        out, err, scheduler = machines.run(dict(planned))
        assert machines.status == 0, err + scheduler
        results.append(found(out))
    assert len(results[0]) == 2
    assert results[0] == results[1]


def test_a_standby_that_ends_again_and_again_ends_no_job(launched: Any) -> None:
    machines = Machines(launched, [str(JOBS / "lost_server.py"), "40", "none", "optimizer", "0.01"])

    given_up, told = threading.Event(), list[str]()

    def kill_until_it_is_given_up() -> None:
        while not given_up.is_set():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if len(living := children(machines.servers[0])) > 2:  # the guardian and the server; a list that is read may lack one
                    os.kill(living[-1], signal.SIGKILL)
            time.sleep(0.02)

    def end_it_again_and_again(_: Machines) -> None:
        killing = threading.Thread(target=kill_until_it_is_given_up)
        killing.start()
        for line in machines.servers[0].stderr:
            told.append(line)
            if "so it is not started again" in line:
                break
        given_up.set()
        killing.join()

    out, err, scheduler = machines.run({20: end_it_again_and_again})
    assert set(machines.statuses.values()) == {0}, err + scheduler
    assert len(found(out)) == 2
    assert "died and was not started again within" in scheduler and "server 1 goes on without a standby" in scheduler
    said = "".join(told) + machines.errors["server 0"]
    assert "so it is not started again" in said and "the others go on without it" in said, said


@pytest.mark.long
def test_a_machine_with_a_worker_is_followed_by_a_worker_elsewhere_and_its_server_by_the_standby(launched: Any) -> None:
    """Somebody starts psgc-launch with the lost machine's number on another one."""
    found = []
    for lost in (False, True):
        common = {
            "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
            "PSGC_TOKEN": "of this test", "PSGC_DEAD_S": "3", "PSGC_REPLICAS": "1", "PSGC_ON_WORKER_LOSS": "wait",
        }  # fmt: skip

        def node(number: int, role: str = "server,worker", common: dict[str, str] = common) -> Any:
            command = (sys.executable, str(JOBS / "lost_worker.py"), "40", "none", "0.02")
            return launched.psgc_launch(*command, DMLC_ROLE=role, DMLC_WORKER_ID=str(number), **common)

        with Pace(ahead=15) as pace:
            common |= pace.env
            popens = [launched.psgc_launch(DMLC_ROLE="scheduler", **common), node(0), node(1)]
            if lost:
                for line in popens[2].stdout:
                    if "rank 1 step 5 " in line:
                        break
                groups = children(popens[2])
                os.kill(popens[2].pid, signal.SIGKILL)
                for pid in groups:
                    _kill_group(pid)
                popens[2].communicate()
                popens[2] = node(1, "worker")
            pace.over()
            ends = [launched.end(popen) for popen in popens]
        assert [status for status, _, _ in ends] == [0, 0, 0], ends
        found.append(sorted({digest for _, out, _ in ends for digest in re.findall(r"found (\w+)", out)}))
    assert len(found[0]) == 1 and found[0] == found[1]
    assert "takes its place (PSGC_REPLICAS=1)" in ends[0][2] and "replaced True" in ends[2][1]


def test_where_all_is_lost_the_job_ends_with_one_line(launched: Any) -> None:
    machines = Machines(launched, [str(JOBS / "lost_server.py"), "100000", "none", "optimizer", "0.01"])

    def lose_both(machines: Machines) -> None:
        for index in (0, 1):
            machines.lose(index)

    _, err, _ = machines.run({10: lose_both})
    assert machines.status not in (0, None)
    last = err.strip().splitlines()[-1]
    assert re.search(r"server \d .*; it has no standby any more, so what it had kept is lost \(PSGC_RESTARTS starts a job again\)", last), (
        err
    )


def test_without_replicas_a_lost_machine_ends_the_job_and_the_line_says_what_would_help(launched: Any) -> None:
    machines = Machines(launched, [str(JOBS / "lost_server.py"), "100000", "none", "optimizer", "0.01"], PSGC_REPLICAS="0")
    _, err, _ = machines.run({10: lambda machines: machines.lose(1)})
    assert machines.status not in (0, None)
    assert "PSGC_REPLICAS=1 keeps it on another machine, too" in err.strip().splitlines()[-1], err


def test_a_process_that_would_follow_when_the_job_is_over_ends(launched: Any) -> None:
    """A server dies as the workers end; the scheduler, on another machine, is gone before its launcher has started the next process."""
    machines = Machines(launched, [str(JOBS / "lost_server.py"), "6", "none", "optimizer", "0.01"], PSGC_REPLICAS="0", PSGC_DEAD_S="20")
    late = machines.servers[1]
    with machines.pace as pace:
        for line in machines.workers.stdout:
            if "found" in line:  # and they end only when they may
                os.kill(late.pid, signal.SIGSTOP)
                machines.kill(1, 1)
                break
        pace.over()
        assert [launched.end(popen)[0] for popen in (machines.workers, machines.scheduler, machines.servers[0])] == [0, 0, 0]
    os.kill(late.pid, signal.SIGCONT)
    status, _, err = launched.end(late)
    assert status == 0, err


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_a_machine_lost_anywhere_changes_nothing(launched: Any, seed: int) -> None:
    transport, codec, front = CASES[seed % 3]
    job, results = [str(JOBS / "lost_server.py"), "60", codec, front, "0"], []
    for faults in ({}, {3 + 13 * seed: lambda machines: machines.lose(seed % 3)}):
        machines = Machines(launched, job, servers=3, **TRANSPORTS[transport])
        out, err, scheduler = machines.run(dict(faults))
        assert machines.status == 0, err + scheduler
        results.append(found(out))
    assert len(results[0]) == 2
    assert results[0] == results[1]
