"""What outlives a process of the scheduler: the job as records, and the job again from what another process has written down. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from psgc.errors import RemoteProtocolError
from psgc.scheduler.job import Job
from psgc.scheduler.records import Alone, Complete, Failed, Joined, Left, Mourned, Record, Succeeded, succeeded
from psgc.scheduler.roster import Member


def records(job: Job) -> Iterator[Record]:
    """What another process of this scheduler has to know to go on: nothing before everyone is there, since members ask again."""
    if job.agreements is None:
        return
    for member in job.roster:
        yield Joined.of(member.peer, member.register)
    yield Complete(job.epoch)
    yield from job.agreements.records()
    if job.losses is not None:
        yield from job.losses.records()
    servers = {server.rank: server for server in job.roster.server_members()}
    for index in job.agreements.declarations.begun_anew():
        yield succeeded(index, servers[index].peer, servers[index].register)
    for member in job.roster:
        if member.left:
            yield Left.of(member)
    if job.failed is not None:
        yield Failed(job.failed[1])


def resume(job: Job, written: Iterable[Record], now: float) -> None:
    """Go on from what another process has written down. Members say again what is not in it. Raises PsgcError for what does not fit."""
    for record in written:
        if isinstance(record, Joined):
            peer, register = record.read()
            if job.roster.has(register):
                job.roster.returns(peer, register, now)
            else:
                job.roster.add(Member(peer, register, now))
        elif isinstance(record, Complete):
            if not job.roster.has_all_but_standbys:
                raise RemoteProtocolError("a journal in which somebody is missing of a job that was complete")
            job.post.epoch = record.epoch
            job.roster.number(job.epoch)
            job.begin()
        elif job.agreements is None or job.losses is None:
            raise RemoteProtocolError(f"a {type(record).__name__} before everyone was there")
        elif isinstance(record, Succeeded):
            peer, register = record.read()
            if register.standby:
                if (standby := job.roster.standby_of(record.index)) is not None:
                    job.roster.replace(standby, peer, register, now)
                continue
            member = job.of_rank(register.role, record.index)
            if register.role == "server" and register.lineage != member.register.lineage:
                job.roster.promote(member, register, peer, now)
            else:
                job.roster.replace(member, peer, register, now)
            if register.role == "server":
                job.agreements.declarations.begins_anew(record.index)
            else:
                job.losses.resumed(member, record.generation)
                member.waited_ms = member.waited_before_ms = record.waited_before_ms
        elif isinstance(record, Mourned):
            worker = job.of_rank("worker", record.rank)
            worker.mourned, worker.gone = not record.heard, None if record.heard else now
            worker.last_seen = now if record.heard else now - job.dead_s - 1  # it stays silent, unless this process hears it
            worker.others_waited_ms = worker.waited_before_ms
        elif isinstance(record, Alone):
            if (standby := job.roster.standby_of(record.server)) is not None:
                job.roster.drop(standby)
        elif isinstance(record, Left):
            left = job.roster.standby_of(record.index) if record.standby else job.of_rank(record.role, record.index)
            if left is not None:
                left.left = True
        elif isinstance(record, Failed):
            job.failed = (now, record.text)
        elif not job.losses.heed(record, now):
            job.agreements.heed(record, now)
    if job.agreements is not None and job.all_away:
        job.over = now
