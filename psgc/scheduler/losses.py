"""Workers that die while the others wait or go on without them: another process takes the place, and gets the job's state from a worker that lives. Pure:
``now`` is passed in.

Knows who lives, and what members are told of it; ``handovers.py`` says who gives the state to whom.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from psgc.errors import UsageError
from psgc.scheduler.actions import Action, Keep, Log, Send
from psgc.scheduler.agreements import Agreements
from psgc.scheduler.handovers import Handovers
from psgc.scheduler.post import Post
from psgc.scheduler.records import Absent, Handed, Mourned, Record, Settled, succeeded
from psgc.scheduler.roster import Member, Roster
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import ErrorCode, Notice, Register, encode_body

TOO_LATE: Final = "was to take a dead worker's place, but came too late: the others have ended the training without it"


def may_be_replaced(member: Member) -> bool:
    """Whether a worker's death does not end the job: another process may take its place, as its launcher has promised, or the others go on without it."""
    return member.register.role == "worker" and (member.register.incarnation > 0 or member.register.shrinks)


class Losses:
    """See the module's text. Everyone in the roster must have a rank."""

    def __init__(self, roster: Roster, post: Post, agreements: Agreements) -> None:
        self._roster, self._post, self._agreements = roster, post, agreements
        self._handovers = Handovers()

    @property
    def fatal(self) -> bool:
        """Whether no worker lives from whose state the job could go on, nor one that may yet say that it has it."""
        without = self._handovers.without - self._handovers.unheard
        return not any(member.rank not in without for member in self._living())

    def mourn(self, member: Member, now: float) -> list[Action]:
        """A worker has died, and is awaited or left out: said once."""
        if member.mourned:
            return []
        member.mourned = True
        if member.register.shrinks:
            return self._leave_out(member, now)
        self._agreements.forget(member.rank)
        text = f"{member.label} died: the others wait for the process that takes its place (PSGC_ON_WORKER_LOSS=wait)"
        return [Keep(Mourned(member.rank)), Log(logging.WARNING, text), *self._tell(text, member), *self._fail_of(member.rank)]

    def _leave_out(self, member: Member, now: float) -> list[Action]:
        """The others go on without it, from now on."""
        member.absent = True
        without = sum(worker.absent for worker in self._roster.workers())
        text = f"{member.label} died: the others go on without it, {without} of {self._roster.ranks.size} ranks are missing now (PSGC_ON_WORKER_LOSS=shrink)"
        servers = (self.tell_absent(server, member) for server in self._roster.server_members())
        agreed = self._agreements.leave_out(member.rank, now)
        return [
            Keep(Absent(member.rank)), Log(logging.WARNING, text), *self._tell(text, member), *servers, *agreed, *self._fail_of(member.rank)
        ]  # fmt: skip

    def tell_absent(self, server: Member, absent: Member) -> Send:
        """Have a server go on without a worker."""
        return self._post.send(server.peer, Kind.HEARTBEAT, plan=absent.rank, key=absent.generation, step=2)

    def turn_away(self, absent: Member, peer: bytes) -> Send:
        """A worker speaks that was silent for so long that the others have gone on without it: its process ends."""
        text = f"{absent.label} was silent for so long that it counted as dead, and the others went on without it (PSGC_DEAD_S); look at its machine"
        return self._post.send(peer, Kind.ABORT, encode_body(Notice(ErrorCode.CUT_OFF, text)))

    def replace(self, worker: Member, peer: bytes, register: Register, now: float) -> list[Action]:
        """Another process has taken a worker's place: it goes on from the state of a worker that lives, for which it will ask."""
        text = f"{worker.label} has ended: pid {register.pid} on {register.hostname} takes its place"
        self._roster.replace(worker, peer, register, now)
        worker.generation += 1
        self._handovers.replaced(worker.rank)
        self._agreements.come_back(worker.rank)
        self._agreements.await_from(worker.rank, now)
        kept = Keep(succeeded(worker.rank, peer, register, worker.generation, worker.waited_before_ms))
        return [kept, Log(logging.WARNING, text), *self._tell(text, worker), *self._fail_of(worker.rank)]

    def records(self) -> Iterator[Record]:
        """What another process of the scheduler has to know."""
        if self._handovers.count:
            yield Handed(self._handovers.count)
        for worker in self._roster.workers():
            if worker.generation > 1:
                yield succeeded(worker.rank, worker.peer, worker.register, worker.generation, worker.waited_before_ms)
                if worker.rank not in self._handovers.without:
                    yield Settled(worker.rank)
            if worker.absent:
                yield Absent(worker.rank)
            elif worker.mourned:
                yield Mourned(worker.rank)

    def heed(self, record: Record, now: float) -> bool:
        """Know what another process of the scheduler has written down of handovers. Returns whether it was that."""
        if isinstance(record, Handed):
            self._handovers.count = max(self._handovers.count, record.count)
        elif isinstance(record, Settled):
            self._handovers.done(record.rank)
        elif isinstance(record, Absent):
            for member in self._roster.workers():
                if member.rank == record.rank:
                    member.absent = member.mourned = True
                    member.gone = now
            self._agreements.leave_out(record.rank, now)
        else:
            return False
        return True

    def resumed(self, worker: Member, generation: int) -> None:
        """As ``replace``, when another process of the scheduler had seen it."""
        worker.generation = generation
        self._agreements.come_back(worker.rank)
        self._handovers.resumed(worker.rank)

    def state(self, member: Member, header: Header) -> list[Action]:
        """A process that has taken another's place asks for the job's state (``plan``: how many handovers to it have failed), or has it (``key``). Raises
        UsageError where nobody has it any more, unless the others have come to the end without it."""
        if header.key:
            self._handovers.done(member.rank)
            return [Keep(Settled(member.rank))]
        living, count = {other.rank: other for other in self._living()}, self._handovers.count
        handover = self._handovers.ask(member.rank, header.plan, living)
        if self._handovers.count > count:
            self._agreements.values.give_up(member.rank)  # what it had looked up for the one before
        if handover is None and self._handovers.unheard.intersection(living):
            return []  # one of these may have it, and say so; this one asks again
        if handover is None and member.register.shrinks and any(other.left for other in self._roster.workers()):
            return [self._post.send(member.peer, Kind.ABORT, encode_body(Notice(0, f"{member.label} {TOO_LATE}")))]
        if handover is None:
            raise UsageError(
                f"{member.label} has taken the place of a worker that died, and no other worker is left to give it the job's state"
            )
        giver = living[handover.giver]
        kept: list[Action] = [Keep(Handed(self._handovers.count))] if self._handovers.count > count else []
        return [
            *kept,
            self._post.send(giver.peer, Kind.STATE, plan=member.rank, step=handover.number),
            self._post.send(member.peer, Kind.STATE, plan=giver.rank, key=1, step=handover.number),
        ]

    def _living(self) -> list[Member]:
        return [member for member in self._roster.workers() if not member.away and member.gone is None]

    def left(self, worker: Member) -> list[Action]:
        """A worker has left in order: it gives no state any more."""
        return self._fail_of(worker.rank)

    def _fail_of(self, giver: int) -> list[Action]:
        """The process of a rank that gave others its state has ended: tell these, and they ask again."""
        takers = set(self._handovers.fail(giver))
        for taker in takers:
            self._agreements.values.give_up(taker)  # where the giver was to listen
        return [self._post.send(m.peer, Kind.STATE, plan=giver, key=1) for m in self._roster.workers() if m.rank in takers]

    def _tell(self, text: str, teller: Member) -> list[Send]:
        body = encode_body(Notice(0, text))
        return [self._post.send(m.peer, Kind.HEARTBEAT, body) for m in self._roster.workers() if not m.away and m is not teller]
