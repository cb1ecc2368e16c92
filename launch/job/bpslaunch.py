"""``psgc-launch CMD...``: one machine's part of a job. Used like BytePS's bpslaunch: role and topology come from the environment."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from psgc.config import Config
from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.job import ranks
from psgc.launch.job.as_byteps import FOLDER, found_as_byteps
from psgc.launch.job.batch_signals import ignore_scripts, passing_on, run_in_step
from psgc.launch.job.checks import check_job
from psgc.launch.job.clusters import completed
from psgc.launch.job.cores import cores_of_ranks, described, near_memory
from psgc.launch.job.interpreter import check_command, check_spares, note_on, spares_of, words_of
from psgc.launch.job.node_addresses import address_of, await_name
from psgc.launch.job.planned import PLAN, inside_of, plan_here
from psgc.launch.job.restarts import Unrepeated, await_the_end, restarts_of, run_again
from psgc.launch.job.role import run_role
from psgc.launch.job.run import run_job
from psgc.launch.job.scheduler_process import listener_of, start_scheduler
from psgc.launch.job.threads import shared_cores
from psgc.launch.job.warming import prepare
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
from psgc.launch.topology import detect, told
from psgc.launch.topology.devices import local_size, seen_devices
from psgc.launch.topology.interfaces import named, place_of
from psgc.launch.version import version_line
from psgc.processes.addresses import join, split
from psgc.transport.control.absence import tell_absence, tell_end
from psgc.transport.control.voice import own_outlet
from psgc.transport.security import encryption

Verdict = Callable[[Weight, str, int], None]  # why the job failed, how far that is the first cause, and the exit status
ROLES: Final = ("scheduler", "server", "worker")
JOINT: Final = ("server", "worker")
REQUIRED = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
GDB = ("gdb", "-ex", "run", "-ex", "bt", "-batch", "--args")
AS_BYTEPS = "--as-byteps"
SLURM_GRACE_S: Final = 3600.0  # later than a site's KillWait and GraceTime
USAGE = """usage: psgc-launch [--as-byteps] CMD...

Starts this machine's part of a job. The role comes from DMLC_ROLE (worker, server, scheduler; joint is server,worker), the rest from
DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and, on workers, DMLC_WORKER_ID; see docs/env.md. Under Slurm
(`srun --ntasks-per-node=1 psgc-launch CMD...`) and in Kubernetes' PyTorchJobs all of these are found; in other pods, DMLC_WORKER_ID.

--as-byteps: CMD's `import byteps.torch` is psgc; everything else comes from the environment.

With DMLC_NUM_WORKER=1 there is one machine: its workers, one for each entry of NVIDIA_VISIBLE_DEVICES, get a scheduler and servers of
their own (BYTEPS_FORCE_DISTRIBUTED=1: they use those that you start).

examples, on the only machine, with two GPUs, and on node 1 of 2:
  NVIDIA_VISIBLE_DEVICES=0,1 DMLC_NUM_WORKER=1 psgc-launch python train.py
  DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=1 DMLC_NUM_SERVER=1 \\
  DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9000 psgc-launch python train.py"""


def main() -> None:
    """Entry point of ``psgc-launch``."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE)
        sys.exit(0)
    if sys.argv[1:2] == ["--version"]:
        print(version_line())
        sys.exit(0)
    ignore_scripts()
    sys.exit(run_in_step(lambda: launch(sys.argv[1:], os.environ), os.environ, "psgc-launch"))


def launch(command: list[str], env: Mapping[str, str], verdict: Verdict | None = None, prefix: bool = True) -> int:
    """Run this machine's roles to their end. Wrong usage is one line on stderr and status 2. verdict: gets why the job failed, in place of stderr.
    prefix: whether lines of several processes begin with their names."""
    try:
        if command[:1] == [AS_BYTEPS]:
            command, env = command[1:], {**env, **found_as_byteps(env)}
        if command and command[0].startswith("-"):
            raise UsageError(f"no such option {command[0]}; everything but the command comes from the environment: see psgc-launch --help")
        found = completed(env, socket.gethostname())
        if found.source == "Slurm" and (node := found.settings.get("DMLC_PS_ROOT_URI", "")):
            found.settings["DMLC_PS_ROOT_URI"] = address_of(node)
        full = found.within(env)
        roles = roles_of(full)
        if found.settings:
            named = ", ".join(f"{name}={value}" for name, value in sorted(found.settings.items()))
            print(f"psgc-launch: from {found.source}: {named}", file=sys.stderr)
        _check_trace(full)
        if env.get("KUBERNETES_SERVICE_HOST") and not _one_machine(full) and "scheduler" not in roles:
            own = Config.from_env(of_machine(full), role=roles[-1])
            await_name(own.root_host, own.register_timeout_s, own.silence_s, lambda text: print(f"psgc-launch: {text}", file=sys.stderr))

        def between() -> None:
            if not _one_machine(full):
                await_the_end(Config.from_env(of_machine(full), role=roles[-1]), "scheduler" in roles)

        return run_again(lambda more: _run(roles, command, {**full, **more}, verdict, prefix), restarts_of(full), "psgc-launch", between)
    except PsgcError as error:
        status = 2 if isinstance(error, (CodecError, ConfigError, UsageError)) else 1
        if verdict is None:
            print(f"psgc-launch: {error}", file=sys.stderr)
        else:
            verdict(Weight.OWN, str(error), status)
        return status


def _run(roles: Sequence[str], command: list[str], env: Mapping[str, str], verdict: Verdict | None, prefix: bool) -> int:
    """Run this machine's roles once."""
    if _one_machine(env):
        return _run_machine(roles, command, env)
    if roles == ("scheduler",) and Config.from_env(of_machine(env), role="scheduler").wire != "psgc":
        return run_role("scheduler", env)
    return _run_members(roles, command, {"PSGC_OUTLET": own_outlet(), **env}, verdict, prefix)


def roles_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """The roles of this machine, in the order of ROLES. Raises ConfigError if a setting that one needs is missing or wrong."""
    text = env.get("DMLC_ROLE", "").strip().lower() or ("worker" if _one_machine(env) else "")
    names = {role.strip() for item in text.split(",") for role in (JOINT if item.strip() == "joint" else (item,))}
    if not text or not names <= set(ROLES):
        Config.from_env({k: v for k, v in env.items() if k != "DMLC_ROLE"})  # a misspelt setting may be why no role was found
        came = f"={env['DMLC_ROLE']!r}" if env.get("DMLC_ROLE", "").strip() else " is not set"
        raise ConfigError(f"DMLC_ROLE{came}: expected worker, server, scheduler or joint, or several with commas; see psgc-launch --help")
    roles = tuple(role for role in ROLES if role in names)
    for role in roles:
        _check_role(role, env)
    if roles != ("scheduler",) and not (_one_machine(env) and local_size(env) > 1):  # which tell of them themselves
        for note in Config.from_env(of_machine(env), role=roles[-1]).notes:
            print(f"psgc-launch: {note}", file=sys.stderr)
    return roles


def _check_role(role: str, env: Mapping[str, str]) -> None:
    config = Config.from_env({k: v for k, v in of_machine(env).items() if k != "DMLC_WORKER_ID"}, role=role)
    required = () if _one_machine(env) else REQUIRED + (("DMLC_WORKER_ID",) if role == "worker" else ())
    missing = [name for name in required if not env.get(name, "").strip()]
    if missing:
        raise ConfigError(f"{role}: missing {', '.join(missing)}; set them to the same job on every machine (docs/env.md)")
    if role == "server" and not _one_machine(env):
        config.require_cluster()


def of_machine(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that describe a single process."""
    return {name: value for name, value in env.items() if name not in ("DMLC_ROLE", "BYTEPS_LOCAL_RANK", "LOCAL_RANK")}


def _check_trace(env: Mapping[str, str]) -> None:
    """Make the folder of timelines, before anything starts. Raises ConfigError if it cannot be made."""
    if folder := Config.from_env(of_machine(env), role="server", node=0).trace_folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder of timelines {folder} cannot be made: {error.strerror}; set PSGC_TRACE or BYTEPS_TRACE_DIR"
            ) from None


def _one_machine(env: Mapping[str, str]) -> bool:
    """Whether the job is what BytePS calls non-distributed: one node, without BYTEPS_FORCE_DISTRIBUTED. Does not validate the values."""
    forced = env.get("BYTEPS_FORCE_DISTRIBUTED", "").strip()
    return env.get("DMLC_NUM_WORKER", "").strip() == "1" and forced in ("", "0")


def _run_machine(roles: Sequence[str], command: list[str], env: Mapping[str, str]) -> int:
    """Run a job on this machine alone: one worker by itself, or several with a scheduler and servers started here. As with bpslaunch, the
    ports and addresses in the environment are not used."""
    if "worker" not in roles:
        print(f"psgc-launch: DMLC_NUM_WORKER=1 needs no {roles[0]}: the workers' launcher starts what they need; to have them use this one, set "
              f"BYTEPS_FORCE_DISTRIBUTED=1 everywhere", file=sys.stderr)  # fmt: skip
        return 0
    size = local_size(env)
    if size == 1:
        return _run_members(("worker",), command, {"PSGC_OUTLET": own_outlet(), **env})
    command, cores = _command(command, env), _cores(env, size)
    config = Config.from_env(of_machine(env), role="worker")
    if address := env.get("DMLC_PS_ROOT_URI", "").strip():
        print(f"psgc-launch: DMLC_NUM_WORKER=1: the scheduler and the servers are started here, DMLC_PS_ROOT_URI={address} is not used (it is "
              f"with BYTEPS_FORCE_DISTRIBUTED=1)", file=sys.stderr)  # fmt: skip
    as_byteps = str(FOLDER) in env.get("PYTHONPATH", "").split(os.pathsep)  # the job's environment is this process's
    return run_job(
        command, workers=size, servers=config.servers, program="psgc-launch", cores=cores, as_byteps=as_byteps, before=near_memory(cores),
        more={name: env[name] for name in ("PSGC_RESTART",) if name in env}, spares=spares_of(env),
    )  # fmt: skip


def _command(command: list[str], env: Mapping[str, str]) -> list[str]:
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


def _cores(env: Mapping[str, str], size: int) -> list[list[int]]:
    cores = cores_of_ranks(env, size)
    if any(cores) and not env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip():
        print(f"psgc-launch: BYTEPS_NUMA_ON=1: {described(cores)}", file=sys.stderr)
    return cores


def _run_members(
    roles: Sequence[str], command: list[str], env: Mapping[str, str], verdict: Verdict | None = None, prefix: bool = True
) -> int:
    """Run this machine's members as children: a server's memory outlives it in this process, and whichever fails, all are ended."""
    workers, env = "worker" in roles, {**env, "DMLC_ROLE": roles[-1]}
    size = local_size(env) if workers else 0
    cores: list[list[int]] = []
    spares = spares_of(env) if workers else 0
    if workers:
        env |= inside_of(plan_here(env.get(PLAN, ""), needed=False), env)
        env |= told(env, size, detect)
        command, cores = _command(command, env), _cores(env, size)
    servers = servers_of(env) if "server" in roles else []
    standbys = standbys_of(env) if "server" in roles else []
    own = Config.from_env(of_machine(env), role="worker" if workers else roles[-1])
    alone = _one_machine(env)
    if alone:
        check_spares(command, spares, "stop")
    else:
        _check_members(own, env, command, spares, sum(ranks.node_sizes(env, own.nodes, own.node, size)) if workers else 0, len(servers))
    if workers and (note := note_on(command)):
        print(f"psgc-launch: {note}", file=sys.stderr)
    places = _places(env, size) if workers else []
    prepare(_codecs(env) if roles != ("scheduler",) else [])
    configs: dict[str, Config] = {}  # of workers, by their processes' names

    def absent(child: Child) -> None:
        if child.name in configs:
            tell_absence(configs[child.name], child.describe_end())

    count = len(servers) + len(standbys) + size + ("scheduler" in roles)
    # On one node the services end once the workers have; of several, other nodes' workers may still need them.
    ends_with_workers = own.nodes == 1
    supervised = Supervisor(
        "psgc-launch", prefix and count > 1, _patience(own, env), absent=None if alone or not workers else absent, verdict=verdict,
        interrupted=_nothing if alone else _told_when_interrupted(own, env, workers),
    )  # fmt: skip
    with supervised as supervisor, passing_on(lambda: [child for child in supervisor.children if child.name in configs]):
        role = [sys.executable, "-m", "psgc.launch.job.role"]
        if "scheduler" in roles:
            _start_scheduler(supervisor, env, own, service=workers and ends_with_workers)
        for number, more in enumerate(servers):
            name = f"server {number}" if len(servers) > 1 else "server"
            _start(
                supervisor,
                name,
                [*role, "server"],
                {**env, **more, "DMLC_ROLE": "server"},
                keep_memory=True,
                service=workers and ends_with_workers,
            )
        for number, more in enumerate(standbys):
            name = f"standby {number}" if len(standbys) > 1 else "standby"
            full = {
                **{key: text for key, text in env.items() if key != "DMLC_SERVER_ID"},
                **more,
                "DMLC_ROLE": "server",
                "PSGC_STANDBY": "1",
            }
            _start(
                supervisor,
                name,
                [*role, "server"],
                full,
                keep_memory=True,
                service=workers and ends_with_workers,
                spared=lambda: True,  # the scheduler has its server go on alone
            )
        for child in supervisor.children:
            child.follows = workers
        for local_rank, near in enumerate(near_memory(cores)):
            full = {
                **env, **shared_cores(env, size, pinned=any(cores)), **places[local_rank], **seen_devices(env, local_rank), "DMLC_ROLE": "worker",
                **place_of(env, local_rank), "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(size), "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            config, name = Config.from_env(full), f"worker {local_rank}"
            configs[name] = config
            on_loss = "stop" if config.solo else config.on_worker_loss
            again, spared = on_loss != "stop", (lambda: True) if on_loss == "shrink" else None
            _start(supervisor, name, command, full, cores=cores[local_rank], replaced=again, spared=spared, before=near)
        if spares:
            supervisor.keep_spares(spares, command[0], {**env, **shared_cores(env, size, pinned=any(cores)), "PYTHONUNBUFFERED": "1"})
        status = supervisor.run()
        return Unrepeated(status) if supervisor.final else status


def _told_when_interrupted(config: Config, env: Mapping[str, str], workers: bool) -> Callable[[str], None]:
    """What a signal to this launcher does first: it tells the scheduler that the job is over, since other machines' launchers would start it again without
    this one. Under wait and shrink a worker's launcher may end, and be followed by another."""
    if config.wire == "psgc" and restarts_of(env) and (not workers or config.on_worker_loss == "stop"):
        return partial(tell_end, config)
    return _nothing


def _nothing(_: str) -> None:
    pass


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


def servers_of(env: Mapping[str, str]) -> list[dict[str, str]]:
    """What differs between the servers of this machine: PSGC_LOCAL_SERVERS of them, on ports one after the other where a port is named."""
    config = Config.from_env(of_machine(env), role="server")
    servers = []
    for number in range(local_servers(config, env)):
        own = place_of(env, number)
        if config.server_index >= 0:
            own["DMLC_SERVER_ID"] = str(config.server_index + number)
        if config.port:
            own["DMLC_PORT"] = str(config.port + number)
        if config.advertise:
            host, port = split(config.advertise)
            own["PSGC_ADVERTISE"] = join(host, port + number)
        servers.append(own)
    return servers


def standbys_of(env: Mapping[str, str]) -> list[dict[str, str]]:
    """Of the processes that take the places of servers of other machines: as many as this machine has servers, on the ports behind theirs."""
    config, servers = Config.from_env(of_machine(env), role="server"), servers_of(env)
    if not config.replicas:
        return []
    standbys = [{key: text for key, text in own.items() if key != "DMLC_SERVER_ID"} for own in servers]
    for own in standbys:
        if "DMLC_PORT" in own:
            own["DMLC_PORT"] = str(int(own["DMLC_PORT"]) + len(servers))
        if "PSGC_ADVERTISE" in own:
            host, port = split(own["PSGC_ADVERTISE"])
            own["PSGC_ADVERTISE"] = join(host, port + len(servers))
    return standbys


def local_servers(config: Config, env: Mapping[str, str]) -> int:
    """Servers of this machine, where its role is server: PSGC_LOCAL_SERVERS, else one for each interface that PSGC_INTERFACES names, if every
    machine has workers and servers and DMLC_NUM_SERVER counts as many for each, else 1. Raises ConfigError."""
    names = env.get("DMLC_ROLE", "").lower()
    joint = "joint" in names or all(role in names for role in JOINT)
    each = named(env) if joint and config.servers == config.nodes * named(env) else 1
    text = env.get("PSGC_LOCAL_SERVERS", "").strip() or str(max(1, each))
    if not text.isdigit() or not 1 <= int(text) <= max(1, config.servers):
        raise ConfigError(
            f"PSGC_LOCAL_SERVERS={text!r}: expected how many of the job's servers (DMLC_NUM_SERVER={config.servers}) run on this machine"
        )
    return int(text)


def _codecs(env: Mapping[str, str]) -> list[str]:
    return [codec] if (codec := env.get("PSGC_CODEC", "").strip()) else []


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


def _start_scheduler(supervisor: Supervisor, env: Mapping[str, str], config: Config, *, service: bool) -> None:
    """config: of any role of this machine."""
    if config.wire != "psgc":
        _start(
            supervisor,
            "scheduler",
            [sys.executable, "-m", "psgc.launch.job.role", "scheduler"],
            {**env, "DMLC_ROLE": "scheduler"},
            service=service,
        )
        return
    try:
        start_scheduler(supervisor, {**env, "PSGC_ON_ITS_OWN": "1"}, listener_of(config), service=service)
    except OSError as error:
        raise PsgcError(f"cannot start scheduler: {error}; see `ulimit -u -n`") from None


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
