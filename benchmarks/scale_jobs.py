"""Real jobs of processes on this machine, and what each of them costs in processor time: the runs by which ``scale.py`` measures its model's costs, and against
which it holds the model.

A job's worker is ``python scale_jobs.py worker FOLDER ...``, a learner ``python scale_jobs.py learner FOLDER ADDRESS ...``. All times are of CLOCK_MONOTONIC,
which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
ROLES: Final = ("launcher", "scheduler", "server", "worker", "ended")
WARM_STEPS: Final = 10
EVENTS: Final = 3  # deaths of the server, and switches of the plan, of a job
BETWEEN_STEPS: Final = 5
LIMIT_S: Final = 280.0
PART_KIB: Final = 256
LEARNER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds so far: of a job's processes by role, and of the whole machine. at: the time."""

    at: float
    machine: float
    roles: dict[str, float]

    def since(self, earlier: Used) -> Used:
        """What came after that; at: how long it took."""
        return Used(
            self.at - earlier.at, self.machine - earlier.machine,
            {role: seconds - earlier.roles.get(role, 0.0) for role, seconds in self.roles.items()},
        )  # fmt: skip

    def others(self) -> float:
        """Of a difference: how many cores others took."""
        return max(0.0, (self.machine - sum(self.roles.values())) / self.at) if self.at else 0.0


def used(launcher: int) -> Used:
    """Of the job of this launcher, and of its processes that live."""
    roles = dict.fromkeys(ROLES, 0.0)
    pids = [launcher]
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            ran_ns = 0
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids.extend(map(int, (task / "children").read_text().split()))
                ran_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
        role = role_of(words)
        # What a member costs the scheduler and the servers is less than a tick; their threads live as long as they do, so that all are counted.
        roles[role] += ran_ns / 1e9 if role in ("scheduler", "server") else (int(fields[11]) + int(fields[12])) * TICK_S
        roles["ended"] += (int(fields[13]) + int(fields[14])) * TICK_S if pid == launcher else 0.0  # servers that were killed
    busy = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    idle = int(busy[3]) + int(busy[4])
    return Used(time.monotonic(), (sum(map(int, busy[:8])) - idle) * TICK_S, roles)


def role_of(words: list[bytes]) -> str:
    for role in ("scheduler", "server", "worker"):
        if role.encode() in words:
            return role
    return "launcher"


def servers_of(launcher: int) -> list[int]:
    """Processes of servers that live."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [pid for pid in map(int, children) if role_of(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) == "server"]


# a worker


def work(folder: Path, steps: int, numel: int) -> None:
    """Train; then kill the server, and switch the plan, now and then. Writes what it has seen to the folder."""
    import torch

    import psgc.torch as psgc

    torch.set_num_threads(1)
    psgc.init()
    rank, launcher = psgc.rank(), os.getppid()
    snaps: dict[str, Any] = {}

    def snap(name: str) -> None:
        """All ranks have come so far; what has been used."""
        psgc.barrier()
        if rank == 0:
            found = used(launcher)
            snaps[name] = [found.at, found.machine, found.roles]
        psgc.barrier()

    snap("joined")
    side = round(numel**0.5 / 2)
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(4)))
    optimizer: Any = psgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.randn(4, side)

    def step() -> float:
        began = time.monotonic()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.monotonic() - began

    step()
    snap("first")
    for _ in range(WARM_STEPS):
        step()
    snap("before")
    own = time.thread_time()
    took = [step() for _ in range(steps)]
    own = (time.thread_time() - own) / steps
    snap("after")
    recoveries, restarts, replans = [], list[float](), []
    for _ in range(EVENTS):
        psgc.barrier()
        if rank == 0:
            os.kill(servers_of(launcher)[0], signal.SIGKILL)
        recoveries.append(step())
        if rank == 0:
            restarts.append(used(launcher).roles["server"])
        for _ in range(BETWEEN_STEPS):
            step()
    snap("recovered")
    for number in range(2 * EVENTS):
        optimizer.switch_plan("none" if number % 2 else "bf16")
        replans.append(step())
        for _ in range(BETWEEN_STEPS):
            step()
    snap("replanned")
    payload = {"steps": took, "own_s": own, "recoveries": recoveries, "restarts": restarts, "replans": replans, "snaps": snaps}
    (folder / f"rank{rank}.json").write_text(json.dumps(payload))


@dataclass(frozen=True, slots=True)
class Job:
    """A real job of so many workers and one server. Seconds: start (until all had joined), first (from there until all had the first step), step (median),
    recovery (the step that ends after the server's death) and replan (the step after a switch to no codec): medians of the slowest rank's. phases: what was
    used; own_s: of a worker's training thread for a step; restarted: of a server that took a dead one's place, until the end of its first step."""

    workers: int
    start: float
    first: float
    step: float
    recovery: float
    replan: float
    phases: dict[str, Used]
    own_s: float
    restarted: float

    @property
    def others(self) -> dict[str, float]:
        return {name: phase.others() for name, phase in self.phases.items()}


def run_job(workers: int, steps: int, numel: int) -> Job:
    """Raises RuntimeError with the job's last line."""
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, __file__, "worker", folder, str(steps), str(numel)]
        command = [sys.executable, "-m", "psgc.launch", "run", "--workers", str(workers), "--servers", "1", "--", *own]
        before = used(os.getpid())
        process = subprocess.Popen(
            command, env=clean(PSGC_PART_BYTES=str(PART_KIB << 10), PSGC_TRANSPORT="tcp"), stderr=subprocess.PIPE, text=True
        )
        ended(process)
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(workers)]
    snaps = {name: Used(*snap) for name, snap in ranks[0]["snaps"].items()}
    began = Used(before.at, before.machine, dict.fromkeys(ROLES, 0.0))
    phases = {
        "start": snaps["joined"].since(began), "first": snaps["first"].since(snaps["joined"]), "steps": snaps["after"].since(snaps["before"]),
        "recoveries": snaps["recovered"].since(snaps["after"]), "replans": snaps["replanned"].since(snaps["recovered"]),
    }  # fmt: skip

    def slowest(name: str) -> list[float]:
        return [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]

    return Job(
        workers, phases["start"].at, phases["first"].at, statistics.median(slowest("steps")), statistics.median(slowest("recoveries")),
        statistics.median(slowest("replans")[1::2]), phases, statistics.mean(rank["own_s"] for rank in ranks),
        statistics.median(ranks[0]["restarts"]),
    )  # fmt: skip


def clean(**more: str) -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def ended(process: subprocess.Popen[str]) -> None:
    """Wait for its end, and for that of nothing else. Raises RuntimeError."""
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        raise RuntimeError((err.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1])


# learners around a syncer


def learn(folder: Path, address: str, number: int, exchanges: int) -> None:
    """Push and take values, one exchange after the other. Begins when the file "go" is there."""
    import numpy as np

    from psgc import __version__
    from psgc.config import Config
    from psgc.wire.learners import Enrol
    from psgc.worker.learner.client import LearnerClient

    numel = LEARNER_BYTES // 4
    enrol = Enrol(f"learner{number}", __version__, number + 1, "none", "none", ("w",), (numel,))
    zeros = np.zeros(numel, np.float32).view(np.uint8)
    client = LearnerClient(Config.from_env(), f"tcp://{address}", enrol, [zeros], lambda *_: zeros)
    values = client.answer(0, wait=True)
    payload = np.full(numel, 1e-6, np.float32).view(np.uint8)
    (folder / f"ready{number}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    began, cpu, took = time.monotonic(), time.process_time(), []
    busy = used(os.getpid()).machine
    for _ in range(exchanges):
        at = time.monotonic()
        assert values is not None
        client.push(0, values.version, payload, zeros)
        values = client.answer(0, wait=True)
        took.append(time.monotonic() - at)
    found = {
        "began": began,
        "ended": time.monotonic(),
        "cpu": (time.process_time() - cpu) / exchanges,
        "took": took,
        "busy": [busy, used(os.getpid()).machine],
    }
    (folder / f"learner{number}.json").write_text(json.dumps(found))
    client.close()


@dataclass(frozen=True, slots=True)
class Learners:
    """So many real learners that exchange one time after the other. Seconds: exchange (mean), and the processor's for one, of a learner and of the syncer."""

    learners: int
    exchange: float
    learner: float
    syncer: float
    others: float


def run_learners(learners: int, exchanges: int) -> Learners:
    """Raises RuntimeError with a process's last line."""
    with tempfile.TemporaryDirectory() as name, syncing() as (syncer, address):
        folder = Path(name)
        command = [sys.executable, __file__, "learner", name, address]
        env = clean(PSGC_TOKEN="token")
        processes = [
            subprocess.Popen([*command, str(number), str(exchanges)], env=env, stderr=subprocess.PIPE, text=True)
            for number in range(learners)
        ]
        try:
            deadline = time.monotonic() + LIMIT_S
            while any(not (folder / f"ready{number}").exists() for number in range(learners)):
                if time.monotonic() > deadline or any(process.poll() for process in processes):
                    raise RuntimeError("a learner has not begun")
                time.sleep(0.02)
            before = used(syncer)
            (folder / "go").touch()
            for process in processes:
                ended(process)
            after = used(syncer).since(before)
        finally:
            for process in processes:
                process.kill()
        found = [json.loads((folder / f"learner{number}.json").read_text()) for number in range(learners)]
    own = statistics.mean(each["cpu"] for each in found)
    syncer_s = sum(after.roles.values())
    wall = max(each["ended"] for each in found) - min(each["began"] for each in found)
    busy = max(each["busy"][1] for each in found) - min(each["busy"][0] for each in found)
    return Learners(
        learners, statistics.mean(time_ for each in found for time_ in each["took"]), own, syncer_s / (learners * exchanges),
        max(0.0, (busy - syncer_s - own * learners * exchanges) / wall),
    )  # fmt: skip


@contextmanager
def syncing() -> Iterator[tuple[int, str]]:
    """A syncer's process, and its address."""
    command = [sys.executable, "-m", "psgc.launch", "syncer", "--listen", "127.0.0.1:0", "--rule", "add", "--json"]
    process = subprocess.Popen(command, env=clean(PSGC_TOKEN="token"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        learn(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
