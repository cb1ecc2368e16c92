"""``psgc-launch CMD...``: one machine's part of a job. Used like BytePS's bpslaunch: role and topology come from the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from psgc.config import Config
from psgc.errors import CodecError, ConfigError, PsgcError, UsageError
from psgc.launch.job import ranks
from psgc.launch.job.absence import tell_absence
from psgc.launch.job.as_byteps import FOLDER, found_as_byteps
from psgc.launch.job.interpreter import check_command, note_on
from psgc.launch.job.role import run_role
from psgc.launch.job.run import run_job
from psgc.launch.job.threads import shared_cores
from psgc.launch.job.warming import prepare
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.supervisor import Patience, Supervisor
from psgc.launch.version import version_line
from psgc.transport.control.voice import own_outlet

REQUIRED = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
GDB = ("gdb", "-ex", "run", "-ex", "bt", "-batch", "--args")
AS_BYTEPS = "--as-byteps"
USAGE = """usage: psgc-launch [--as-byteps] CMD...

Starts this machine's part of a job. The role comes from DMLC_ROLE (worker, server or scheduler), the rest from
DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and, on workers, DMLC_WORKER_ID; see docs/env.md.

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
    sys.exit(launch(sys.argv[1:], os.environ))


def launch(command: list[str], env: Mapping[str, str]) -> int:
    """Run this machine's role to its end. Wrong usage is one line on stderr and status 2."""
    try:
        if command[:1] == [AS_BYTEPS]:
            command, env = command[1:], {**env, **found_as_byteps(env)}
        if command and command[0].startswith("-"):
            raise UsageError(f"no such option {command[0]}; everything but the command comes from the environment: see psgc-launch --help")
        role = _role(env)
        if _one_machine(env):
            return _run_machine(role, command, env)
        full = {"PSGC_OUTLET": own_outlet(), **env, "DMLC_ROLE": role}
        if role == "scheduler":
            return run_role("scheduler")
        if role == "server":
            return _run_server(full)
        return _run_workers(command, full)
    except PsgcError as error:
        print(f"psgc-launch: {error}", file=sys.stderr)
        return 2 if isinstance(error, (CodecError, ConfigError, UsageError)) else 1


def _role(env: Mapping[str, str]) -> str:
    """The role of this machine. Raises ConfigError if a setting that the role needs is missing or wrong."""
    role = env.get("DMLC_ROLE", "").strip().lower() or ("worker" if _one_machine(env) else "")
    if role not in ("worker", "server", "scheduler"):
        Config.from_env({k: v for k, v in env.items() if k != "DMLC_ROLE"})  # a misspelt setting may be why no role was found
        came = f"={env['DMLC_ROLE']!r}" if env.get("DMLC_ROLE", "").strip() else " is not set"
        raise ConfigError(f"DMLC_ROLE{came}: expected worker, server or scheduler; see psgc-launch --help")
    config = Config.from_env(
        {k: v for k, v in env.items() if k not in ("DMLC_ROLE", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK", "LOCAL_RANK")}, role=role
    )
    required = () if _one_machine(env) else REQUIRED + (("DMLC_WORKER_ID",) if role == "worker" else ())
    missing = [name for name in required if not env.get(name, "").strip()]
    if missing:
        raise ConfigError(f"{role}: missing {', '.join(missing)}; set them to the same job on every machine (docs/env.md)")
    if role == "server" and not _one_machine(env):
        config.require_cluster()
    if role != "scheduler" and not (_one_machine(env) and local_size(env) > 1):  # which tell of them themselves
        for note in config.notes:
            print(f"psgc-launch: {note}", file=sys.stderr)
    return role


def _one_machine(env: Mapping[str, str]) -> bool:
    """Whether the job is what BytePS calls non-distributed: one node, without BYTEPS_FORCE_DISTRIBUTED. Does not validate the values."""
    forced = env.get("BYTEPS_FORCE_DISTRIBUTED", "").strip()
    return env.get("DMLC_NUM_WORKER", "").strip() == "1" and forced in ("", "0")


def _run_machine(role: str, command: list[str], env: Mapping[str, str]) -> int:
    """Run a job on this machine alone: one worker by itself, or several with a scheduler and servers started here. As with bpslaunch, the
    ports and addresses in the environment are not used."""
    if role != "worker":
        print(f"psgc-launch: DMLC_NUM_WORKER=1 needs no {role}: the workers' launcher starts what they need; to have them use this one, set "
              f"BYTEPS_FORCE_DISTRIBUTED=1 everywhere", file=sys.stderr)  # fmt: skip
        return 0
    size = local_size(env)
    if size == 1:
        return _run_workers(command, {"PSGC_OUTLET": own_outlet(), **env, "DMLC_ROLE": role})
    command, cores = _command(command, env), visible_cores(env, size)
    config = Config.from_env({k: v for k, v in env.items() if k not in ("BYTEPS_LOCAL_RANK", "LOCAL_RANK")}, role=role)
    if address := env.get("DMLC_PS_ROOT_URI", "").strip():
        print(f"psgc-launch: DMLC_NUM_WORKER=1: the scheduler and the servers are started here, DMLC_PS_ROOT_URI={address} is not used (it is "
              f"with BYTEPS_FORCE_DISTRIBUTED=1)", file=sys.stderr)  # fmt: skip
    as_byteps = str(FOLDER) in env.get("PYTHONPATH", "").split(os.pathsep)  # the job's environment is this process's
    return run_job(command, workers=size, servers=config.servers, program="psgc-launch", cores=cores, as_byteps=as_byteps)


def _command(command: list[str], env: Mapping[str, str]) -> list[str]:
    """The command line of each worker. Raises UsageError if there is no such program."""
    if not command:
        raise UsageError("worker: no command given; for example: psgc-launch python train.py")
    check_command("worker", command)
    return [*GDB, *command] if env.get("BYTEPS_ENABLE_GDB", "0").strip() not in ("", "0") else command


def _run_server(env: Mapping[str, str]) -> int:
    """Run the server as a child process, so that its memory outlives it in this process."""
    prepare(_codecs(env))
    with Supervisor("psgc-launch", prefix=False) as supervisor:
        _start(supervisor, "server", [sys.executable, "-m", "psgc.launch.job.role", "server"], env, keep_memory=True)
        return supervisor.run()


def _run_workers(command: list[str], env: Mapping[str, str]) -> int:
    size = local_size(env)
    command, cores = _command(command, env), visible_cores(env, size)
    if note := note_on(command):
        print(f"psgc-launch: {note}", file=sys.stderr)
    places = _places(env, size)
    prepare(_codecs(env))
    threads = shared_cores(env, size)
    configs: dict[int, Config] = {}

    def absent(child: Child) -> None:
        tell_absence(configs[child.pid], child.pid, child.describe_end())

    patience = Patience.of(Config.from_env({**env, **places[0], "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": str(size)}))
    with Supervisor("psgc-launch", size > 1, patience, absent=None if _one_machine(env) else absent) as supervisor:
        for local_rank in range(size):
            own = {
                **env, **threads, **places[local_rank], "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(size), "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            config = Config.from_env(own)
            configs[_start(supervisor, f"worker {local_rank}", command, own, cores=cores[local_rank]).pid] = config
        return supervisor.run()


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


def _start(
    supervisor: Supervisor, name: str, command: list[str], env: Mapping[str, str], *, keep_memory: bool = False, cores: Iterable[int] = ()
) -> Child:
    try:
        return supervisor.start(name, command, env, keep_memory=keep_memory, cores=cores)
    except OSError as error:
        raise PsgcError(f"cannot start {name}: {error}; see `ulimit -u -n`") from None


def local_size(env: Mapping[str, str]) -> int:
    """Worker processes on this node: BYTEPS_LOCAL_SIZE, else one for each visible device, else one."""
    if env.get("BYTEPS_LOCAL_SIZE", "").isdigit():
        return max(1, int(env["BYTEPS_LOCAL_SIZE"]))
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        devices = [d for d in env.get(name, "").split(",") if d.strip() and d.strip() not in ("all", "none", "void")]
        if devices:
            return len(devices)
    return 1


def visible_cores(env: Mapping[str, str], size: int) -> list[list[int]]:
    """For each local rank the cores that BYTEPS_VISIBLE_CPU_CORES gives it, as in ``0,2-3:4-7``; empty lists where it is not set."""
    text = env.get("BYTEPS_VISIBLE_CPU_CORES", "").strip()
    if not text:
        return [[] for _ in range(size)]
    wrong = ConfigError(f"BYTEPS_VISIBLE_CPU_CORES={text!r}: expected cores of each of the {size} local ranks, as in 0,2-3:4-7")
    try:
        cores = [[core for item in section.split(",") for core in _range(item)] for section in text.split(":")]
    except ValueError:
        raise wrong from None
    if len(cores) < size or not all(cores):
        raise wrong
    absent = sorted({core for section in cores for core in section} - os.sched_getaffinity(0))
    if absent:
        raise ConfigError(f"BYTEPS_VISIBLE_CPU_CORES={text!r}: this machine has no core {', '.join(map(str, absent))} for us")
    return cores


def _range(item: str) -> range:
    first, _, last = item.partition("-")
    return range(int(first), int(last or first) + 1)
