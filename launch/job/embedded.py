"""The process that runs one node's scheduler and servers for a job whose workers start them (PSGC_SERVERS=embedded, ``psgc/torch/session/embedded.py``).

Started by the node's first worker, which writes an order to its stdin and reads an answer (the scheduler's port, or an error) from a pipe. It lives no longer
than that worker; and where the worker outlives the agent of torchrun that started it, it ends the worker. Its services' output goes where the worker's goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.launch.job.part import servers_of
from psgc.launch.job.run import NOT_INHERITED
from psgc.launch.job.scheduler_process import start_scheduler
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.ending import Patience
from psgc.launch.supervision.supervisor import Supervisor
from psgc.processes.addresses import is_loopback, listening_socket
from psgc.transport.control.absence import tell_absence
from psgc.transport.control.voice import own_outlet

PROGRAM: Final = "psgc"
POLL_S: Final = 0.1
OWN_END_S: Final = 4.0  # by then services have told the other nodes of a worker's end, and ended; else they are ended
PATIENCE: Final = Patience(fault_s=OWN_END_S, save_s=OWN_END_S, grace_s=1.0, service_s=OWN_END_S, term_s=1.0)


def main() -> None:
    told = int(sys.argv[1])
    order = json.load(sys.stdin)
    sys.exit(serve(order, told))


def serve(order: Mapping[str, Any], told: int) -> int:
    """Run the services to their end. order: see ``Embedded._start_services``. told: descriptor for the answer. Returns the exit status."""
    listener: socket.socket | None = None
    try:
        if os.environ.get("PSGC_LOCAL_SERVERS", "").strip():
            raise ConfigError(
                "PSGC_LOCAL_SERVERS is for psgc-launch; under PSGC_SERVERS=embedded set DMLC_NUM_SERVER to the number of all of the job's servers, which the "
                "nodes share"
            )
        if order["scheduler"]:
            listener = _listener(order["host"], order["port"])
        env = _environment(order, listener.getsockname()[1] if listener is not None else order["port"])
        config = Config.from_env(env, role="server")
        (config if order["servers"] else Config.from_env(env, role="scheduler")).require_cluster()
        with Supervisor(PROGRAM, patience=PATIENCE, verdict=_say) as supervisor:
            _start(supervisor, order, env, listener)
            _answer(told, {"port": int(env["DMLC_PS_ROOT_PORT"])})
            threading.Thread(target=_watch, args=(order, config), daemon=True).start()
            return supervisor.run()
    except PsgcError as error:
        _answer(told, {"error": str(error), "wrong_usage": isinstance(error, ConfigError)})
        return 1


def _say(weight: Weight, text: str, _: int) -> None:
    """Why it failed, if that was here. What members were told the workers say."""
    if weight == Weight.OWN:
        sys.stderr.write(f"{PROGRAM}: {text}\n")


def _start(supervisor: Supervisor, order: Mapping[str, Any], env: Mapping[str, str], listener: socket.socket | None) -> None:
    role = [sys.executable, "-m", "psgc.launch.job.role"]
    try:
        if listener is not None:
            start_scheduler(supervisor, env, listener, service=False)
        here = {
            **env, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(order["first_server"]), "PSGC_LOCAL_SERVERS": str(order["own_servers"]),
            "PSGC_SCHEDULER_LISTENS": "1",
        }  # fmt: skip
        for own in servers_of(here) if order["own_servers"] else ():
            supervisor.start(f"server {own['DMLC_SERVER_ID']}", [*role, "server"], {**here, **own}, keep_memory=True)
    except OSError as error:
        raise PsgcError(f"the node's servers cannot be started: {error}; see `ulimit -u -n`") from None


def _listener(host: str, port: int) -> socket.socket:
    """port: 0: any. One that is named may still be in use by the scheduler of this job's last attempt, which is about to end. Raises PsgcError."""
    until = time.monotonic() + (2 * OWN_END_S if port else 0)
    while True:
        try:
            return listening_socket(port, host if is_loopback(host) else "")
        except PsgcError:
            if time.monotonic() > until:
                raise
        time.sleep(POLL_S)


def _environment(order: Mapping[str, Any], port: int) -> dict[str, str]:
    """What the services share: the worker's settings, without those that describe the worker."""
    kept = ("DMLC_INTERFACE", "DMLC_NODE_HOST", "DMLC_PORT", "PSGC_ADVERTISE", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED or name in kept}
    env.update(
        DMLC_NUM_WORKER=str(order["nodes"]), DMLC_NUM_SERVER=str(order["servers"]), DMLC_WORKER_ID=str(order["node"]), DMLC_PS_ROOT_URI=order["host"],
        DMLC_PS_ROOT_PORT=str(port), PSGC_JOB=str(order["job"]), PSGC_TOKEN=order["token"], BYTEPS_FORCE_DISTRIBUTED="1", PSGC_OUTLET=own_outlet(),
    )  # fmt: skip
    return env


def _answer(told: int, text: Mapping[str, Any]) -> None:
    """Once: a second answer goes nowhere."""
    with contextlib.suppress(OSError):
        os.write(told, json.dumps(text).encode())
        os.close(told)


def _watch(order: Mapping[str, Any], config: Config) -> None:
    """Wait for the worker's end; then tell the scheduler, and give the services a few seconds to end by themselves."""
    worker, agent = order["worker"], order["agent"]
    orphaned = float("inf")
    while os.getppid() == worker:
        if agent and orphaned == float("inf") and _parent_of(worker) not in (agent, None):
            orphaned = time.monotonic()
            sys.stderr.write(
                f"{PROGRAM}: torchrun's agent (pid {agent}) has ended, so its worker (pid {worker}) and this node's servers are ended, too\n"
            )
            _kill(worker, signal.SIGTERM)
        if time.monotonic() > orphaned + OWN_END_S:
            _kill(worker, signal.SIGKILL)
        time.sleep(POLL_S)
    tell_absence(config, f"the worker with pid {worker} ended")  # the scheduler heeds it while it awaits members
    time.sleep(OWN_END_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
