"""Starts a job's scheduler as a child that another process may follow: its launcher holds the socket that it listens with, and its journal.

So members' connections wait in the kernel while there is no scheduler, and nobody else takes its port; a launcher that ends closes both, and members see that
nobody listens any more.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import IO

from psgc.config import Config
from psgc.launch.supervision.child import Child
from psgc.launch.supervision.supervisor import Supervisor
from psgc.processes.addresses import is_loopback, listening_socket
from psgc.transport.host import local_address_for

FILES = 2  # of a journal


def listener_of(config: Config) -> socket.socket:
    """The socket of a scheduler at DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, on this machine. Raises PsgcError if the port is taken."""
    return listening_socket(config.root_port, local_address_for(config.root_host) if is_loopback(config.root_host) else "")


def start_scheduler(supervisor: Supervisor, env: Mapping[str, str], listener: socket.socket, *, service: bool) -> Child:
    """Start it with a socket that is this function's from now on. service: it ends by itself when all workers have. Raises OSError."""
    files: list[IO[bytes]] = [os.fdopen(os.memfd_create("psgc-journal", os.MFD_CLOEXEC), "r+b", buffering=0) for _ in range(FILES)]
    estate: list[IO[bytes] | socket.socket] = [listener, *files]
    env = {
        **env, "DMLC_ROLE": "scheduler", "PSGC_SCHEDULER_FD": str(listener.fileno()), "PSGC_JOURNAL_FDS": ",".join(str(file.fileno()) for file in files)
    }  # fmt: skip
    fds = [each.fileno() for each in estate]
    restarts = Config.from_env(env, role="scheduler").on_scheduler_loss == "restart"
    command = [sys.executable, "-m", "psgc.launch.job.role", "scheduler"]
    try:
        child = supervisor.start("scheduler", command, env, service=service, pass_fds=fds, estate=estate if restarts else ())
    except BaseException:
        for each in estate:
            each.close()
        raise
    for each in () if restarts else estate:
        each.close()  # the scheduler has its own descriptors; without it nobody would listen
    return child
