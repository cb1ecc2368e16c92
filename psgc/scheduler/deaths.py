"""Members that die or fall silent: whether the job ends, waits, or goes on without them. Pure: ``now`` is passed in.

On this host a member is dead when its process is gone, on another after PSGC_DEAD_S of silence. What becomes of workers is in ``losses.py``.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from psgc.processes.reminder import Reminder
from psgc.scheduler.actions import Action, Keep, Log
from psgc.scheduler.job import Job
from psgc.scheduler.losses import may_be_replaced
from psgc.scheduler.records import Alone, Mourned, succeeded
from psgc.scheduler.roster import Member
from psgc.wire.frames import Kind

# After a process has ended: what it said last, as why it failed, may still be on its way on a busy machine. Well below the few heartbeats for which
# its peers in a collective wait for this scheduler to say who has died.
LAST_WORDS_S = 0.5


class Deaths:
    """See the module's text."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def tick(self, now: float) -> tuple[list[Action], bool]:
        """What is done about members that have died, and whether the job has ended by it."""
        moved: list[Action] = []
        for member in list(self._job.roster):
            mourned, text = member.mourned, self._death(member, now)
            if mourned and not member.mourned:  # it was only silent: what it had asked for was forgotten
                moved += [Keep(Mourned(member.rank, heard=True)), self._job.post.send(member.peer, Kind.REGISTER)]
            if text is None:
                continue
            actions = None if self._job.agreements is None else self._go_on_without(member, text, now)
            if actions is None:
                return [*moved, *self._job.abort(self._final(member, text), now)], True
            moved += actions
        return moved, False

    def mourn(self, now: float) -> list[Action]:
        """Say of workers that have died, once, that they are awaited or left out."""
        return [action for member in self._job.roster for action in self._mourn(member, now)]

    def silent(self, now: float) -> list[Log]:
        """Name members that have said nothing for long."""
        return [log for member in self._job.roster if (log := self._silence(member, now)) is not None]

    def _death(self, member: Member, now: float) -> str | None:
        if member.away:
            return None
        alive = self._job.alive(member.register)
        if alive is False:
            member.gone = now if member.gone is None else member.gone
            if now - member.gone < LAST_WORDS_S:
                return None
            if not (member.register.incarnation or may_be_replaced(member)):
                return f"{member.label} died: its process is gone without leaving the job; look at its log"
            return self._not_followed(member, now)
        if alive:
            return None  # it is stopped, or busy: its silence is named, and it may come back
        # Before everyone is there, members send nothing but repeated registrations, a worker one every silence_s.
        limit = self._job.dead_s if self._job.agreements is not None else max(self._job.dead_s, 3 * self._job.silence_s)
        if now - member.last_seen <= limit:
            member.gone, member.mourned = None, False
            return None
        if self._job.losses is not None and may_be_replaced(member):
            member.gone = now if member.gone is None else member.gone
            return self._not_followed(member, now)
        return f"{member.label} has said nothing for {now - member.last_seen:.0f} s and counts as dead (PSGC_DEAD_S); look at its machine"

    def _go_on_without(self, member: Member, text: str, now: float) -> list[Action] | None:
        """A server's machine is lost, or its standby's: what is done so that the job goes on. None if it cannot. text: how it was lost."""
        assert self._job.agreements is not None
        roster, register = self._job.roster, member.register
        if register.role != "server":
            return None
        if register.standby:
            server = self._job.of_rank("server", member.rank)
            roster.drop(member)
            line = f"{text}; server {member.rank} goes on without a standby: if its machine is lost as well, the job ends"
            return [Keep(Alone(member.rank)), Log(logging.WARNING, line), *self._job.tell_workers(line), self._job.topology(server)]
        standby = roster.standby_of(member.rank)
        if standby is not None and standby.gone is not None:
            return []  # its next process is awaited for PSGC_DEAD_S, as ever, and then has the place
        if standby is None or (self._job.alive(standby.register) is None and now - standby.last_seen > self._job.dead_s):
            return None
        peer, register = standby.peer, replace(standby.register, standby=False)
        roster.promote(member, register, peer, now)
        self._job.agreements.declarations.begins_anew(member.rank)
        line = f"{text}; {member.label}, which has all that it had committed, takes its place (PSGC_REPLICAS=1)"
        workers = (worker for worker in roster.workers() if not worker.away)
        return [
            Keep(succeeded(member.rank, peer, register)), Log(logging.WARNING, line), *self._job.tell_workers(line), self._job.topology(member),
            *self._job.layouts_again(member), *map(self._job.topology, workers),
        ]  # fmt: skip

    def _final(self, member: Member, text: str) -> str:
        """Why the job ends without the member."""
        register = member.register
        if register.role != "server" or register.standby or not register.incarnation or self._job.agreements is None:
            return text
        if self._job.replicas:
            return f"{text}; it has no standby any more, so what it had kept is lost (PSGC_RESTARTS starts a job again)"
        return f"{text}; what it had kept is lost with it: PSGC_REPLICAS=1 keeps it on another machine, too, and PSGC_RESTARTS starts a job again"

    def _not_followed(self, member: Member, now: float) -> str | None:
        """Of a member that has died, whose launcher starts it again, or ends the job, or that the job goes on without: why it cannot any more."""
        assert member.gone is not None
        worker, since = member.register.role == "worker", now - member.gone
        if worker and self._job.losses is None:
            return f"{member.label} died: its process is gone without leaving the job; look at its log"
        ending = member.register.shrinks and any(other.left for other in self._job.roster.workers())
        if worker and self._job.losses is not None and self._job.losses.fatal and not ending:
            return f"{member.label} died, and no other worker is left whose state the job could go on from; look at its log"
        if member.register.shrinks or since < (self._job.register_timeout_s if worker else self._job.dead_s):
            return None
        name = "PSGC_REGISTER_TIMEOUT_S" if worker else "PSGC_DEAD_S"
        return f"{member.label} died and was not started again within {since:.0f} s ({name}); look at its launcher"

    def _mourn(self, member: Member, now: float) -> list[Action]:
        if self._job.losses is None or member.gone is None or now - member.gone < LAST_WORDS_S or not may_be_replaced(member):
            return []
        if not member.mourned:
            self._job.roster.note_death(member)
        return self._job.losses.mourn(member, now)

    def _silence(self, member: Member, now: float) -> Log | None:
        quiet = now - member.last_seen
        if member.left or member.mourned or quiet < self._job.silence_s:
            member.named = None
            return None
        member.named = member.named or Reminder(member.last_seen)
        if not member.named.due(now, self._job.silence_s):
            return None
        return Log(logging.WARNING, f"{member.label} has said nothing for {quiet:.0f} s")
