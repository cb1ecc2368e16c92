"""A Slurm of this machine alone, with nodes of its own, for one test module: munged, slurmctld and a slurmd a node, all below one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.ports import free_port

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
START_S: Final = 60.0
WAIT_S: Final = 240.0
OVER: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
CONF: Final = """\
ClusterName=psgc
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{track}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
OverTimeLimit=0
InactiveLimit=0
JobRequeue=1
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=n[1-{count}] Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why no Slurm can be run here; "" if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"{', '.join(missing)} not installed (slurmctld, slurmd, slurm-client, munge)"
    return "" if os.getuid() == 0 else "slurmd starts jobs as root only"


class Slurm:
    """Nodes n1, n2, ...: names that are no hosts' names. Partitions: main, which jobs of urgent preempt. track: how Slurm finds a step's processes; by
    `pgid`, as by cgroups, its signals reach the launcher alone, by `linuxproc` every process."""

    def __init__(self, folder: Path, count: int = 4, track: str = "pgid") -> None:
        self.folder, self.count, self.track, self._daemons = folder, count, track, list[subprocess.Popen[bytes]]()
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=500 State=UNKNOWN"
            for number in range(1, count + 1)
        )
        (folder / "slurm.conf").write_text(
            CONF.format(folder=folder, controller=free_port(), user="root", nodes=nodes, count=count, track=track)
        )
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_", "SLURM_", "OMP_"))}
        self.env = {**clean, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def start(self) -> None:
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={self.folder}/key", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._until("munged listens", (self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, self.count + 1):
            self._start_node(number)
        self._until("all nodes are idle", lambda: self.do("sinfo", "-h", "-o", "%D %t", "-p", "main").split() == [str(self.count), "idle"])

    def lose(self, number: int) -> None:
        """A node is lost, with all that runs on it, and Slurm learns of it."""
        name, conf = f"n{number}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        daemon = self._nodes[number]
        daemon.kill()
        daemon.wait()
        self._daemons.remove(daemon)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words, settings = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
                    if conf in settings and (
                        b"SLURMD_NODENAME=" + name in settings or (b"slurmstepd" in words and self._is_of(entry, number))
                    ):
                        os.kill(int(entry.name), signal.SIGKILL)
        self.do("scontrol", "update", f"NodeName=n{number}", "State=DOWN", "Reason=lost")

    def _is_of(self, process: Path, number: int) -> bool:
        """Whether a step's daemon is of this node."""
        return any(f"spool-n{number}" in os.readlink(fd) for fd in (process / "fd").iterdir())

    def come_back(self, number: int) -> None:
        self._start_node(number)
        self.do("scontrol", "update", f"NodeName=n{number}", "State=RESUME")
        self._until("all nodes are idle", lambda: self.do("sinfo", "-h", "-o", "%D %t", "-p", "main").split() == [str(self.count), "idle"])

    def _start_node(self, number: int) -> None:
        self._daemon("slurmd", "-D", "-N", f"n{number}")
        self._nodes[number] = self._daemons[-1]

    def stop(self) -> None:
        """Nothing is left, of its jobs neither."""
        self.do("scancel", "--user", "root")
        deadline = time.monotonic() + START_S
        while self.do("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def do(self, *command: str, **env: str) -> str:
        """The output of one of Slurm's commands; its complaint, if it fails."""
        done = subprocess.run(command, env={**self.env, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else done.stderr

    def submit(self, log: Path, *arguments: str, **env: str) -> str:
        """`psgc slurm ARGUMENTS`, whose output goes to ``log``; the job's number."""
        command = [sys.executable, "-m", "psgc.launch", "slurm", "--sbatch", f"output={log}", *arguments]
        done = subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def state(self, job: str) -> str:
        return self.shown(job).get("JobState", "")

    def shown(self, job: str) -> Mapping[str, str]:
        """What `scontrol show job` has."""
        return dict(word.partition("=")[::2] for word in self.do("scontrol", "show", "job", job).split() if "=" in word)  # type: ignore[misc]

    def await_end(self, job: str) -> str:
        """The state in which the job has ended."""
        self._until(f"job {job} has ended", lambda: self.state(job) in OVER and not self.do("squeue", "-h", "-j", job).strip(), WAIT_S)
        return self.state(job)

    def await_text(self, log: Path, text: str, count: int = 1) -> None:
        self._until(f"{text!r} is in {log}", lambda: log.exists() and log.read_text().count(text) >= count, WAIT_S, log)

    def _daemon(self, *command: str) -> None:
        self._daemons.append(
            subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )

    def _until(self, what: str, done, limit_s: float = START_S, log: Path | None = None) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + limit_s
        while not done():
            said = (
                log.read_text()
                if log is not None and log.exists()
                else "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            )
            assert time.monotonic() < deadline, f"not {what} within {limit_s:g} s: {said}"
            time.sleep(0.2)
