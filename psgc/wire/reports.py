"""Bodies by which members report how they do, and by which an observer (``psgc top``, the status page) learns of it. Counts and times only grow, from the
moment at which the member joined; whoever wants a rate takes the difference of two reports. What the numbers mean, and in which units they are shown, is the
table of ``psgc/observe/table.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from psgc.errors import RemoteProtocolError
from psgc.wire.messages import LEFT_OUT_IF_EMPTY, ErrorCode, parse_record

MOST_NAMES: Final = 8  # buckets in a report, and codecs: a thousand ranks send one a second
MOST_TEXT: Final = 400


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
    folds: int = 0  # server: sums that these have made
    resent: int = 0  # worker: contributions that a lost connection took along
    reconnects: int = 0  # worker: connections to servers that were made again
    queued: int = 0  # worker: payloads that wait for a server's credit, now
    in_flight_bytes: int = 0  # worker: that servers have not accepted yet, now
    plan_version: int = 0  # worker: layouts that its optimizers have had so far
    travels: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)  # worker: the last of these, in words
    codecs: dict[str, Any] = field(default_factory=dict, metadata=LEFT_OUT_IF_EMPTY)  # worker: Carried's numbers by codec
    residuals: dict[str, Any] = field(
        default_factory=dict, metadata=LEFT_OUT_IF_EMPTY
    )  # worker: of the buckets where it is largest: |residual| / |gradient|
    # Of the last steps, and the last seconds:
    compute_us: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # worker: of a step, while its training thread does not wait for psgc
    coding_us: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # worker: of a step, while it waits for its own encoding and decoding
    waits_us: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # worker: of a step, while it waits, these included
    servers: dict[str, Any] = field(
        default_factory=dict, metadata=LEFT_OUT_IF_EMPTY
    )  # worker: by server, the share of the time in which it has something there, bytes a second, both ways, and the share in which what it sent is on its way
    late: dict[str, Any] = field(
        default_factory=dict, metadata=LEFT_OUT_IF_EMPTY
    )  # server: by rank, ms of a step that its contributions are awaited, and the share of the time that results to it are on their way, beyond the others'
    sums_permille: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # server: of the time, while a sum is under way
    loop_permille: int = field(default=0, metadata=LEFT_OUT_IF_EMPTY)  # server: of the time, while its loop works

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if not 0 <= value < 1 << 63:
                raise RemoteProtocolError(f"Report.{name} is {value}, expected a count", ErrorCode.MALFORMED)
        if len(self.travels) > MOST_TEXT:
            raise RemoteProtocolError(f"Report.travels has {len(self.travels)} letters", ErrorCode.MALFORMED)
        for codec, carried in _entries("codecs", self.codecs):
            if not (isinstance(carried, list) and len(carried) == 3 and all(type(each) is int and 0 <= each < 1 << 63 for each in carried)):
                raise RemoteProtocolError(f"Report.codecs[{codec!r:.80}] is {carried!r:.80}, expected three counts", ErrorCode.MALFORMED)
        for bucket, ratio in _entries("residuals", self.residuals):
            if not _is_number(ratio):
                raise RemoteProtocolError(f"Report.residuals[{bucket!r:.80}] is {ratio!r:.80}, expected a ratio", ErrorCode.MALFORMED)
        for server, told in _entries("servers", self.servers):
            if not (isinstance(told, list) and len(told) == 3 and all(map(_is_number, told))):
                raise RemoteProtocolError(f"Report.servers[{server!r:.80}] is {told!r:.80}, expected three numbers", ErrorCode.MALFORMED)
        for rank, late in _entries("late", self.late):
            if not (isinstance(late, list) and len(late) == 2 and all(map(_is_number, late))):
                raise RemoteProtocolError(f"Report.late[{rank!r:.80}] is {late!r:.80}, expected two numbers", ErrorCode.MALFORMED)


def _entries(name: str, found: dict[str, Any]) -> list[tuple[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(key, str) and len(key) <= MOST_TEXT for key in found):
        raise RemoteProtocolError(f"Report.{name} is {found!r:.80}, expected an object", ErrorCode.MALFORMED)
    return list(found.items())


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


COUNTS: Final = tuple(each.name for each in fields(Report) if each.type == "int")
NOW: Final = (
    "step_us",
    "threads",
    "queued",
    "in_flight_bytes",
    "plan_version",
    "compute_us",
    "coding_us",
    "waits_us",
    "sums_permille",
    "loop_permille",
)  # of these, those that do not count since the member joined


def shortened(report: Report) -> Report:
    """As it travels once a heartbeat: the codecs that carried most, the buckets whose residual is largest, and the servers that take longest."""
    codecs = sorted(report.codecs.items(), key=lambda entry: -entry[1][0])[:MOST_NAMES]
    residuals = sorted(report.residuals.items(), key=lambda entry: -entry[1])[:MOST_NAMES]
    servers = sorted(report.servers.items(), key=lambda entry: -entry[1][0])[:MOST_NAMES]
    return replace(
        report, codecs=dict(codecs), residuals={name: float(f"{ratio:.4g}") for name, ratio in residuals},
        servers={name: [float(f"{number:.4g}") for number in numbers] for name, numbers in servers},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportOf:
    """A member and its last report, for an observer."""

    role: Literal["worker", "server", "standby"]
    index: int  # a worker's rank or a server's index, also of its standby; -1 until everyone is there
    hostname: str
    pid: int
    left: bool
    silent_ms: int  # since the scheduler last heard of it
    report: dict[str, Any]  # Report; empty until one has come


@dataclass(frozen=True, slots=True)
class Event:
    """What the scheduler has noted, or logged, of the job. ago_s: seconds before the answer; level: as in the logging module."""

    ago_s: int
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The job as the scheduler knows it."""

    job: int
    version: str
    workers: int  # those that have registered; all of them once ``complete``
    servers: int
    complete: bool
    members: tuple[ReportOf, ...]
    heartbeat_ms: int = 1000
    events: tuple[Event, ...] = ()  # of the last hour, the oldest first

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Observed:
        """Raises RemoteProtocolError."""
        members, events = body.get("members"), body.get("events", [])
        for name, found in (("members", members), ("events", events)):
            if not isinstance(found, list):
                raise RemoteProtocolError(f"Observed.{name} is {found!r:.80}, expected a list", ErrorCode.MALFORMED)
        parsed = tuple(parse_record(ReportOf, member) for member in members or ())
        noted = tuple(parse_record(Event, event) for event in events)
        return replace(parse_record(cls, {**body, "members": [], "events": []}), members=parsed, events=noted)


def report_of(member: ReportOf) -> Report | None:
    """The member's report, if one has come. Raises RemoteProtocolError."""
    return parse_record(Report, member.report) if member.report else None
