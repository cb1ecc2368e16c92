"""``psgc run``: a whole job on one machine, from one command to its end."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from psgc.config import Config
from psgc.errors import PsgcError, UsageError
from psgc.launch.job import ranks
from psgc.launch.job.as_byteps import found_as_byteps
from psgc.launch.job.batch_signals import passing_on
from psgc.launch.job.checks import canonical, check_codec_or_plan, check_job, check_trace
from psgc.launch.job.interpreter import check_command, note_on
from psgc.launch.job.planned import PLAN, inside_of, plan_here, plan_told
from psgc.launch.job.scheduler_process import start_scheduler
from psgc.launch.job.threads import shared_cores
from psgc.launch.job.warming import PLANNER, prepare
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
from psgc.launch.tables import progress
from psgc.launch.topology import detect, told
from psgc.launch.topology.devices import seen_devices
from psgc.launch.topology.interfaces import NAME as INTERFACES
from psgc.plan.model.level import SAFE, asks_auto, level_of
from psgc.processes.addresses import listening_socket
from psgc.transport.control.voice import own_outlet
from psgc.transport.pacing import make_file
from psgc.transport.security import encryption

# Variables that identify a process in another job (the shell's, or the one that this command runs in); they do not apply to this job.
NOT_INHERITED: Final = {
    "DMLC_ROLE", "PSGC_SERVERS", "DMLC_WORKER_ID", "DMLC_SERVER_ID", "DMLC_NODE_HOST", "DMLC_INTERFACE", "DMLC_PORT", "PSGC_ADVERTISE", "PSGC_KEEPER_FD",
    "PSGC_SCHEDULER_FD", "PSGC_SERVES_AGAIN", "PSGC_STANDBY", "PSGC_JOURNAL_FDS", "PSGC_ON_ITS_OWN", "PSGC_INCARNATION", "PSGC_LINK_MBIT", "PSGC_LINK_FD",
    "PSGC_SCHEDULER_LISTENS",
    "BYTEPS_LOCAL_RANK", "BYTEPS_LOCAL_SIZE", *ranks.NAMES, *ranks.MASTER, *ranks.TORCHRUNS,
}  # fmt: skip


def run_job(command: Sequence[str], *, workers: int = 2, servers: int = 1, nodes: int | None = None, codec: str | None = None,
            plan: str | None = None, layout_out: str | None = None, link_mbit: float | None = None, prefix: bool = True,
            program: str = "psgc run", cores: Sequence[Iterable[int]] = (), as_byteps: bool = False,
            before: Sequence[Sequence[str]] = (), more: Mapping[str, str] | None = None, spares: int = 0) -> int:  # fmt: skip
    """Start scheduler, servers and workers; return the job's exit status. nodes: default: 1, with ``link_mbit`` one for each worker. plan,
    layout_out: PSGC_PLAN and PSGC_LAYOUT_OUT. link_mbit: of each node's and each server's simulated link, each way, 1e6 bit/s.
    program: begins our own lines. cores: that each worker stays on. as_byteps: workers find psgc under the name ``byteps``. before: words
    before each worker's command. more: further variables of all processes. spares: processes that wait to take dead workers' places.

    Raises UsageError, ConfigError or CodecError before anything starts.
    """
    if nodes is None:
        nodes = workers if link_mbit is not None else 1
    _check(command, workers, servers, nodes)
    if link_mbit is not None:
        _check_link(link_mbit)
    check_codec_or_plan("run", codec, plan)
    files = _files(plan, layout_out)
    codec = canonical(codec or os.environ.get("PSGC_CODEC", "").strip(), servers)
    files |= told({**files, **os.environ}, workers // nodes, detect)
    config = Config.from_env({**_job_env(1, workers, servers, nodes, codec), **files})  # what is wrong is said before kernels are compiled
    check_job(config, workers=workers, command=command, spares=spares)
    if text := os.environ.get(INTERFACES, "").strip():
        raise UsageError(
            f"{program}: {INTERFACES}={text}: all processes of this job are on this machine and use none of its interfaces; unset it, or start the job "
            f"with psgc-launch (docs/plans.md)"
        )
    if config.wire != "psgc":
        raise UsageError(
            f"{program}: PSGC_WIRE={config.wire}: the jobs that it starts speak psgc's own wire; start each role of this one with psgc-launch (docs/pslite.md)"
        )
    if config.replicas:
        raise UsageError(
            f"{program}: PSGC_REPLICAS=1: all servers of this job are on this machine, so that nothing outlives it; unset it, or start the job with "
            f"psgc-launch on several machines (docs/operations.md)"
        )
    if config.encrypt:
        encryption.require()
    check_trace(config)
    if note := note_on(command):
        print(f"{program}: {note}", file=sys.stderr)
    prepare([codec] if codec else [])
    with (
        ExitStack() as links,
        Supervisor(program, prefix, Patience.of(config)) as supervisor,
        passing_on(lambda: [child for child in supervisor.children if not child.service]),
    ):
        listener = listening_socket(host="127.0.0.1")
        env = {**_job_env(listener.getsockname()[1], workers, servers, nodes, codec, pinned=any(cores)), **files, **(more or {})}
        for note in Config.from_env(env).notes:
            print(f"{program}: {note}", file=sys.stderr)
        if link_mbit is not None:
            print(f"{program}: {_described(link_mbit, workers, nodes)}", file=sys.stderr)
        try:
            _start_services(supervisor, env, listener, servers, link_mbit, links)
            env |= found_as_byteps(env) if as_byteps else {}
            links_of = _start_workers(supervisor, env, command, workers, nodes, cores, link_mbit, before, links, config.on_worker_loss)
            if spares:
                supervisor.keep_spares(spares, command[0], env, links_of)
        except OSError as error:
            raise PsgcError(f"run: cannot start process {len(supervisor.children) + 1} of the job: {error}; see `ulimit -u -n`") from None
        return supervisor.run()


@contextmanager
def _link(link_mbit: float | None) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Environment and descriptors that give the processes of one simulated host their link."""
    if link_mbit is None:
        yield {}, []
        return
    fd = make_file()
    try:
        yield {"PSGC_TRANSPORT": "tcp", "PSGC_LINK_MBIT": f"{link_mbit:g}", "PSGC_LINK_FD": str(fd)}, [fd]
    finally:
        os.close(fd)


def _start_services(
    supervisor: Supervisor, env: Mapping[str, str], listener: socket.socket, servers: int, link_mbit: float | None, links: ExitStack
) -> None:  # fmt: skip
    """links: closes servers' links at the job's end, since a server may be started again."""
    role, env = [sys.executable, "-m", "psgc.launch.job.role"], {**env, "PSGC_SERVES_AGAIN": "1"}
    start_scheduler(supervisor, env, listener, service=True)
    for index in range(servers):
        link, fds = links.enter_context(_link(link_mbit))
        server = {**env, **link, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(index)}
        supervisor.start(f"server {index}", [*role, "server"], server, service=True, keep_memory=True, pass_fds=fds)


def _start_workers(
    supervisor: Supervisor, env: Mapping[str, str], command: Sequence[str], workers: int, nodes: int, cores: Sequence[Iterable[int]],
    link_mbit: float | None, before: Sequence[Sequence[str]], links: ExitStack, on_loss: str,
) -> list[int]:  # fmt: skip
    """Start the workers, spread evenly over the simulated nodes (sizes differ by at most one). links: closes nodes' links at the job's end, since workers may
    be started again. on_loss: PSGC_ON_WORKER_LOSS. Returns the descriptors of all links."""
    sizes = [workers // nodes + (node < workers % nodes) for node in range(nodes)]
    meeting_place, all_fds = ranks.meeting_place(os.environ), list[int]()
    for node, local_size in enumerate(sizes):
        link, fds = links.enter_context(_link(link_mbit))
        all_fds += fds
        for local_rank in range(local_size):
            worker = {
                **env, **meeting_place, **ranks.place(sizes, node, local_rank), **link, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(node),
                "BYTEPS_LOCAL_RANK": str(local_rank), "BYTEPS_LOCAL_SIZE": str(local_size),
            }  # fmt: skip
            rank = int(worker["RANK"])
            supervisor.start(
                f"worker {rank}",
                command,
                {**worker, **seen_devices(env, rank)},
                who=f"rank {rank}",
                cores=cores[rank] if cores else (),
                pass_fds=fds,
                before=before[rank] if before else (),
                replaced=on_loss != "stop",
                spared=(lambda: True) if on_loss == "shrink" else None,
            )
    return all_fds


def _check(command: Sequence[str], workers: int, servers: int, nodes: int) -> None:
    if not command:
        raise UsageError("run: no command given; for example: psgc run --workers 2 -- python train.py")
    check_command("run", command)
    if min(workers, nodes) < 1 or servers < 0:
        raise UsageError(
            f"run: --workers {workers} --servers {servers} --nodes {nodes}: at least 1 worker on 1 node, and 0 servers or more"
        )
    if nodes > workers:
        raise UsageError(f"run: --nodes {nodes} is more than --workers {workers}: every node needs a worker")


def _check_link(link_mbit: float) -> None:
    if not 0.001 <= link_mbit <= 100_000:
        raise UsageError(f"run: --link-mbit {link_mbit:g}: expected a rate from 0.001 to 100000, in 1e6 bit/s")
    if os.environ.get("PSGC_TRANSPORT", "").strip().lower() == "shm":
        raise UsageError(f"run: --link-mbit {link_mbit:g} paces TCP, but PSGC_TRANSPORT=shm asks for shared memory; leave one of them out")


def _described(link_mbit: float, workers: int, nodes: int) -> str:
    each = "each worker" if nodes == workers else f"each of {nodes} nodes"
    return (
        f"{each} and each server has a link of {link_mbit:g} Mbit/s, each way, simulated: psgc's own payloads are paced, "
        f"torch.distributed's collectives are not"
    )


def _files(plan: str | None, layout_out: str | None) -> dict[str, str]:
    """PSGC_PLAN and PSGC_LAYOUT_OUT as absolute paths, because a script may change its directory, and what the plan's cluster says of its nodes' inside, unless
    the environment does. Raises UsageError for a plan that cannot run."""
    planned = plan or os.environ.get(PLAN, "").strip()
    loaded = None
    if asks_auto(planned):
        with progress(False):
            from psgc.plan.live.levels import all_candidates

        prepare([*all_candidates(level_of(planned, os.environ.get("PSGC_QUALITY", "").strip() or SAFE)), PLANNER])
    elif planned:
        with progress(False):
            loaded = plan_here(planned, needed=True)
    if loaded is not None:
        prepare(bucket.codec for bucket in loaded.buckets)
    out = layout_out or os.environ.get("PSGC_LAYOUT_OUT", "").strip()
    if out and not os.path.isdir(os.path.dirname(os.path.abspath(out))):
        raise UsageError(f"run: --layout-out {out}: no such directory")
    if os.path.isdir(out):
        raise UsageError(f"run: --layout-out {out}: is a directory, expected a file to write")
    files = {PLAN: plan_told(planned), "PSGC_LAYOUT_OUT": out and os.path.abspath(out)}
    return {name: path for name, path in files.items() if path} | inside_of(loaded, os.environ)


def _job_env(port: int, workers: int, servers: int, nodes: int, codec: str, pinned: bool = False) -> dict[str, str]:
    """The environment that all processes of the job share."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env.update(
        DMLC_NUM_WORKER=str(nodes), DMLC_NUM_SERVER=str(servers), DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(port),
        BYTEPS_FORCE_DISTRIBUTED="1", PSGC_JOB=str(secrets.randbits(62) | 1), PSGC_TOKEN=secrets.token_hex(16), PYTHONUNBUFFERED="1",
    )  # fmt: skip
    env.setdefault("PSGC_OUTLET", own_outlet())
    env.update(shared_cores(env, workers, pinned))
    if codec:
        env["PSGC_CODEC"] = codec
    return env
