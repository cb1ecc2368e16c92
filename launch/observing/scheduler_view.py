"""Asks a running job's scheduler how the job does, as an observer: it is no member, and nobody waits for it."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any, Final

import zmq

from psgc.config import Config
from psgc.errors import JobFailed, PsgcError, UsageError
from psgc.launch.observing.processes import environment, family
from psgc.transport.control.dealer import Dealer
from psgc.transport.security.job_keys import JobKeys
from psgc.transport.watch import Watch
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import Notice, decode_body, decode_json
from psgc.wire.reports import Observed

PATIENCE_S: Final = 10.0  # a scheduler on a busy machine answers late
TURN_S: Final = 0.2


class SchedulerView:
    """See the module's text. Use it as a context manager."""

    def __init__(self, config: Config) -> None:
        config.require_cluster()
        self._job, self._endpoint = config.job, config.root_endpoint
        self._context: zmq.Context[Any] = zmq.Context()
        identity = b"observer-%s-%d" % (secrets.token_hex(6).encode(), os.getpid())
        self._dealer = Dealer(self._context, self._endpoint, identity, config.dead_s, JobKeys.of(config))
        self._watch = Watch()

    def __enter__(self) -> SchedulerView:
        return self

    def __exit__(self, *_: object) -> None:
        self._dealer.close()
        self._context.destroy(0)

    def ask(self) -> Observed:
        """How the job does now. Raises JobFailed if it has failed, PsgcError if no scheduler answers, or one that turns observers away."""
        until = time.monotonic() + PATIENCE_S
        self._say()
        while (now := time.monotonic()) < until:
            self._dealer.tick(now)
            if why := self._dealer.turned_away():
                raise PsgcError(f"top: {why}")
            self._watch.wait(self._dealer.pollables(), TURN_S)
            if "up" in list(self._dealer.events()):
                self._say()  # what was asked on an earlier connection may be lost
            for header, payload in self._dealer.receive():
                body = b"" if payload is None else payload.tobytes()
                if header.kind == Kind.OBSERVE:
                    return Observed.from_body(decode_json(body, "OBSERVE"))
                if header.kind == Kind.ABORT:
                    raise JobFailed(decode_body(Notice, body).text)
                if header.kind == Kind.ERROR:
                    raise PsgcError(f"top: the scheduler at {self._endpoint} refuses: {decode_body(Notice, body).text}")
        raise PsgcError(f"top: no scheduler answers at {self._endpoint}: has the job ended, or not begun?")

    def _say(self) -> None:
        self._dealer.send(Header(Kind.OBSERVE, job=self._job, sender=UNASSIGNED_SENDER), b"")


def config_of(pid: int | None) -> Config:
    """Where the scheduler is, and the job's secret: from this process's environment, or from that of a job's process, or of its launcher.

    Raises UsageError where neither says so.
    """
    if pid is None:
        config = Config.from_env()
        if not config.root_host or not config.root_port:
            raise UsageError(
                "top: which job? Set DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, PSGC_JOB and PSGC_TOKEN as the job has them, or name the launcher or "
                "another process of a job on this machine with --pid"
            )
        return config
    for process in family(pid):
        env = environment(process)
        if env.get("DMLC_PS_ROOT_PORT") and env.get("DMLC_PS_ROOT_URI") and env.get("DMLC_ROLE"):
            # of its settings only these matter here; its others may be another version's
            names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "PSGC_JOB", "PSGC_TOKEN", "PSGC_TOKEN_FILE", "PSGC_DEAD_S")
            return Config.from_env({name: env[name] for name in names if name in env})
    raise UsageError(f"top: --pid {pid}: neither that process nor one that it has started is a job's, or it is another user's")
