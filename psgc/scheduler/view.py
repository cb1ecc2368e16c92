"""What observers are shown of a job. Pure: ``now`` is passed in."""

from __future__ import annotations

from typing import Final

from psgc import __version__
from psgc.scheduler.events import Events
from psgc.scheduler.roster import Member, Roster
from psgc.wire.messages import encode_body, pack, plain
from psgc.wire.reports import Observed, ReportOf

OBSERVED_S: Final = 0.2  # so long an answer to observers may be given again


class View:
    """The job as it is now, or was a moment ago: however many ask, the answer is made five times a second at most."""

    def __init__(self, job: int, heartbeat_s: float) -> None:
        self._job, self._heartbeat_ms = job, int(1e3 * heartbeat_s)
        self._body = b""  # the last answer, and when it was made
        self._at = 0.0

    def body(self, roster: Roster, complete: bool, events: Events, now: float) -> bytes:
        """The answer's body."""
        if not self._body or not self._at <= now < self._at + OBSERVED_S:
            members = tuple(_report_of(member, now) for member in roster)
            counts = len(roster.workers()), len(roster.server_members())
            observed = Observed(self._job, __version__, *counts, complete, members, self._heartbeat_ms, events.told(now))
            self._body, self._at = pack(encode_body(observed)), now
        return self._body


def _report_of(member: Member, now: float) -> ReportOf:
    register, report = member.register, {} if member.report is None else plain(member.report)
    role = "standby" if register.standby else register.role
    return ReportOf(role, member.rank, register.hostname, register.pid, member.away, int(1e3 * (now - member.last_seen)), report)
