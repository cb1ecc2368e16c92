"""One machine's members as children of one launcher: a server's memory outlives it in this process, and whichever fails, all are ended."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from psgc.config import Config
from psgc.errors import PsgcError, UsageError
from psgc.launch.job import ranks
from psgc.launch.job.batch_signals import passing_on
from psgc.launch.job.checks import check_job
from psgc.launch.job.cores import cores_of_ranks, described, near_memory
from psgc.launch.job.interpreter import check_command, check_spares, note_on, spares_of, words_of
from psgc.launch.job.part import of_machine, one_machine, servers_of, standbys_of
from psgc.launch.job.planned import PLAN, inside_of, plan_here
from psgc.launch.job.restarts import restarts_of
from psgc.launch.job.scheduler_process import listener_of, start_scheduler
from psgc.launch.job.threads import shared_cores
from psgc.launch.job.warming import prepare
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
from psgc.launch.topology import detect, told
from psgc.launch.topology.devices import local_size, seen_devices
from psgc.launch.topology.interfaces import place_of
from psgc.transport.control.absence import tell_absence, tell_end
from psgc.transport.security import encryption

Verdict = Callable[[Weight, str, int], None]  # why the job failed, how far that is the first cause, and the exit status
GDB: Final = ("gdb", "-ex", "run", "-ex", "bt", "-batch", "--args")
SLURM_GRACE_S: Final = 3600.0  # later than a site's KillWait and GraceTime
ROLE: Final = (sys.executable, "-m", "psgc.launch.job.role")


@dataclass(frozen=True, slots=True)
class Members:
    """What one machine is about to start, checked. A list has an entry for each worker, or for each server."""

    own: Config  # of any role here
    env: Mapping[str, str]  # of all
    scheduler: bool
    servers: list[dict[str, str]]  # what differs between them
    standbys: list[dict[str, str]]
    command: list[str]  # of workers
    workers: list[dict[str, str]]  # whole environments
    cores: list[list[int]]  # that each worker stays on
    spares: int
    alone: bool

    @property
    def count(self) -> int:
        return self.scheduler + len(self.servers) + len(self.standbys) + len(self.workers)

    @property
    def end_with_workers(self) -> bool:
        """Whether scheduler and servers end once the workers here have. Of several nodes, other nodes' workers may still need them."""
        return bool(self.workers) and self.own.nodes == 1


def run_members(
    roles: Sequence[str], command: list[str], env: Mapping[str, str], verdict: Verdict | None = None, prefix: bool = True
) -> int:
    """Run this machine's members to their end. verdict, prefix: as for ``launch``."""
    members = _members(roles, command, {**env, "DMLC_ROLE": roles[-1]})
    configs = {f"worker {local_rank}": Config.from_env(own) for local_rank, own in enumerate(members.workers)}

    def absent(child: Child) -> None:
        if child.name in configs:
            tell_absence(configs[child.name], child.describe_end())

    supervised = Supervisor(
        "psgc-launch", prefix and members.count > 1, _patience(members.own, env), absent=absent if configs and not members.alone else None,
        verdict=verdict, interrupted=_told_when_interrupted(members),
    )  # fmt: skip
    with supervised as supervisor, passing_on(lambda: [child for child in supervisor.children if child.name in configs]):
        _start_services(supervisor, members)
        for child in supervisor.children:
            child.follows = bool(configs)
        _start_workers(supervisor, members, configs)
        return supervisor.run()


def _members(roles: Sequence[str], command: list[str], env: Mapping[str, str]) -> Members:
    """What this machine starts. Raises UsageError, ConfigError or CodecError."""
    workers, alone = "worker" in roles, one_machine(env)
    size = local_size(env) if workers else 0
    spares = spares_of(env) if workers else 0
    cores: list[list[int]] = []
    if workers:
        env = {**env, **inside_of(plan_here(env.get(PLAN, ""), needed=False), env)}
        env |= told(env, size, detect)
        command, cores = worker_command(command, env), worker_cores(env, size)
    servers, standbys = (servers_of(env), standbys_of(env)) if "server" in roles else ([], [])
    own = Config.from_env(of_machine(env), role=roles[-1])
    if alone:
        check_spares(command, spares, "stop")
    else:
        _check_members(own, env, command, spares, sum(ranks.node_sizes(env, own.nodes, own.node, size)) if workers else 0, len(servers))
    if workers and (note := note_on(command)):
        print(f"psgc-launch: {note}", file=sys.stderr)
    places = _places(env, size) if workers else []
    prepare([codec] if (codec := env.get("PSGC_CODEC", "").strip()) and roles != ("scheduler",) else [])
    each = [
        {
            **env, **shared_cores(env, size, pinned=any(cores)), **place, **seen_devices(env, local_rank), "DMLC_ROLE": "worker",
            **place_of(env, local_rank), "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(size), "PYTHONUNBUFFERED": "1",
        }
        for local_rank, place in enumerate(places)
    ]  # fmt: skip
    return Members(own, env, "scheduler" in roles, servers, standbys, command, each, cores, spares, alone)


def worker_command(command: list[str], env: Mapping[str, str]) -> list[str]:
    """The command line of each worker. Raises UsageError if there is no such program."""
    if not command:
        raise UsageError("worker: no command given; for example: psgc-launch python train.py")
    command = words_of(command)
    under_gdb = env.get("BYTEPS_ENABLE_GDB", "0").strip() not in ("", "0")
    if under_gdb and command[0].endswith(".py"):
        command = ["python", *command]  # gdb runs programs, not scripts
    check_command("worker", command)
    if under_gdb and shutil.which("gdb") is None:
        raise UsageError("worker: BYTEPS_ENABLE_GDB=1, but there is no gdb here; install it, or unset BYTEPS_ENABLE_GDB")
    return [*GDB, *command] if under_gdb else command


def worker_cores(env: Mapping[str, str], size: int) -> list[list[int]]:
    cores = cores_of_ranks(env, size)
    if any(cores) and not env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip():
        print(f"psgc-launch: BYTEPS_NUMA_ON=1: {described(cores)}", file=sys.stderr)
    return cores


def _check_members(config: Config, env: Mapping[str, str], command: Sequence[str], spares: int, workers: int, servers: int) -> None:
    """Refuse what this machine's part of the job cannot have. workers: of the whole job; 0: none are here. servers: of this machine."""
    assumed = config.nodes > 1 and not env.get("PSGC_NODE_SIZES", "").strip()
    counted = f"{config.nodes} nodes of {workers // config.nodes}; where they differ, set PSGC_NODE_SIZES" if assumed else ""
    check_job(config, workers=workers, counted=counted, shares={"this machine": servers}, command=command, spares=spares)
    if config.encrypt:
        encryption.require()


def _patience(config: Config, env: Mapping[str, str]) -> Patience:
    """Under Slurm, it is Slurm that ends those who have not ended after a signal: a job that is preempted is requeued only if it is still there then."""
    patience = Patience.of(config)
    return replace(patience, grace_s=SLURM_GRACE_S) if env.get("SLURM_STEP_ID") else patience


def _places(env: Mapping[str, str], size: int) -> list[dict[str, str]]:
    """torch.distributed's variables for each local rank. The user's own settings are kept, except RANK and LOCAL_RANK when several workers run
    here."""
    config = Config.from_env({**env, "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": str(size)})
    node, nodes = config.node, config.nodes
    sizes, meeting_place = ranks.node_sizes(env, nodes, node, size), ranks.agreed_meeting_place(env, nodes)
    if node == 0 and nodes > 1 and not ranks.is_ours(meeting_place["MASTER_ADDR"]):
        print(
            f"psgc-launch: MASTER_ADDR is {meeting_place['MASTER_ADDR']}, not an address of this machine, which has rank 0: a script that "
            f"uses torch.distributed will not start; set MASTER_ADDR to an address of this machine on every one",
            file=sys.stderr,
        )  # fmt: skip
    told = {name: env[name] for name in ranks.NAMES if env.get(name, "").strip() and (size == 1 or name not in ("RANK", "LOCAL_RANK"))}
    return [{**meeting_place, **ranks.place(sizes, node, local_rank), **told} for local_rank in range(size)]


def _told_when_interrupted(members: Members) -> Callable[[str], None]:
    """What a signal to this launcher does first: it tells the scheduler that the job is over, since other machines' launchers would start it again without
    this one. Under wait and shrink a worker's launcher may end, and be followed by another."""
    own = members.own
    if not members.alone and own.wire == "psgc" and restarts_of(members.env) and (not members.workers or own.on_worker_loss == "stop"):
        return partial(tell_end, own)
    return _nothing


def _nothing(_: str) -> None:
    pass


def _start_services(supervisor: Supervisor, members: Members) -> None:
    """Scheduler, servers and standbys."""
    if members.scheduler:
        _start_scheduler(supervisor, members)
    service = members.end_with_workers
    for number, more in enumerate(members.servers):
        name = f"server {number}" if len(members.servers) > 1 else "server"
        _start(supervisor, name, [*ROLE, "server"], {**members.env, **more, "DMLC_ROLE": "server"}, keep_memory=True, service=service)
    unnumbered = {name: text for name, text in members.env.items() if name != "DMLC_SERVER_ID"}
    for number, more in enumerate(members.standbys):
        name = f"standby {number}" if len(members.standbys) > 1 else "standby"
        env = {**unnumbered, **more, "DMLC_ROLE": "server", "PSGC_STANDBY": "1"}
        # Spared: the scheduler has its server go on alone.
        _start(supervisor, name, [*ROLE, "server"], env, keep_memory=True, service=service, spared=lambda: True)


def _start_scheduler(supervisor: Supervisor, members: Members) -> None:
    service = members.end_with_workers
    if members.own.wire != "psgc":
        _start(supervisor, "scheduler", [*ROLE, "scheduler"], {**members.env, "DMLC_ROLE": "scheduler"}, service=service)
        return
    try:
        start_scheduler(supervisor, {**members.env, "PSGC_ON_ITS_OWN": "1"}, listener_of(members.own), service=service)
    except OSError as error:
        raise PsgcError(f"cannot start scheduler: {error}; see `ulimit -u -n`") from None


def _start_workers(supervisor: Supervisor, members: Members, configs: Mapping[str, Config]) -> None:
    """Workers, and the processes that wait to take their places. configs: the workers', by their processes' names."""
    for (name, config), env, cores, near in zip(configs.items(), members.workers, members.cores, near_memory(members.cores), strict=True):
        on_loss = "stop" if config.solo else config.on_worker_loss
        spared = (lambda: True) if on_loss == "shrink" else None
        _start(supervisor, name, members.command, env, cores=cores, replaced=on_loss != "stop", spared=spared, before=near)
    if members.spares:
        shared = shared_cores(members.env, len(members.workers), pinned=any(members.cores))
        supervisor.keep_spares(members.spares, members.command[0], {**members.env, **shared, "PYTHONUNBUFFERED": "1"})


def _start(
    supervisor: Supervisor, name: str, command: list[str], env: Mapping[str, str], *, keep_memory: bool = False, cores: Iterable[int] = (),
    service: bool = False, replaced: bool = False, spared: Callable[[], bool] | None = None, before: Sequence[str] = (),
) -> Child:  # fmt: skip
    try:
        return supervisor.start(
            name, command, env, keep_memory=keep_memory, cores=cores, service=service, replaced=replaced, spared=spared, before=before
        )
    except OSError as error:
        raise PsgcError(f"cannot start {name}: {error}; see `ulimit -u -n`") from None
