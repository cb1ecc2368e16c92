"""Bodies by which members report how they do, and by which an observer (``psgc top``) learns of it. Counts and times only grow, from the moment at which
the member joined; whoever wants a rate takes the difference of two reports."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from psgc.errors import RemoteProtocolError
from psgc.wire.messages import ErrorCode, parse_record


@dataclass(frozen=True, slots=True)
class Report:
    """A member's report of itself, sent with each heartbeat."""

    up_ms: int  # since it joined
    wire_bytes: int  # both directions, headers included
    steps: int = 0  # worker: that its optimizers have applied
    step_us: int = 0  # worker: the median of its last steps
    exchange_ms: int = 0  # worker: from steps' first submissions to their last means
    waited_ms: int = 0  # worker: of that, while its training thread waited
    gradient_bytes: int = 0  # worker: payloads of optimizers' steps, both directions
    uncompressed_bytes: int = 0  # worker: what they would have been uncompressed
    busy_ms: int = 0  # server: that its summing threads have worked, together
    threads: int = 0  # server: how many those are

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value < 1 << 63:
                raise RemoteProtocolError(f"Report.{each.name} is {value}, expected a count", ErrorCode.MALFORMED)


@dataclass(frozen=True, slots=True)
class ReportOf:
    """A member and its last report, for an observer."""

    role: Literal["worker", "server"]
    index: int  # a worker's rank or a server's index; -1 until everyone is there
    hostname: str
    pid: int
    left: bool
    silent_ms: int  # since the scheduler last heard of it
    report: dict[str, Any]  # Report; empty until one has come


@dataclass(frozen=True, slots=True)
class Observed:
    """The job as the scheduler knows it."""

    job: int
    version: str
    workers: int  # those that have registered; all of them once ``complete``
    servers: int
    complete: bool
    members: tuple[ReportOf, ...]

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Observed:
        """Raises RemoteProtocolError."""
        members = body.get("members")
        if not isinstance(members, list):
            raise RemoteProtocolError(f"Observed.members is {members!r:.80}, expected a list", ErrorCode.MALFORMED)
        parsed = tuple(parse_record(ReportOf, member) for member in members)
        return replace(parse_record(cls, {**body, "members": []}), members=parsed)


def report_of(member: ReportOf) -> Report | None:
    """The member's report, if one has come. Raises RemoteProtocolError."""
    return parse_record(Report, member.report) if member.report else None
