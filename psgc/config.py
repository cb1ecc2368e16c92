"""The configuration of one process: the only reader of ``os.environ``.

``psgc/variables.py`` has the table of every name that psgc honours; docs/env.md shows the same table and a test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from psgc.diagnostics.names import notes_on, raised, refuse_mistyped
from psgc.errors import ConfigError
from psgc.processes.addresses import endpoint, interface_address, is_loopback
from psgc.processes.token_file import await_tokens, read_tokens
from psgc.variables import VARIABLES, Variable

Role = Literal["worker", "server", "scheduler"]
DEAD_S: Final = 60.0


def outlet() -> str:
    """``Config.outlet``, for code that runs before the configuration is read."""
    return os.environ.get("PSGC_OUTLET", "").strip()


@dataclass(frozen=True, slots=True)
class Agent:
    """The torchrun agent that started this process, whose store outlives the workers. node: its number; attempt: how often it has started them before."""

    host: str
    port: int
    node: str
    attempt: str


def agent() -> Agent | None:
    """None where no agent serves a store. For code that runs without a configuration, because that may be what is wrong."""
    named = {name: os.environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")}
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() != "True"
        or not all(named.values())
        or not named["MASTER_PORT"].isdigit()
    ):
        return None
    return Agent(named["MASTER_ADDR"], int(named["MASTER_PORT"]), named["GROUP_RANK"], named["TORCHELASTIC_RESTART_COUNT"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one process. Built by ``from_env``; logged at the start."""

    role: Role = "worker"
    nodes: int = 1
    servers: int = 1
    servers_by: str = ""  # PSGC_SERVERS as it was set
    root_host: str = ""
    root_port: int = 0
    node: int = 0
    server_index: int = -1
    node_host: str = ""
    port: int = 0
    wire: str = "psgc"
    interface: str = ""
    local_files: bool = False
    pslite_heartbeat_s: float = 0.0
    pslite_dead_s: float = 0.0
    pslite_resend: bool = False
    pslite_resend_ms: int = 1000
    pslite_racy: bool = False
    advertise: str = ""
    local_rank: int = 0
    local_size: int = 1
    reduce_roots: tuple[int, ...] = ()  # all local ranks
    switch_size: int = 0  # not said
    force_distributed: bool = False
    job: int = 0
    token: str = field(default="", repr=False)  # of those in PSGC_TOKEN_FILE the oldest
    token_file: str = ""
    newer_tokens: tuple[str, ...] = field(default=(), repr=False)
    syncer: str = ""
    learner: str = ""
    encrypt: bool = False
    codec: str = "none"
    codec_given: str = ""  # PSGC_CODEC as it was set; "" where it was not
    plan: str = ""
    quality: str = "safe"
    layout_out: str = ""
    late_synchronization: bool = False
    part_bytes: int = 4 << 20
    part_bytes_given: bool = False  # PSGC_PART_BYTES, or BytePS's name for it, was set
    fuse_bytes: int = 4 << 20
    min_compress_bytes: int = 64 << 10
    credit_bytes: int = 64 << 20  # enough to keep 100 Gbit/s busy over 5 ms
    credit_parts: int = -1  # no limit in parts
    hash_fn: str = ""  # BytePS's; "" for psgc's own placement
    hash_coefficient: int = 1
    mixed_mode: bool = False
    mixed_bound: int = 101
    async_mode: bool = False
    staleness: int = -1  # no bound
    backup_workers: int = 0
    nonfinite: str = "propagate"
    allow_pickle: bool = False
    seed: int = 0
    profile: str = ""
    profile_iterations: int = 20
    profile_only: bool = False
    verify: str = ""
    verify_rounds: int = 6
    gpu_codecs: bool = True
    collectives: str = "host"
    cpu_threads: int = 0  # 0: from the cores and the local size
    server_threads: int = 0
    window_bytes: int = 1 << 30
    transport: str = "auto"
    link_mbit: float = 0.0  # not paced
    link_fd: int = -1
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    on_server_loss: str = "restart"
    replicas: bool = False
    standby: bool = False
    on_worker_loss: str = "stop"
    incarnation: int = 0  # from 1, of a worker under a launcher that may start another in its place; above 1 of all that follow another
    on_scheduler_loss: str = "restart"
    journal: str = ""
    journal_fds: tuple[int, ...] = ()
    dead_s: float = DEAD_S  # so that a link that is cut for 20 s, and the kernel's pause after that, cost nothing
    register_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    abort_grace_s: float = 10.0
    save_timeout_s: float = 300.0
    switch_interval_s: float = 0.0005  # the interpreter's 5 ms would cost the network thread 10 ms a trip beside a busy main thread
    trace: str = ""
    trace_on: bool = False
    trace_dir: str = "./trace"
    trace_first: int = 10  # BytePS's: the first steps declare, compile and measure
    trace_last: int = 20
    log_steps: int = 100
    metrics_port: int = 0  # nowhere
    metrics_host: str = "127.0.0.1"
    metrics_otel: bool = False
    status_port: int = 0  # nowhere
    status_host: str = "127.0.0.1"
    status_token: str = field(default="", repr=False)
    log_level: str = "warning"
    log_format: str = ""  # text, unless the script has set up logging
    telemetry: bool = True
    outlet: str = ""
    launcher: str = ""
    scheduler_fd: int = -1
    on_its_own: bool = False
    serves_again: bool = False
    keeper_fd: int = -1
    world_size: int = 0  # torch.distributed's processes, as the environment has them; 0: it says nothing
    notes: tuple[str, ...] = ()  # warnings about names that are unknown, or without effect here
    meeting_place: str = ""  # MASTER_ADDR, where nothing else names the scheduler
    embedded: bool = False  # the workers start the scheduler and the servers themselves
    torchrun: bool = False  # ... in a process that torchrun's agent has started
    of_agent: bool = False  # torchrun's agent, and no launcher of psgc's, has started this worker, whoever starts the servers
    scheduler_listens: bool = False  # it did before this process began to join: if nobody listens at its address, it has ended
    lonely: str = ""  # why a worker that is alone by these settings was hardly meant to be

    def __post_init__(self) -> None:
        if self.node >= self.nodes:
            raise ConfigError(f"DMLC_WORKER_ID={self.node}, but DMLC_NUM_WORKER={self.nodes}: nodes are numbered 0 to {self.nodes - 1}")
        if self.local_rank >= self.local_size:
            raise ConfigError(f"BYTEPS_LOCAL_RANK={self.local_rank}, but BYTEPS_LOCAL_SIZE={self.local_size}: local ranks start at 0")
        if not 0 <= self.root_port < 1 << 16:
            raise ConfigError(f"DMLC_PS_ROOT_PORT={self.root_port} is no port; ports go up to 65535")
        if self.trace_folder and self.trace_last < self.trace_first:
            raise ConfigError(
                f"PSGC_TRACE_END_STEP={self.trace_last} is before PSGC_TRACE_START_STEP={self.trace_first}: the last step that is traced cannot come "
                f"before the first"
            )
        if self.hash_fn == "mixed" and not self.mixed_mode:
            raise ConfigError("BYTEPS_KEY_HASH_FN=mixed, but BYTEPS_ENABLE_MIXED_MODE is not 1: set it, too, or leave both out")
        if self.staleness >= 0 and not self.async_mode:
            raise ConfigError(
                f"PSGC_STALENESS={self.staleness} bounds asynchronous training, but PSGC_ASYNC (BYTEPS_ENABLE_ASYNC) is not 1; set both, or neither"
            )
        for name, given in (("PSGC_PLAN", self.plan), ("PSGC_PROFILE", self.profile), ("PSGC_VERIFY", self.verify)):
            if self.async_mode and given:
                raise ConfigError(f"PSGC_ASYNC=1 and {name}={given}: plans and profiles are of synchronous gradients; unset one of the two")
        if self.backup_workers:
            self._check_backup()
        if self.profile and self.verify:
            raise ConfigError(
                f"PSGC_PROFILE={self.profile} and PSGC_VERIFY={self.verify}: each ends the job when it has measured; unset one of the two"
            )
        if self.journal and not self.job:
            raise ConfigError(
                f"PSGC_JOURNAL={self.journal} without PSGC_JOB: set it to a number of this job's own, so that no other job's journal is read"
            )
        if self.plan and self.codec != "none":
            raise ConfigError(
                f"PSGC_PLAN={self.plan} names each bucket's codec, but PSGC_CODEC={self.codec} is set, too; leave one of them out"
            )

    def _check_backup(self) -> None:
        asked = f"PSGC_BACKUP_WORKERS={self.backup_workers}"
        if self.async_mode:
            raise ConfigError(f"{asked} and PSGC_ASYNC=1: asynchronous training waits for nobody; unset one of the two")
        if self.on_worker_loss != "stop":
            raise ConfigError(
                f"{asked} and PSGC_ON_WORKER_LOSS={self.on_worker_loss}: a worker that dies may owe a step to the others; unset one, or leave it at stop"
            )
        if self.verify:
            raise ConfigError(f"{asked} and PSGC_VERIFY={self.verify}: what is late would be lost between two codecs; unset one of the two")
        if self.wire != "psgc":
            raise ConfigError(f"{asked} and PSGC_WIRE={self.wire}: servers of that wire await every worker; unset one of the two")

    @property
    def solo(self) -> bool:
        """Whether this worker trains alone: no scheduler is named, or the job has one process and is not forced to use servers."""
        return not self.root_host or (self.nodes * self.local_size == 1 and not self.force_distributed)

    @property
    def trace_folder(self) -> str:
        """The folder for timelines; "" if none are written."""
        return self.trace or (self.trace_dir if self.trace_on else "")

    @property
    def trace_as_byteps(self) -> bool:
        """Whether workers alone write timelines, in BytePS's format."""
        return self.trace_on and not self.trace

    @property
    def hashed(self) -> str:
        """BytePS's hash function that places parts, as a declaration carries it; "" for psgc's own placement."""
        if self.mixed_mode:
            return f"mixed:{self.mixed_bound}"
        return f"built_in:{self.hash_coefficient}" if self.hash_fn == "built_in" else self.hash_fn

    @property
    def root_endpoint(self) -> str:
        return endpoint(self.root_host, self.root_port)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Read, parse and check the environment. Raises ConfigError that names the variable, its value and what was expected; PsgcError if the job's tokens
        cannot be read, for PSGC_DEAD_S, by a process that follows another."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            name = next((n for n in (variable.name, *variable.aliases) if env.get(n, "").strip()), None)
            if name is not None:
                values[variable.field] = _parse(variable, name, raised(name, env[name]))
        values.update(overrides)
        values["codec_given"] = values.get("codec", "")
        values["part_bytes_given"] = "part_bytes" in values
        if values.get("token_file"):
            file, follows = values["token_file"], values.get("incarnation", 0) > 1
            *newer, values["token"] = await_tokens(file, values.get("dead_s", DEAD_S)) if follows else read_tokens(file)
            values["newer_tokens"] = tuple(newer)
        _from_torchrun(env, values)
        refuse_mistyped(env)
        torchrun = bool(env.get("TORCHELASTIC_RUN_ID", "").strip())
        values["embedded"] = _embedded(env, values, overrides, torchrun)
        values["torchrun"] = torchrun and values["embedded"]
        values["of_agent"] = torchrun and values.get("role", "worker") == "worker" and not ("role" in overrides or "launcher" in values)
        if values["embedded"]:
            values.setdefault("servers", values.get("nodes", 1))
        values.setdefault("world_size", int(env["WORLD_SIZE"]) if env.get("WORLD_SIZE", "").isdigit() else 0)
        values.setdefault("meeting_place", "" if env.get("DMLC_PS_ROOT_URI", "").strip() else env.get("MASTER_ADDR", "").strip())
        config = cls(**values, notes=tuple(notes_on(env)), lonely=_lonely(env, values))
        if config.interface and config.wire != "pslite" and not (config.node_host or config.solo or config.role == "scheduler"):
            return replace(config, node_host=interface_address(config.interface, f"DMLC_INTERFACE={config.interface}"))
        return config

    @property
    def tokens(self) -> tuple[str, ...]:
        """The newest first; empty for a job without one."""
        return (*self.newer_tokens, self.token) if self.token else ()

    def require_alone(self) -> None:
        """Raise ConfigError if the environment mentions other members, so that this worker was hardly meant to train alone."""
        if self.lonely:
            raise ConfigError(self.lonely)

    def require_cluster(self) -> None:
        """Raise ConfigError unless this process knows how to find the scheduler and how many members to expect."""
        if self.meeting_place and not self.root_port:
            raise ConfigError(
                f"MASTER_ADDR={self.meeting_place} is set, as torchrun does, but DMLC_PS_ROOT_PORT is missing: set PSGC_SERVERS=embedded, so that the workers "
                f"start the scheduler and the servers; or start these beside it, and set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER everywhere "
                f"(docs/clusters.md); or start the job with `psgc run`"
            )
        if not self.root_host or not self.root_port:
            raise ConfigError(
                f"a {self.role} needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (the scheduler's address), "
                f"got {self.root_host or 'none'!r} and {self.root_port or 'none'!r}; or start the job with `psgc run`"
            )
        self.require_secret()
        if self.role == "server" and not self.servers:
            raise ConfigError(
                "DMLC_NUM_SERVER=0: this job has no servers; start the scheduler and the workers alone, or set it to the number of servers"
            )
        if self.async_mode and not self.servers:
            raise ConfigError("PSGC_ASYNC=1 and DMLC_NUM_SERVER=0: servers hold the weights of asynchronous training; start one or more")
        if self.backup_workers and not self.servers:
            raise ConfigError(
                f"PSGC_BACKUP_WORKERS={self.backup_workers} and DMLC_NUM_SERVER=0: workers that exchange among themselves await each other; start servers, or "
                f"unset it"
            )
        self.require_replaceable()
        self.require_replicable()

    def require_replicable(self) -> None:
        """Raise ConfigError where servers are to outlive their machines, but cannot."""
        if not self.replicas:
            return
        asked, remedy = "PSGC_REPLICAS=1", "or leave it at 0"
        if self.embedded:
            raise ConfigError(
                f"{asked} and PSGC_SERVERS=embedded: a lost machine takes workers with it, and torchrun then ends the others; start servers with "
                f"psgc-launch, {remedy}"
            )
        if self.servers < 2:
            raise ConfigError(
                f"{asked} and DMLC_NUM_SERVER={self.servers}: what a server keeps is sent to another server's machine; start servers on two "
                f"machines or more, {remedy}"
            )
        if self.backup_workers:
            raise ConfigError(
                f"{asked} and PSGC_BACKUP_WORKERS={self.backup_workers}: late contributions have no replicas; unset one, {remedy}"
            )
        if self.on_server_loss == "stop":
            raise ConfigError(f"{asked} and PSGC_ON_SERVER_LOSS=stop: the job would end when a server dies; unset one, {remedy}")
        if self.wire != "psgc":
            raise ConfigError(f"{asked} and PSGC_WIRE={self.wire}: servers of that wire keep nothing elsewhere; unset one, {remedy}")
        if self.dead_s >= self.step_timeout_s:
            raise ConfigError(
                f"{asked} and PSGC_DEAD_S={self.dead_s:g}, PSGC_STEP_TIMEOUT_S={self.step_timeout_s:g}: workers would give up a server that is lost before "
                f"its standby has its place; have PSGC_DEAD_S well below PSGC_STEP_TIMEOUT_S, {remedy}"
            )

    def require_replaceable(self) -> None:
        """Raise ConfigError where workers that die are to be followed by others, but cannot be."""
        if self.on_worker_loss == "stop":
            return
        asked, remedy = f"PSGC_ON_WORKER_LOSS={self.on_worker_loss}", "or leave it at stop"
        if not self.servers:
            raise ConfigError(
                f"{asked} and DMLC_NUM_SERVER=0: workers that exchange among themselves cannot go on without one; start servers, {remedy}"
            )
        if self.async_mode:
            raise ConfigError(
                f"{asked} and PSGC_ASYNC=1: changes that a dead worker had pushed are in the servers' weights already; unset one, {remedy}"
            )
        if self.wire != "psgc":
            raise ConfigError(
                f"{asked} and PSGC_WIRE={self.wire}: servers of that wire await every worker's first process; unset one, {remedy}"
            )
        if self.of_agent:
            raise ConfigError(
                f"{asked} under torchrun, which itself ends all workers when one dies; start the job with psgc run or psgc-launch, {remedy}"
            )
        if self.embedded:
            raise ConfigError(
                f"{asked} and PSGC_SERVERS=embedded: nobody starts another process in a dead worker's place; start the job with psgc run or psgc-launch, "
                f"{remedy}"
            )

    def require_secret(self) -> None:
        """Raise ConfigError where payloads are to be encrypted, but their keys would not be."""
        if self.encrypt and not self.token and not is_loopback(self.root_host):
            raise ConfigError(
                "PSGC_ENCRYPT=1 without PSGC_TOKEN: the keys of payload connections would travel in clear; set PSGC_TOKEN to one long random text everywhere"
            )


def _parse(variable: Variable, name: str, text: str) -> Any:
    try:
        return variable.parse(text)
    except (ValueError, KeyError) as error:
        meant = str(error) if str(error).startswith(";") else ""
        raise ConfigError(f"{name}={text!r} is wrong: expected {variable.parse.__doc__} ({variable.meaning}){meant}") from None


def _from_torchrun(env: Mapping[str, str], values: dict[str, Any]) -> None:
    """Under torchrun, without DMLC_*: nodes from GROUP_WORLD_SIZE, else from WORLD_SIZE and LOCAL_WORLD_SIZE. Does nothing elsewhere."""
    if "nodes" in values or not env.get("WORLD_SIZE", "").isdigit():
        return
    world, local = int(env["WORLD_SIZE"]), values.get("local_size", 1)
    if env.get("GROUP_WORLD_SIZE", "").isdigit():  # nodes may differ in size
        values["nodes"] = int(env["GROUP_WORLD_SIZE"])
        return
    if world % local:
        raise ConfigError(f"WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={local}; set DMLC_NUM_WORKER and DMLC_WORKER_ID")
    values["nodes"] = world // local
    if "node" not in values and env.get("RANK", "").isdigit():
        values["node"] = int(env["RANK"]) // local


def _embedded(env: Mapping[str, str], values: Mapping[str, Any], overrides: Mapping[str, Any], torchrun: bool) -> bool:
    """Whether the workers are to start the scheduler and the servers: see PSGC_SERVERS. Raises ConfigError where they are, but cannot."""
    asked = values.get("servers_by", "")
    if asked == "external" or values.get("role", "worker") != "worker" or {"root_host", "root_port"} & overrides.keys():
        return False
    if not asked:
        taken = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER")
        return bool(
            torchrun and values.get("wire", "psgc") == "psgc" and not any(env.get(name, "").strip() for name in (*taken, "DMLC_ROLE"))
        )
    if address := env.get("DMLC_PS_ROOT_URI", "").strip():
        raise ConfigError(
            f"PSGC_SERVERS=embedded: the workers start the scheduler, but DMLC_PS_ROOT_URI={address} names one that others start; unset one of the two"
        )
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(name, "").strip()]:
        raise ConfigError(
            f"PSGC_SERVERS=embedded needs torch.distributed's variables, as torchrun sets them, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; start the script with torchrun, or the job with `psgc run`"
        )
    if values.get("wire", "psgc") != "psgc":
        raise ConfigError("PSGC_SERVERS=embedded starts servers of psgc's own wire, but PSGC_WIRE=pslite; unset one of the two")
    return True


def _lonely(env: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """What is missing if the environment mentions other members but the worker would train alone; else ""."""

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
