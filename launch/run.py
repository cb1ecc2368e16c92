"""``psgc run``: a whole job on one machine, from one command to its end."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence

from psgc.errors import UsageError
from psgc.launch.supervisor import Supervisor


def run_job(command: Sequence[str], *, workers: int = 2, servers: int = 1, nodes: int = 1, codec: str | None = None,
            prefix: bool = True) -> int:  # fmt: skip
    """Start scheduler, servers and workers; return the job's exit status. Raises UsageError/CodecError before anything starts."""
    _check(command, workers, servers, nodes)
    if codec is not None:
        from psgc.codecs import parse_pair

        codec = parse_pair(codec).canonical
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    env = _job_env(listener.getsockname()[1], workers, servers, nodes, codec)
    supervisor = Supervisor("psgc run", prefix)
    role = [sys.executable, "-m", "psgc.launch.role"]
    fd = listener.fileno()
    scheduler = {**env, "DMLC_ROLE": "scheduler", "PSGC_SCHEDULER_FD": str(fd)}
    supervisor.start("scheduler", [*role, "scheduler"], scheduler, service=True, pass_fds=[fd])
    listener.close()
    for index in range(servers):
        server = {**env, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(index)}
        supervisor.start(f"server {index}", [*role, "server"], server, service=True, keep_memory=True)
    rank = 0
    for node in range(nodes):
        local_size = workers // nodes + (node < workers % nodes)
        for local_rank in range(local_size):
            worker = {
                **env, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(node), "BYTEPS_LOCAL_RANK": str(local_rank),
                "BYTEPS_LOCAL_SIZE": str(local_size),
            }  # fmt: skip
            supervisor.start(f"worker {rank}", list(command), worker)
            rank += 1
    return supervisor.run()


def _check(command: Sequence[str], workers: int, servers: int, nodes: int) -> None:
    if not command:
        raise UsageError("psgc run: no command given; for example: psgc run --workers 2 -- python train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"psgc run: command {command[0]!r} is not found or not executable")
    if min(workers, servers, nodes) < 1:
        raise UsageError(f"psgc run: --workers {workers} --servers {servers} --nodes {nodes}: each must be at least 1")
    if nodes > workers:
        raise UsageError(f"psgc run: --nodes {nodes} is more than --workers {workers}: every node needs a worker")


def _job_env(port: int, workers: int, servers: int, nodes: int, codec: str | None) -> dict[str, str]:
    """What every process of the job is told."""
    env = {name: value for name, value in os.environ.items() if name not in ("DMLC_SERVER_ID", "PSGC_KEEPER_FD", "PSGC_SCHEDULER_FD")}
    env.update(
        DMLC_NUM_WORKER=str(nodes), DMLC_NUM_SERVER=str(servers), DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(port),
        BYTEPS_FORCE_DISTRIBUTED="1", PSGC_JOB=str(secrets.randbits(62) | 1), PSGC_TOKEN=secrets.token_hex(16), PYTHONUNBUFFERED="1",
    )  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    env.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads beside servers cost scheduler slices of milliseconds
    if codec is not None:
        env["PSGC_CODEC"] = codec
    return env
