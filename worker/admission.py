"""A worker that asks to join its job: what it says of itself, again and again until it is answered, and how long it waits for that.

Runs in the network thread; ``now`` is passed in. Invariant: a scheduler that takes the connection says itself who is missing, so it is named as silent, or
given up, only while it does not.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from psgc import __version__
from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import Reminder
from psgc.transport.control.lifeline import Lifeline, Sign
from psgc.transport.host import host_id, own_start, session_number
from psgc.transport.lookup import Lookup
from psgc.wire.messages import Register, encode_body

TICK_S: Final = 0.25  # how often the network thread calls ``tick``


class Admission:
    """life: the scheduler's, as this worker knows it. began: when this worker began to join; what a suspended process slept does not count."""

    def __init__(self, config: Config, life: Lifeline, began: float) -> None:
        self._config, self._life, self.began = config, life, began
        self._session = session_number()
        self._lineage = Launcher(config.launcher).number if config.incarnation else 0
        self._lookup = Lookup(config.root_host, config.root_port)
        self._absence = Absence(TICK_S)
        self._named = Reminder(began)
        self._repeated = 0.0  # when it last asked

    def request(self) -> bytes:
        """What it says of itself. The scheduler answers with TOPOLOGY once everyone is there. Safe to repeat."""
        config = self._config
        body = Register(
            "worker", __version__, host_id(), socket.gethostname(), os.getpid(), own_start(),
            config.nodes, config.servers, config.node, config.local_rank, config.local_size, encrypt=config.encrypt,
            planned=bool(config.plan), roots=config.reduce_roots, switch=config.switch_size, asynchronous=config.async_mode,
            session=self._session, incarnation=config.incarnation, lineage=self._lineage,
            waits=config.on_worker_loss == "wait", shrinks=config.on_worker_loss == "shrink",
        )  # fmt: skip
        return encode_body(body)

    def due(self, now: float) -> bool:
        """Whether to ask again. Until it is answered this is the heartbeat."""
        if now - self._repeated < self._config.silence_s:
            return False
        self._repeated = now
        return True

    def tick(self, now: float) -> Sign | None:
        """What to say of the scheduler; as of ``Lifeline``, whether to give it up."""
        self.began = younger(self.began, self._absence.ended(now), now)
        config, waited = self._config, now - self.began
        if waited > config.register_timeout_s and not self._life.talks(now):
            return Sign(f"gave up after {waited:.0f} s (PSGC_REGISTER_TIMEOUT_S) of waiting for {self._awaited(now)}", gone=True)
        if self._life.up and now - self._life.last_seen < config.silence_s + 2 * config.heartbeat_s:
            return None  # the scheduler has said who is missing, or will soon
        if config.scheduler_listens and not self._life.up and self._life.refused(now):
            return Sign(
                f"the scheduler at {config.root_endpoint} is gone: it was started, and nobody listens there any more; it, or a server beside it, has ended "
                f"before the job was complete: look at the log of rank 0's node",
                gone=True,
            )
        due = self._named.due(now, config.silence_s)
        return Sign(f"waiting for {self._awaited(now, f', for {waited:.0f} s so far')}") if due else None

    def _awaited(self, now: float, so_far: str = "") -> str:
        """The scheduler, and why it is awaited. so_far: since when, for a line that is logged meanwhile."""
        scheduler = f"the scheduler at {self._config.root_endpoint}{so_far}"
        if self._life.up:
            return f"{scheduler}: it has said nothing for {now - self._life.last_seen:.0f} s"
        if trouble := self._lookup.trouble():
            return f"{scheduler}: its name has no address ({trouble}), and is looked up again; is DMLC_PS_ROOT_URI={self._config.root_host} right?"
        return f"{scheduler}: nothing answers there; is it started, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT the same everywhere?"
