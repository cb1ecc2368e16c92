"""The job as every part of the scheduler's state machine knows it: its settings, who is there, what is agreed on, whether it has failed. Pure."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from psgc.errors import RemoteProtocolError
from psgc.scheduler.actions import Action, Keep, Log, Send
from psgc.scheduler.agreements import Agreements
from psgc.scheduler.events import Events
from psgc.scheduler.losses import Losses
from psgc.scheduler.post import Post
from psgc.scheduler.records import Failed
from psgc.scheduler.roster import Member, Roster
from psgc.transport.security.handshake import KEY_BYTES, worker_key
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Notice, Register, encode_body


@dataclass(slots=True)
class Job:
    """alive: whether a member's process still runs; None if that is unknown (it is on another host)."""

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
    failed: tuple[float, str] | None = None  # since when, and why
    final: bool = False  # a launcher has been ended by a signal: a job that fails now is not to be started again
    over: float | None = None  # since when all workers have left in order
    events: Events = field(default_factory=Events)
    post: Post = field(init=False)

    def __post_init__(self) -> None:
        self.roster = Roster(self.nodes, self.servers, self.itself, self.replicas)
        self.post = Post(self.job)

    @property
    def epoch(self) -> int:
        """Of the membership as it is now."""
        return self.post.epoch

    @property
    def all_away(self) -> bool:
        return all(m.away for m in self.roster.workers())

    def has_heard_of_all(self, since: float) -> bool:
        """Whether everyone from whom something is awaited was heard after that."""
        return all(m.away or m.last_seen > since for m in self.roster)

    @property
    def unbegun(self) -> bool:
        """Whether this is a process's second job, or a later one, which no worker has begun."""
        return self.again and not self.roster.workers()

    def begin(self) -> None:
        """Everyone is there."""
        self.agreements = Agreements(self.roster, self.post)
        self.losses = Losses(self.roster, self.post, self.agreements)

    def of_rank(self, role: str, index: int) -> Member:
        members = self.roster.workers() if role == "worker" else self.roster.server_members()
        found = next((member for member in members if member.rank == index), None)
        if found is None:
            raise RemoteProtocolError(f"{role} {index} in a journal that does not say who it is")
        return found

    def abort(self, text: str, now: float) -> list[Action]:
        """End the job for everybody; the first reason is kept."""
        if self.failed is not None:
            return []
        self.failed = (now, text)
        return [Keep(Failed(text)), Log(logging.ERROR, text), *(self.abort_to(m.peer) for m in self.roster if not m.left)]

    def abort_to(self, peer: bytes) -> Send:
        assert self.failed is not None
        return self.post.send(peer, Kind.ABORT, encode_body(Notice(ErrorCode.FINAL if self.final else 0, self.failed[1])))

    def tell_workers(self, text: str, teller: Member | None = None) -> list[Send]:
        body = encode_body(Notice(0, text))
        return [self.post.send(m.peer, Kind.HEARTBEAT, body) for m in self.roster.workers() if not m.away and m is not teller]

    def topology(self, member: Member) -> Send:
        key = self.data_key if member.register.role == "server" else worker_key(self.data_key, member.rank, self.epoch)
        layouts = 0
        if self.agreements is not None and member.register.role == "server" and not member.register.standby:
            declarations = self.agreements.declarations
            follows = member.register.incarnation > 1 or member.rank in declarations.begun_anew()
            layouts = declarations.layouts if follows else 0
        return self.post.send(member.peer, Kind.TOPOLOGY, self.roster.topology(member, key, layouts, self.returns))

    def layouts_again(self, member: Member) -> Iterator[Action]:
        """What a member that registers again may not have got."""
        if member.register.role == "server" and not member.register.standby and self.agreements is not None and self.losses is not None:
            yield from (self.losses.tell_absent(member, worker) for worker in self.roster.workers() if worker.absent)
            yield from self.agreements.again(member)

    def turn_away(self, label: str, peer: bytes) -> Send:
        """A member of a lost machine is there after all."""
        text = f"{label} was silent for so long that it counted as lost, and the others have gone on without it (PSGC_DEAD_S); look at its machine"
        return self.post.send(peer, Kind.ABORT, encode_body(Notice(0, text)))
