"""The job from its first registration to its end: heartbeats, faults, leaving. Pure: ``now`` and ``alive`` are passed in.

A detected fault (a dead member, a mismatch, a duplicate, a FAULT) ends the job for everybody with one text: who, what, and the remedy.
A stranger (another job's id, one member too many) is refused, and the job goes on; a peer without the token never gets this far.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from psgc import __version__
from psgc.errors import CodecError, PsgcError, RemoteProtocolError
from psgc.processes.absence import Absence, younger
from psgc.processes.addresses import is_loopback, split
from psgc.processes.reminder import Reminder
from psgc.scheduler.actions import Action, End, Keep, Log, Send
from psgc.scheduler.agreements import Agreements
from psgc.scheduler.events import Events
from psgc.scheduler.lateness import Lateness, Overdue
from psgc.scheduler.losses import Losses, may_be_replaced
from psgc.scheduler.post import Post
from psgc.scheduler.records import Alone, Complete, Failed, Joined, Left, Record, Succeeded, succeeded
from psgc.scheduler.rendezvous import Gathering
from psgc.scheduler.roster import Member, Roster
from psgc.scheduler.slowness import Slowness
from psgc.scheduler.view import View
from psgc.transport.host import same_network
from psgc.transport.security.handshake import KEY_BYTES, worker_key
from psgc.wire.frames import VERSION, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, decode_body, encode_body
from psgc.wire.reports import Report

AT_ONE = "PSGC_REPLICAS=1, but servers and what takes their places are on one machine, of different launchers: replicas outlive the launchers, not the machine"
FAREWELL_S = 2.0  # after a fault: how long members may take to say BYE
SEEN_OUT_S = 15.0  # after the workers have left: how long servers may take
# After a process has ended: what it said last, as why it failed, may still be on its way on a busy machine. Well below the few heartbeats for which
# its peers in a collective wait for this scheduler to say who has died.
LAST_WORDS_S = 0.5
LAUNCHED = 12  # members that a launcher knows to live are named so many times later: they import, or compile kernels, on a busy machine


@dataclass(slots=True)
class Membership:
    """See the module's text. alive: whether a member's process still runs; None if that is unknown (it is on another host)."""

    nodes: int
    servers: int
    job: int
    began: float
    alive: Callable[[Register], bool | None] = lambda _: None
    silence_s: float = 5.0
    dead_s: float = 60.0
    register_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    data_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)  # of the job's payload connections
    heartbeat_s: float = 1.0
    itself: tuple[str, int, int] = ("", 0, 0)  # this scheduler's host, pid and when it started
    launched: bool = False  # a launcher on this host has started all the others, and reports one that ends
    again: bool = False  # this scheduler's process has seen a job to its end: no worker may begin another
    replicas: bool = False  # each server has a standby on another machine
    returns: bool = False  # another process may follow this one, though nobody listens at its address meanwhile
    roster: Roster = field(init=False)
    agreements: Agreements | None = None  # this and the next: once everyone is there
    losses: Losses | None = None
    _named: Reminder = field(init=False)  # of members that have not registered
    _told: float = field(init=False)  # when the registered members were last told who is missing
    _stalled: float = float("-inf")  # when a stalled step was last named
    _failed: tuple[float, str] | None = None
    _early: dict[tuple[int, int], Reminder] = field(default_factory=dict)  # by pid and session, of those who wait for the next job
    _over: float | None = None  # since when all workers have left in order
    _absence: Absence = field(init=False)
    _least: Member | None = None  # the worker that has waited least, and the longest that any has
    _most_ms: int = 0
    events: Events = field(default_factory=Events)
    _post: Post = field(init=False)
    _view: View = field(init=False)
    _lateness: Lateness = field(init=False)
    _slowness: Slowness = field(init=False)

    def __post_init__(self) -> None:
        self.roster = Roster(self.nodes, self.servers, self.itself, self.replicas)
        self._named, self._told = Reminder(self.began), self.began
        self._absence = Absence(self.heartbeat_s, self.began)
        self._post, self._view = Post(self.job), View(self.job, self.heartbeat_s)
        self._lateness = Lateness(self.silence_s, self.step_timeout_s)
        self._slowness = Slowness(self.heartbeat_s)

    def receive(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Action]:
        """Handle one message. An error in it becomes an ERROR reply; the job goes on."""
        unknown = False
        try:
            if header.job != self.job:
                raise RemoteProtocolError(
                    "the message is of another job than this scheduler's: check address and PSGC_JOB", ErrorCode.WRONG_JOB
                )
            if header.version != VERSION:
                return self._of_another_version(peer, header, body, now)
            if header.kind == Kind.OBSERVE:
                return [self._observed(peer, now)]
            if header.kind == Kind.REGISTER:
                return self._register(peer, decode_body(Register, body), now)
            member = self.roster.heard_from(peer, now)
            if member is None and (lost := self.roster.lost(peer)) is not None:
                return [self._turn_away(lost, peer)]
            if member is None and header.kind == Kind.FAULT and self.agreements is None and self._failed is None:
                told = decode_body(Notice, body)
                if told.code == ErrorCode.ABSENT:
                    return self.abort(told.text, now)
            if member is None:
                unknown = True  # a member whose new connection is not up yet: there it registers, and repeats its open requests
                raise RemoteProtocolError("register first", ErrorCode.NOT_ADMITTED)
            if member.absent and self._failed is None:
                assert self.losses is not None
                return [self.losses.turn_away(member, peer)]
            if header.kind == Kind.BYE:
                return self._bye(member, now)
            return self._said(member, header, body, now) if self._failed is None else [self._abort_to(member.peer)]
        except RemoteProtocolError as error:
            notice = encode_body(Notice(error.code, f"scheduler: {error}"))
            reply = self._post.send(peer, Kind.ERROR, notice, plan=header.plan)
            # The job is the peer's own: a stranger does not learn this job's id. The version is the one that the peer reads.
            reply = replace(reply, header=reply.header._replace(job=header.job, version=header.version))
            return [reply, Log(logging.DEBUG if unknown else logging.WARNING, f"refused a message: {error}")]
        except CodecError as error:  # the text names the scheduler: a server's packages may differ
            return self.abort(f"scheduler: {error}", now)
        except PsgcError as error:
            return self.abort(str(error), now)

    def tick(self, now: float) -> list[Action]:
        """Name what is awaited, find members that have died, and give up on what takes too long."""
        was_away = self._was_away(now)
        if self._failed is not None:
            since, reason = self._failed
            done = all(m.away for m in self.roster) or now - since > FAREWELL_S
            return [End(1, reason)] if done else []
        if self._over is not None:
            return self._see_out(self._over, now)
        moved: list[Action] = []
        for member in () if was_away else list(self.roster):  # first handle the last messages of members that ended in the meantime
            if (text := self._death(member, now)) is None:
                continue
            actions = None if self.agreements is None else self._go_on_without(member, text, now)
            if actions is None:
                return [*moved, *self.abort(self._final(member, text), now)]
            moved += actions
        mourned = moved + [action for member in self.roster for action in self._mourn(member, now)]
        if self.losses is not None and self._all_away and mourned:
            return [*mourned, *self._end(now)]
        if self.agreements is None:
            return self._await_members(now)
        silent = [log for member in self.roster if (log := self._silence(member, now)) is not None]
        slow = [Log(logging.WARNING, text) for text in self._slowness.tick(self.roster.workers(), self.roster.server_members(), now)]
        return [*mourned, *silent, *slow, *(self._deserted(now) or self._name_late(now))]

    def _was_away(self, now: float) -> bool:
        """Whether this process did not run since the last tick (it was stopped, or the machine slept). Members are not silent because of
        that, nor are dead ones' successors late."""
        away = self._absence.ended(now)
        if not away:
            return False
        self.began = younger(self.began, away, now)
        for member in self.roster:
            member.last_seen = younger(member.last_seen, away, now)
            if member.gone is not None:
                member.gone = younger(member.gone, away, now)
        for kind in self.agreements.by_kind() if self.agreements is not None else ():
            for gathering in kind:
                gathering.since = younger(gathering.since, away, now)
        return True

    def abort(self, text: str, now: float) -> list[Action]:
        """End the job for everybody; the first reason is kept."""
        if self._failed is not None:
            return []
        self._failed = (now, text)
        return [Keep(Failed(text)), Log(logging.ERROR, text), *(self._abort_to(m.peer) for m in self.roster if not m.left)]

    # what outlives this process

    def records(self) -> Iterator[Record]:
        """What another process of this scheduler has to know to go on: nothing before everyone is there, since members ask again."""
        if self.agreements is None:
            return
        for member in self.roster:
            yield Joined.of(member.peer, member.register)
        yield Complete(self.epoch)
        yield from self.agreements.records()
        if self.losses is not None:
            yield from self.losses.records()
        servers = {server.rank: server for server in self.roster.server_members()}
        for index in self.agreements.declarations.begun_anew():
            yield succeeded(index, servers[index].peer, servers[index].register)
        for member in self.roster:
            if member.left:
                yield Left(member.register.role, member.rank)
        if self._failed is not None:
            yield Failed(self._failed[1])

    def resume(self, records: Iterable[Record], now: float) -> None:
        """Go on from what another process has written down. Members say again what is not in it. Raises PsgcError for what does not fit."""
        for record in records:
            if isinstance(record, Joined):
                peer, register = record.read()
                self.roster.add(Member(peer, register, now))
            elif isinstance(record, Complete):
                if not self.roster.has_all_but_standbys:
                    raise RemoteProtocolError("a journal in which somebody is missing of a job that was complete")
                self._post.epoch = record.epoch
                self.roster.number(self.epoch)
                self._begin()
            elif self.agreements is None or self.losses is None:
                raise RemoteProtocolError(f"a {type(record).__name__} before everyone was there")
            elif isinstance(record, Succeeded):
                peer, register = record.read()
                member = self._of_rank(register.role, record.index)
                if register.role == "server" and register.lineage != member.register.lineage:
                    self.roster.promote(member, register, peer, now)
                else:
                    self.roster.replace(member, peer, register, now)
                if register.role == "server":
                    self.agreements.declarations.begins_anew(record.index)
                else:
                    self.losses.resumed(member, record.generation)
            elif isinstance(record, Alone):
                if (standby := self.roster.standby_of(record.server)) is not None:
                    self.roster.drop(standby)
            elif isinstance(record, Left):
                self._of_rank(record.role, record.index).left = True
            elif isinstance(record, Failed):
                self._failed = (now, record.text)
            elif not self.losses.heed(record, now):
                self.agreements.heed(record, now)
        if self.agreements is not None and self._all_away:
            self._over = now
        if self.losses is not None and self._failed is None and (unsettled := self.losses.unsettled):
            self._failed = (
                now,
                f"the scheduler died while rank {unsettled[0]}, whose process had taken a dead one's place, was still to get the job's state; start it again",
            )

    def _begin(self) -> None:
        """Everyone is there."""
        self.agreements = Agreements(self.roster, self._post)
        self.losses = Losses(self.roster, self._post, self.agreements)

    def _of_rank(self, role: str, index: int) -> Member:
        members = self.roster.workers() if role == "worker" else self.roster.server_members()
        found = next((member for member in members if member.rank == index), None)
        if found is None:
            raise RemoteProtocolError(f"{role} {index} in a journal that does not say who it is")
        return found

    # registration

    @property
    def epoch(self) -> int:
        """Of the membership as it is now."""
        return self._post.epoch

    @property
    def unbegun(self) -> bool:
        """Whether this is a process's second job, or a later one, which no worker has begun."""
        return self.again and not self.roster.workers()

    def _register(self, peer: bytes, register: Register, now: float) -> list[Action]:
        if self._failed is not None:
            return [self._abort_to(peer)]
        if (lost := self.roster.lost(peer, register.lineage)) is not None:
            return [self._turn_away(lost, peer)]
        register = self.roster.known_as(register)
        if self.roster.has_left(register, self._over is not None):
            return [self._await_the_end(peer, register, now)]
        known = self.roster.returns(peer, register, now)
        if known is not None and known.absent and self.losses is not None:
            return [self.losses.turn_away(known, peer)]
        if known is not None:
            return [self._topology(known), *self._layouts_again(known)] if self.agreements is not None else []
        former = self.roster.former(register)
        if former is not None:
            return self._succeeded(former, peer, register, now)
        member = Member(peer, register, now)
        conflict = self.roster.conflict(member)
        if self.agreements is not None:
            raise RemoteProtocolError(f"everyone is already there: {conflict or member.label}", ErrorCode.NOT_ADMITTED)
        self.roster.add(member)
        if conflict is not None:
            return self.abort(conflict, now)
        warning = self._warn_of_loopback(member)
        return warning + (self._admit_all(now) if self.roster.complete else [])

    def _succeeded(self, server: Member, peer: bytes, register: Register, now: float) -> list[Action]:
        """A server's launcher has started it again: it goes on from what its former process has left, at the same address."""
        before = server.register
        if register.role == "worker":
            return self._replaced(server, peer, register, now)
        if register.incarnation <= before.incarnation:
            return []  # a former process's word, late
        if (register.address, register.local_address, register.more) != (before.address, before.local_address, before.more):
            return self.abort(
                f"{server.label} was started again and listens at {register.address}, not at {before.address}; workers do not find it", now
            )
        text = f"{server.label} has ended and was started again"
        self.roster.replace(server, peer, register, now)
        log: list[Action] = [Log(logging.WARNING, f"{text}: pid {register.pid} goes on")]
        if self.agreements is None:
            return log
        if register.standby:
            return [*log, self._topology(server)]
        self.agreements.declarations.begins_anew(server.rank)
        return [Keep(succeeded(server.rank, server.peer, server.register)), *log, self._topology(server), *self._layouts_again(server)]

    def _replaced(self, worker: Member, peer: bytes, register: Register, now: float) -> list[Action]:
        assert self.losses is not None, "a worker's former process is known once everyone was there"
        gone = worker.gone is not None or self.alive(worker.register) is False  # it may have ended since the last tick
        if self.roster.is_past(register) or (register.incarnation <= worker.register.incarnation and not gone):
            raise RemoteProtocolError(f"another process has taken the place of {worker.label}", ErrorCode.NOT_ADMITTED)
        if register.version != __version__:
            who = f"pid {register.pid} on {register.hostname}"
            return self.abort(
                f"{who}, which is to take the place of {worker.label}, runs psgc {register.version}, the job {__version__}", now
            )
        if worker.register.shrinks and any(other.left for other in self.roster.workers()):
            return [self._await_the_end(peer, register, now)]  # it is too late to go on with the others
        return [*self.losses.replace(worker, peer, register, now), self._topology(worker)]

    def _of_another_version(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Action]:
        """End a job that is not complete, as for another contradiction, and tell the member so in its own version."""
        try:
            label = Member(peer, decode_body(Register, body), now).label
        except RemoteProtocolError:  # that version's body is another
            label = "a member"
        text = f"{label} speaks version {header.version} of the protocol, the scheduler version {VERSION}; install one psgc everywhere"
        if header.kind != Kind.REGISTER or self.agreements is not None:
            raise RemoteProtocolError(text, ErrorCode.NOT_ADMITTED)
        actions, answer = self.abort(text, now), self._abort_to(peer)
        return [*actions, replace(answer, header=answer.header._replace(version=header.version))]

    def _await_the_end(self, peer: bytes, register: Register, now: float) -> Send:
        """Answer a process that has left this job and would join the next one: it hears that this scheduler lives, repeats its registration and asks the next
        scheduler at this address on a new connection. Named are the members it waits for, if it waits for long."""
        early = self._early.setdefault((register.pid, register.session), Reminder(now))
        staying = ", ".join(member.label for member in self.roster if not member.left)
        text = f"{staying} still in the job that this process has left: the next one begins when it is over" if staying else ""
        return self._post.send(peer, Kind.HEARTBEAT, encode_body(Notice(0, text)) if text and early.due(now, self.silence_s) else b"")

    def _layouts_again(self, member: Member) -> Iterator[Action]:
        """What a member that registers again may not have got."""
        if member.register.role == "server" and not member.register.standby and self.agreements is not None and self.losses is not None:
            yield from (self.losses.tell_absent(member, worker) for worker in self.roster.workers() if worker.absent)
            yield from self.agreements.again(member)

    def _warn_of_loopback(self, member: Member) -> list[Action]:
        """Warn of a server whose address workers on other machines would take for their own machine."""
        register = member.register
        if register.role != "server" or same_network(register.host, self.itself[0]):
            return []
        try:
            host, _ = split(register.address)
        except ValueError:
            return []
        if not is_loopback(host):
            return []
        return [
            Log(
                logging.WARNING, f"{member.label} says that workers reach it at {register.address}, which on every other machine is that "
                f"machine itself; set DMLC_NODE_HOST or PSGC_ADVERTISE for it to an address of {register.hostname} that the workers reach",
            )
        ]  # fmt: skip

    def _admit_all(self, now: float) -> list[Action]:
        if (text := self.roster.lonely()) is not None:
            return self.abort(text, now)
        workers = self.roster.number(self.epoch)
        self._begin()
        for member in self.roster:
            member.last_seen, member.named = now, None
        text = f"everyone is there: {workers} workers, {self.servers} servers"
        kept = [*(Keep(Joined.of(member.peer, member.register)) for member in self.roster), Keep(Complete(self.epoch))]
        warning = [Log(logging.WARNING, AT_ONE)] if self.roster.at_one else []
        return [*kept, *warning, Log(logging.INFO, text), *map(self._topology, self.roster)]

    def _topology(self, member: Member) -> Send:
        key = self.data_key if member.register.role == "server" else worker_key(self.data_key, member.rank, self.epoch)
        layouts = 0
        if self.agreements is not None and member.register.role == "server" and not member.register.standby:
            declarations = self.agreements.declarations
            follows = member.register.incarnation > 1 or member.rank in declarations.begun_anew()
            layouts = declarations.layouts if follows else 0
        return self._post.send(member.peer, Kind.TOPOLOGY, self.roster.topology(member, key, layouts, self.returns))

    # a complete job

    def _said(self, member: Member, header: Header, body: bytes, now: float) -> list[Action]:
        kind = Kind(header.kind)
        if kind is Kind.HEARTBEAT:
            stalled = self._name_stall(member, decode_body(Notice, body).text, now) if body else []
            self._note_waited(member, header.step)
            return [*stalled, self._answer_heartbeat(member)]
        if kind is Kind.REPORT:
            report = decode_body(Report, body)
            if (member.rank == 0 or report.reconnects) and not member.register.standby:  # all ranks' gradients travel alike
                self.events.compare(now, f"{'rank' if member.register.role == 'worker' else 'server'} {member.rank}", member.report, report)
            member.report = report
            return []
        if kind is Kind.FAULT:
            return self._fault(member, decode_body(Notice, body), now)
        if self.agreements is None or self.losses is None:
            raise RemoteProtocolError(f"{kind.name} before everyone is there", ErrorCode.NOT_ADMITTED)
        if kind is Kind.ERROR:
            return self.abort(f"{member.label}: {decode_body(Notice, body).text}", now)
        if kind is Kind.STATE and member.register.role == "worker":
            return self.losses.state(member, header)
        return self.agreements.said(member, header, body, now)

    def _fault(self, member: Member, notice: Notice, now: float) -> list[Action]:
        text = notice.text or f"{member.label} reported a fault and did not say which"
        left = sorted(m.rank for m in self.roster.workers() if m.left)
        if left and notice.code == ErrorCode.BROKEN_GROUP:
            ranks = ", ".join(map(str, left))
            text = f"rank(s) {ranks} left the job, but others go on: every rank must run the same number of steps ({text})"
        return self.abort(text, now)

    def _name_stall(self, teller: Member, text: str, now: float) -> list[Action]:
        """Log what a member awaits: a server awaits ranks, a worker awaits a server. Other members report the same, so reports that follow soon are
        dropped."""
        if now - self._stalled < self.silence_s / 2:
            return []
        self._stalled = now
        return [Log(logging.WARNING, text), *self._tell_workers(text, teller)]

    def _tell_workers(self, text: str, teller: Member | None = None) -> list[Send]:
        body = encode_body(Notice(0, text))
        return [self._post.send(m.peer, Kind.HEARTBEAT, body) for m in self.roster.workers() if not m.away and m is not teller]

    def _answer_heartbeat(self, member: Member) -> Send:
        """Tell a worker which rank waited least for steps (all others waited for that rank), how long it waited, and the longest wait of any
        rank; a server, one of the workers that have left or that the job goes on without, in turn: the worker's own BYE is lost where its connection to the
        server is down."""
        if self.agreements is None:
            return self._post.send(member.peer, Kind.HEARTBEAT)
        if member.register.role != "worker":
            away = [worker for worker in self.roster.workers() if worker.away]
            if not away:
                return self._post.send(member.peer, Kind.HEARTBEAT)
            member.told_left += 1
            worker = away[member.told_left % len(away)]
            if not worker.left and self.losses is not None:
                return self.losses.tell_absent(member, worker)
            return self._post.send(member.peer, Kind.HEARTBEAT, plan=worker.rank, step=1)
        least = self._least or member
        return self._post.send(member.peer, Kind.HEARTBEAT, plan=least.rank, key=least.waited_ms, step=self._most_ms)

    def _note_waited(self, member: Member, waited_ms: int) -> None:
        """Counts only grow, so the least is searched again only when its own count has grown: once a heartbeat, for any number of members."""
        member.waited_ms = waited_ms
        self._most_ms = max(self._most_ms, waited_ms)
        if self._least is None or self._least is member or self._least.absent or waited_ms < self._least.waited_ms:
            self._least = min((m for m in self.roster.workers() if not m.absent), key=lambda m: m.waited_ms, default=None)

    def _observed(self, peer: bytes, now: float) -> Send:
        if self._failed is not None:
            return self._abort_to(peer)
        return self._post.send(peer, Kind.OBSERVE, self._view.body(self.roster, self.agreements is not None, self.events, now))

    # leaving

    def _bye(self, member: Member, now: float) -> list[Action]:
        member.left = True
        return [Keep(Left(member.register.role, member.rank)), self._post.send(member.peer, Kind.BYE), *self._after_bye(member, now)]

    def _after_bye(self, member: Member, now: float) -> list[Action]:
        if self._failed is not None:
            return []
        if self.agreements is None:
            return self.abort(f"{member.label} left before everyone was there", now)
        if self._over is not None:
            return [End(0, "")] if all(m.left for m in self.roster) else []
        if member.register.role == "server":
            return self.abort(f"{member.label} left while workers still run; look at its log", now)
        return self._end(now) if self._all_away else self._deserted(now)

    @property
    def _all_away(self) -> bool:
        return all(m.away for m in self.roster.workers())

    def _end(self, now: float) -> list[Action]:
        """No worker is left: the servers end."""
        self._over = now
        for worker in self.roster.workers():
            worker.left = True
        return [self._post.send(m.peer, Kind.BYE) for m in (*self.roster.server_members(), *self.roster.standbys())]

    def _see_out(self, since: float, now: float) -> list[Action]:
        """The workers are done: tell the servers until each has said BYE or is gone."""
        for member in self.roster:
            member.left = member.left or self.alive(member.register) is False
        staying = [m for m in self.roster if not m.left]
        if not staying:
            return [End(0, "")]
        if now - since <= SEEN_OUT_S:
            return [self._post.send(m.peer, Kind.BYE) for m in staying]
        return [Log(logging.WARNING, f"{', '.join(m.label for m in staying)} did not say BYE at the end of the job"), End(0, "")]

    def _deserted(self, now: float) -> list[Action]:
        """A worker has left in order: end the job if other workers wait for it."""
        left = {m.rank for m in self.roster.workers() if m.left}
        for gathering in self._gatherings() if left else ():
            gone = left.intersection(gathering.missing)
            if gone:
                who = ", ".join(map(str, sorted(gone)))
                return self.abort(f"rank(s) {who} left the job, but {gathering.what} awaits them: every rank must make the same calls", now)
        for value in self.agreements.values.open() if left and self.agreements is not None else ():
            if left.issuperset(value.missing):
                return self.abort(f"{value.what} awaits {value.awaited} and all other ranks have left the job: nobody can publish it", now)
        return []

    # what is awaited

    def _await_members(self, now: float) -> list[Action]:
        if self.unbegun:
            self.began, self._named = now, Reminder(now)
        waited = now - self.began
        missing, here = self.roster.missing(), self._here()
        text = f"waiting for {missing} to register, for {waited:.0f} s so far; here: {here}"
        if waited > self.register_timeout_s:
            return self.abort(
                f"gave up after {waited:.0f} s of waiting for {missing} to register; here: {here}; start the missing ones, or raise PSGC_REGISTER_TIMEOUT_S",
                now,
            )
        if now - self._told < self.silence_s:
            return []
        self._told = now  # even without a text: members that receive nothing take the scheduler for dead
        named = self._named.due(now, self.silence_s * (LAUNCHED if self.launched else 1))
        body = encode_body(Notice(0, text)) if named else b""
        return [*([Log(logging.WARNING, text)] if named else []), *(self._post.send(m.peer, Kind.HEARTBEAT, body) for m in self.roster)]

    def _here(self) -> str:
        labels = [m.label for m in self.roster]
        return ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "") or "nobody"

    def _gatherings(self) -> list[Gathering]:
        return [] if self.agreements is None else self.agreements.gatherings()

    def _name_late(self, now: float) -> list[Action]:
        assert self.agreements is not None
        try:
            texts = self._lateness.tick(self.agreements.by_kind(), now)
        except Overdue as overdue:
            return self.abort(str(overdue), now)
        actions: list[Action] = []
        for text in texts:
            actions += [Log(logging.WARNING, text), *self._tell_workers(text)]
        return actions

    def _death(self, member: Member, now: float) -> str | None:
        if member.away:
            return None
        alive = self.alive(member.register)
        if alive is False:
            member.gone = now if member.gone is None else member.gone
            if now - member.gone < LAST_WORDS_S:
                return None
            if not member.register.incarnation:
                return f"{member.label} died: its process is gone without leaving the job; look at its log"
            return self._not_followed(member, now)
        if alive:
            return None  # it is stopped, or busy: its silence is named, and it may come back
        # Before everyone is there, members send nothing but repeated registrations, a worker one every silence_s.
        limit = self.dead_s if self.agreements is not None else max(self.dead_s, 3 * self.silence_s)
        if now - member.last_seen <= limit:
            member.gone, member.mourned = None, False
            return None
        if self.losses is not None and may_be_replaced(member):
            member.gone = now if member.gone is None else member.gone
            return self._not_followed(member, now)
        return f"{member.label} has said nothing for {now - member.last_seen:.0f} s and counts as dead (PSGC_DEAD_S); look at its machine"

    def _go_on_without(self, member: Member, text: str, now: float) -> list[Action] | None:
        """A server's machine is lost, or its standby's: what is done so that the job goes on. None if it cannot. text: how it was lost."""
        assert self.agreements is not None
        roster, register = self.roster, member.register
        if register.role != "server":
            return None
        if register.standby:
            server = self._of_rank("server", member.rank)
            roster.drop(member)
            line = f"{text}; server {member.rank} goes on without a standby: if its machine is lost as well, the job ends"
            return [Keep(Alone(member.rank)), Log(logging.WARNING, line), *self._tell_workers(line), self._topology(server)]
        standby = roster.standby_of(member.rank)
        if standby is None or standby.gone is not None or (self.alive(standby.register) is None and now - standby.last_seen > self.dead_s):
            return None
        peer, register = standby.peer, replace(standby.register, standby=False)
        roster.promote(member, register, peer, now)
        self.agreements.declarations.begins_anew(member.rank)
        line = f"{text}; {member.label}, which has all that it had committed, takes its place (PSGC_REPLICAS=1)"
        workers = (worker for worker in roster.workers() if not worker.away)
        return [
            Keep(succeeded(member.rank, peer, register)), Log(logging.WARNING, line), *self._tell_workers(line), self._topology(member),
            *self._layouts_again(member), *map(self._topology, workers),
        ]  # fmt: skip

    def _final(self, member: Member, text: str) -> str:
        """Why the job ends without the member."""
        register = member.register
        if register.role != "server" or register.standby or not register.incarnation or self.agreements is None:
            return text
        if self.replicas:
            return f"{text}; it has no standby any more, so what it had kept is lost (PSGC_RESTARTS starts a job again)"
        return f"{text}; what it had kept is lost with it: PSGC_REPLICAS=1 keeps it on another machine, too, and PSGC_RESTARTS starts a job again"

    def _turn_away(self, label: str, peer: bytes) -> Send:
        """A member of a lost machine is there after all."""
        text = f"{label} was silent for so long that it counted as lost, and the others have gone on without it (PSGC_DEAD_S); look at its machine"
        return self._post.send(peer, Kind.ABORT, encode_body(Notice(0, text)))

    def _not_followed(self, member: Member, now: float) -> str | None:
        """Of a member that has died, whose launcher starts it again, or ends the job: why the job cannot wait for it any more."""
        assert member.gone is not None
        worker, since = member.register.role == "worker", now - member.gone
        if worker and self.losses is None:
            return f"{member.label} died: its process is gone without leaving the job; look at its log"
        ending = member.register.shrinks and any(other.left for other in self.roster.workers())
        if worker and self.losses is not None and self.losses.fatal and not ending:
            return f"{member.label} died, and no other worker is left whose state the job could go on from; look at its log"
        if member.register.shrinks or since < (self.register_timeout_s if worker else self.dead_s):
            return None
        name = "PSGC_REGISTER_TIMEOUT_S" if worker else "PSGC_DEAD_S"
        return f"{member.label} died and was not started again within {since:.0f} s ({name}); look at its launcher"

    def _mourn(self, member: Member, now: float) -> list[Action]:
        if self.losses is None or member.gone is None or now - member.gone < LAST_WORDS_S or not may_be_replaced(member):
            return []
        return self.losses.mourn(member, now)

    def _silence(self, member: Member, now: float) -> Log | None:
        quiet = now - member.last_seen
        if member.left or member.mourned or quiet < self.silence_s:
            member.named = None
            return None
        member.named = member.named or Reminder(member.last_seen)
        if not member.named.due(now, self.silence_s):
            return None
        return Log(logging.WARNING, f"{member.label} has said nothing for {quiet:.0f} s")

    def _abort_to(self, peer: bytes) -> Send:
        assert self._failed is not None
        return self._post.send(peer, Kind.ABORT, encode_body(Notice(0, self._failed[1])))
