"""torchrun alone starts a whole job: its workers start the scheduler and the servers, and nothing of them is left, however the job ends.

Hosts are torchrun agents of this machine, which know nothing of each other but MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.killing import until_gone
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
JOB = str(ROOT / "tests" / "jobs" / "sums_in_jobs.py")
DIGITS = str(ROOT / "examples" / "train_digits.py")
OWN = {"OMP_NUM_THREADS": "1", "PSGC_TOKEN": "secret"}
FOREVER = ("1", "1000000")


class Hosts:
    """One torchrun agent for each host, each with ``workers`` workers; their output goes to files."""

    def __init__(
        self, launched: Any, folder: Path, hosts: int, workers: int, *command: str, rendezvous: str = "static", **env: str
    ) -> None:
        self.launched, self.logs = launched, [folder / f"host{host}.log" for host in range(hosts)]
        port = str(free_port())
        found = (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
            if rendezvous == "c10d"
            else ["--master-addr", "localhost", "--master-port", port]
        )
        self.agents = []
        for host, log in enumerate(self.logs):
            with log.open("w") as out:
                torchrun = ["-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(workers), *found]
                if rendezvous == "static":
                    torchrun += ["--node-rank", str(host)]
                self.agents.append(launched.preloaded(*torchrun, *command, output=out, **OWN, **env))

    @property
    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def await_lines(self, pattern: str, count: int) -> None:
        while len(re.findall(pattern, self.text, re.MULTILINE)) < count:
            assert all(agent.poll() is None for agent in self.agents), self.text
            time.sleep(0.05)

    def end(self) -> list[int]:
        """Wait for the agents and for all processes of the job; the agents' statuses."""
        statuses = [agent.wait(500) for agent in self.agents]
        deadline = time.monotonic() + 100
        while self.launched.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.launched.left(), "processes are left"
        return statuses

    def processes(self, what: str) -> list[int]:
        """Pids of the job's processes whose command line contains ``what``."""
        found = []
        for pid in self.launched.left():
            try:
                if what in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(pid)
            except OSError:
                continue
        return sorted(found)


@pytest.fixture
def hosts(launched: Any, tmp_path: Path) -> Callable[..., Hosts]:
    def start(*arguments: Any, **options: str) -> Hosts:
        return Hosts(launched, tmp_path, *arguments, **options)

    return start


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "psgc" in name}


def record(path: Path) -> Any:
    return {name: value for name, value in json.loads(path.read_text()).items() if name in ("losses", "validation_loss", "accuracy")}


@pytest.mark.timeout(600)
def test_two_hosts_train_the_digits_to_the_losses_of_psgc_run_bit_for_bit(
    hosts: Callable[..., Hosts], launched: Any, tmp_path: Path
) -> None:
    job = (DIGITS, "--steps", "30", "--codec", "int8", "--out")
    status, _, err = launched.end(
        launched.psgc("run", "--nodes", "2", "--", sys.executable, *job, str(tmp_path / "run.json"), OMP_NUM_THREADS="1")
    )
    assert status == 0, err
    group = hosts(2, 1, *job, str(tmp_path / "torchrun.json"))
    assert group.end() == [0, 0], group.text
    assert "started a scheduler" in group.text and "and 2 servers on 2 nodes for this job (PSGC_SERVERS=embedded)" in group.text
    assert record(tmp_path / "torchrun.json") == record(tmp_path / "run.json") != {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("agents", "workers", "rendezvous"), [(1, 2, "static"), pytest.param(2, 1, "c10d", marks=pytest.mark.long)])
def test_an_attempt_that_failed_is_followed_by_one_that_runs(
    hosts: Callable[..., Hosts], agents: int, workers: int, rendezvous: str
) -> None:
    group = hosts(agents, workers, "--max-restarts", "2", JOB, "1", "3", "1", rendezvous=rendezvous)
    assert group.end() == [0] * agents, group.text
    assert "rank 1 ended with ValueError: bad batch" in group.text
    assert len(re.findall(r"^done in attempt [12]$", group.text, re.MULTILINE)) == 2, group.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "servers"), [("0", 0), pytest.param("2", 2, marks=pytest.mark.long)])
def test_a_process_joins_job_after_job_each_with_as_many_servers_as_asked_for(
    hosts: Callable[..., Hosts], number: str, servers: int
) -> None:
    group = hosts(1, 2, JOB, "2", "3", DMLC_NUM_SERVER=number)
    assert group.end() == [0], group.text
    found = f" and {servers} servers" if servers else ""
    assert len(re.findall(rf"started a scheduler( \(port \d+\))?{found} on this node for this job", group.text)) == 2, group.text
    assert len(re.findall("^joined job 1 as rank . of 2$", group.text, re.MULTILINE)) == 2, group.text


def kill_one(hosts: Callable[..., Hosts], victim: str, rng: random.Random) -> Hosts:
    """A job of two hosts with two workers each, of which one process is killed."""
    before = shared_memory()
    group = hosts(2, 2, JOB, *FOREVER, PSGC_ON_SERVER_LOSS="stop", PSGC_ON_SCHEDULER_LOSS="stop")
    group.await_lines("^joined job 0 as rank . of 4$", 4)
    found = {
        "rank 0": [min(group.processes(f"-u {JOB}"))], "worker": group.processes(f"-u {JOB}"), "server": group.processes("role server"),
        "scheduler": group.processes("role scheduler"), "services": group.processes("launch.job.embedded"), "guardian": group.processes("guardian.py"),
        "agent": [rng.choice(group.agents).pid],
    }  # fmt: skip
    os.kill(rng.choice(found[victim]), signal.SIGKILL)
    killed = time.monotonic()
    statuses = group.end()
    print(f"{victim} killed: all had ended {time.monotonic() - killed:.1f} s later")
    assert 0 not in statuses, group.text
    assert shared_memory() <= before
    return group


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("worker", r"psgc: worker \d .* died: its process is gone"),
        pytest.param("server", r"psgc: server \d .*(died: its process is gone|was killed by SIGKILL)", marks=pytest.mark.long),
        ("scheduler", r"psgc: scheduler was killed by SIGKILL"),
        pytest.param("services", r"psgc: .*(its process is gone|its process has ended)", marks=pytest.mark.long),
        ("agent", r"psgc: torchrun's agent \(pid \d+\) has ended, so its worker"),
    ],
)
def test_any_process_killed_ends_the_job_everywhere_and_leaves_nothing(hosts: Callable[..., Hosts], victim: str, said: str) -> None:
    group = kill_one(hosts, victim, random.Random(victim))
    assert re.search(said, group.text), group.text
    lines = re.findall(r"^psgc: (?:worker|server|scheduler) .*$", group.text, re.MULTILINE)
    assert len(lines) <= 2 * len(set(lines)), f"once a node: {group.text}"


@pytest.mark.timeout(600)
def test_a_server_killed_before_all_workers_are_there_ends_the_job_too(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import os, time, psgc.torch as psgc\nif os.environ['RANK'] == '1': time.sleep(1000)\npsgc.init()\n")
    group = hosts(1, 2, str(tmp_path / "late.py"), PSGC_ON_SERVER_LOSS="stop")
    group.await_lines("started a scheduler", 1)
    while not (servers := group.processes("role server")):  # its command line is seen only once it has begun
        time.sleep(0.05)
    os.kill(servers[0], signal.SIGKILL)
    assert group.end() == [1], group.text
    assert re.search(
        "psgc: (.* is gone: it was started, and nobody listens there any more|.*server 0 .*(died|ended|was killed))", group.text
    ), group.text


@pytest.mark.timeout(600)
def test_a_server_that_is_started_again_when_the_job_is_over_ends_with_it(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    go = tmp_path / "go"
    (tmp_path / "late.py").write_text(
        "import os, sys, time, torch, psgc.torch as psgc\npsgc.init()\npsgc.push_pull(torch.ones(1000), name='x')\npsgc.barrier()\n"
        "print('everyone has it\\n' * (psgc.rank() == 0), end='', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    group = hosts(1, 2, str(tmp_path / "late.py"), str(go), DMLC_NUM_SERVER="1", PSGC_DEAD_S="1000")
    group.await_lines("^everyone has it$", 1)
    (services,), (scheduler,), (server,) = map(group.processes, ("launch.job.embedded", "role scheduler", "role server"))
    os.kill(services, signal.SIGSTOP)  # it starts the server again once the scheduler has ended
    os.kill(server, signal.SIGKILL)
    go.touch()
    until_gone(scheduler)
    os.kill(services, signal.SIGCONT)
    assert group.end() == [0], group.text
    assert "server 0 was killed by SIGKILL" in group.text


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_leave_nothing(hosts: Callable[..., Hosts], seed: int) -> None:
    rng = random.Random(seed)
    kill_one(hosts, rng.choice(["rank 0", "worker", "server", "scheduler", "services", "agent"]), rng)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PSGC_LOCAL_SERVERS": "2"}, "PSGC_LOCAL_SERVERS is for psgc-launch; under PSGC_SERVERS=embedded set DMLC_NUM_SERVER"),
        (
            {"PSGC_SERVERS": "external"},
            "MASTER_ADDR=.* is set, as torchrun does, but DMLC_PS_ROOT_PORT is missing: set PSGC_SERVERS=embedded",
        ),
    ],
)
def test_wrong_settings_are_a_line_and_no_traceback(hosts: Callable[..., Hosts], settings: dict[str, str], said: str) -> None:
    """Of one of the node's workers, whichever is first; the other may have said it, too, before its agent ends it."""
    group = hosts(1, 2, JOB, "1", "1", **settings)
    assert group.end() == [1]
    lines = re.findall(f"^psgc: (?:rank 0 could not start the scheduler: )?{said}", group.text, re.MULTILINE)
    assert len(lines) in (1, 2), group.text
    assert JOB not in "".join(line for line in group.text.splitlines() if line.startswith("  File")), group.text
