"""The scheduler's process: one ROUTER socket, one state machine and a clock."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any, Final

import zmq

from psgc.codecs import BucketContext, parse_scheme
from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.errors import PsgcError
from psgc.processes.addresses import endpoint, is_loopback
from psgc.processes.mailbox import Mailbox
from psgc.scheduler.actions import Action, End, Keep, Log, Send
from psgc.scheduler.continuity import Continuity
from psgc.scheduler.membership import Membership
from psgc.transport.control.router import Router
from psgc.transport.control.voice import AWAITED, Voice
from psgc.transport.host import host_id, local_address_for, member_alive, own_start
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import pack_header
from psgc.wire.messages import Register

logger = logging.getLogger(__name__)
TURN_S: Final = 0.05
MAX_HEARD_BYTES: Final = 16 << 20  # the largest message; the declaration of 100,000 tensors takes about 2 MB, packed


def serve(config: Config, again: bool = False) -> int:
    """Keep one job together to its end. again: this process has done so before, and no worker may begin another job. Returns the exit status; the last line
    logged says why a job failed."""
    config.require_cluster()
    context: zmq.Context[Any] = zmq.Context()
    keys = JobKeys.of(config)
    alone = is_loopback(config.root_host)
    if not alone and not again:
        _warn(config)
    listening = (
        os.dup(config.scheduler_fd) if config.scheduler_fd >= 0 else -1
    )  # ZeroMQ closes it with its socket, and another job may follow
    host = local_address_for(config.root_host) if alone else "*"
    try:
        router = Router(context, endpoint(host, config.root_port), config.dead_s, listening, MAX_HEARD_BYTES, keys)
    except PsgcError as error:
        context.destroy(0)
        raise PsgcError(f"scheduler: {error}") from None
    loop = None
    try:
        continuity = Continuity(config, again)
        parse_scheme("none", BucketContext("float32"))  # loading what codecs need takes most of a second, so it is done while nobody waits
        loop = _Loop(config, router, continuity, keys)
    finally:
        if loop is None:
            router.close()
            context.destroy(0)
    names = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
    before = {n: signal.signal(n, lambda number, _: loop.mailbox.put(loop.stop, names[signal.Signals(number)])) for n in names}
    try:
        status = loop.run()
        continuity.end()
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        continuity.close()
        router.close(linger_ms=1000)
        context.destroy(linger=1000)


def _warn(config: Config) -> None:
    """Warn if a job on several machines has no token, or does not encrypt its payloads."""
    if not config.token:
        logger.warning(
            "PSGC_TOKEN is not set: anybody who reaches port %d can join the job, read and alter gradients; set the same secret everywhere",
            config.root_port,
        )
    if config.encrypt:
        return
    logger.warning(
        "payloads are not encrypted: an attacker on the network's path could read and alter them (PSGC_ENCRYPT=1 prevents it); "
        "torch.distributed's own collectives are never protected by psgc"
    )


def _alive(register: Register) -> bool | None:
    return member_alive(register.host, register.pid, register.pid_started)


class _Loop:
    def __init__(self, config: Config, router: Router, continuity: Continuity, keys: JobKeys | None) -> None:
        self.mailbox = Mailbox()
        alone = is_loopback(config.root_host)
        self._config, self._router, self._continuity, self._keys = config, router, continuity, keys
        self._end: End | None = None
        self._voice = Voice.of(config)
        self._voice.speaks(AWAITED)  # members that log to the same place leave it to the scheduler to name what is awaited
        self._launcher = Launcher(config.launcher)
        self._told = False  # the launcher has been told why the job failed, and prints it
        self._state = Membership(
            config.nodes, config.servers, config.job, time.monotonic(), _alive, config.silence_s, config.dead_s,
            config.register_timeout_s, config.step_timeout_s, data_key=continuity.data_key, heartbeat_s=config.heartbeat_s,
            launched=alone and config.scheduler_fd >= 0 and not config.on_its_own, itself=(host_id(), os.getpid(), own_start()),
            again=continuity.again, returns=continuity.returns, replicas=config.replicas,
        )  # fmt: skip
        self._resumed_at = float("inf")  # when this process took another's place; inf: it did not, or has heard of everyone again
        if continuity.records:
            self._resumed_at = time.monotonic()
            self._state.resume(continuity.records, self._resumed_at)
            continuity.grown_to(self._state.records())
            self._state.events.note(self._resumed_at, logging.WARNING, "the scheduler has ended and was started again")

    def run(self) -> int:
        poller = zmq.Poller()
        if not self._state.unbegun and not self._continuity.follows:  # else a former process has done so
            self._launcher.tell("joining")
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self.mailbox.fileno(), zmq.POLLIN)
        next_tick = time.monotonic()
        while self._end is None:
            poller.poll(max(0, int((next_tick - time.monotonic()) * 1000) + 1))
            for call, args in self.mailbox.drain(TURN_S):
                call(*args)
            self._hear(time.monotonic() + TURN_S)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + self._config.heartbeat_s
                self._look_at_tokens()
                self._apply(self._state.tick(now))
        if self._end.reason and not self._told:
            logger.error("job failed: %s", self._end.reason)
        return self._end.status

    def _look_at_tokens(self) -> None:
        """Take what PSGC_TOKEN_FILE has now; the journal is sealed by all of it before anybody can have come under it."""
        if self._keys is None or not self._keys.read_again():
            return
        self._continuity.rekey(self._keys.tokens)
        again = self._router.rekey()
        more = "; members connect again under the oldest of them" if again else ""
        logger.info("the job's tokens have changed: %d are accepted now%s", len(self._keys.tokens), more)

    def _note_return(self) -> None:
        """Tell the launcher once everyone has come to this process: it has done what it was started again for."""
        if self._resumed_at < float("inf") and self._state.has_heard_of_all(self._resumed_at):
            self._resumed_at = float("inf")
            self._launcher.tell("stepped")

    def stop(self, why: str) -> None:
        if self._state.unbegun:
            self._end = End(0, "")
            return
        self._apply(self._state.abort(f"the scheduler was ended by {why}", time.monotonic()))

    def _hear(self, until: float) -> None:
        """Handle messages, from each peer in turn, until the given time: signals and ticks wait no longer than that, even under a flood."""
        for identity, header, payload in self._router.receive():
            body = b"" if payload is None else payload.tobytes()
            unbegun = self._state.unbegun
            self._apply(self._state.receive(identity, header, body, time.monotonic()))
            self._note_return()
            if unbegun and not self._state.unbegun:
                self._launcher.tell("joining")
            if self._end is not None or time.monotonic() >= until:
                return

    def _apply(self, actions: list[Action]) -> None:
        if kept := [action.record for action in actions if isinstance(action, Keep)]:  # before anything of it is said
            self._continuity.keep(kept, self._state.records)
        for action in actions:
            if isinstance(action, Send):
                self._router.send(action.peer, [pack_header(action.header), *([action.body] if action.body else [])])
            elif isinstance(action, Log):
                if action.level >= logging.INFO:
                    self._state.events.note(time.monotonic(), action.level, action.text)
                if action.level >= logging.ERROR and self._state.final:
                    self._launcher.tell("final")
                if action.level >= logging.ERROR and not self._told:
                    self._told = self._launcher.tell("job failed", action.text)
                logger.log(
                    logging.INFO if action.level >= logging.ERROR else action.level, "%s", action.text
                )  # an error is the last line, too
            elif isinstance(action, End) and self._end is None:
                self._end = action
