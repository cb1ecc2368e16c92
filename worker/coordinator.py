"""The worker's conversation with the scheduler: join (``admission.py``), send heartbeats, ask (``requests.py``), leave, and learn of the job's end.

Runs in the network thread. Knows nothing of parts and payloads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Set
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import zmq

from psgc.config import Config
from psgc.diagnostics.report import Launcher
from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, Layout
from psgc.layout.speed import UNKNOWN, Speed
from psgc.program.agenda import Use
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.lifeline import Lifeline, Sign
from psgc.transport.control.voice import ADMISSION, AWAITED, LIFELINE, Voice
from psgc.transport.host import member_alive
from psgc.transport.security.job_keys import JobKeys
from psgc.transport.watch import Pollable
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Published, Topology, decode_body, decode_json, encode_body
from psgc.worker.admission import TICK_S, Admission
from psgc.worker.membership import Membership
from psgc.worker.requests import Requests
from psgc.worker.session import Handover

logger = logging.getLogger(__name__)
TURN_S: Final = 0.02  # time for the scheduler's messages in one turn of the network thread


class Owner(Protocol):
    """What the coordinator tells the network thread."""

    def joined(self, topology: Topology) -> None: ...
    def moved(self, topology: Topology) -> None: ...
    def laid_out(self, layout: Layout) -> None: ...
    def turn(self, key: int) -> None: ...
    def hand_over(self, handover: Handover) -> None: ...
    def failed(self, text: str, cut_off: bool = False) -> None: ...


class _Stage(Enum):
    MEMBER = "member"  # or not admitted yet
    LEAVING = "leaving"
    LEFT = "left"


class _Line:
    """What this worker says: under its place in the job, once it is admitted. beat: when it last sent a heartbeat."""

    def __init__(self, context: zmq.Context[Any], config: Config) -> None:
        identity = b"worker-%s-%d" % (os.urandom(6).hex().encode(), os.getpid())
        self.dealer = Dealer(context, config.root_endpoint, identity, config.dead_s, JobKeys.of(config))
        self._job = config.job
        self.topology: Topology | None = None  # once this worker is admitted
        self.beat = 0.0

    def send(self, kind: Kind, body: bytes = b"", *, plan: int = 0, key: int = 0, step: int = 0) -> None:
        sender, epoch = (UNASSIGNED_SENDER, 0) if self.topology is None else (self.topology.rank, self.topology.epoch)
        header = Header(kind, job=self._job, epoch=epoch, plan=plan, key=key, step=step, sender=sender, payload_bytes=len(body))
        self.dealer.send(header, body)


class Coordinator:
    """See the module's text. What it learns of the job is written down in ``job``."""

    def __init__(self, context: zmq.Context[Any], config: Config, job: Membership, owner: Owner) -> None:
        self._config, self._job, self._owner = config, job, owner
        began = time.monotonic()
        self._line = _Line(context, config)
        dealer = self._line.dealer
        self._life = Lifeline(
            config.root_endpoint, config.silence_s, config.dead_s, TICK_S, began, dealer.nobody_listens,
            turned_away=lambda: dealer.turned_away(silent=False),
        )  # fmt: skip
        self._admission = Admission(config, self._life, began)
        self.requests = Requests(self._line.send)
        self.told = float("-inf")  # when the scheduler last said what is awaited
        self.voice = Voice.of(config)
        self._stage = _Stage.MEMBER
        self._over = False  # the job has failed

    @property
    def began(self) -> float:
        """When this worker began to join the job."""
        return self._admission.began

    @property
    def left(self) -> bool:
        """Whether the scheduler knows that this worker has left, or is gone itself."""
        return self._stage is _Stage.LEFT

    def pollables(self) -> tuple[Pollable, Pollable]:
        return self._line.dealer.pollables()

    def register(self) -> None:
        """Ask to join."""
        self._line.send(Kind.REGISTER, self._admission.request())

    def declare(self, declaration: Declaration, then: Callable[[Layout], None], speed: Speed = UNKNOWN) -> None:
        """See ``Requests``; a name that has a layout is not declared again."""
        layout = self._job.layouts.get(declaration.name)
        if layout is not None:
            then(layout)
        else:
            self.requests.declare(declaration, then, speed)

    def tell(self, text: str) -> None:
        """Have the scheduler log what this worker awaits, and tell the other members."""
        self._line.send(Kind.HEARTBEAT, encode_body(Notice(0, text)), step=int(1e3 * self._job.waiting.own_s))

    def fault(self, text: str, code: int = 0) -> None:
        self._line.send(Kind.FAULT, encode_body(Notice(code, text)))

    def leave(self) -> None:
        self._stage = _Stage.LEFT if self._line.topology is None else _Stage.LEAVING
        self._line.send(Kind.BYE)

    def farewell_s(self) -> float:
        """How long to wait for the scheduler's answer to BYE: it would take a worker that ends without one for dead."""
        return self._config.step_timeout_s if self._life.alive() else self._config.dead_s

    def release(self) -> None:
        """The job has failed: release every thread that waits for a barrier."""
        self._over = True
        self.requests.release()

    def receive(self, ready: Set[Any]) -> None:
        """Handle the scheduler's messages, and events of the connection, if one of ``ready`` is its socket."""
        for event in self._line.dealer.events() if self._line.dealer.monitor in ready else ():
            self._life.connection(event == "up", time.monotonic())
            if self._life.up:
                self._say_again()
        until = time.monotonic() + TURN_S
        try:
            for header, payload in self._line.dealer.receive() if self._line.dealer.socket in ready else ():
                self._life.hear(time.monotonic())
                self._handle(header, b"" if payload is None else payload.tobytes())
                if time.monotonic() >= until:
                    return  # the rest is handled in the next turn
        except RemoteProtocolError as error:
            self._owner.failed(f"the scheduler at {self._config.root_endpoint} sent bytes that are no message: {error}")

    def tick(self, now: float) -> None:
        """Send a heartbeat; repeat the registration until it is answered; name a silent scheduler, and in the end give up."""
        line = self._line
        line.dealer.tick(now)
        if now - line.beat >= self._config.heartbeat_s and line.topology is not None:
            line.beat = now
            self._line.send(Kind.HEARTBEAT, step=int(1e3 * self._job.waiting.own_s))
            self.requests.ask_state_again()
            if self._job.reporter is not None:
                self._line.send(Kind.REPORT, encode_body(self._job.reporter()))
        if self._line.topology is None and self._admission.due(now):
            self.register()
        if self._line.topology is None and self._stage is _Stage.MEMBER:
            why = self._line.dealer.turned_away()
            self._heed(Sign(why, gone=True) if why else self._admission.tick(now), ADMISSION)
        else:
            self._heed(self._life.tick(now), LIFELINE)

    def _heed(self, sign: Sign | None, topic: str) -> None:
        """Name the scheduler, or give it up: a worker that leaves has then left."""
        if sign is None:
            return
        if not sign.gone:
            self._warn(topic, sign.text)
        elif self._stage is _Stage.MEMBER:
            self._owner.failed(sign.text, sign.cut_off)
        else:
            self._stage = _Stage.LEFT

    def _warn(self, topic: str, text: str) -> None:
        """Unless another process of the job does, or the job has failed: why it has is the last line."""
        if not self._over and self.voice.speaks(topic):
            logger.warning("%s", text)

    def _say_again(self) -> None:
        """On a new connection, which may follow one that has lost it, or because the scheduler asks: repeat what is unanswered."""
        if self._stage is _Stage.MEMBER:  # also once it is admitted: who listens now may be another process of the scheduler
            self.register()
        self.requests.say_again()
        if self._stage is _Stage.LEAVING:
            self._line.send(Kind.BYE)

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.TOPOLOGY:
            topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
            self._life.alive = partial(member_alive, topology.scheduler_host, topology.scheduler_pid, topology.scheduler_started)
            self._life.returns = topology.returns
            if self._line.topology is None:
                self._line.topology = self._job.topology = topology
                self._owner.joined(topology)
            elif topology.servers != self._line.topology.servers:
                self._line.topology = self._job.topology = topology
                self._owner.moved(topology)
        elif header.kind == Kind.REGISTER:
            self._say_again()
        elif header.kind == Kind.DECLARE:
            self.requests.declare_whole(header.plan)
        elif header.kind == Kind.LAYOUT:
            self._laid_out(header, body)
        elif header.kind == Kind.BARRIER:
            self.requests.passed(header.plan, header.step)
        elif header.kind == Kind.TURN:
            for key in self.requests.turns(header.plan, Use(header.key, header.step)):
                self._owner.turn(key)
        elif header.kind == Kind.STATE:
            self._owner.hand_over(Handover(header.step, header.plan, takes=header.key == 1))
        elif header.kind == Kind.PUBLISH:
            self.requests.published(header.plan)
        elif header.kind == Kind.LOOKUP:
            self.requests.looked_up(decode_body(Published, body))
        elif header.kind in (Kind.ABORT, Kind.ERROR):
            notice = decode_body(Notice, body)
            if self._stage is not _Stage.MEMBER and notice.code == ErrorCode.NOT_ADMITTED:
                self._stage = _Stage.LEFT  # this scheduler is the next job's: the one of this job has ended, and its answer to BYE was lost
            else:
                if notice.code == ErrorCode.FINAL:
                    Launcher(self._config.launcher).tell("final")
                self._owner.failed(notice.text, notice.code == ErrorCode.CUT_OFF)
        elif header.kind == Kind.BYE and self._stage is _Stage.LEAVING:
            self._stage = _Stage.LEFT
        elif header.kind == Kind.HEARTBEAT and body:
            self.told = time.monotonic()
            self._warn(AWAITED, f"scheduler: {decode_body(Notice, body).text}")
        elif header.kind == Kind.HEARTBEAT and header.step:
            waiting = self._job.waiting
            waiting.slowest_rank, waiting.least_ms, waiting.most_ms = header.plan, header.key, header.step

    def _laid_out(self, header: Header, body: bytes) -> None:
        waiting = self.requests.laid_out(header.plan)
        if waiting is None:
            return
        layout = Layout.from_json(body)
        self._owner.laid_out(layout)
        self._job.layouts[layout.name] = layout
        for then in waiting:
            then(layout)

    def close(self, linger_ms: int = 500) -> None:
        self.voice.close()
        self._line.dealer.close(linger_ms)
