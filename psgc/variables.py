"""Every name of the environment that psgc honours, accepts without effect, or hands on: tables, which docs/env.md shows.

Reads no environment: ``psgc/config.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from psgc.diagnostics.spelling import did_you_mean
from psgc.processes.addresses import bare_host, join, split
from psgc.program.backends import ASKED
from psgc.transport.registry import choices
from psgc.wire.carriers import MODULES

MIN_PART_BYTES: Final = 4096
MOST_PORT: Final = 65535
LONGEST_S: Final = 2_147_483.0  # 25 days: longer waits, by which users mean "never", overflow the kernel's milliseconds


def _integer(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(parse.__doc__)
        return value

    parse.__doc__ = f"a whole number, at least {minimum}" if maximum is None else f"a whole number from {minimum} to {maximum}"
    return parse


def _seconds(text: str) -> float:
    """a number of seconds above 0"""
    return min(_rate(text), LONGEST_S)


def _number(text: str) -> float:
    """a number of seconds, at least 0"""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("at least 0")
    return value


def _rate(text: str) -> float:
    """a number above 0"""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("above 0")
    return value


def _switch(text: str) -> bool:
    """0 or 1"""
    return {"0": False, "1": True}[text.strip()]


def _text(text: str) -> str:
    """text"""
    return text.strip()


def _roots(text: str) -> tuple[int, ...]:
    """local ranks, as in `2,3`, or auto"""
    if text.strip() == "auto":  # the launcher has told what that is; elsewhere all ranks are roots
        return ()
    found = [_integer(0)(root) for root in text.replace(" ", ",").split(",") if root]
    if not found or len(set(found)) < len(found):
        raise ValueError("each once")
    return tuple(sorted(found))


def _numbers(text: str) -> tuple[int, ...]:
    """numbers with commas"""
    return tuple(int(number) for number in text.split(","))


def _switches(text: str) -> int:
    """how many GPUs are behind a PCIe switch, or auto"""
    if text.strip() == "auto":
        return 0
    return max(1, _integer(0)(text.strip()))


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


def _level(text: str) -> str:
    """one of debug, info, warning, error; or BytePS's trace and fatal"""
    level = text.strip().lower()
    return {"trace": "debug", "fatal": "error"}.get(level) or _one_of("debug", "info", "warning", "error")(level)


def _transport(text: str) -> str:
    return str(_one_of(*choices())(text))


_transport.__doc__ = _one_of(*choices()).__doc__


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
    Variable(
        "DMLC_ROLE", "role", _one_of("worker", "server", "scheduler"), "wsc",
        "the role of this process; required by psgc-launch, which also takes joint (server,worker) and other roles joined by commas",
    ),
    Variable("DMLC_NUM_WORKER", "nodes", _integer(1), "wsc", "number of worker machines (nodes)"),
    Variable("DMLC_NUM_SERVER", "servers", _integer(0), "wsc", "number of servers; 0: workers aggregate among themselves"),
    Variable(
        "PSGC_SERVERS", "servers_by", _one_of("embedded", "external"), "w",
        "embedded: the workers start the scheduler (on rank 0's node) and the servers (one a node, or DMLC_NUM_SERVER in all), and find them through "
        "torchrun's store; external: others start them. Default: embedded under torchrun, where no DMLC_NUM_WORKER and no scheduler's address are set",
    ),
    Variable("DMLC_PS_ROOT_URI", "root_host", _host, "wsc", "address of the scheduler", ("MASTER_ADDR",)),
    Variable("DMLC_PS_ROOT_PORT", "root_port", _integer(1), "wsc", "port of the scheduler"),
    Variable("DMLC_WORKER_ID", "node", _integer(0), "w", "this node's number, from 0", ("GROUP_RANK",)),
    Variable("DMLC_SERVER_ID", "server_index", _integer(0), "s", "this server's number; without it the scheduler numbers servers"),
    Variable(
        "DMLC_NODE_HOST", "node_host", _host, "ws",
        "server: address that workers reach it at; worker: address that it reaches servers and other workers from; default: the one that reaches the scheduler",
    ),
    Variable("DMLC_PORT", "port", _integer(0), "s", "port this server listens on; 0: any"),
    Variable(
        "PSGC_WIRE", "wire", _one_of(*MODULES), "wsc",
        "pslite: speak BytePS's wire, without authentication, to work with its processes (pslite.md); the same everywhere",
    ),
    Variable("DMLC_INTERFACE", "interface", _text, "ws", "the interface whose address DMLC_NODE_HOST is, if not set; default with PSGC_WIRE=pslite: lo"),
    Variable("DMLC_LOCAL", "local_files", _switch, "wsc", "with PSGC_WIRE=pslite, 1: sockets are files of /tmp; all processes on one machine"),
    Variable("PS_HEARTBEAT_INTERVAL", "pslite_heartbeat_s", _number, "ws", "with PSGC_WIRE=pslite, seconds between heartbeats; 0: none"),
    Variable(
        "PS_HEARTBEAT_TIMEOUT", "pslite_dead_s", _number, "c",
        "with PSGC_WIRE=pslite, a node without heartbeats for so many seconds counts as dead, and another may take its place; 0: never",
    ),
    Variable("PS_RESEND", "pslite_resend", _switch, "wsc", "with PSGC_WIRE=pslite, 1: messages are acknowledged, and sent again until they are"),
    Variable("PS_RESEND_TIMEOUT", "pslite_resend_ms", _integer(1), "wsc", "with PS_RESEND=1, milliseconds that an acknowledgement may take"),
    Variable(
        "PSGC_PSLITE_RACY", "pslite_racy", _switch, "wsc",
        "with PSGC_WIRE=pslite, 1: BytePS's workers may share BytePS's servers with psgc's, although sums can then be wrong (pslite.md)",
    ),
    Variable("PSGC_ADVERTISE", "advertise", _host_and_port, "s", "host:port that workers reach this server at, where it differs (NAT, proxy)"),
    Variable("BYTEPS_LOCAL_RANK", "local_rank", _integer(0), "w", "this process's number within its node", ("LOCAL_RANK",)),
    Variable("BYTEPS_LOCAL_SIZE", "local_size", _integer(1), "w", "worker processes on this node", ("LOCAL_WORLD_SIZE",)),
    Variable(
        "BYTEPS_REDUCE_ROOTS", "reduce_roots", _roots, "w",
        "local ranks of this node that alone own shards of its sums, as in `2,3`, and so talk to servers and other nodes under hierarchical plans; "
        "auto (for launchers): of the GPUs off the network interfaces' PCIe switches, on NVLink machines",
    ),
    Variable(
        "BYTEPS_PCIE_SWITCH_SIZE", "switch_size", _switches, "w",
        "workers (GPUs) behind each PCIe switch of this node: hierarchical plans sum behind each first; auto (for launchers): as detected",
    ),
    Variable("BYTEPS_FORCE_DISTRIBUTED", "force_distributed", _switch, "w", "1: one worker, too, goes through the servers"),
    Variable("PSGC_JOB", "job", _integer(0), "wsc", "job id in every header, so that jobs on one network cannot mix"),
    Variable("PSGC_TOKEN", "token", _text, "wsc", "the job's secret, from which keys are made: long and random; it never travels"),
    Variable(
        "PSGC_TOKEN_FILE", "token_file", _text, "wsc",
        "in place of PSGC_TOKEN: a file with the token, or with several, one a line and the newest first; it is read again when it changes",
    ),
    Variable("PSGC_SYNCER", "syncer", _host_and_port, "w", "host:port of the syncer that a Decoupled learner connects to, where the script names none"),
    Variable("PSGC_LEARNER", "learner", _text, "w", "this Decoupled learner's name, where the script gives none; its token is PSGC_TOKEN"),
    Variable(
        "PSGC_ENCRYPT", "encrypt", _switch, "wsc",
        "1: payloads over TCP are encrypted (AES-GCM); needs PSGC_TOKEN beyond one machine, and `pip install 'psgc[encrypt]'` everywhere",
    ),
    Variable("PSGC_CODEC", "codec", _text, "w", "codec of DistributedOptimizer where the script names none"),
    Variable("PSGC_PLAN", "plan", _text, "w", "file of the plan that gradients travel by (only rank 0's machine needs it), or auto; set it everywhere"),
    Variable(
        "PSGC_QUALITY", "quality", _one_of("exact", "safe", "fast"), "w",
        "codecs that auto may choose. exact: none that changes a gradient; safe: those that keep training within the noise of seeds; fast: all, in stages",
    ),
    Variable("PSGC_LAYOUT_OUT", "layout_out", _text, "w", "rank 0 writes the layout of its first DistributedOptimizer or ddp_hook to this file, as a plan"),
    Variable(
        "PSGC_LATE_SYNCHRONIZATION", "late_synchronization", _switch, "w",
        "1: the mean gradients are there after step() or optimizer.synchronize(), not after backward",
    ),
    Variable(
        "PSGC_PART_BYTES", "part_bytes", _integer(MIN_PART_BYTES), "w",
        "bytes of a tensor in one part at most; a model's parts are halved until each server has four (of nine or more: eight), and a slow connection's "
        "until one takes half a second (of none, casts and codecs that work block by block, such as int8: 10 ms)",
        ("BYTEPS_PARTITION_BYTES",),
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
    Variable(
        "BYTEPS_KEY_HASH_FN", "hash_fn", _one_of("djb2", "naive", "built_in", "sdbm", "mixed"), "w",
        "the server of each part by BytePS's hash function; only to compare with BytePS, because psgc's own placement balances the servers",
    ),
    Variable("BYTEPS_BUILT_IN_HASH_COEF", "hash_coefficient", _integer(0), "w", "with BYTEPS_KEY_HASH_FN=built_in: what the hash is multiplied by"),
    Variable("BYTEPS_ENABLE_MIXED_MODE", "mixed_mode", _switch, "w", "1: as BYTEPS_KEY_HASH_FN, BytePS's hash for servers on worker machines and on others"),
    Variable("BYTEPS_MIXED_MODE_BOUND", "mixed_bound", _integer(1), "w", "with BYTEPS_ENABLE_MIXED_MODE=1: BytePS's number of buckets, at least one a server"),
    Variable(
        "PSGC_ASYNC", "async_mode", _switch, "w",
        "1: workers step on their own gradients and push what they have changed; servers hold the weights (optimizers.md)", ("BYTEPS_ENABLE_ASYNC",),
    ),
    Variable(
        "PSGC_STALENESS", "staleness", _integer(0), "w",
        "with PSGC_ASYNC=1: how many steps a worker may be ahead of the slowest; 0: all in step; default: any number",
    ),
    Variable(
        "PSGC_BACKUP_WORKERS", "backup_workers", _integer(0), "w",
        "how many workers' gradients a step of DistributedOptimizer need not wait for; late ones are added to the next step (operations.md)",
    ),
    Variable("PSGC_NONFINITE", "nonfinite", _one_of("propagate", "raise"), "w", "NaN or infinity in a gradient: pass on, or end the job"),
    Variable("PSGC_SEED", "seed", _integer(0), "w", "seed of the codecs' random streams"),
    Variable(
        "PSGC_PROFILE", "profile", _text, "w",
        "rank 0 writes to this file when gradients become ready; until then they leave only when backward is over",
    ),
    Variable("PSGC_PROFILE_ITERATIONS", "profile_iterations", _integer(3), "w", "iterations that PSGC_PROFILE observes, after a warm-up"),
    Variable("PSGC_PROFILE_ONLY", "profile_only", _switch, "w", "1: with PSGC_PROFILE, every rank leaves the job once it has been observed"),
    Variable(
        "PSGC_VERIFY", "verify", _text, "w",
        "set by `psgc verify`: rank 0 writes to this file what steps take by the job's plan, its plain codec, bf16 and none; then the job ends",
    ),
    Variable("PSGC_VERIFY_ROUNDS", "verify_rounds", _integer(1), "w", "windows of 5 steps that PSGC_VERIFY measures each of them in"),
    Variable(
        "PSGC_GPU_CODECS", "gpu_codecs", _switch, "w", "0: gradients on a GPU are copied to the host and encoded there"
    ),
    Variable(
        "PSGC_COLLECTIVES", "collectives", _one_of(*ASKED), "w",
        "what carries a plan's collectives where gradients lie on GPUs, of floats and of what GPUs encode and decode: nccl: from GPU to GPU; "
        "host: the hosts' memory; auto: nccl where every rank of a group has a GPU of its own, else host",
    ),
    Variable("PSGC_CPU_THREADS", "cpu_threads", _integer(1), "w", "encode and decode threads", ("BYTEPS_THREADPOOL_SIZE",)),
    Variable("PSGC_SERVER_THREADS", "server_threads", _integer(1), "s", "summation threads", ("BYTEPS_SERVER_ENGINE_THREAD",)),
    Variable("PSGC_WINDOW_BYTES", "window_bytes", _integer(1), "s", "payload bytes of a plan that a server has room for at once"),
    Variable("PSGC_TRANSPORT", "transport", _transport, "ws", "auto: shared memory on one host, else TCP"),
    Variable("PSGC_LINK_MBIT", "link_mbit", _rate, "ws", "set by `psgc run --link-mbit`: rate of this process's host's link, each way, 1e6 bit/s"),
    Variable("PSGC_LINK_FD", "link_fd", _integer(0), "ws", "set by `psgc run --link-mbit`: descriptor by which the processes of a host share its link"),
    Variable("PSGC_HEARTBEAT_S", "heartbeat_s", _seconds, "wsc", "seconds between heartbeats"),
    Variable("PSGC_SILENCE_S", "silence_s", _seconds, "wsc", "a wait is reported after this many seconds, then less and less often, at most a minute apart"),
    Variable("PSGC_DEAD_S", "dead_s", _seconds, "wsc", "a silent member on another host counts as dead after this many seconds"),
    Variable(
        "PSGC_ON_SERVER_LOSS", "on_server_loss", _one_of("restart", "stop"), "s",
        "what a server's death does. restart: its launcher starts it again, and it goes on from what it had committed; stop: the job ends",
    ),
    Variable(
        "PSGC_REPLICAS", "replicas", _switch, "sc",
        "1: what each server commits is also kept on another server's machine, where a process takes its place if its own machine is lost "
        "(operations.md); set it on every machine that has a server, and for the scheduler",
    ),
    Variable("PSGC_STANDBY", "standby", _switch, "s", "set by launchers under PSGC_REPLICAS=1: this process takes a server's place if that is lost"),
    Variable(
        "PSGC_ON_WORKER_LOSS", "on_worker_loss", _one_of("stop", "wait", "shrink"), "wsc",
        "what a worker's death does. stop: the job ends; wait: the others wait until its launcher has started another process in its place, which goes on from "
        "their state; shrink: they go on without it meanwhile (operations.md); of jobs with servers whose script uses psgc.torch.Elastic",
    ),
    Variable("PSGC_INCARNATION", "incarnation", _integer(0), "wsc", "set by launchers: which of the processes that follow one another in its place it is"),
    Variable(
        "PSGC_ON_SCHEDULER_LOSS", "on_scheduler_loss", _one_of("restart", "stop"), "c",
        "what the scheduler's death does. restart: its launcher starts it again, and it goes on from its journal; stop: the job ends",
    ),
    Variable(
        "PSGC_JOURNAL", "journal", _text, "c",
        "file of the scheduler's journal, where another process than its launcher starts it again; needs PSGC_JOB; default: the launcher keeps it in memory",
    ),
    Variable("PSGC_REGISTER_TIMEOUT_S", "register_timeout_s", _seconds, "wsc", "registration gives up after this many seconds"),
    Variable("PSGC_STEP_TIMEOUT_S", "step_timeout_s", _seconds, "wsc", "a stalled step, barrier or declaration fails after this many seconds"),
    Variable("PSGC_ABORT_GRACE_S", "abort_grace_s", _seconds, "w", "a failed job's process that has not ended by itself is ended after this many seconds"),
    Variable(
        "PSGC_SAVE_TIMEOUT_S", "save_timeout_s", _seconds, "w",
        "inside `with psgc.saving():` a failed job's process is ended only after the block, or after this many seconds",
    ),
    Variable("PSGC_SWITCH_INTERVAL", "switch_interval_s", _seconds, "w", "Python's thread switch interval in the trainer, seconds"),
    Variable("PSGC_TRACE", "trace", _text, "ws", "folder that each rank and each server writes its timeline to (observation.md)"),
    Variable("BYTEPS_TRACE_ON", "trace_on", _switch, "ws", "1: without PSGC_TRACE, workers write BytePS's timelines: BYTEPS_TRACE_DIR/<local rank>/comm.json"),
    Variable("BYTEPS_TRACE_DIR", "trace_dir", _text, "ws", "with BYTEPS_TRACE_ON=1, the folder of those timelines"),
    Variable("PSGC_TRACE_START_STEP", "trace_first", _integer(1), "ws", "first step that is traced, from 1", ("BYTEPS_TRACE_START_STEP",)),
    Variable("PSGC_TRACE_END_STEP", "trace_last", _integer(1), "ws", "last step that is traced", ("BYTEPS_TRACE_END_STEP",)),
    Variable(
        "PSGC_LOG_STEPS", "log_steps", _integer(0), "w",
        "at log level info, rank 0 logs step time, bytes, ratio, waiting and the slowest rank every so many steps; 0: never",
    ),
    Variable(
        "PSGC_ALLOW_PICKLE", "allow_pickle", _switch, "w",
        "1, on every rank: broadcast_object and broadcast_optimizer_state take any object, as with allow_pickle=True; ranks may then run code on one another",
    ),
    Variable(
        "PSGC_METRICS_PORT", "metrics_port", _integer(1, MOST_PORT), "wsc",
        "serve figures for Prometheus: the scheduler at this port, workers at this port + 1 + their local rank, servers at this port + 100 + their index "
        "(observation.md); needs `pip install 'psgc[watch]'`; default: nowhere",
    ),
    Variable("PSGC_METRICS_HOST", "metrics_host", _text, "wsc", "the address at which they are served; 0.0.0.0: to everybody who reaches this machine"),
    Variable("PSGC_METRICS_OTEL", "metrics_otel", _switch, "wsc", "1: OpenTelemetry, where it is installed, gets the same figures (OTEL_* say where to)"),
    Variable(
        "PSGC_STATUS_PORT", "status_port", _integer(1, MOST_PORT), "c",
        "serve a page about the job at this port (observation.md); needs `pip install 'psgc[watch]'`; default: nowhere",
    ),
    Variable("PSGC_STATUS_HOST", "status_host", _text, "c", "the address at which the page is served; beyond loopback it asks for a token"),
    Variable("PSGC_STATUS_TOKEN", "status_token", _text, "c", "the page's token; default: one is drawn, and the scheduler logs the page's address with it"),
    Variable("PSGC_LOG_LEVEL", "log_level", _level, "wsc", "least severity logged; trace counts as debug, fatal as error", ("BYTEPS_LOG_LEVEL",)),
    Variable(
        "PSGC_LOG_FORMAT", "log_format", _one_of("text", "json"), "wsc",
        "json: a JSON object a line, to stderr, also where the script has set up logging of its own; default: text, in the script's format where it has one",
    ),
    Variable("BYTEPS_TELEMETRY_ON", "telemetry", _switch, "w", "0: get_pushpull_speed() always says (0, -5.0), as BytePS's does"),
    Variable("PSGC_OUTLET", "outlet", _text, "wsc", "set by launchers: where their processes' output goes, so that one of them speaks for all"),
    Variable("PSGC_LAUNCHER", "launcher", _text, "wsc", "set by the launcher: where a process tells it whether it has joined, and why it ended"),
    Variable("PSGC_SCHEDULER_FD", "scheduler_fd", _integer(0), "c", "set by the launcher: the scheduler's listening socket"),
    Variable("PSGC_ON_ITS_OWN", "on_its_own", _switch, "c", "set by psgc-launch: other launchers start members of the scheduler's job"),
    Variable("PSGC_JOURNAL_FDS", "journal_fds", _numbers, "c", "set by the launcher: the two files of the scheduler's journal"),
    Variable("PSGC_SERVES_AGAIN", "serves_again", _switch, "sc", "set by `psgc run`: when its workers have left, the process waits for their next init()"),
    Variable(
        "PSGC_SCHEDULER_LISTENS", "scheduler_listens", _switch, "s",
        "set by torchrun's workers for the servers that they start: the scheduler listened before, and once nobody does it has ended",
    ),
    Variable("PSGC_KEEPER_FD", "keeper_fd", _integer(0), "s", "set by the launcher: socket over which the server's memory is kept"),
)  # fmt: skip

# BytePS's settings that psgc accepts and does nothing with, and why.
WITHOUT_EFFECT: Final = {
    "BYTEPS_BLOCKING_WAIT": "BytePS's DistributedDataParallel waits by it; here a wait is always asleep, and PSGC_STEP_TIMEOUT_S bounds it",
    "BYTEPS_OMP_THREAD_PER_GPU": "psgc sums in threads of its own: PSGC_SERVER_THREADS",
    "BYTEPS_NCCL_GROUP_SIZE": "psgc has no such stage",
    "BYTEPS_NCCL_NUM_RINGS": "psgc has no such stage",
    "BYTEPS_ENABLE_IPC": "shared memory is chosen by itself: PSGC_TRANSPORT",
    "BYTEPS_SOCKET_PATH": "psgc leaves no socket files",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "the server sums in the plan's order",
    "BYTEPS_SERVER_ENGINE_BLOCKING": "the server never sums in its network thread",
    "BYTEPS_SERVER_DEBUG": "use PSGC_LOG_LEVEL",
    "BYTEPS_DEBUG_SAMPLE_TENSOR": "use PSGC_LOG_LEVEL",
    "BYTEPS_GLOBAL_RANK": "ranks follow from DMLC_WORKER_ID and BYTEPS_LOCAL_RANK",
    "BYTEPS_JOB_ID": "use PSGC_JOB",
    "BYTEPS_STALENESS": "each step uses its own gradients; PSGC_STALENESS bounds asynchronous training",
    "BYTEPS_LOG_HIDE_TIME": "set the format with Python's logging",
    "BYTEPS_FORCE_JOINT_MODE": "DMLC_ROLE=joint starts a server beside the workers",
    "BYTEPS_MONITOR_INTERVAL": "what is waited for is always said: PSGC_SILENCE_S",
    "BYTEPS_BUCKET_SIZE_BYTES": "use PSGC_FUSE_BYTES",
    "BYTEPS_BUCKET_CAP_MB": "use PSGC_FUSE_BYTES",
    "BYTEPS_BUCKET_PROBE_STEPS": "the first step shows the order in which gradients become ready",
    "BYTEPS_PIPESGD_WARMUP_ITER": "each step uses its own gradients",
    "BYTEPS_ORDERED_HOSTS": "servers are numbered by DMLC_SERVER_ID, workers by DMLC_WORKER_ID",
    "BYTEPS_ADDRESS_POOL_SIZE": "psgc has no such pool",
    "BYTEPS_ZMQ_MAX_SOCKET": "psgc sets ZeroMQ up by itself",
    "BYTEPS_ZMQ_NTHREADS": "psgc sets ZeroMQ up by itself",
    "BYTEPS_IPC_COPY_NUM_THREADS": "shared memory is not copied: PSGC_TRANSPORT",
    "BYTEPS_IPC_ENABLE_ASYNC_COPY": "shared memory is not copied: PSGC_TRANSPORT",
    "BYTEPS_SERVER_DEBUG_KEY": "use PSGC_LOG_LEVEL",
    "BYTEPS_RDMA_RX_DEPTH": "psgc speaks TCP and shared memory",
    "BYTEPS_RDMA_START_DEPTH": "psgc speaks TCP and shared memory",
    "BYTEPS_RDMA_MAX_CONCURR_WR": "psgc speaks TCP and shared memory",
    "BYTEPS_PRINT_RDMA_LOG": "psgc speaks TCP and shared memory",
    "BYTEPS_UCX_SHORT_THRESH": "psgc speaks TCP and shared memory",
    "BYTEPS_UCX_FORCE_REQ_ORDER": "psgc speaks TCP and shared memory",
    "BYTEPS_UCX_QUEUE_SENDS": "psgc speaks TCP and shared memory",
    "BYTEPS_UCX_ERRH_ENABLE": "psgc speaks TCP and shared memory",
    "BYTEPS_UCX_RECONNECT_TMO": "psgc speaks TCP and shared memory",
    "DMLC_LOCKLESS_QUEUE": "psgc has no such queue",
    "DMLC_POLLING_IN_NANOSECOND": "psgc waits without polling",
    "DMLC_NUM_CPU_DEV": "psgc speaks TCP and shared memory",
    "DMLC_NUM_GPU_DEV": "psgc speaks TCP and shared memory",
    "PS_KEY_LOG": "use PSGC_LOG_LEVEL",
    "PS_DROP_MSG": "psgc's tests lose messages by themselves",
    "DMLC_ENABLE_RDMA": "psgc speaks TCP and shared memory",
    "DMLC_ENABLE_UCX": "psgc speaks TCP and shared memory",
    "DMLC_GROUP_SIZE": "a server is one member",
    "DMLC_NUM_PORTS": "a server listens on one port",
    "DMLC_RANK": "ranks follow from DMLC_WORKER_ID and BYTEPS_LOCAL_RANK",
    "DMLC_TRACKER_URI": "psgc has a launcher of its own; the scheduler's address is DMLC_PS_ROOT_URI",
    "DMLC_TRACKER_PORT": "psgc has a launcher of its own; the scheduler's port is DMLC_PS_ROOT_PORT",
    "DMLC_USE_KUBERNETES": "psgc needs no setting for Kubernetes",
    "PS_VERBOSE": "use PSGC_LOG_LEVEL",
}
# What installs BytePS reads, or a library that it uses. Images and clusters set them for all programs, so psgc does not warn of them.
OF_OTHERS: Final = {
    **dict.fromkeys(
        [f"BYTEPS_{with_}_{framework}" for with_ in ("WITH", "WITHOUT") for framework in ("TENSORFLOW", "PYTORCH", "MXNET")]
        + ["BYTEPS_WITH_UCX", "BYTEPS_UCX_HOME", "BYTEPS_UCX_PREFIX", "BYTEPS_UCX_TARBALL_PATH", "BYTEPS_WITHOUT_PRESETUP", "BYTEPS_CUDA_HOME"]
        + ["BYTEPS_CUDA_INCLUDE", "BYTEPS_CUDA_LIB", "BYTEPS_NCCL_HOME", "BYTEPS_NCCL_INCLUDE", "BYTEPS_NCCL_LIB", "BYTEPS_NCCL_LINK"]
        + ["BYTEPS_USE_MPI", "BYTEPS_MPICXX_SHOW"],
        "of BytePS's installation; psgc compiles nothing",
    ),
    **dict.fromkeys(["MXNET_SOURCE_ROOT", "MXNET_USE_MKLDNN"], "MXNet's; psgc is for PyTorch only"),
    **dict.fromkeys(["ENABLE_PROFILING", "PROFILE_PATH"], "of a profiler inside ps-lite; psgc's is PSGC_TRACE"),
    **dict.fromkeys(
        [
            "PSLITE_UCX_RNDV_THRESH", "PSLITE_UCX_IB_TRAFFIC_CLASS", "PSLITE_UCX_SOCKADDR_CM_ENABLE", "PSLITE_UCX_USE_MT_MUTEX", "UCX_HANDLE_ERRORS",
            "UCX_RNDV_THRESH", "UCX_IB_TRAFFIC_CLASS", "FI_EFA_ENABLE_SHM_TRANSFER",
        ],
        "of libraries for RDMA; psgc speaks TCP and shared memory",
    ),
}  # fmt: skip
# These have an effect with PSGC_WIRE=pslite only. For psgc's own wire, what to use instead.
PSLITE_ONLY: Final = {
    "DMLC_LOCAL": "shared memory is chosen by itself: PSGC_TRANSPORT",
    "PS_HEARTBEAT_INTERVAL": "use PSGC_HEARTBEAT_S",
    "PS_HEARTBEAT_TIMEOUT": "use PSGC_DEAD_S",
    "PS_RESEND": "psgc always replays what was lost",
    "PS_RESEND_TIMEOUT": "psgc always replays what was lost",
    "PSGC_PSLITE_RACY": "steps cannot mix on it",
}
# Read elsewhere than in Config: by psgc-launch, for the workers it starts.
LAUNCHER_VARIABLES: Final = {
    "BYTEPS_VISIBLE_CPU_CORES": "cores that each local rank stays on, as in `0,2-3:4-7`; default: all of them",
    "BYTEPS_NUMA_ON": "1: each local rank stays on cores of one NUMA node, its GPU's where that is known; default, unlike BytePS's: 0",
    "BYTEPS_NUMA_DEFAULT_QUOTA": "with BYTEPS_NUMA_ON=1: physical cores of each local rank; default: an equal share",
    "BYTEPS_NUMA_ROOT_QUOTA": "with BYTEPS_NUMA_ON=1: physical cores of the last local rank; default: what its NUMA node has left",
    "BYTEPS_CPU_BLACKLIST": "with BYTEPS_NUMA_ON=1: cores that no local rank gets, as in `0,2-3`; -1: none",
    "BYTEPS_MULTITHREADED_CPU": "with BYTEPS_NUMA_ON=1, 0: one hardware thread of each physical core; default: 1, all of them",
    "NVIDIA_VISIBLE_DEVICES": "devices of this machine, as in `0,1`: a worker for each, without BYTEPS_LOCAL_SIZE; `all` counts as none, as in BytePS",
    "CUDA_VISIBLE_DEVICES": "the same, where NVIDIA_VISIBLE_DEVICES names none",
    "PSGC_CUDA_DEVICES": "CUDA_VISIBLE_DEVICES of each worker: `inherited` (default), `listed`: NVIDIA_VISIBLE_DEVICES, `own`: one, the worker's",
    "PSGC_INTERFACES": "this machine's interfaces, as in `eth0,eth1`: DMLC_NODE_HOST of its local ranks and servers, in turn; auto: nearest to its GPU",
    "PSGC_LOCAL_SERVERS": "servers that psgc-launch starts here, if this machine's role is server or joint; default: 1, or one for each of PSGC_INTERFACES",
    "PSGC_SPARES": "processes that wait on each machine, with imports done, to take dead workers' places (PSGC_ON_WORKER_LOSS=wait or shrink); default: 0",
    "PSGC_RESTARTS": "how many times a job that failed is started again; set it on every machine; default: 0",
    "PSGC_STATUS_FILE": "set by `psgc slurm`: where the first node's launcher writes its exit status, of a job that goes on without a lost node",
    "PSGC_RESTART": "set by the launcher with PSGC_RESTARTS: how many times this job was started again so far",
    "BYTEPS_ENABLE_GDB": "1: each worker runs under gdb, which prints a backtrace if it crashes",
    "PSGC_NODE_SIZES": "workers on each node, as in `4,4,2`; needed for torch.distributed's ranks where nodes differ in size",
    "PSGC_TEST_FAULT": "nothing; marks the processes of psgc's own tests",
}

# These identify the job and its members. A misspelt one is an error, not a warning: without it the job would be a different one.
MEMBERSHIP: Final = {
    "DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK",
    "BYTEPS_LOCAL_SIZE", "BYTEPS_FORCE_DISTRIBUTED",
}  # fmt: skip
PREFIXES: Final = ("PSGC", "BYTEPS", "DMLC")
