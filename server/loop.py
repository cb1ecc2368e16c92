"""The server process: its one thread, and whom it hears. Headers come in and go out; payloads stay where they are.

One thread polls everything: the workers' links, connections that have not yet proved that they are a worker's (the gate), the scheduler, and
the engine's mailbox. Sums run in the engine's pool. ``psgc/transport`` has the kinds of links; this module knows none of them.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Set
from functools import partial
from typing import Any, Final

import zmq

from psgc import __version__
from psgc.codecs import BucketContext, parse_scheme
from psgc.config import Config
from psgc.diagnostics.lines import joined
from psgc.diagnostics.report import Launcher
from psgc.errors import RemoteProtocolError
from psgc.layout import Layout
from psgc.observe.exporter import OF_SERVERS, Exporter, export
from psgc.observe.server_trace import server_trace
from psgc.observe.table import member_families
from psgc.processes.absence import Absence, younger
from psgc.processes.mailbox import Mailbox
from psgc.processes.reminder import Reminder
from psgc.server.mirror import Mirror
from psgc.server.own_report import OwnReport
from psgc.server.replica import Replica
from psgc.server.serving import Serving
from psgc.server.state import Fault, ServerState
from psgc.server.store import Store
from psgc.server.succession import Succession
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.lifeline import Lifeline
from psgc.transport.control.voice import ADMISSION, AWAITED, LIFELINE, Voice
from psgc.transport.host import host_id, member_alive, own_start, session_number
from psgc.transport.link import Link, Transport
from psgc.transport.link_set import LinkSet
from psgc.transport.lookup import Lookup
from psgc.transport.memory.segment import Segment
from psgc.transport.pacing import PacedLink
from psgc.transport.security import encryption
from psgc.transport.security.gate import Gate
from psgc.transport.security.handshake import NONCE_BYTES, ServerProof, worker_key
from psgc.transport.security.job_keys import JobKeys
from psgc.transport.watch import Pollable, Watch
from psgc.wire.frames import HEADER_BYTES, SERVER_SENDER, UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, Topology, address_fields, decode_body, decode_json, encode_body

logger = logging.getLogger(__name__)
TURN_S: Final = 0.02  # time for one source's messages in one turn of the loop


def serve(config: Config, again: bool = False, succession: Succession | None = None) -> int:
    """Serve one job to its end. again: this process has served one before, and none may follow. succession: of this process. Returns the exit status; the last
    line logged says why a job failed."""
    config.require_cluster()
    if config.encrypt:
        encryption.require()
    server = Server(config, succession or Succession(config), again)
    stop = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
    before = {
        number: signal.signal(number, lambda n, _: server.mailbox.put(server.told_to_stop, stop[signal.Signals(n)])) for number in stop
    }
    try:
        return server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server:
    """See the module's text."""

    def __init__(self, config: Config, succession: Succession, again: bool = False) -> None:
        self._succession, self._follows = succession, succession.follows
        self.config, self._again, self._session = config, again, session_number()
        self.mailbox = Mailbox()
        self._context: zmq.Context[Any] = zmq.Context()
        self._watch = Watch()
        self._listeners = succession.listen(config)
        identity, keys = b"server-" + secrets.token_hex(6).encode(), JobKeys.of(config)
        self._scheduler = Dealer(self._context, config.root_endpoint, identity, config.dead_s, keys)
        self._gate: Gate | None = None  # opened once the keys of workers are known; until then connections wait in the kernel
        pace = PacedLink.of(config.link_mbit, config.link_fd) if config.link_mbit else None
        self._links = LinkSet(pace, lambda _, header: None if self._mirror is None else self._mirror.room(header))
        self._mirror: Mirror | None = None  # while this process is a standby
        self._topology: Topology  # once this server is admitted
        self._former_layouts = 0  # that a former process has served: workers are let in once they are served again
        self._stepped = (
            False  # the launcher has been told that this process has completed a step, has had nothing to do, or as a standby has all
        )
        self._idle_ticks = 0
        self._preparing: set[int] = set()  # layouts whose kernels are being loaded, or have been
        self._trace = server_trace(config)
        store = Store() if config.standby else Store(self._former(), succession.keep)
        self._serving = Serving(config, store, self._links, self.mailbox, self._trace, self._fault, self._has_stepped)
        self._own_report = OwnReport(self._serving)
        self._admitted_at = 0.0
        self._exporter: Exporter | None = None
        self._launcher = Launcher(config.launcher)
        self._status: int | None = None
        self._reason = ""
        self._began = time.monotonic()
        self._life = Lifeline(
            config.root_endpoint, config.silence_s, config.dead_s, config.heartbeat_s, self._began, self._scheduler.nobody_listens,
            turned_away=lambda: self._scheduler.turned_away(silent=False),
        )  # fmt: skip
        self._lookup = Lookup(config.root_host, config.root_port)
        self._absence = Absence(config.heartbeat_s)
        self._named = Reminder(self._began)
        self._voice = Voice.of(config)
        self._told = False  # the launcher has been told why the job failed, and prints it

    def _former(self) -> list[Segment]:
        """What a former process has left."""
        return self._succession.segments() if self._follows else []

    def run(self) -> int:
        try:
            if not self._again and not self._follows:  # else once it is admitted, or a former process has done so
                self._launcher.tell("joining")
            parse_scheme(
                "none", BucketContext("float32")
            ).warm()  # loading what kernels need takes seconds and holds the GIL, so it is done while nobody waits
            self._register()
            next_tick = time.monotonic() + self.config.heartbeat_s
            while self._status is None:
                self._turn(next_tick)
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + self.config.heartbeat_s
        finally:
            self._shut()
        if self._reason:
            is_news = self._status and not self._told
            logger.log(logging.ERROR if is_news else logging.INFO, "%s", self._reason)
        return self._status or 0

    def told_to_stop(self, why: str) -> None:
        if self._again and self._state is None:  # nobody has begun another job
            self._end(0, "")
            return
        text = f"{self._who}: ended by {why}"
        self._tell_scheduler(Kind.FAULT, encode_body(Notice(0, text)))
        self._end(1, text)

    def _turn(self, next_tick: float) -> None:
        while touched := self._links.flush():
            for link in touched:
                self._close(link)
        things: list[Pollable] = [(self.mailbox, zmq.POLLIN), (self._links, zmq.POLLIN), *self._scheduler.pollables()]
        if self._gate is not None:
            things.append((self._gate, zmq.POLLIN))
        began = time.monotonic()
        ready = self._watch.wait(things, 0.0 if self._links.pending else next_tick - began)
        self._own_report.slept_s += time.monotonic() - began
        self._hear_scheduler(ready)
        if self.mailbox.fileno() in ready:
            for call, args in self.mailbox.drain(TURN_S):
                call(*args)
        self._hear_workers(ready)

    def _hear_workers(self, ready: Set[Any]) -> None:
        if self._gate is not None and self._gate.fileno() in ready:
            for link in self._gate.serve():
                self._let_in(link)
        if self._links.fileno() in ready or self._links.pending:
            self._hear_links(self._links.ready())

    def _hear_links(self, ready: list[Link]) -> None:
        """Receive from the workers in turn, for at most ``TURN_S``, and answer in between, so that ticks and the scheduler never wait for them."""
        until = time.monotonic() + TURN_S
        for number, link in enumerate(ready):
            self._hear_link(link)
            if time.monotonic() >= until:
                self._links.defer(ready[number + 1 :])
                return

    def _let_in(self, link: Link) -> None:
        """A connection has proved that it is a worker's, or at a standby its server's."""
        rank = link.proof.rank
        if self._mirror is not None and rank == self._topology.size:
            if (former := self._mirror.let_in(link)) is not None:
                self._close(former)
            self._links.add(link)
            return
        if self._state is None or rank == self._topology.size or not self._state.serves(self._former_layouts):
            link.fail("this process does not serve it yet, or not any more")
            link.close()  # a worker that was quicker than the scheduler's word to this process comes again
            return
        self._links.add(link)
        self._serving.apply(self._state.proved(link, rank))
        logger.debug("worker connected rank=%d peer=%s", rank, link.peer)

    def _hear_link(self, link: Link) -> None:
        serving = self._serving
        if serving.replica is not None and link.owner is serving.replica.link:
            serving.hear_standby(serving.replica)
            return
        if self._mirror is not None:
            self._hear_server(link, self._mirror)
            return
        assert serving.state is not None
        try:
            for header, payload in link.receive():
                serving.wire_bytes += HEADER_BYTES + header.payload_bytes
                if self._trace is not None:
                    self._trace.received(link.proof.rank, header)
                serving.apply(serving.state.receive(link, header, payload, time.monotonic()))
            if self._trace is not None and link.receiving:
                self._trace.receiving(link.proof.rank)
        except RemoteProtocolError as error:
            logger.warning("connection of rank %s closed: %s", link.proof.rank, error)
            link.fail("bytes that are no message")
        self._links.received(link)
        self._close(link)

    def _hear_server(self, link: Link, mirror: Mirror) -> None:
        """As a standby: write what the server has committed."""
        try:
            self._serving.wire_bytes += mirror.receive(link)
            if mirror.has_all:
                self._has_stepped()
        except (RemoteProtocolError, OSError) as error:
            self._fault(Fault(f"{self._who}: {error}"))
            link.fail(str(error))
        self._links.touch(link)
        self._links.received(link)
        self._close(link)

    def _close(self, link: Link) -> None:
        """Forget a connection if it is closed; its worker makes another."""
        serving = self._serving
        if serving.replica is not None and link.owner is serving.replica.link:
            serving.replica.look(time.monotonic())
            return
        if link.closed:
            self._links.discard(link)
            if serving.state is not None:
                serving.state.lost(link)
            link.close()

    def _has_stepped(self) -> None:
        """The launcher starts a server again without limit as long as its processes complete something, or could have."""
        if not self._stepped:
            self._stepped = True
            self._launcher.tell("stepped")

    def _fault(self, fault: Fault) -> None:
        """The scheduler ends the job; its ABORT ends this server, too."""
        self._tell_scheduler(Kind.FAULT, encode_body(Notice(0, fault.text, fault.awaited)))

    # the scheduler

    def _register(self) -> None:
        config = self.config
        incarnation, lineage = self._succession.place
        body = Register(
            "server", __version__, host_id(), socket.gethostname(), os.getpid(), own_start(),
            config.nodes, config.servers, index=config.server_index, encrypt=config.encrypt,
            session=self._session, incarnation=incarnation, lineage=lineage, standby=config.standby,
            launcher=os.getppid() if config.replicas else 0, goes_on=self._succession.has_store,
            **address_fields(listener.address for listener in self._listeners),
        )  # fmt: skip
        self._tell_scheduler(Kind.REGISTER, encode_body(body))

    def _hear_scheduler(self, ready: Set[Any]) -> None:
        for event in self._scheduler.events() if self._scheduler.monitor in ready else ():
            self._life.connection(event == "up", time.monotonic())
            if self._life.up:  # also after it was admitted: the last connection may have lost layouts
                self._register()
        until = time.monotonic() + TURN_S
        for header, payload in self._scheduler.receive() if self._scheduler.socket in ready else ():
            self._life.hear(time.monotonic())
            self._handle(header, b"" if payload is None else payload.tobytes())
            if time.monotonic() >= until:
                return  # the rest is heard in the next turn

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.TOPOLOGY:
            topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
            # Also as a member: another process of the scheduler may have taken its place.
            self._life.alive = partial(member_alive, topology.scheduler_host, topology.scheduler_pid, topology.scheduler_started)
            self._life.returns = topology.returns
            if topology.stands_by:
                if self._mirror is None:
                    self._stand_by(topology)
            elif self._state is None:
                self._admitted(topology)
            elif not topology.standby:
                self._serving.go_alone()
        elif header.kind == Kind.KEYS and self._state is not None:  # else TOPOLOGY was lost; both come again on the new connection
            self._prepare(Layout.from_json(body))
        elif header.kind in (Kind.ABORT, Kind.ERROR):
            notice = decode_body(Notice, body)
            # All workers have left: this scheduler is the next job's, and the BYE of this job's one was lost.
            over = notice.code == ErrorCode.NOT_ADMITTED and self._state is not None and self._state.deserted
            if notice.code == ErrorCode.FINAL:
                self._launcher.tell("final")
            self._tell_scheduler(Kind.BYE)
            self._end(0 if over else 1, "" if over else notice.text)
        elif header.kind == Kind.BYE:
            self._tell_scheduler(Kind.BYE)
            if self._succession.has_store and self._state is None and self._mirror is None and not self.config.serves_again:
                self._end(1, f"{self._who}: the job that it was to go on with has ended, and another has begun")
            else:
                self._end(0, "")
        elif header.kind == Kind.HEARTBEAT and body and self._voice.speaks(AWAITED):
            logger.warning("scheduler: %s", decode_body(Notice, body).text)
        elif header.kind == Kind.HEARTBEAT and header.step == 1 and not body and self._state is not None:
            self._serving.apply(self._state.left(header.plan, time.monotonic()))
        elif header.kind == Kind.HEARTBEAT and header.step == 2 and not body and self._state is not None:
            self._serving.apply(self._state.leave_out(header.plan, header.key, time.monotonic()))

    def _admitted(self, topology: Topology) -> None:
        config = self.config
        self._serving.state = ServerState(
            topology.rank, topology.size, config.job, topology.epoch, config.window_bytes, config.silence_s, config.step_timeout_s,
            absence=Absence(config.heartbeat_s),
        )  # fmt: skip
        self._topology, self._former_layouts = topology, topology.layouts
        if config.standby:
            self._take_over()
        if topology.standby:
            self._serving.replica = replica = Replica(config, topology, self._links, self._serving.store, time.monotonic())
            replica.look(time.monotonic())
        self._open_gate()
        self._admitted_at = time.monotonic()
        if self._trace is not None:
            self._trace.joined(topology.rank, topology.node_sizes, self._follows)
        joined(topology.rank)
        name, index = f"server {topology.rank}", topology.rank
        self._exporter = export(
            config,
            OF_SERVERS + index,
            lambda: member_families("server", name, config.job, self._own_report.make(time.monotonic(), self._admitted_at)),
        )
        if not self._follows:
            self._launcher.tell("joined")
        logger.info("admitted server=%d workers=%d", topology.rank, topology.size)

    def _stand_by(self, topology: Topology) -> None:
        """Keep what a server commits, until the scheduler says that its machine is lost."""
        self._topology = topology
        self._mirror = Mirror(self._former(), self._succession.keep)
        self._open_gate()
        self._admitted_at = time.monotonic()
        if not self._follows:
            self._launcher.tell("joined")
        logger.info("standing by for server=%d", topology.rank)

    def _take_over(self) -> None:
        """The machine of the server that this process stood by for, or that another process here has followed, is lost."""
        mirror, self._mirror, self._follows = self._mirror, None, True
        self._serving.store = Store(self._former() if mirror is None else mirror.segments, self._succession.keep)
        if mirror is not None and (link := mirror.let_in(None)) is not None:  # whatever still comes from the server does not count
            self._close(link)

    def _open_gate(self) -> None:
        """Accept connections, once this server serves what a former process has served. Workers may have learned of this server before it learned of them;
        their connections have waited in the kernel."""
        topology, state = self._topology, self._state
        if self._gate is not None or (state is not None and not state.serves(self._former_layouts)):
            return
        data_key = bytes.fromhex(topology.key)
        own = topology.size + self.config.standby  # the last one is the server's, at its standby
        keys = [worker_key(data_key, rank, topology.epoch) for rank in range(own)]

        def proof(transport: Transport) -> ServerProof:
            nonce = secrets.token_bytes(NONCE_BYTES)
            encrypt = self.config.encrypt and not transport.local
            return ServerProof(transport.label, topology.rank, topology.epoch, own, keys.__getitem__, nonce, encrypt=encrypt)

        self._gate = Gate(self._listeners, proof, workers=own)

    def _prepare(self, layout: Layout) -> None:
        """Load the layout's kernels in a pool thread, then add the layout. Compiling them may take seconds, in which heartbeats must go on."""
        state = self._state
        assert state is not None
        if layout.id in state.windows or layout.id in state.retired:  # asked again: the answer was lost
            self._tell_scheduler(Kind.KEYS_READY, plan=layout.id)
        elif layout.id not in self._preparing:
            self._preparing.add(layout.id)
            self._serving.engine.load_codecs(layout, lambda: self.mailbox.put(self._add_layout, layout))

    def _add_layout(self, layout: Layout) -> None:
        if self._serving.add_layout(layout, self._follows):
            self._tell_scheduler(Kind.KEYS_READY, plan=layout.id)
            self._open_gate()

    def _tell_scheduler(self, kind: Kind, body: bytes = b"", *, plan: int = 0) -> None:
        sender = UNASSIGNED_SENDER if self._state is None else SERVER_SENDER + self._state.index
        epoch = 0 if self._state is None else self._state.epoch
        header = Header(kind, job=self.config.job, epoch=epoch, plan=plan, sender=sender, payload_bytes=len(body))
        self._scheduler.send(header, body)

    def _tick(self, now: float) -> None:
        self._scheduler.tick(now)
        if self._state is None and self._mirror is None:
            self._await_admission(now)
            return
        if self._gate is not None:
            self._gate.tick()
        texts, faults = self._serving.look_at_standby(now)
        if self._state is not None:
            awaited, stalled = self._state.tick(now)
            texts, faults = [*texts, *awaited], [*faults, *stalled]
            self._idle_ticks += self._state.idle
            if self._idle_ticks > 1:
                self._has_stepped()
        for text in texts if self._voice.speaks(AWAITED) else ():
            logger.warning("%s", text)
        for fault in faults:
            self._fault(fault)
        body = encode_body(Notice(0, f"{self._who}: {texts[0]}")) if texts else b""
        self._tell_scheduler(Kind.HEARTBEAT, body)
        self._tell_scheduler(Kind.REPORT, encode_body(self._own_report.make(now, self._admitted_at)))
        if (sign := self._life.tick(now)) is not None:
            if sign.gone:
                self._end(1, f"{self._who}: {sign.text}")
            elif self._voice.speaks(LIFELINE):
                logger.warning("%s", sign.text)

    def _await_admission(self, now: float) -> None:
        config = self.config
        self._began = younger(self._began, self._absence.ended(now), now)
        if why := self._scheduler.turned_away():
            self._end(1, f"server: {why}")
            return
        refused = self._scheduler.nobody_listens(now)
        if self._follows and refused and (config.scheduler_listens or now - self._began > config.dead_s):
            self._end(
                0,
                f"{self._who}: the job has ended before this process could follow another: nobody listens at {config.root_endpoint} any more",
            )
            return
        self._register()
        if (waited := now - self._began) > config.register_timeout_s and not self._life.talks(now):
            self._end(
                1,
                f"server: gave up after {waited:.0f} s (PSGC_REGISTER_TIMEOUT_S) of waiting for the scheduler at {config.root_endpoint}{self._nameless()}",
            )
        elif self._life.up and now - self._life.last_seen < config.silence_s + 2 * config.heartbeat_s:
            return  # the scheduler has said who is missing, or will soon
        elif self._named.due(now, config.silence_s) and self._voice.speaks(ADMISSION):
            why = self._nameless() or "; is it started?"
            logger.warning("waiting for the scheduler at %s to answer, for %.0f s so far%s", config.root_endpoint, waited, why)

    def _nameless(self) -> str:
        """The end of a line on a scheduler that does not answer: that its name has no address, if that is so."""
        trouble = "" if self._life.up else self._lookup.trouble()
        return f": its name has no address ({trouble}), and is looked up again; is DMLC_PS_ROOT_URI right?" if trouble else ""

    @property
    def _state(self) -> ServerState | None:
        """None until this server is admitted."""
        return self._serving.state

    @property
    def _who(self) -> str:
        """This process, in sentences."""
        return f"server {self._serving.index}" if self._mirror is None else f"the standby of server {self._topology.rank}"

    def _end(self, status: int, reason: str) -> None:
        if self._status is None:
            self._status, self._reason = status, reason
            if status:
                self._told = self._launcher.tell("job failed", reason)

    def _shut(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self._serving.close()
        self._links.flush()
        if self._gate is not None:
            self._gate.close()  # and the listeners
        else:
            for listener in self._listeners:
                listener.close()
        for link in self._links:
            link.close()
        self._links.close()
        self._voice.close()
        self._scheduler.close(linger_ms=500)
        self._context.destroy(linger=500)
        self._serving.store.close()
        if self._status == 0:
            self._succession.forget()
        if self._trace is not None:
            self._trace.close()
