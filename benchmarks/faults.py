"""The same faults under psgc and under torchft's DDP: what a training of a few workers loses when one of its processes dies or stands still.

    python benchmarks/faults.py                                   all systems and faults, some eight minutes
    python benchmarks/faults.py --systems "psgc wait" --faults "kill worker" --json

    systems  psgc wait, psgc shrink: PSGC_ON_WORKER_LOSS with psgc.torch.Elastic; psgc wait spare: with --spares 1; psgc stop: any death ends the job,
             which PSGC_RESTARTS starts again from a checkpoint of every EVERY steps; torchft: its DistributedDataParallel over gloo, where torchft is
             installed, with a lighthouse; this script starts a dead replica again at once, as a cluster's manager would
    faults   kill worker: SIGKILL of rank 1; stop worker: SIGSTOP, and SIGCONT after STOPPED_S; kill server; kill coordinator: the scheduler, torchft's
             lighthouse. torchft has no servers.

Each job trains a small network by Adam, every rank on data that follows from rank and step. Beside the same system's undisturbed job: "lost" is how much
later the last step came; "again" counts steps that a rank took a second time; "absent" counts contributions that are missing in the means that were
applied (one for each rank and step); "started" counts workers' processes that were started again; "same" says whether all ranks end with the
undisturbed job's parameters, bit for bit. A wrong end (a status, ranks that disagree) ends the script.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from psgc.diagnostics.machine import machine
from psgc.launch.chaos.members import descendants, members_of
from psgc.launch.tables import print_table

SYSTEMS: Final = ("psgc wait", "psgc wait spare", "psgc shrink", "psgc stop", "torchft")
FAULTS: Final = ("kill worker", "stop worker", "kill server", "kill coordinator")
UNDISTURBED: Final = ""
PACE_S: Final = 0.03  # a step's computation on a device
EVERY: Final = 20  # steps between two checkpoints
STOPPED_S: Final = 3.0
LIMIT_S: Final = 120.0
LIGHTHOUSE_PORT: Final = 9310
END_S: Final = 100.0  # for the processes of a job that is over
RANKS: Final = 2
HOLD: Final = "FAULTS_HOLD"  # in workers' environment: a step, and a file without which none goes beyond it: by then the fault has come, on a busy machine too


class Failed(Exception):
    """A job that did not end as it should."""


@dataclass(frozen=True, slots=True)
class Row:
    """See above. lost_s: -1 where there is nothing to compare with."""

    system: str
    fault: str
    seconds: float
    lost_s: float
    again: int
    absent: int
    started: int
    same: bool


# what a worker runs


def network(seed: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def backward(run: Any, rank: int, step: int) -> None:
    """This rank's gradients of this step."""
    import torch

    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    time.sleep(PACE_S)
    (run(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()


def tell(rank: int, step: int, parts: int) -> None:
    """A step has been taken, with so many ranks' contributions."""
    say(f"STEP {rank} {step} {parts} {os.getpid()}")
    last, _, disturbed = os.environ[HOLD].partition(" ")
    while step == int(last) and not os.path.exists(disturbed):
        time.sleep(0.01)


def tell_end(rank: int, model: Any) -> None:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    say(f"FOUND {rank} {found.hexdigest()}")


def say(line: str) -> None:
    """In one write: others write to the same pipe."""
    os.write(1, f"{line}\n".encode())


def work_elastic(steps: int) -> None:
    import torch

    import psgc.torch as psgc

    psgc.init()
    model, adam = network(0)
    optimizer = psgc.DistributedOptimizer(adam, model.named_parameters())
    for step in psgc.Elastic(model=model, optimizer=optimizer).steps(steps):
        optimizer.zero_grad()
        backward(model, psgc.rank(), step)
        parts = psgc.push_pull(torch.ones(1), average=False, name="parts")
        optimizer.step()
        tell(psgc.rank(), step, int(parts.item()))
    tell_end(psgc.rank(), model)


def work_from_checkpoints(steps: int, checkpoint: Path) -> None:
    import torch

    import psgc.torch as psgc

    psgc.init()
    model, adam = network(0)
    optimizer = psgc.DistributedOptimizer(adam, model.named_parameters())
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, steps):
        optimizer.zero_grad()
        backward(model, psgc.rank(), step)
        optimizer.step()
        tell(psgc.rank(), step, psgc.size())
        if psgc.rank() == 0 and (step + 1) % EVERY == 0:
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
    tell_end(psgc.rank(), model)


def work_torchft(steps: int) -> None:
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["REPLICA"])
    model, adam = network(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        lighthouse_addr=f"http://127.0.0.1:{LIGHTHOUSE_PORT}", replica_id=f"replica{rank}",
    )  # fmt: skip
    run, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()
        backward(run, rank, step)
        optimizer.step()
        if manager.current_step() > step:
            tell(rank, manager.current_step() - 1, manager.num_participants())
    tell_end(rank, model)
    manager.shutdown(wait=False)


def light() -> None:
    """torchft's lighthouse, with the settings of its README."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"127.0.0.1:{LIGHTHOUSE_PORT}", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10000)
    print(f"lighthouse at {server.address()}", flush=True)
    time.sleep(1e6)


# what this process does


class Job:
    """One training under way. Its processes write to one pipe, whose lines are ``lines``."""

    def __init__(self, system: str, steps: int, folder: Path) -> None:
        self.system = system
        self._work = ("--work", system, "--steps", str(steps))
        self._disturbed = folder / "disturbed"
        self._hold = f"{steps // 2} {self._disturbed}"
        self._reads, writes = os.pipe()
        self.lines = os.fdopen(self._reads)
        self._writes = writes
        self._errors = (folder / "errors").open("w+")
        self._replicas: dict[int, subprocess.Popen[str]] = {}
        self._ending = False
        if system == "torchft":
            self._main = self._start("--work", "lighthouse")
            for rank in range(RANKS):
                self._replicas[rank] = self._start(*self._work, REPLICA=str(rank))
            threading.Thread(target=self._supervise, daemon=True).start()
        else:
            spares, policy = [], {}
            if system == "psgc stop":
                policy = {"PSGC_RESTARTS": "3", "PSGC_ON_SERVER_LOSS": "stop", "PSGC_ON_SCHEDULER_LOSS": "stop"}
            else:
                _, policy["PSGC_ON_WORKER_LOSS"], *spare = system.split()
                spares = ["--spares", "1"] if spare else []
            command = [sys.executable, __file__, *self._work, "--checkpoint", str(folder / "checkpoint.pt")]
            self._main = self._start(
                "-m", "psgc", "run", "--no-prefix", "--workers", str(RANKS), *spares, "--", *command, script=False, **policy
            )

    def _start(self, *arguments: str, script: bool = True, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, *([__file__] if script else []), *arguments]
        return subprocess.Popen(
            command,
            stdout=self._writes,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", HOLD: self._hold, **env},
            text=True,
            start_new_session=True,
        )

    def _supervise(self) -> None:
        """Start again what has died before its end."""
        while not self._ending:
            for rank, replica in list(self._replicas.items()):
                if replica.poll() not in (None, 0):
                    self._replicas[rank] = self._start(*self._work, REPLICA=str(rank))
            if self._main.poll() is not None and not self._ending:
                self._main = self._start("--work", "lighthouse")
            time.sleep(0.02)

    def let_on(self) -> None:
        """Its fault has come, or it has none."""
        self._disturbed.touch()

    def disturb(self, fault: str, pid: int) -> None:
        """pid: of rank 1."""
        if fault == "kill worker":
            os.kill(pid, signal.SIGKILL)
        elif fault == "stop worker":
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()
        elif self.system == "torchft":
            os.kill(self._main.pid, signal.SIGKILL)
        else:
            role = "server" if fault == "kill server" else "scheduler"
            (victim, *_) = [member for member in members_of(descendants(self._main.pid)) if member.role == role]
            os.kill(victim.process.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """After LIMIT_S, or when it has ended: whoever reads its lines finds their end."""
        os.write(self._writes, b"OVER\n")

    def end(self, well: bool) -> None:
        """well: psgc's processes end by themselves."""
        self._ending = True
        for process in (self._main, *self._replicas.values()):
            if process.poll() is None and (self.system == "torchft" or not well):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Failed(f"{self.system}: its processes did not end") from None
        os.close(self._writes)
        self.lines.close()
        self._errors.close()

    @property
    def ended(self) -> bool:
        return self._main.poll() is not None

    @property
    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:]


@contextmanager
def running(system: str, steps: int) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(system, steps, Path(folder))
        over = threading.Timer(LIMIT_S, job.give_up)
        over.start()
        well = False
        try:
            yield job
            well = True
        finally:
            over.cancel()
            job.end(well)


def measure(system: str, fault: str, steps: int) -> tuple[Row, set[str]]:
    """A job with this fault, and what its ranks ended with. Its seconds are from rank 0's first step to the last."""
    taken, parts, pids, found = Counter[tuple[int, int]](), dict[int, int](), dict[int, set[int]](), dict[int, str]()
    begun = ended = 0.0
    with running(system, steps) as job:
        if not fault:
            job.let_on()
        for line in job.lines:
            words = line.split()
            if words[:1] == ["STEP"]:
                rank, step, count, pid = map(int, words[1:5])
                now = time.monotonic()
                begun, ended = begun or now, max(ended, now)
                taken[rank, step] += 1
                parts[step] = min(count, parts.get(step, RANKS))
                pids.setdefault(rank, set()).add(pid)
                if rank == 1 and step == steps // 4 and taken[rank, step] == 1 and fault:
                    job.disturb(fault, pid)
                    job.let_on()
            elif words[:1] == ["FOUND"]:
                found[int(words[1])] = words[2]
            if len(found) == RANKS or words == ["OVER"]:
                break
            if system != "torchft" and job.ended:
                job.give_up()  # behind the lines that are still to be read
        if len(found) < (1 if system == "psgc shrink" else RANKS):  # there, a rank may come back too late
            raise Failed(f"{system}, {fault or 'undisturbed'}: ended after {len(taken)} steps of ranks\n{job.said}")
        started = sum(map(len, pids.values())) - RANKS
    if len(set(found.values())) != 1:
        raise Failed(f"{system}, {fault or 'undisturbed'}: ranks ended with different parameters")
    again, absent = sum(count - 1 for count in taken.values()), sum(RANKS - count for count in parts.values())
    return Row(system, fault, ended - begun, -1.0, again, absent, started, True), set(found.values())


def rows_of(systems: Sequence[str], faults: Sequence[str], steps: int, progress: Any) -> list[Row]:
    rows = []
    for system in systems:
        progress(f"{system}, undisturbed")
        plain, expected = measure(system, UNDISTURBED, steps)
        for fault in faults:
            if system == "torchft" and fault == "kill server":
                continue
            progress(f"{system}, {fault}")
            row, found = measure(system, fault, steps)
            rows.append(Row(**{**asdict(row), "lost_s": row.seconds - plain.seconds, "same": found == expected}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"with commas (default: {','.join(SYSTEMS)})")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"with commas (default: {','.join(FAULTS)})")
    parser.add_argument("--steps", type=int, default=400, help="of each job; the fault comes after a quarter of them (default: 400)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        if options.work == "lighthouse":
            light()
        elif options.work == "psgc stop":
            work_from_checkpoints(options.steps, options.checkpoint)
        else:
            (work_torchft if options.work == "torchft" else work_elastic)(options.steps)
        return
    systems, faults = options.systems.split(","), options.faults.split(",")
    if unknown := [*(one for one in systems if one not in SYSTEMS), *(one for one in faults if one not in FAULTS)]:
        parser.error(f"{', '.join(unknown)}: expected systems out of {', '.join(SYSTEMS)} and faults out of {', '.join(FAULTS)}")
    if "torchft" in systems and importlib.util.find_spec("torchft") is None:
        print("faults: torchft is not installed, and left out", file=sys.stderr)
        systems.remove("torchft")
    try:
        rows = rows_of(systems, faults, options.steps, lambda text: print(f"faults: {text}", file=sys.stderr, flush=True))
    except Failed as error:
        sys.exit(f"faults: {error}")
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))
        return
    body = [
        [row.system, row.fault, f"{row.lost_s:.1f}", str(row.again), str(row.absent), str(row.started), "yes" if row.same else "no"]
        for row in rows
    ]
    print_table(
        ["system", "fault", "lost, s", "again", "absent", "started", "same"],
        body,
        title=f"{options.steps} steps of {RANKS} workers; {machine()}",
    )


if __name__ == "__main__":
    main()
