"""The worker's conversation with the scheduler: register, send heartbeats, declare, meet at barriers, leave, and learn of the job's end.

Runs in the network thread. Knows nothing of parts and payloads.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import zmq

from psgc import __version__
from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, Layout
from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import Reminder
from psgc.program.agenda import Agenda, Turn, Use
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.lifeline import Lifeline
from psgc.transport.control.voice import ADMISSION, AWAITED, LIFELINE, Voice
from psgc.transport.host import host_id, member_alive, pid_started, session_number
from psgc.transport.security.curve import control_keys
from psgc.transport.watch import Pollable
from psgc.wire.frames import UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import (
    Declare,
    ErrorCode,
    Lookup,
    Notice,
    Published,
    Register,
    Topology,
    decode_body,
    decode_json,
    encode_body,
    pack,
)
from psgc.wire.reports import Report

logger = logging.getLogger(__name__)
TICK_S: Final = 0.25  # how often the network thread calls ``tick``
TURN_S: Final = 0.02  # time for the scheduler's messages in one turn of the network thread


@dataclass(slots=True)
class Waiting:
    """How long ranks have waited for results of steps, in total: this rank, and all ranks as the scheduler last reported."""

    own_s: float = 0.0
    slowest_rank: int = -1  # the one that waited least; -1: not known
    least_ms: int = 0
    most_ms: int = 0


class Owner(Protocol):
    """What the coordinator tells the network thread."""

    layouts: dict[str, Layout]
    waiting: Waiting
    reporter: Callable[[], Report] | None

    def joined(self, topology: Topology) -> None: ...
    def laid_out(self, layout: Layout) -> None: ...
    def turn(self, key: int) -> None: ...
    def failed(self, text: str) -> None: ...


class _Declared:
    """A declared name that has no layout yet."""

    def __init__(self, request: int, declaration: Declaration, rate: int) -> None:
        self.request, self.declaration, self.rate = request, declaration, rate
        self.digest = encode_body(Declare(declaration.name, declaration.digest(), declaration.unused))
        self.then: list[Callable[[Layout], None]] = []


@dataclass(slots=True)
class _Lookup:
    """A published value that has been asked for and has not come."""

    request: int
    body: bytes
    then: list[Callable[[bytes], None]]


class Coordinator:
    """See the module's text."""

    def __init__(self, context: zmq.Context[Any], config: Config, owner: Owner) -> None:
        self._config, self._owner, self._session = config, owner, session_number()
        identity = b"worker-%s-%d" % (os.urandom(6).hex().encode(), os.getpid())
        self._dealer = Dealer(context, config.root_endpoint, identity, config.dead_s, control_keys(config.job, config.token))
        self.began = time.monotonic()
        self._life = Lifeline(config.root_endpoint, config.silence_s, config.dead_s, TICK_S, self.began, self._dealer.nobody_listens)
        self._absence = Absence(TICK_S)
        self.told = float("-inf")  # when the scheduler last said what is awaited
        self.voice = Voice.of(config)
        self._beat = self._repeat = 0.0
        self._rank: int | None = None
        self._epoch = 0
        self._requests = 0
        self._declared: dict[str, _Declared] = {}
        self._by_request: dict[int, _Declared] = {}
        self._published: dict[int, bytes] = {}  # bodies by request, until the scheduler says that it keeps them
        self._lookups: dict[str, _Lookup] = {}
        self._agenda = Agenda()
        self._barriers: dict[tuple[int, int], threading.Event] = {}  # by layout (0: none) and number
        self._named = Reminder(self.began)
        self.left = False
        self._leaving = self._over = False  # over: the job has failed

    def pollables(self) -> tuple[Pollable, Pollable]:
        return self._dealer.pollables()

    def register(self) -> None:
        """Ask to join. The scheduler answers with TOPOLOGY once everyone is there. Safe to repeat."""
        config = self._config
        body = Register(
            "worker", __version__, host_id(), socket.gethostname(), os.getpid(), pid_started(os.getpid()),
            config.nodes, config.servers, config.node, config.local_rank, config.local_size, encrypt=config.encrypt,
            planned=bool(config.plan), roots=config.reduce_roots, switch=config.switch_size, asynchronous=config.async_mode,
            session=self._session,
        )  # fmt: skip
        self._send(Kind.REGISTER, encode_body(body))

    def declare(self, declaration: Declaration, then: Callable[[Layout], None], rate: int = 0) -> None:
        """rate: bytes a second of this rank's slowest connection to a server; 0 if none has been measured."""
        layout = self._owner.layouts.get(declaration.name)
        if layout is not None:
            then(layout)
            return
        declared = self._declared.get(declaration.name)
        if declared is None:
            self._requests += 1
            declared = self._declared[declaration.name] = _Declared(self._requests, declaration, rate)
            self._by_request[declared.request] = declared
            self._send(Kind.DECLARE, declared.digest, plan=declared.request, step=rate)
        declared.then.append(then)

    def barrier(self, number: int, passed: threading.Event, layout: int = 0) -> None:
        self._barriers[layout, number] = passed
        self._send(Kind.BARRIER, plan=layout, step=number)

    def ask_turn(self, key: int) -> None:
        """This rank has submitted the key's next step: ask for its turn."""
        self._ask_turn(self._agenda.submit(key))

    def _ask_turn(self, use: Use) -> None:
        self._send(Kind.TURN, plan=self._agenda.received, key=use.key, step=use.step)

    def publish(self, name: str, value: bytes) -> None:
        """Have the scheduler keep a value for whoever looks it up, to the end of the job."""
        self._requests += 1
        body = self._published[self._requests] = pack(encode_body(Published.of(name, value)))
        self._send(Kind.PUBLISH, body, plan=self._requests)

    def look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then`` with a published value once it is there."""
        lookup = self._lookups.get(name)
        if lookup is None:
            self._requests += 1
            lookup = self._lookups[name] = _Lookup(self._requests, encode_body(Lookup(name)), [])
            self._send(Kind.LOOKUP, lookup.body, plan=lookup.request)
        lookup.then.append(then)

    def tell(self, text: str) -> None:
        """Have the scheduler log what this worker awaits, and tell the other members."""
        self._send(Kind.HEARTBEAT, encode_body(Notice(0, text)), step=int(1e3 * self._owner.waiting.own_s))

    def fault(self, text: str, code: int = 0) -> None:
        self._send(Kind.FAULT, encode_body(Notice(code, text)))

    def leave(self) -> None:
        self._leaving = True
        if self._rank is None:
            self.left = True
        self._send(Kind.BYE)

    def farewell_s(self) -> float:
        """How long to wait for the scheduler's answer to BYE: it would take a worker that ends without one for dead."""
        return self._config.step_timeout_s if self._life.alive() else self._config.dead_s

    def release(self) -> None:
        """The job has failed: release every thread that waits for a barrier."""
        self._over = True
        for passed in self._barriers.values():
            passed.set()
        self._barriers.clear()

    def receive(self, ready: Set[Any]) -> None:
        """Handle the scheduler's messages, and events of the connection, if one of ``ready`` is its socket."""
        for event in self._dealer.events() if self._dealer.monitor in ready else ():
            self._life.connection(event == "up", time.monotonic())
            if self._life.up:
                self._say_again()
        until = time.monotonic() + TURN_S
        try:
            for header, payload in self._dealer.receive() if self._dealer.socket in ready else ():
                self._life.hear(time.monotonic())
                self._handle(header, b"" if payload is None else payload.tobytes())
                if time.monotonic() >= until:
                    return  # the rest is handled in the next turn
        except RemoteProtocolError as error:
            self._owner.failed(f"the scheduler at {self._config.root_endpoint} sent bytes that are no message: {error}")

    def tick(self, now: float) -> None:
        """Send a heartbeat; repeat the registration until it is answered; name a silent scheduler, and in the end give up."""
        config = self._config
        self._dealer.tick(now)
        if now - self._beat >= config.heartbeat_s and self._rank is not None:
            self._beat = now
            self._send(Kind.HEARTBEAT, step=int(1e3 * self._owner.waiting.own_s))
            if self._owner.reporter is not None:
                self._send(Kind.REPORT, encode_body(self._owner.reporter()))
        if self._rank is None and now - self._repeat >= config.silence_s:  # until then this is the heartbeat
            self._repeat = now
            self.register()
        if self._leaving:
            sign = self._life.tick(now)
            self.left = self.left or (sign is not None and sign.gone)
            if sign is not None and not sign.gone:
                self._warn(LIFELINE, sign.text)
            return
        if self._rank is None and (why := self._dealer.turned_away()):
            self._owner.failed(why)
        elif self._rank is None:
            self._await_admission(now)
        elif (sign := self._life.tick(now)) is not None:
            if sign.gone:
                self._owner.failed(sign.text)
            else:
                self._warn(LIFELINE, sign.text)

    def _warn(self, topic: str, text: str) -> None:
        """Unless another process of the job does, or the job has failed: why it has is the last line."""
        if not self._over and self.voice.speaks(topic):
            logger.warning("%s", text)

    def _await_admission(self, now: float) -> None:
        self.began = younger(self.began, self._absence.ended(now), now)
        waited = now - self.began
        if waited > self._config.register_timeout_s and not self._life.talks(now):
            self._owner.failed(f"gave up after {waited:.0f} s (PSGC_REGISTER_TIMEOUT_S) of waiting for {self._awaited()}")
        elif self._life.up and now - self._life.last_seen < self._config.silence_s + 2 * self._config.heartbeat_s:
            return  # the scheduler has said who is missing, or will soon
        elif self._named.due(now, self._config.silence_s):
            self._warn(ADMISSION, f"waiting for {self._awaited(f', for {waited:.0f} s so far')}")

    def _awaited(self, so_far: str = "") -> str:
        """The scheduler, and why it is awaited. so_far: since when, for a line that is logged meanwhile."""
        scheduler = f"the scheduler at {self._config.root_endpoint}{so_far}"
        if self._life.up:
            return f"{scheduler}: it has said nothing for {time.monotonic() - self._life.last_seen:.0f} s"
        return f"{scheduler}: nothing answers there; is it started, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT the same everywhere?"

    def _say_again(self) -> None:
        """On a new connection: repeat requests that are still unanswered, because the old connection may have lost them. The scheduler counts
        none of them twice."""
        if self._rank is None:
            self.register()
        for declared in self._declared.values():
            self._send(Kind.DECLARE, declared.digest, plan=declared.request, step=declared.rate)
        for layout, number in self._barriers:
            self._send(Kind.BARRIER, plan=layout, step=number)
        for use in self._agenda.unanswered:
            self._ask_turn(use)
        for request, body in self._published.items():
            self._send(Kind.PUBLISH, body, plan=request)
        for lookup in self._lookups.values():
            self._send(Kind.LOOKUP, lookup.body, plan=lookup.request)
        if self._leaving and not self.left:
            self._send(Kind.BYE)

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.TOPOLOGY and self._rank is None:
            topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
            self._rank, self._epoch = topology.rank, topology.epoch
            self._life.alive = partial(member_alive, topology.scheduler_host, topology.scheduler_pid, topology.scheduler_started)
            self._owner.joined(topology)
        elif header.kind == Kind.DECLARE:
            self._declare_whole(header.plan)
        elif header.kind == Kind.LAYOUT:
            self._laid_out(header, body)
        elif header.kind == Kind.BARRIER:
            passed = self._barriers.pop((header.plan, header.step), None)
            if passed is not None:
                passed.set()
        elif header.kind == Kind.TURN:
            for use in self._agenda.told(Turn(header.plan, Use(header.key, header.step))):
                self._owner.turn(use.key)
        elif header.kind == Kind.PUBLISH:
            self._published.pop(header.plan, None)
        elif header.kind == Kind.LOOKUP:
            self._looked_up(decode_body(Published, body))
        elif header.kind in (Kind.ABORT, Kind.ERROR):
            notice = decode_body(Notice, body)
            if self._leaving and notice.code == ErrorCode.NOT_ADMITTED:
                self.left = True  # this scheduler is the next job's: the one of this job has ended, and its answer to BYE was lost
            else:
                self._owner.failed(notice.text)
        elif header.kind == Kind.BYE:
            self.left = True
        elif header.kind == Kind.HEARTBEAT and body:
            self.told = time.monotonic()
            self._warn(AWAITED, f"scheduler: {decode_body(Notice, body).text}")
        elif header.kind == Kind.HEARTBEAT and header.step:
            waiting = self._owner.waiting
            waiting.slowest_rank, waiting.least_ms, waiting.most_ms = header.plan, header.key, header.step

    def _declare_whole(self, request: int) -> None:
        """The scheduler asks for the whole declaration: it has only the digest."""
        declared = self._by_request.get(request)
        if declared is not None:
            self._send(Kind.DECLARATION, pack(encode_body(declared.declaration.to_json())), plan=request)

    def _laid_out(self, header: Header, body: bytes) -> None:
        declared = self._by_request.pop(header.plan, None)
        if declared is None:
            return  # the answer to a request that was said again
        layout = Layout.from_json(body)
        del self._declared[layout.name]
        self._owner.laid_out(layout)
        for then in declared.then:
            then(layout)

    def _looked_up(self, published: Published) -> None:
        lookup = self._lookups.pop(published.name, None)
        for then in lookup.then if lookup is not None else ():  # None: the answer to a request that was said again
            then(published.data)

    def _send(self, kind: Kind, body: bytes = b"", *, plan: int = 0, key: int = 0, step: int = 0) -> None:
        sender = UNASSIGNED_SENDER if self._rank is None else self._rank
        header = Header(
            kind, job=self._config.job, epoch=self._epoch, plan=plan, key=key, step=step, sender=sender, payload_bytes=len(body)
        )
        self._dealer.send(header, body)

    def close(self, linger_ms: int = 500) -> None:
        self.voice.close()
        self._dealer.close(linger_ms)
