"""The job from its first registration to its end: heartbeats, faults, leaving. Pure: ``now`` and ``alive`` are passed in.

A detected fault (a dead member, a mismatch, a duplicate, a FAULT) ends the job for everybody with one text: who, what, and the remedy.
A stranger (another job's id, one member too many) is refused, and the job goes on; a peer without the token never gets this far.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from psgc.errors import CodecError, PsgcError, RemoteProtocolError
from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import Reminder
from psgc.scheduler import history
from psgc.scheduler.actions import Action, End, Keep, Log, Send
from psgc.scheduler.admission import NOTHING_LEFT, Admission
from psgc.scheduler.deaths import Deaths
from psgc.scheduler.job import Job
from psgc.scheduler.lateness import Lateness, Overdue, in_turn
from psgc.scheduler.records import Left, Record
from psgc.scheduler.rendezvous import Gathering
from psgc.scheduler.roster import Member
from psgc.scheduler.slowness import Slowness
from psgc.scheduler.view import View
from psgc.wire.frames import VERSION, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, decode_body, encode_body
from psgc.wire.reports import Report

FAREWELL_S = 2.0  # after a fault: how long members may take to say BYE
SEEN_OUT_S = 15.0  # after the workers have left: how long servers may take
LAUNCHED = 12  # members that a launcher knows to live are named so many times later: they import, or compile kernels, on a busy machine


@dataclass(slots=True)
class Membership(Job):
    """See the module's text, and Job's for the arguments."""

    _named: Reminder = field(init=False)  # of members that have not registered
    _told: float = field(init=False)  # when the registered members were last told who is missing
    _stalled: float = float("-inf")  # when a stalled step was last named
    _absence: Absence = field(init=False)
    _least: Member | None = None  # the worker that has waited least, and the longest that any has
    _most_ms: int = 0
    _admission: Admission = field(init=False)
    _deaths: Deaths = field(init=False)
    _view: View = field(init=False)
    _lateness: Lateness = field(init=False)
    _slowness: Slowness = field(init=False)

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        self._named, self._told = Reminder(self.began), self.began
        self._absence = Absence(self.heartbeat_s, self.began)
        self._admission, self._deaths = Admission(self), Deaths(self)
        self._view, self._lateness = View(self.job, self.heartbeat_s), Lateness(self.silence_s, self.step_timeout_s)
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
                return self._admission.of_another_version(peer, header, body, now)
            if header.kind == Kind.OBSERVE:
                return [self._observed(peer, now)]
            if header.kind == Kind.REGISTER:
                return self._admission.register(peer, decode_body(Register, body), now, header.epoch)
            member = self.roster.heard_from(peer, now)
            if member is None and (lost := self.roster.lost(peer)) is not None:
                return [self.turn_away(lost, peer)]
            if member is None and header.kind == Kind.FAULT and self.failed is None:
                told = decode_body(Notice, body)
                if told.code == ErrorCode.ABSENT and self.agreements is None:
                    return self.abort(told.text, now)
                if told.code == ErrorCode.FINAL:
                    return self._launcher_ended(peer, told.text)
            if member is None:
                unknown = True  # a member whose new connection is not up yet: there it registers, and repeats its open requests
                # Of a job that another scheduler had and this one knows nothing of: what was queued for that one comes before a registration.
                former = header.epoch and self.agreements is None
                raise RemoteProtocolError(f"a member {NOTHING_LEFT}" if former else "register first", ErrorCode.NOT_ADMITTED)
            if member.absent and self.failed is None:
                assert self.losses is not None
                return [self.losses.turn_away(member, peer)]
            if header.kind == Kind.BYE:
                return self._bye(member, now)
            return self._said(member, header, body, now) if self.failed is None else [self.abort_to(member.peer)]
        except RemoteProtocolError as error:
            notice = encode_body(Notice(error.code, f"scheduler: {error}"))
            reply = self.post.send(peer, Kind.ERROR, notice, plan=header.plan)
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
        if self.failed is not None:
            since, reason = self.failed
            done = all(m.away for m in self.roster) or now - since > FAREWELL_S
            return [End(1, reason)] if done else []
        if self.over is not None:
            return self._see_out(self.over, now)
        moved: list[Action] = []
        if not was_away:  # else first handle the last messages of members that ended in the meantime
            moved, ended = self._deaths.tick(now)
            if ended:
                return moved
        mourned = moved + self._deaths.mourn(now)
        if self.losses is not None and self.all_away and mourned:
            return [*mourned, *self._end(now)]
        if self.agreements is None:
            return self._await_members(now)
        slow = [Log(logging.WARNING, text) for text in self._slowness.tick(self.roster.workers(), self.roster.server_members(), now)]
        return [*mourned, *self._deaths.silent(now), *slow, *(self._deserted(now) or self._name_late(now))]

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

    # what outlives this process

    def records(self) -> Iterator[Record]:
        """What another process of this scheduler has to know to go on: nothing before everyone is there, since members ask again."""
        return history.records(self)

    def resume(self, records: Iterable[Record], now: float) -> None:
        """Go on from what another process has written down. Members say again what is not in it. Raises PsgcError for what does not fit."""
        history.resume(self, records, now)

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
        return self.abort(text + in_turn(notice.awaited, self._gatherings()), now)

    def _launcher_ended(self, peer: bytes, text: str) -> list[Action]:
        """Its members may still save and leave in order. Before everyone is there it may be started once more, and nothing is lost."""
        self.final = self.agreements is not None
        return [self.post.send(peer, Kind.BYE), Log(logging.INFO, text)]

    def _name_stall(self, teller: Member, text: str, now: float) -> list[Action]:
        """Log what a member awaits: a server awaits ranks, a worker awaits a server. Other members report the same, so reports that follow soon are
        dropped."""
        if now - self._stalled < self.silence_s / 2:
            return []
        self._stalled = now
        return [Log(logging.WARNING, text), *self.tell_workers(text, teller)]

    def _answer_heartbeat(self, member: Member) -> Send:
        """Tell a worker which rank waited least for steps (all others waited for that rank), how long it waited, and the longest wait of any
        rank; a server, one of the workers that have left or that the job goes on without, in turn: the worker's own BYE is lost where its connection to the
        server is down."""
        if self.agreements is None:
            return self.post.send(member.peer, Kind.HEARTBEAT)
        if member.register.role != "worker":
            away = [worker for worker in self.roster.workers() if worker.away]
            if not away:
                return self.post.send(member.peer, Kind.HEARTBEAT)
            member.told_left += 1
            worker = away[member.told_left % len(away)]
            if not worker.left and self.losses is not None:
                return self.losses.tell_absent(member, worker)
            return self.post.send(member.peer, Kind.HEARTBEAT, plan=worker.rank, step=1)
        least = self._least or member
        return self.post.send(member.peer, Kind.HEARTBEAT, plan=least.rank, key=least.waited_ms, step=self._most_ms)

    def _note_waited(self, member: Member, waited_ms: int) -> None:
        """waited_ms: of this process. Counts only grow, so the least is searched again only when its own count has grown: once a heartbeat, for any number of
        members."""
        member.waited_ms = member.waited_before_ms + waited_ms
        self._most_ms = max(self._most_ms, member.waited_ms)
        if self._least is None or self._least is member or self._least.absent or member.waited_ms < self._least.waited_ms:
            self._least = self.roster.least_waited()

    def _observed(self, peer: bytes, now: float) -> Send:
        if self.failed is not None:
            return self.abort_to(peer)
        return self.post.send(peer, Kind.OBSERVE, self._view.body(self.roster, self.agreements is not None, self.events, now))

    # leaving

    def _bye(self, member: Member, now: float) -> list[Action]:
        member.left = True
        return [Keep(Left.of(member)), self.post.send(member.peer, Kind.BYE), *self._after_bye(member, now)]

    def _after_bye(self, member: Member, now: float) -> list[Action]:
        if self.failed is not None:
            return []
        if self.agreements is None:
            return self.abort(f"{member.label} left before everyone was there", now)
        if self.over is not None:
            return [End(0, "")] if all(m.left for m in self.roster) else []
        if member.register.role == "server":
            return self.abort(f"{member.label} left while workers still run; look at its log", now)
        if self.all_away:
            return self._end(now)
        failed = self.losses.left(member) if self.losses is not None else []
        return [*failed, *self._deserted(now)]

    def _end(self, now: float) -> list[Action]:
        """No worker is left: the servers end."""
        self.over = now
        for worker in self.roster.workers():
            worker.left = True
        return [self.post.send(m.peer, Kind.BYE) for m in (*self.roster.server_members(), *self.roster.standbys())]

    def _see_out(self, since: float, now: float) -> list[Action]:
        """The workers are done: tell the servers until each has said BYE or is gone."""
        for member in self.roster:
            member.left = member.left or self.alive(member.register) is False
        staying = [m for m in self.roster if not m.left]
        if not staying:
            return [End(0, "")]
        if now - since <= SEEN_OUT_S:
            return [self.post.send(m.peer, Kind.BYE) for m in staying]
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
        return [*([Log(logging.WARNING, text)] if named else []), *(self.post.send(m.peer, Kind.HEARTBEAT, body) for m in self.roster)]

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
            return self.abort(f"{overdue}{in_turn(overdue.ranks, self._gatherings())}", now)
        actions: list[Action] = []
        for text in texts:
            actions += [Log(logging.WARNING, text), *self.tell_workers(text)]
        return actions
