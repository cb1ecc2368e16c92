"""Who is in the job: registration, ranks, heartbeats, leaving, and the end. Pure: ``now`` and ``alive`` are passed in.

A fault that is detected (a dead member, a mismatch, a duplicate, a FAULT) ends the job for everybody with one text: who, what, remedy.
A stranger (another job's id, a wrong token) is refused and ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from psgc import __version__
from psgc.errors import LayoutMismatch, PsgcError, RemoteProtocolError
from psgc.layout import Declaration, Layout
from psgc.scheduler.actions import Action, End, Log, Send
from psgc.scheduler.rendezvous import Barriers, Declarations, Gathering
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, ServerAddress, Topology, decode_body, decode_json, encode_body

EPOCH = 1
FAREWELL_S = 2.0  # after the end of a job: how long members may take to say BYE


@dataclass(slots=True)
class Member:
    """One registered process. rank: of a worker; index: of a server; both once everyone is there."""

    peer: bytes
    register: Register
    heard: float
    named: float = 0.0
    rank: int = -1
    left: bool = False

    @property
    def label(self) -> str:
        r = self.register
        where = f"pid {r.pid} on {r.hostname}"
        if r.role == "server":
            return f"server {self.rank if self.rank >= 0 else r.index} ({where})"
        return f"{'worker' if self.rank < 0 else f'worker {self.rank}'} (node {r.node}, local rank {r.local_rank}, {where})"


@dataclass(slots=True)
class Membership:
    """See the module's text. alive: whether a member's process still runs; None where that cannot be told from here."""

    nodes: int
    servers: int
    job: int
    token: str
    began: float
    alive: Callable[[Register], bool | None] = lambda _: None
    silence_s: float = 5.0
    dead_s: float = 15.0
    register_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    members: dict[bytes, Member] = field(default_factory=dict)
    barriers: Barriers | None = None
    declarations: Declarations | None = None
    _named: float = 0.0
    _ended: tuple[float, str] | None = None
    _over: bool = False

    def receive(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Action]:
        """One message. Whatever is wrong with it becomes an ERROR reply; the job goes on."""
        try:
            if header.job != self.job:
                raise RemoteProtocolError(
                    f"job {header.job}, but this scheduler runs job {self.job}: check the address", ErrorCode.WRONG_JOB
                )
            if header.kind == Kind.REGISTER:
                return self._register(peer, decode_body(Register, body), now)
            member = self.members.get(peer)
            if member is None:
                raise RemoteProtocolError("register first", ErrorCode.NOT_ADMITTED)
            member.heard = now
            if header.kind == Kind.BYE:
                return self._bye(member, now)
            if self._ended is not None:
                return []
            return self._said(member, header, body, now)
        except RemoteProtocolError as error:
            notice = encode_body(Notice(error.code, f"scheduler: {error}"))
            return [self._send(peer, Kind.ERROR, notice, plan=header.plan), Log(logging.WARNING, f"refused a message: {error}")]
        except (LayoutMismatch, PsgcError) as error:
            return self.abort(str(error), now)

    def tick(self, now: float) -> list[Action]:
        """Name what is awaited, find who has died, give up on what takes too long."""
        if self._ended is not None:
            since, reason = self._ended
            done = all(m.left for m in self.members.values()) or now - since > FAREWELL_S
            return [End(1, reason)] if done else []
        for member in self.members.values():
            text = self._death(member, now)
            if text:
                return self.abort(text, now)
        if self.barriers is None:
            return self._await_members(now)
        actions: list[Action] = [log for member in self.members.values() if (log := self._silence(member, now)) is not None]
        for layout, keys, servers in self._unready():
            actions += [self._send(m.peer, Kind.KEYS, keys, plan=layout.id) for m in self._of("server") if m.rank in servers]
        return actions + self._await_gatherings(now)

    def abort(self, text: str, now: float) -> list[Action]:
        """End the job for everybody; said once."""
        if self._ended is not None:
            return []
        self._ended = (now, text)
        body = encode_body(Notice(0, text))
        return [Log(logging.ERROR, text), *(self._send(m.peer, Kind.ABORT, body) for m in self.members.values() if not m.left)]

    # registration

    def _register(self, peer: bytes, register: Register, now: float) -> list[Action]:
        if register.token != self.token:
            raise RemoteProtocolError(
                f"{register.role} pid {register.pid} on {register.hostname} showed a wrong token; set the same PSGC_TOKEN everywhere",
                ErrorCode.BAD_TOKEN,
            )
        known = self.members.get(peer)
        if known is not None:
            known.heard = now
            return [self._topology(known)] if self.barriers is not None else []
        if self._ended is not None:
            return [self._send(peer, Kind.ABORT, encode_body(Notice(0, self._ended[1])))]
        member = Member(peer, register, now, named=now)
        if self.barriers is not None:
            raise RemoteProtocolError(f"{member.label}: the job is complete; is one started twice?", ErrorCode.NOT_ADMITTED)
        conflict = self._conflict(member)
        self.members[peer] = member
        if conflict:
            return self.abort(conflict, now)
        return self._admit_all(now) if not self._missing() else []

    def _conflict(self, new: Member) -> str | None:
        """Why ``new`` cannot be in the job with those who are, or None."""
        r = new.register
        if r.version != __version__:
            return f"{new.label} runs psgc {r.version}, the scheduler {__version__}; install one version everywhere"
        if r.nodes != self.nodes:
            return f"{new.label} has DMLC_NUM_WORKER={r.nodes}, the scheduler has {self.nodes}; set the same number of nodes everywhere"
        if r.servers != self.servers:
            return f"{new.label} has DMLC_NUM_SERVER={r.servers}, the scheduler has {self.servers}; set the same number everywhere"
        if r.role == "server" and r.index >= self.servers:
            return (
                f"{new.label}: DMLC_SERVER_ID={r.index}, but DMLC_NUM_SERVER={self.servers}: servers are numbered 0 to {self.servers - 1}"
            )
        for other in self._of(r.role):
            o = other.register
            if r.role == "server" and r.index >= 0 and r.index == o.index:
                return f"two servers have DMLC_SERVER_ID={r.index}: {other.label} and {new.label}; number them 0 to {self.servers - 1}"
            if r.role == "worker" and r.node == o.node and r.local_rank == o.local_rank:
                return (
                    f"two workers have DMLC_WORKER_ID={r.node} and local rank {r.local_rank}: {other.label} and {new.label}; "
                    f"number the nodes 0 to {self.nodes - 1}"
                )
            if r.role == "worker" and r.node == o.node and r.local_size != o.local_size:
                return f"node {r.node}: {new.label} has BYTEPS_LOCAL_SIZE={r.local_size}, {other.label} has {o.local_size}"
        if r.role == "server" and sum(1 for _ in self._of("server")) >= self.servers:
            return f"{new.label} is one server too many: DMLC_NUM_SERVER={self.servers}"
        return None

    def _missing(self) -> list[str]:
        """Who has not registered yet."""
        missing = []
        for node in range(self.nodes):
            there = [m.register for m in self._of("worker") if m.register.node == node]
            if not there:
                missing.append(f"node {node} (DMLC_WORKER_ID={node})")
            else:
                ranks = {r.local_rank for r in there}
                missing += [f"local rank {i} of node {node}" for i in range(there[0].local_size) if i not in ranks]
        servers = self.servers - sum(1 for _ in self._of("server"))
        if servers:
            missing.append(f"{servers} of {self.servers} server(s)")
        return missing

    def _admit_all(self, now: float) -> list[Action]:
        workers = sorted(self._of("worker"), key=lambda m: (m.register.node, m.register.local_rank))
        for rank, member in enumerate(workers):
            member.rank = rank
        servers = list(self._of("server"))
        free = iter(sorted(set(range(self.servers)) - {m.register.index for m in servers}))
        for member in servers:
            member.rank = member.register.index if member.register.index >= 0 else next(free)
        self.barriers, self.declarations = Barriers(len(workers)), Declarations(len(workers), self.servers)
        for member in self.members.values():
            member.heard = member.named = now
        return [
            Log(logging.INFO, f"everyone is there: {len(workers)} workers, {self.servers} servers"),
            *map(self._topology, self.members.values()),
        ]

    def _topology(self, member: Member) -> Send:
        workers = sorted(self._of("worker"), key=lambda m: m.rank)
        servers = sorted(self._of("server"), key=lambda m: m.rank)
        sizes = [sum(m.register.node == node for m in workers) for node in range(self.nodes)]
        addresses = tuple(ServerAddress(m.rank, m.register.host, m.register.address, m.register.local_address) for m in servers)
        names = tuple(f"{m.register.node}.{m.register.local_rank}@{m.register.hostname}" for m in workers)
        topology = Topology(member.rank, len(workers), self.nodes, tuple(sizes), EPOCH, addresses, names)
        return self._send(member.peer, Kind.TOPOLOGY, encode_body(topology))

    # a complete job

    def _said(self, member: Member, header: Header, body: bytes, now: float) -> list[Action]:
        if header.kind == Kind.HEARTBEAT:
            log = [Log(logging.WARNING, decode_body(Notice, body).text)] if body else []
            return [*log, self._send(member.peer, Kind.HEARTBEAT)]
        if header.kind == Kind.FAULT:
            return self.abort(decode_body(Notice, body).text, now)
        if self.barriers is None or self.declarations is None:
            raise RemoteProtocolError(f"{Kind(header.kind).name} before everyone is there", ErrorCode.NOT_ADMITTED)
        if header.kind == Kind.BARRIER and member.register.role == "worker":
            ranks = self.barriers.arrive(member.rank, header.step, now)
            return [self._send(m.peer, Kind.BARRIER, step=header.step) for m in self._of("worker") if m.rank in ranks]
        if header.kind == Kind.DECLARE and member.register.role == "worker":
            return self._declare(member, header, body, now)
        if header.kind == Kind.KEYS_READY and member.register.role == "server":
            if self.declarations.server_ready(member.rank, header.plan):
                name = self.declarations.name_of(header.plan)
                return [s for m in self._of("worker") if (s := self._layout(m, name)) is not None]
            return []
        if header.kind == Kind.ERROR:
            return self.abort(f"{member.label}: {decode_body(Notice, body).text}", now)
        raise RemoteProtocolError(
            f"a {member.register.role} does not send {Kind(header.kind).name} to the scheduler", ErrorCode.UNKNOWN_KIND
        )

    def _declare(self, member: Member, header: Header, body: bytes, now: float) -> list[Action]:
        assert self.declarations is not None
        try:
            declaration = Declaration.from_json(decode_json(body, "DECLARE"))
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"DECLARE: {type(error).__name__}: {error}", ErrorCode.MALFORMED) from None
        layout = self.declarations.declare(member.rank, header.plan, declaration, now)
        if layout is not None:
            text = self.declarations.text(layout.id)
            return [self._send(m.peer, Kind.KEYS, text, plan=layout.id) for m in self._of("server")]
        answer = self._layout(member, declaration.name)
        return [answer] if answer is not None else []

    def _layout(self, member: Member, name: str) -> Send | None:
        assert self.declarations is not None
        answer = self.declarations.answer(name, member.rank)
        return None if answer is None else self._send(member.peer, Kind.LAYOUT, answer[2], plan=answer[0], key=answer[1])

    def _bye(self, member: Member, now: float) -> list[Action]:
        member.left = True
        actions: list[Action] = [self._send(member.peer, Kind.BYE)]
        if self._ended is not None or self.barriers is None:
            return actions if self._ended is not None else actions + self.abort(f"{member.label} left before everyone was there", now)
        if member.register.role == "server":
            if self._over:
                return actions + ([End(0, "")] if all(m.left for m in self.members.values()) else [])
            return actions + self.abort(f"{member.label} left while workers still run", now)
        if all(m.left for m in self._of("worker")):
            self._over = True
            return [*actions, *(self._send(m.peer, Kind.BYE) for m in self._of("server"))]
        return actions + self._deserted(now)

    def _deserted(self, now: float) -> list[Action]:
        """A worker has left in order: does anybody wait for it?"""
        left = {m.rank for m in self._of("worker") if m.left}
        for what, gathering in self._gatherings():
            gone = left.intersection(gathering.missing(sum(1 for _ in self._of("worker"))))
            if gone:
                ranks = ", ".join(map(str, sorted(gone)))
                return self.abort(f"worker(s) {ranks} left the job, but {what} awaits them: every rank must make the same calls", now)
        return []

    # what is awaited

    def _await_members(self, now: float) -> list[Action]:
        waited = now - self.began
        text = f"waiting for {', '.join(self._missing())} to register for {waited:.0f} s; {len(self.members)} member(s) are here"
        if waited > self.register_timeout_s:
            return self.abort(f"gave up {text}: start the missing ones, or set PSGC_REGISTER_TIMEOUT_S", now)
        if now - max(self._named, self.began) < self.silence_s:
            return []
        self._named = now
        body = encode_body(Notice(0, text))
        return [Log(logging.WARNING, text), *(self._send(m.peer, Kind.HEARTBEAT, body) for m in self.members.values())]

    def _await_gatherings(self, now: float) -> list[Action]:
        actions = self._deserted(now)
        if actions:
            return actions
        size = sum(1 for _ in self._of("worker"))
        for what, gathering in self._gatherings():
            waited = now - gathering.since
            if now - gathering.named < self.silence_s:
                continue
            gathering.named = now
            text = f"{what} has awaited rank(s) {', '.join(map(str, gathering.missing(size)))} for {waited:.0f} s"
            if waited > self.step_timeout_s:
                return self.abort(f"{text}, more than the limit of {self.step_timeout_s:.0f} s (PSGC_STEP_TIMEOUT_S)", now)
            body = encode_body(Notice(0, text))
            actions += [Log(logging.WARNING, text), *(self._send(m.peer, Kind.HEARTBEAT, body) for m in self._of("worker") if not m.left)]
        return actions

    def _gatherings(self) -> Iterator[tuple[str, Gathering]]:
        if self.barriers is not None and self.declarations is not None:
            yield from ((f"barrier {number}", g) for number, g in list(self.barriers.open.items()))
            yield from ((f"the declaration of {name!r}", g) for name, g in list(self.declarations.open().items()))

    def _unready(self) -> list[tuple[Layout, bytes, list[int]]]:
        return self.declarations.unready() if self.declarations is not None else []

    def _death(self, member: Member, now: float) -> str | None:
        if member.left:
            return None
        if self.alive(member.register) is False:
            return f"{member.label} died: its process is gone without leaving the job; look at its log"
        if self.barriers is not None and now - member.heard > self.dead_s:
            return f"{member.label} has said nothing for {now - member.heard:.0f} s and counts as dead (PSGC_DEAD_S)"
        return None

    def _silence(self, member: Member, now: float) -> Log | None:
        quiet = now - member.heard
        if member.left or quiet < self.silence_s or now - member.named < self.silence_s:
            return None
        member.named = now
        return Log(logging.WARNING, f"{member.label} has said nothing for {quiet:.0f} s")

    def _of(self, role: str) -> Iterator[Member]:
        return (m for m in self.members.values() if m.register.role == role)

    def _send(self, peer: bytes, kind: Kind, body: bytes = b"", *, plan: int = 0, key: int = 0, step: int = 0) -> Send:
        header = Header(kind, job=self.job, epoch=EPOCH, plan=plan, key=key, step=step, sender=SCHEDULER_SENDER, payload_bytes=len(body))
        return Send(peer, header, body)
