"""Who may come into the job: registrations of members, of processes that follow others, and of strangers. Pure: ``now`` is passed in."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from psgc import __version__
from psgc.errors import RemoteProtocolError
from psgc.processes.addresses import is_loopback, split
from psgc.processes.reminder import Reminder
from psgc.scheduler.actions import Action, Keep, Log, Send
from psgc.scheduler.job import Job
from psgc.scheduler.losses import TOO_LATE
from psgc.scheduler.records import Complete, Joined, succeeded
from psgc.scheduler.roster import Member
from psgc.transport.host import same_network
from psgc.wire.frames import VERSION, Header, Kind
from psgc.wire.messages import NUMBERS_A_HOST, ErrorCode, Notice, Register, decode_body, encode_body

AT_ONE = "PSGC_REPLICAS=1, but servers and what takes their places are on one machine, of different launchers: replicas outlive the launchers, not the machine"
NOTHING_LEFT = (
    "is in a job whose scheduler has ended, and has left this one nothing to go on from (PSGC_JOURNAL): start all processes of it again"
)


class Admission:
    """See the module's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._early: dict[tuple[int, int], Reminder] = {}  # by pid and session, of those who wait for the next job

    def register(self, peer: bytes, register: Register, now: float, epoch: int = 0) -> list[Action]:
        """epoch: that the process is in already; 0: none."""
        if self._job.failed is not None:
            return [self._job.abort_to(peer)]
        if (lost := self._job.roster.lost(peer, register.lineage)) is not None:
            return [self._job.turn_away(lost, peer)]
        register = self._job.roster.known_as(register)
        if self._job.roster.has_left(register, self._job.over is not None):
            return [self._await_the_end(peer, register, now)]
        if self._job.unbegun and register.role == "worker" and register.incarnation > 1 and not register.session:
            # of the job before: its script is at its beginning, and would take this job for that one
            return [self._job.post.send(peer, Kind.ABORT, encode_body(Notice(0, f"{Member(peer, register, now).label} {TOO_LATE}")))]
        new = not self._job.roster.knows(peer)
        known = self._job.roster.returns(peer, register, now)
        if known is not None and known.absent and self._job.losses is not None:
            return [self._job.losses.turn_away(known, peer)]
        if known is not None and self._job.agreements is None:
            return []
        if known is not None:
            kept = (
                [Keep(Joined.of(peer, known.register))] if new else []
            )  # what it says to another process may come before its registration
            return [*kept, self._job.topology(known), *self._job.layouts_again(known)]
        former = self._job.roster.former(register)
        if former is not None:
            return self._succeeded(former, peer, register, now)
        # From a job that ended before it came: what it has would be taken for this job's, whose layouts have the same numbers.
        if register.goes_on and not epoch:
            return [self._job.post.send(peer, Kind.BYE)]
        member = Member(peer, register, now)
        if epoch:  # its layouts would have the numbers of this job's
            raise RemoteProtocolError(f"{member.label} {NOTHING_LEFT}", ErrorCode.NOT_ADMITTED)
        conflict = self._job.roster.conflict(member)
        if self._job.agreements is not None:
            raise RemoteProtocolError(f"everyone is already there: {conflict or member.label}", ErrorCode.NOT_ADMITTED)
        self._job.roster.add(member)
        if conflict is not None:
            return self._job.abort(conflict, now)
        warning = self._warn_of_loopback(member)
        return warning + (self._admit_all(now) if self._job.roster.complete else [])

    def _succeeded(self, server: Member, peer: bytes, register: Register, now: float) -> list[Action]:
        """A server's launcher has started it again: it goes on from what its former process has left, at the same address."""
        before = server.register
        if register.role == "worker":
            return self._replaced(server, peer, register, now)
        if register.incarnation <= before.incarnation:
            return []  # a former process's word, late
        if (register.address, register.local_address, register.more) != (before.address, before.local_address, before.more):
            return self._job.abort(
                f"{server.label} was started again and listens at {register.address}, not at {before.address}; workers do not find it", now
            )
        text = f"{server.label} has ended and was started again"
        self._job.roster.replace(server, peer, register, now)
        log: list[Action] = [Log(logging.WARNING, f"{text}: pid {register.pid} goes on")]
        if self._job.agreements is None:
            return log
        if register.standby:
            return [Keep(succeeded(server.rank, peer, register)), *log, self._job.topology(server)]
        self._job.agreements.declarations.begins_anew(server.rank)
        return [
            Keep(succeeded(server.rank, server.peer, server.register)),
            *log,
            self._job.topology(server),
            *self._job.layouts_again(server),
        ]

    def _replaced(self, worker: Member, peer: bytes, register: Register, now: float) -> list[Action]:
        assert self._job.losses is not None, "a worker's former process is known once everyone was there"
        before = worker.register
        gone = worker.gone is not None or self._job.alive(before) is False  # it may have ended since the last tick
        if self._job.roster.is_past(register) or (register.incarnation <= before.incarnation and not gone):
            raise RemoteProtocolError(f"another process has taken the place of {worker.label}", ErrorCode.NOT_ADMITTED)
        if not gone and register.lineage != before.lineage and _host_number(register) <= _host_number(before):
            # of a machine that was cut off, perhaps, and whose launcher does not know that another one has its place
            raise RemoteProtocolError(
                f"pid {register.pid} on {register.hostname} is not let in, because {worker.label} has its place, which another launcher has started with the "
                f"same DMLC_WORKER_ID, and which was heard {now - worker.last_seen:.0f} s ago",
                ErrorCode.NOT_ADMITTED,
            )
        if register.version != __version__:
            who = f"pid {register.pid} on {register.hostname}"
            return self._job.abort(
                f"{who}, which is to take the place of {worker.label}, runs psgc {register.version}, the job {__version__}", now
            )
        if differs := other_settings(worker.register, register):
            raise RemoteProtocolError(
                f"pid {register.pid} on {register.hostname} would take the place of {worker.label}, but it has {differs}; start it with the same settings",
                ErrorCode.NOT_ADMITTED,
            )
        if worker.register.shrinks and any(other.left for other in self._job.roster.workers()):
            return [self._await_the_end(peer, register, now)]  # it is too late to go on with the others
        return [*self._job.losses.replace(worker, peer, register, now), self._job.topology(worker)]

    def of_another_version(self, peer: bytes, header: Header, body: bytes, now: float) -> list[Action]:
        """End a job that is not complete, as for another contradiction, and tell the member so in its own version."""
        try:
            label = Member(peer, decode_body(Register, body), now).label
        except RemoteProtocolError:  # that version's body is another
            label = "a member"
        text = f"{label} speaks version {header.version} of the protocol, the scheduler version {VERSION}; install one psgc everywhere"
        if header.kind != Kind.REGISTER or self._job.agreements is not None:
            raise RemoteProtocolError(text, ErrorCode.NOT_ADMITTED)
        actions, answer = self._job.abort(text, now), self._job.abort_to(peer)
        return [*actions, replace(answer, header=answer.header._replace(version=header.version))]

    def _await_the_end(self, peer: bytes, register: Register, now: float) -> Send:
        """Answer a process that has left this job and would join the next one: it hears that this scheduler lives, repeats its registration and asks the next
        scheduler at this address on a new connection. Named are the members it waits for, if it waits for long."""
        early = self._early.setdefault((register.pid, register.session), Reminder(now))
        staying = ", ".join(member.label for member in self._job.roster if not member.left)
        text = f"{staying} still in the job that this process has left: the next one begins when it is over" if staying else ""
        return self._job.post.send(
            peer, Kind.HEARTBEAT, encode_body(Notice(0, text)) if text and early.due(now, self._job.silence_s) else b""
        )

    def _warn_of_loopback(self, member: Member) -> list[Action]:
        """Warn of a server whose address workers on other machines would take for their own machine."""
        register = member.register
        if register.role != "server" or same_network(register.host, self._job.itself[0]):
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
        if (text := self._job.roster.lonely()) is not None:
            return self._job.abort(text, now)
        workers = self._job.roster.number(self._job.epoch)
        self._job.begin()
        for member in self._job.roster:
            member.last_seen, member.named = now, None
        text = f"everyone is there: {workers} workers, {self._job.servers} servers"
        kept = [*(Keep(Joined.of(member.peer, member.register)) for member in self._job.roster), Keep(Complete(self._job.epoch))]
        warning = [Log(logging.WARNING, AT_ONE)] if self._job.roster.at_one else []
        return [*kept, *warning, Log(logging.INFO, text), *map(self._job.topology, self._job.roster)]


def _host_number(register: Register) -> int:
    """Which of the hosts it is on that the job's own launcher has had take one another's place, each when it knew that nothing ran on the one before."""
    return register.incarnation // NUMBERS_A_HOST


def other_settings(former: Register, new: Register) -> str:
    """Of the settings in which all workers agree, or all of a node, the first that a process has otherwise than the one whose place it would take; "" if there
    is none."""
    for name, variable in _SETTINGS.items():
        own, wanted = getattr(new, name), getattr(former, name)
        if own == wanted:
            continue
        if isinstance(own, bool):
            return f"{variable} {'set' if own else 'not set'}, unlike that one"
        own, wanted = (",".join(map(str, each)) or "none" if isinstance(each, tuple) else each for each in (own, wanted))
        return f"{variable}={own}, and that one had {wanted}"
    return ""


_SETTINGS: Final = {
    "nodes": "DMLC_NUM_WORKER", "servers": "DMLC_NUM_SERVER", "local_size": "BYTEPS_LOCAL_SIZE", "roots": "BYTEPS_REDUCE_ROOTS",
    "switch": "BYTEPS_PCIE_SWITCH_SIZE", "encrypt": "PSGC_ENCRYPT", "planned": "PSGC_PLAN", "asynchronous": "PSGC_ASYNC",
    "waits": "PSGC_ON_WORKER_LOSS=wait", "shrinks": "PSGC_ON_WORKER_LOSS=shrink",
}  # fmt: skip
