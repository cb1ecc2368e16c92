"""Scheduler and servers that the workers start themselves (PSGC_SERVERS=embedded), and how workers find the scheduler: through torchrun's store.

The first worker of each node starts one process (``psgc/launch/job/embedded.py``) that runs the node's servers, on rank 0's node the scheduler, too, and
ends with the worker. Every other worker takes a ticket in the store, and rank 0 answers each ticket with the scheduler's address. What an earlier attempt
of the same job has left in the store answers nobody: a ticket is given out once.

The job's secret is PSGC_TOKEN, which does not travel. Where that is not set, rank 0 draws one. On one node it passes it on through a Unix socket that
serves this user only; between nodes it goes through the store, which has no authentication.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final, TypeVar

from psgc.config import Config
from psgc.errors import ConfigError, JobFailed, PsgcError, UsageError
from psgc.layout.backup import check_count
from psgc.processes.addresses import is_loopback
from psgc.processes.reminder import Reminder
from psgc.torch.session.run_report import run_logger

logger = logging.getLogger(__name__)
SERVICES: Final = "psgc.launch.job.embedded"
POLL_S: Final = (0.01, 0.25)  # how often rank 0 looks for tickets, and others for their answer: at first, and later
FAILED_END_S: Final = 3.0  # services of a failed job have mostly ended by then; else their own process ends them
SAY_S: Final = 5.0
_PEER: Final = struct.Struct("iII")  # pid, uid, gid, as SO_PEERCRED gives them
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What rank 0 tells the others. token: "" where each has PSGC_TOKEN, or gets it from ``door``, the name of rank 0's socket. error: why there is no
    scheduler."""

    host: str = ""
    port: int = 0
    job: int = 0
    servers: int = 0
    given: bool = False  # rank 0 has PSGC_TOKEN
    token: str = ""
    door: str = ""
    error: str = ""


class Embedded:
    """This worker's part of it, for one ``init``. Use ``start``; ``close`` once every member is there, or ``fail`` if they will not be."""

    def __init__(self, config: Config, count: int) -> None:
        """count: how often this process has called ``init`` before."""
        self._config, self._count = config, count
        self._services: subprocess.Popen[bytes] | None = None
        self._door: _Door | None = None
        self._store: Any = None
        self._closing = threading.Event()
        self._answering: threading.Thread | None = None
        self._answer = ""

    def start(self) -> Config:
        """Start what this worker has to start, find the scheduler, and return the configuration of a job that others have started.

        Raises ConfigError, PsgcError, and JobFailed where rank 0 does not answer."""
        config = self._config
        config.require_replicable()
        config.require_replaceable()
        if config.backup_workers and config.world_size:
            check_count(config.backup_workers, config.world_size)
        if config.nodes > 1:
            config.require_secret()
        first = config.local_rank == 0
        self._store = self._join_store()
        if first and config.node == 0:
            found = self._begin()
        else:
            found = self._ask()
        if found.error:
            raise JobFailed(found.error)
        complete = replace(
            config, embedded=False, scheduler_listens=True, root_host=found.host, root_port=found.port, job=found.job, servers=found.servers,
            token=self._token(found), meeting_place="",
        )  # fmt: skip
        if first and config.node > 0:
            self._start_services(complete)
        return complete

    def close(self) -> None:
        """Nobody asks any more."""
        self._closing.set()
        if self._answering is not None:
            self._answering.join()
        if self._door is not None:
            self._door.close()

    def fail(self, why: str) -> None:
        """This worker cannot join: rank 0 says so to those who ask from now on."""
        self._answer = json.dumps(asdict(Found(error=why)))

    # the store

    def _join_store(self) -> Any:
        """A client of torchrun's store, which rank 0 serves where no agent does."""
        from torch import distributed

        config = self._config
        if not distributed.is_available():
            raise UsageError(
                "PSGC_SERVERS=embedded needs torch.distributed, which this torch is built without; start the job with `psgc run`"
            )
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        try:
            store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=config.register_timeout_s)))
        except (RuntimeError, ValueError) as error:
            raise PsgcError(
                f"the store at MASTER_ADDR={config.root_host} and MASTER_PORT, through which workers find the scheduler, cannot be reached: "
                f"{_first_line(error)}"
            ) from None
        if (rank == 0) != (config.node == 0 and config.local_rank == 0):
            raise ConfigError(
                f"RANK={rank}, but this is local rank {config.local_rank} of node {config.node}: rank 0 is the first worker of node 0; check RANK, LOCAL_RANK, "
                f"GROUP_RANK and DMLC_WORKER_ID"
            )
        return PrefixStore(f"psgc/{self._count}", store)

    def _kept(self, call: Callable[[], T]) -> T:
        """What a call of the store returns. Raises JobFailed where the store is lost."""
        try:
            return call()
        except RuntimeError as error:
            raise JobFailed(
                f"the store at MASTER_ADDR={self._config.root_host}, through which workers find the scheduler, is lost: rank 0 or its torchrun has ended "
                f"({_first_line(error)})"
            ) from None

    # rank 0

    def _begin(self) -> Found:
        config = self._config
        host = "127.0.0.1" if config.nodes == 1 else config.root_host
        token = config.token or secrets.token_hex(16)
        found = Found(host, config.root_port, config.job or secrets.randbits(62) | 1, config.servers, given=bool(config.token))
        if not config.token and config.nodes == 1:
            self._door = _Door(token)
            found = replace(found, door=self._door.name)
        elif not config.token:
            found = replace(found, token=token)
        try:
            port = self._start_services(replace(config, root_host=host, job=found.job, token=token))
            found = replace(found, port=port)
        except PsgcError as error:
            self._answer_from_now_on(Found(error=f"rank 0 could not start the scheduler: {error}"))
            time.sleep(config.heartbeat_s)  # for those who are asking now
            raise
        self._answer_from_now_on(found)
        where = f"{config.nodes} nodes" if config.nodes > 1 else "this node"
        started = (
            f"a scheduler (port {found.port}) and {config.servers} server{'' if config.servers == 1 else 's'}"
            if config.servers
            else "a scheduler"
        )
        run_logger.info("started %s on %s for this job (PSGC_SERVERS=embedded)", started, where)
        if found.token and not is_loopback(host):
            logger.warning(
                "PSGC_TOKEN is not set: this job's was drawn, and travels through torchrun's store in clear, so that anybody who reaches MASTER_PORT "
                "can read it and join the job; set the same secret on every node"
            )
        return replace(found, token=token)

    def _answer_from_now_on(self, found: Found) -> None:
        """Answer all tickets until ``close``."""
        self._answer = json.dumps(asdict(found))
        self._answering = threading.Thread(target=self._answer_tickets, name="psgc-embedded", daemon=True)
        self._answering.start()

    def _answer_tickets(self) -> None:
        answered, pause = 0, POLL_S[0]
        with contextlib.suppress(RuntimeError):  # a lost store is found by those who ask
            while True:
                last = self._closing.is_set()
                asked = self._store.add("asked", 0)
                for ticket in range(answered + 1, asked + 1):
                    self._store.set(f"told/{ticket}", self._answer)
                pause = POLL_S[0] if asked > answered else min(1.5 * pause, POLL_S[1])
                answered = asked
                if last:
                    return
                self._closing.wait(pause)

    # the others

    def _ask(self) -> Found:
        """Rank 0's answer to a new ticket. Raises JobFailed after PSGC_REGISTER_TIMEOUT_S."""
        config, store = self._config, self._store
        key = f"told/{self._kept(lambda: store.add('asked', 1))}"
        began = time.monotonic()
        pause, said = POLL_S[0], False
        while not self._kept(lambda: store.check([key])):
            waited = time.monotonic() - began
            if waited > config.register_timeout_s:
                raise JobFailed(
                    f"rank 0 has not started the scheduler within {config.register_timeout_s:g} s (PSGC_REGISTER_TIMEOUT_S): does it call psgc.torch.init()?"
                )
            if waited > config.silence_s and not said:
                said = True
                logger.warning(
                    "waiting for rank 0 to start the scheduler (%s, PSGC_SERVERS=embedded): has it called psgc.torch.init()?",
                    config.root_host,
                )
            time.sleep(pause)
            pause = min(1.5 * pause, POLL_S[1])
        found = Found(**json.loads(self._kept(lambda: store.get(key))))
        self._kept(lambda: store.delete_key(key))
        return found

    def _token(self, found: Found) -> str:
        config = self._config
        if found.given != bool(config.token) and not (config.node == 0 and config.local_rank == 0):
            one, other = ("rank 0", "this worker") if found.given else ("this worker", "rank 0")
            raise ConfigError(f"{one} has PSGC_TOKEN, and {other} has not: set the same on every node, or on none")
        if found.door and not found.token:
            return _knock(found.door)
        return found.token or config.token

    # this node's services

    def _start_services(self, config: Config) -> int:
        """Start the process that runs them, and return the scheduler's port. Raises PsgcError saying why it does not."""
        share = config.servers // config.nodes
        more = config.servers % config.nodes
        order = {
            "worker": os.getpid(), "agent": os.getppid() if config.torchrun else 0, "scheduler": config.node == 0, "nodes": config.nodes,
            "node": config.node, "host": config.root_host, "port": config.root_port, "job": config.job, "token": config.token, "servers": config.servers,
            "first_server": config.node * share + min(config.node, more), "own_servers": share + (config.node < more),
        }  # fmt: skip
        if not (order["scheduler"] or order["own_servers"]):
            return config.root_port
        answer, told = os.pipe()
        try:
            self._services = subprocess.Popen(
                [sys.executable, "-m", SERVICES, str(told)], stdin=subprocess.PIPE, pass_fds=[told], start_new_session=True
            )
        except OSError as error:
            os.close(answer)
            raise PsgcError(f"the process of the node's servers cannot be started: {error}; see `ulimit -u -n`") from None
        finally:
            os.close(told)
        _started.append(_Services(self._services))
        assert self._services.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._services.stdin as pipe:
            pipe.write(json.dumps(order).encode())
        with os.fdopen(answer) as pipe:
            text = pipe.read()
        said = json.loads(text) if text else {"error": f"the process of the node's servers ended with status {self._services.wait()}"}
        if "error" in said:
            raise ConfigError(said["error"]) if said.get("wrong_usage") else PsgcError(said["error"])
        return int(said["port"])


@dataclass(slots=True)
class _Services:
    """One process that this one has started. left: this worker has left its job in order."""

    popen: subprocess.Popen[bytes]
    left: bool = False


_started: Final[list[_Services]] = []


def left_in_order() -> None:
    """This worker has left the jobs that it was in."""
    for services in _started:
        services.left = True


def await_services() -> None:
    """At exit: wait until this node's services have ended, because other workers may still need them. Of a job that has failed, not for long. What is waited
    for is said again and again: a worker that hangs elsewhere, and whose process lives, is nobody's fault that psgc could find."""
    began = time.monotonic()
    reminder = Reminder(began)
    for services in _started:
        while services.popen.poll() is None:
            waited = time.monotonic() - began
            if waited > FAILED_END_S and not services.left:
                return
            if reminder.due(time.monotonic(), SAY_S):
                logger.warning(
                    "this worker is done, and has waited for %.0f s so far: its node's servers end once every worker has left the job "
                    "(`psgc top` shows who has not)",
                    waited,
                )
            time.sleep(POLL_S[0])


def forget_services() -> None:
    """In a forked child: they are another process's."""
    _started.clear()


class _Door:
    """Gives a secret to processes of this user in this network namespace. name: of its abstract Unix socket."""

    def __init__(self, secret: str) -> None:
        self.name = f"psgc-token/{os.getpid()}/{secrets.token_hex(16)}"
        self._secret = secret.encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)
        threading.Thread(target=self._serve, name="psgc-token", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                if _user_of(peer) == os.getuid():
                    peer.sendall(self._secret)


def _knock(name: str) -> str:
    """The secret behind a door of this user. Raises PsgcError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.connect(f"\0{name}")
            if _user_of(door) != os.getuid():
                raise OSError("another user's")
            if secret := door.makefile("rb").read().decode():
                return secret
            raise OSError("it gave none")
        except OSError as error:
            raise PsgcError(
                f"rank 0's socket for the job's secret cannot be used ({error}): do all workers of this node have one user and one network namespace? "
                f"Else set PSGC_TOKEN for all of them"
            ) from None


def _user_of(peer: socket.socket) -> int:
    return int(_PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
