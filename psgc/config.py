"""The configuration of one process: the only reader of ``os.environ``.

VARIABLES is the table of every name that psgc honours; docs/env.md shows the same table and a test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from psgc.addresses import bare_host, endpoint, join, split
from psgc.errors import ConfigError
from psgc.spelling import did_you_mean, nearest

Role = Literal["worker", "server", "scheduler"]


def _integer(minimum: int = 0) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError(f"at least {minimum}")
        return value

    parse.__doc__ = f"a whole number, at least {minimum}"
    return parse


def _seconds(text: str) -> float:
    """a number of seconds above 0"""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("above 0")
    return value


def _rate(text: str) -> float:
    """a number above 0"""
    return _seconds(text)


def _switch(text: str) -> bool:
    """0 or 1"""
    return {"0": False, "1": True}[text.strip()]


def _text(text: str) -> str:
    """text"""
    return text.strip()


def _host(text: str) -> str:
    """a host name or an IP address, without a port"""
    return bare_host(text)


def _host_and_port(text: str) -> str:
    """host:port, an IPv6 address in brackets as in [::1]:9000"""
    return join(*split(text))


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in choices:
            raise ValueError(did_you_mean(value, choices))
        return value

    parse.__doc__ = "one of " + ", ".join(choices)
    return parse


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting: its name in the environment, BytePS's names for it, which roles it has an effect on, and its meaning."""

    name: str
    field: str
    parse: Callable[[str], Any]
    roles: str  # letters of the roles it has an effect on: w, s (server), c (scheduler)
    meaning: str
    aliases: tuple[str, ...] = ()


VARIABLES: Final = (
    Variable("DMLC_ROLE", "role", _one_of("worker", "server", "scheduler"), "wsc", "what this process is; psgc-launch has to be told it"),
    Variable("DMLC_NUM_WORKER", "nodes", _integer(1), "wsc", "number of worker machines (nodes)"),
    Variable("DMLC_NUM_SERVER", "servers", _integer(0), "wsc", "number of servers"),
    Variable("DMLC_PS_ROOT_URI", "root_host", _host, "wsc", "address of the scheduler", ("MASTER_ADDR",)),
    Variable("DMLC_PS_ROOT_PORT", "root_port", _integer(1), "wsc", "port of the scheduler"),
    Variable("DMLC_WORKER_ID", "node", _integer(0), "w", "this node's number, from 0", ("GROUP_RANK",)),
    Variable("DMLC_SERVER_ID", "server_index", _integer(0), "s", "this server's number; without it the scheduler numbers servers"),
    Variable("DMLC_NODE_HOST", "node_host", _host, "s", "address that workers reach this server at; default: the one that reaches the scheduler"),
    Variable("DMLC_PORT", "port", _integer(0), "s", "port this server listens on; 0: any"),
    Variable("PSGC_ADVERTISE", "advertise", _host_and_port, "s", "host:port that workers reach this server at, where it differs (NAT, proxy)"),
    Variable("BYTEPS_LOCAL_RANK", "local_rank", _integer(0), "w", "this process's number within its node", ("LOCAL_RANK",)),
    Variable("BYTEPS_LOCAL_SIZE", "local_size", _integer(1), "w", "worker processes on this node", ("LOCAL_WORLD_SIZE",)),
    Variable("BYTEPS_FORCE_DISTRIBUTED", "force_distributed", _switch, "w", "1: one worker, too, goes through the servers"),
    Variable("PSGC_JOB", "job", _integer(0), "wsc", "job id in every header, so that jobs on one network cannot mix"),
    Variable("PSGC_TOKEN", "token", _text, "wsc", "the job's secret, from which keys are made: long and random; it never travels"),
    Variable(
        "PSGC_ENCRYPT", "encrypt", _switch, "wsc", "1: payloads over TCP are encrypted (AES-GCM); needs `pip install 'psgc[encrypt]'` everywhere"
    ),
    Variable("PSGC_CODEC", "codec", _text, "w", "codec of DistributedOptimizer where the script names none"),
    Variable("PSGC_PLAN", "plan", _text, "w", "file of the plan that gradients travel by (DistributedOptimizer's or ddp_hook's), on each machine"),
    Variable("PSGC_LAYOUT_OUT", "layout_out", _text, "w", "rank 0 writes the layout of its first DistributedOptimizer or ddp_hook to this file, as a plan"),
    Variable(
        "PSGC_LATE_SYNCHRONIZATION", "late_synchronization", _switch, "w",
        "1: the mean gradients are there after step() or optimizer.synchronize(), not after backward",
    ),
    Variable(
        "PSGC_PART_BYTES", "part_bytes", _integer(4096), "w",
        "bytes of a tensor in one part; fewer where a connection would take over half a second for them", ("BYTEPS_PARTITION_BYTES",),
    ),
    Variable("PSGC_FUSE_BYTES", "fuse_bytes", _integer(0), "w", "small tensors are fused into buckets of up to this many bytes"),
    Variable(
        "PSGC_MIN_COMPRESS_BYTES", "min_compress_bytes", _integer(0), "w",
        "a model's bucket of fewer bytes travels uncompressed", ("BYTEPS_MIN_COMPRESS_BYTES",),
    ),
    Variable("PSGC_CREDIT_BYTES", "credit_bytes", _integer(0), "w", "payload bytes sent to a server and not acknowledged; 0: no limit"),
    Variable(
        "BYTEPS_SCHEDULING_CREDIT", "credit_parts", _integer(0), "w", "parts sent to a server and not acknowledged; 0: first come, first served"
    ),
    Variable("PSGC_NONFINITE", "nonfinite", _one_of("propagate", "raise"), "w", "NaN or infinity in a gradient: pass on, or end the job"),
    Variable("PSGC_SEED", "seed", _integer(0), "w", "seed of the codecs' random streams"),
    Variable(
        "PSGC_PROFILE", "profile", _text, "w",
        "rank 0 writes to this file when gradients become ready; until then they leave only when backward is over",
    ),
    Variable("PSGC_PROFILE_ITERATIONS", "profile_iterations", _integer(3), "w", "iterations that PSGC_PROFILE observes, after a warm-up"),
    Variable("PSGC_PROFILE_ONLY", "profile_only", _switch, "w", "1: with PSGC_PROFILE, every rank leaves the job once it has been observed"),
    Variable("PSGC_CPU_THREADS", "cpu_threads", _integer(1), "w", "encode and decode threads", ("BYTEPS_THREADPOOL_SIZE",)),
    Variable("PSGC_SERVER_THREADS", "server_threads", _integer(1), "s", "summation threads", ("BYTEPS_SERVER_ENGINE_THREAD",)),
    Variable("PSGC_WINDOW_BYTES", "window_bytes", _integer(1), "s", "payload bytes of a plan that a server has room for at once"),
    Variable("PSGC_TRANSPORT", "transport", _one_of("auto", "tcp", "shm"), "ws", "auto: shared memory on one host, else TCP"),
    Variable("PSGC_LINK_MBIT", "link_mbit", _rate, "ws", "set by `psgc run --link-mbit`: rate of this process's host's link, each way, 1e6 bit/s"),
    Variable("PSGC_LINK_FD", "link_fd", _integer(0), "ws", "set by `psgc run --link-mbit`: by which the processes of one host share its link"),
    Variable("PSGC_HEARTBEAT_S", "heartbeat_s", _seconds, "wsc", "seconds between heartbeats"),
    Variable("PSGC_SILENCE_S", "silence_s", _seconds, "wsc", "after so many seconds what is awaited is named; then ever more rarely, up to a minute apart"),
    Variable("PSGC_DEAD_S", "dead_s", _seconds, "wsc", "a silent member on another host is dead after so many seconds"),
    Variable("PSGC_REGISTER_TIMEOUT_S", "register_timeout_s", _seconds, "wsc", "registration gives up after so many seconds"),
    Variable("PSGC_STEP_TIMEOUT_S", "step_timeout_s", _seconds, "wsc", "a stalled step, barrier or declaration fails after so many seconds"),
    Variable("PSGC_ABORT_GRACE_S", "abort_grace_s", _seconds, "w", "a failed job's process that has not ended by itself is ended after so many seconds"),
    Variable(
        "PSGC_SAVE_TIMEOUT_S", "save_timeout_s", _seconds, "w",
        "inside `with psgc.saving():` a failed job's process is ended only when that is over, or after so many seconds",
    ),
    Variable("PSGC_SWITCH_INTERVAL", "switch_interval_s", _seconds, "w", "Python's thread switch interval in the trainer, seconds"),
    Variable("PSGC_LOG_STEPS", "log_steps", _integer(0), "w", "at log level info, steps from one line on step time and waiting to the next; 0: none"),
    Variable("PSGC_LOG_LEVEL", "log_level", _one_of("debug", "info", "warning", "error"), "wsc", "least severity logged", ("BYTEPS_LOG_LEVEL",)),
    Variable("PSGC_OUTLET", "outlet", _text, "wsc", "set by launchers: where their processes' lines end up, so that one of these speaks for all"),
    Variable("PSGC_LAUNCHER", "launcher", _text, "wsc", "set by the launcher: where a process tells it whether it has joined, and why it ended"),
    Variable("PSGC_SCHEDULER_FD", "scheduler_fd", _integer(0), "c", "set by `psgc run`: the scheduler's listening socket"),
    Variable("PSGC_KEEPER_FD", "keeper_fd", _integer(0), "s", "set by the launcher: socket over which the server's memory is kept"),
)  # fmt: skip


def outlet() -> str:
    """``Config.outlet``, for what happens before a process knows its configuration."""
    return os.environ.get("PSGC_OUTLET", "").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything one process was told. Built by ``from_env``; printed at start."""

    role: Role = "worker"
    nodes: int = 1
    servers: int = 1
    root_host: str = ""
    root_port: int = 0
    node: int = 0
    server_index: int = -1
    node_host: str = ""
    port: int = 0
    advertise: str = ""
    local_rank: int = 0
    local_size: int = 1
    force_distributed: bool = False
    job: int = 0
    token: str = field(default="", repr=False)
    encrypt: bool = False
    codec: str = "none"
    codec_given: str = ""  # PSGC_CODEC as it was set; "" where it was not
    plan: str = ""
    layout_out: str = ""
    late_synchronization: bool = False
    part_bytes: int = 4 << 20
    fuse_bytes: int = 4 << 20
    min_compress_bytes: int = 64 << 10
    credit_bytes: int = 64 << 20  # enough to keep 100 Gbit/s busy over 5 ms
    credit_parts: int = -1  # no limit in parts
    nonfinite: str = "propagate"
    seed: int = 0
    profile: str = ""
    profile_iterations: int = 20
    profile_only: bool = False
    cpu_threads: int = 0  # 0: from the cores and the local size
    server_threads: int = 0
    window_bytes: int = 1 << 30
    transport: str = "auto"
    link_mbit: float = 0.0  # not paced
    link_fd: int = -1
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    dead_s: float = 60.0  # so that a link that is cut for 20 s, and the kernel's pause after that, cost nothing
    register_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    abort_grace_s: float = 10.0
    save_timeout_s: float = 300.0
    switch_interval_s: float = 0.0005  # the interpreter's 5 ms would cost the network thread 10 ms a trip beside a busy main thread
    log_steps: int = 100
    log_level: str = "warning"
    outlet: str = ""
    launcher: str = ""
    scheduler_fd: int = -1
    keeper_fd: int = -1
    world_size: int = 0  # torch.distributed's processes, as the environment has them; 0: it says nothing
    notes: tuple[str, ...] = ()  # warnings about names that are unknown, or without effect here
    meeting_place: str = ""  # MASTER_ADDR, where nothing else names the scheduler
    lonely: str = ""  # why a worker that is alone by these settings was hardly meant to be

    def __post_init__(self) -> None:
        if self.node >= self.nodes:
            raise ConfigError(f"DMLC_WORKER_ID={self.node}, but DMLC_NUM_WORKER={self.nodes}: nodes are numbered 0 to {self.nodes - 1}")
        if self.local_rank >= self.local_size:
            raise ConfigError(f"BYTEPS_LOCAL_RANK={self.local_rank}, but BYTEPS_LOCAL_SIZE={self.local_size}: local ranks start at 0")
        if not 0 <= self.root_port < 1 << 16:
            raise ConfigError(f"DMLC_PS_ROOT_PORT={self.root_port} is no port; ports go up to 65535")
        if self.plan and self.codec != "none":
            raise ConfigError(
                f"PSGC_PLAN={self.plan} names each bucket's codec, but PSGC_CODEC={self.codec} is set, too; leave one of them out"
            )

    @property
    def solo(self) -> bool:
        """A worker with nobody to talk to: no scheduler named, or one process that was not told to use servers."""
        return not self.root_host or (self.nodes * self.local_size == 1 and not self.force_distributed)

    @property
    def root_endpoint(self) -> str:
        return endpoint(self.root_host, self.root_port)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Read, parse and check. Raises ConfigError naming variable, what came and what was expected."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            name = next((n for n in (variable.name, *variable.aliases) if env.get(n, "").strip()), None)
            if name is not None:
                values[variable.field] = _parse(variable, name, env[name])
        values.update(overrides)
        values["codec_given"] = values.get("codec", "")
        _from_torchrun(env, values)
        _refuse_mistyped(env)
        values.setdefault("world_size", int(env["WORLD_SIZE"]) if env.get("WORLD_SIZE", "").isdigit() else 0)
        role = values.get("role", "worker")
        values.setdefault("meeting_place", "" if env.get("DMLC_PS_ROOT_URI", "").strip() else env.get("MASTER_ADDR", "").strip())
        return cls(**values, notes=tuple(_notes(env, role)), lonely=_lonely(env, values))

    def require_alone(self) -> None:
        """Raise ConfigError if the environment speaks of other members of the job, without whom each worker would train alone."""
        if self.lonely:
            raise ConfigError(self.lonely)

    def require_cluster(self) -> None:
        """Raise ConfigError unless this process knows how to find the scheduler and how many members to expect."""
        if self.meeting_place and not self.root_port:
            raise ConfigError(
                f"MASTER_ADDR={self.meeting_place} is set, as torchrun does, but DMLC_PS_ROOT_PORT is missing: torchrun starts workers alone; start the "
                f"scheduler and the servers beside it, and set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER everywhere "
                f"(docs/integrations.md); or start the job with `psgc run`"
            )
        if not self.root_host or not self.root_port:
            raise ConfigError(
                f"a {self.role} needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (the scheduler's address), "
                f"got {self.root_host or 'none'!r} and {self.root_port or 'none'!r}; or start the job with `psgc run`"
            )
        if self.servers < 1:
            raise ConfigError("DMLC_NUM_SERVER=0: a job needs at least one server")


def _parse(variable: Variable, name: str, text: str) -> Any:
    try:
        return variable.parse(text)
    except (ValueError, KeyError) as error:
        meant = str(error) if str(error).startswith(";") else ""
        raise ConfigError(f"{name}={text!r} is wrong: expected {variable.parse.__doc__} ({variable.meaning}){meant}") from None


def _from_torchrun(env: Mapping[str, str], values: dict[str, Any]) -> None:
    """Under torchrun, without DMLC_*: nodes from WORLD_SIZE and LOCAL_WORLD_SIZE. Does nothing elsewhere."""
    if "nodes" in values or not env.get("WORLD_SIZE", "").isdigit():
        return
    world, local = int(env["WORLD_SIZE"]), values.get("local_size", 1)
    if world % local:
        raise ConfigError(f"WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={local}; set DMLC_NUM_WORKER and DMLC_WORKER_ID")
    values["nodes"] = world // local


def _lonely(env: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """What is missing where the environment speaks of other members, and yet the worker would be alone; else nothing."""

    def told(*names: str) -> str:
        return next((f"{name}={env[name].strip()}" for name in names if env.get(name, "").strip()), "")

    forced = bool(values.get("force_distributed"))
    if values.get("root_host"):
        address = "" if forced or told("DMLC_NUM_WORKER", "WORLD_SIZE") or values.get("local_size", 1) > 1 else told("DMLC_PS_ROOT_URI")
        return address and (
            f"{address} names a scheduler, but DMLC_NUM_WORKER is missing: this worker would train alone; set DMLC_NUM_WORKER to the number "
            f"of worker machines, or unset DMLC_PS_ROOT_URI"
        )
    mpi = next((name for name in MPI_SIZES if "nodes" not in values and env.get(name, "").isdigit() and int(env[name]) > 1), "")
    if mpi:
        return (
            f"{mpi}={env[mpi]}: mpirun or srun started several processes, but DMLC_PS_ROOT_URI and DMLC_NUM_WORKER are missing: each of them "
            f"would train alone; start one `psgc-launch` on each node with the DMLC_* settings of docs/env.md, or the job with `psgc run`, "
            f"or unset {mpi}"
        )
    asking = (
        (told("DMLC_NUM_WORKER", "WORLD_SIZE") if values.get("nodes", 1) > 1 else "")
        or (told("BYTEPS_LOCAL_SIZE", "LOCAL_WORLD_SIZE") if values.get("local_size", 1) > 1 else "")
        or (told("BYTEPS_FORCE_DISTRIBUTED") if forced else "")
    )
    return asking and (
        f"{asking} is set, but DMLC_PS_ROOT_URI, the address of the job's scheduler, is missing: this worker would train alone; set "
        f"DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or start the job with `psgc run`, or unset {asking.partition('=')[0]}"
    )


# How many processes Open MPI, MPICH (and Intel MPI) and Slurm's srun say that they started together.
MPI_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# BytePS's settings that psgc accepts and does nothing with, and why.
WITHOUT_EFFECT: Final = {
    "BYTEPS_OMP_THREAD_PER_GPU": "psgc sums in threads of its own: PSGC_SERVER_THREADS",
    "BYTEPS_NCCL_GROUP_SIZE": "psgc has no such stage",
    "BYTEPS_NCCL_NUM_RINGS": "psgc has no such stage",
    "BYTEPS_PCIE_SWITCH_SIZE": "each process talks to the servers itself",
    "BYTEPS_REDUCE_ROOTS": "each process talks to the servers itself",
    "BYTEPS_NUMA_ON": "say where local ranks run with BYTEPS_VISIBLE_CPU_CORES",
    "BYTEPS_NUMA_DEFAULT_QUOTA": "say where local ranks run with BYTEPS_VISIBLE_CPU_CORES",
    "BYTEPS_NUMA_ROOT_QUOTA": "say where local ranks run with BYTEPS_VISIBLE_CPU_CORES",
    "BYTEPS_CPU_BLACKLIST": "say where local ranks run with BYTEPS_VISIBLE_CPU_CORES",
    "BYTEPS_MULTITHREADED_CPU": "say where local ranks run with BYTEPS_VISIBLE_CPU_CORES",
    "BYTEPS_KEY_HASH_FN": "parts are spread evenly over the servers",
    "BYTEPS_BUILT_IN_HASH_COEF": "parts are spread evenly over the servers",
    "BYTEPS_ENABLE_MIXED_MODE": "parts are spread evenly over the servers",
    "BYTEPS_MIXED_MODE_BOUND": "parts are spread evenly over the servers",
    "BYTEPS_ENABLE_ASYNC": "psgc is synchronous",
    "BYTEPS_ENABLE_IPC": "shared memory is chosen by itself: PSGC_TRANSPORT",
    "BYTEPS_SOCKET_PATH": "psgc leaves no socket files",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "the server sums in the plan's order",
    "BYTEPS_SERVER_ENGINE_BLOCKING": "the server never sums in its network thread",
    "BYTEPS_SERVER_DEBUG": "use PSGC_LOG_LEVEL",
    "BYTEPS_DEBUG_SAMPLE_TENSOR": "use PSGC_LOG_LEVEL",
    "BYTEPS_GLOBAL_RANK": "ranks follow from DMLC_WORKER_ID and BYTEPS_LOCAL_RANK",
    "BYTEPS_FORCE_JOINT_MODE": "a server is a process of its own",
    "BYTEPS_JOB_ID": "use PSGC_JOB",
    "BYTEPS_STALENESS": "psgc is synchronous",
    "BYTEPS_LOG_HIDE_TIME": "set the format with Python's logging",
    "BYTEPS_TRACE_ON": "no trace is written",
    "BYTEPS_TRACE_DIR": "no trace is written",
    "BYTEPS_TRACE_START_STEP": "no trace is written",
    "BYTEPS_TRACE_END_STEP": "no trace is written",
    "BYTEPS_TELEMETRY_ON": "no telemetry is kept",
    "DMLC_ENABLE_RDMA": "psgc speaks TCP and shared memory",
    "DMLC_ENABLE_UCX": "psgc speaks TCP and shared memory",
    "DMLC_INTERFACE": "use DMLC_NODE_HOST",
    "DMLC_GROUP_SIZE": "a server is one member",
    "DMLC_LOCAL": "shared memory is chosen by itself: PSGC_TRANSPORT",
    "DMLC_NUM_PORTS": "a server listens on one port",
    "DMLC_RANK": "ranks follow from DMLC_WORKER_ID and BYTEPS_LOCAL_RANK",
    "DMLC_USE_KUBERNETES": "nothing has to be known of Kubernetes",
    "PS_HEARTBEAT_INTERVAL": "use PSGC_HEARTBEAT_S",
    "PS_HEARTBEAT_TIMEOUT": "use PSGC_DEAD_S",
    "PS_RESEND": "psgc always replays what was lost",
    "PS_VERBOSE": "use PSGC_LOG_LEVEL",
}
# Read elsewhere than in Config: by psgc-launch, for the workers it starts.
LAUNCHER_VARIABLES: Final = {
    "BYTEPS_VISIBLE_CPU_CORES": "cores that each local rank stays on, as in `0,2-3:4-7`; default: all of them",
    "BYTEPS_ENABLE_GDB": "1: each worker runs under gdb, which prints a backtrace if it crashes",
    "PSGC_NODE_SIZES": "workers on each node, as in `4,4,2`; needed for torch.distributed's ranks where nodes differ in size",
    "PSGC_TEST_FAULT": "nothing; marks the processes of psgc's own tests",
}


# Who is who: a misspelt one of these is refused, for without it the job would be another one.
MEMBERSHIP: Final = {
    "DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK",
    "BYTEPS_LOCAL_SIZE", "BYTEPS_FORCE_DISTRIBUTED",
}  # fmt: skip
PREFIXES: Final = ("PSGC", "BYTEPS", "DMLC")
NEAR: Final = 0.69  # difflib's ratio: DMLC_PS_ROOT_HOST is near to DMLC_PS_ROOT_URI, no name that BytePS or ps-lite has is near to another


def _known() -> dict[str, str]:
    """Every name that is honoured under one of psgc's prefixes, by what follows the prefix."""
    names = [name for v in VARIABLES if not v.meaning.startswith("set by") for name in (v.name, *v.aliases)]
    return {name.partition("_")[2]: name for name in reversed((*names, *LAUNCHER_VARIABLES)) if name.partition("_")[0] in PREFIXES}


def _unknown(env: Mapping[str, str]) -> dict[str, str]:
    """Names that are set, and nothing reads, each with the one that was meant ("" if none is near): of those that are not set, if any."""
    honoured = {name for v in VARIABLES for name in (v.name, *v.aliases)} | LAUNCHER_VARIABLES.keys() | WITHOUT_EFFECT.keys()
    unknown, known = {}, _known()
    missing = {end: name for end, name in known.items() if not env.get(name, "").strip()}
    for name in sorted(env):
        prefix, _, end = name.partition("_")
        if name in honoured or not end:
            continue
        if prefix in PREFIXES:
            meant = nearest(end, known, 0.9) or nearest(end, missing, NEAR) or nearest(end, known, NEAR)
            unknown[name] = known.get(meant, "")
        elif end in missing and sorted(prefix) in [sorted(p) for p in PREFIXES]:  # DLMC_NUM_WORKER
            unknown[name] = known[end]
    return unknown


def _refuse_mistyped(env: Mapping[str, str]) -> None:
    for name, meant in _unknown(env).items():
        if meant in MEMBERSHIP and not env.get(meant, "").strip():
            raise ConfigError(f"{name}={env[name]} is set, but psgc knows no such name; did you mean {meant}? Else unset it")


def _notes(env: Mapping[str, str], role: str) -> list[str]:
    """Warnings. A known name without effect on this role is no news: `psgc run` gives every process the same environment."""
    notes = [f"{name} is set but has no effect: {why}" for name, why in sorted(WITHOUT_EFFECT.items()) if name in env]
    for name, meant in _unknown(env).items():
        notes.append(f"{name} is set but unknown; " + (f"did you mean {meant}?" if meant else "see docs/env.md for the names psgc honours"))
    return notes
