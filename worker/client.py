"""The worker's side of the data protocol: the state of every part, which payloads may be sent now, and which must be sent again.

Pure: no sockets, clocks, threads or numbers; ``now`` is passed in. The network thread carries out the actions in order.

A part's step goes IDLE -> QUEUED -> SENT -> ACKED -> DECODING -> IDLE (a skip goes straight to SENT). It is submitted with its payload, which
stays as it is until the step is decoded, so it can be sent again at any time; servers never add a step twice.

A living connection loses nothing, so the worker never asks because of silence. After a connection was replaced, the worker asks about every
part that is unanswered, and sends a payload again only if the server says that it lacks it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.layout import ITEM_BYTES, OF_MODELS, Layout, key_text
from psgc.processes.reminder import LONGEST_S, Reminder
from psgc.wire.frames import SERVER_SENDER, Flag, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, decode_body
from psgc.worker.connections.pace import Pace
from psgc.worker.residuals.transfers import Transfer, Transfers
from psgc.worker.session import RAISED

NAMED_BY_SERVER_S: Final = 2.5  # a server looks once a heartbeat, and the scheduler passes its line on
# Payloads that may wait in a connection's own queue: one that the kernel is taking, and one to follow without a pause. All others wait here,
# where a payload of higher priority can still overtake them. The kernel itself buffers what the link's bandwidth and delay can hold.
MOST_UNSENT: Final = 2


class Phase(Enum):
    IDLE = "idle"
    QUEUED = "waiting to be sent"
    SENT = "sent, not yet accepted"
    ACKED = "accepted, result awaited"
    DECODING = "being decoded"


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send to a server; with the part's payload if ``payload``, or with a body of its own."""

    server: int
    header: Header
    payload: bool = False
    body: Any = None


@dataclass(frozen=True, slots=True)
class Result:
    """Hand the result to who submitted the part; answered with ``Client.taken``, until when the payload stays as it is."""

    key: int
    step: int
    flags: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot go on; the text says why."""

    text: str


@dataclass(frozen=True, slots=True)
class Greet:
    """Say HELLO to the server on this connection before anything else."""

    server: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """A server has answered: the transfer now holds the residual's elements, or the server has set them."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Measured:
    """All servers' connections have been measured; ``Client.rate`` is now known."""


Action = Transmit | Result | Failed | Greet | Transferred | Measured


@dataclass(slots=True)
class PartState:
    """The state of one part from step to step."""

    key: int
    server: int
    layout: int
    round: int
    position: int  # within a turn of its layout's window on its server
    turn: int  # the layout's parts on that server
    priority: int
    codec: int
    name: str
    of_gradients: bool = False  # of an optimizer's layout
    of_weights: bool = False  # the first step's payload is of initial values, uncompressed
    plain_bytes: int = 0  # what a step of its slice would carry in both directions uncompressed; 0 in later rounds, and behind groups
    step: int = 0
    phase: Phase = Phase.IDLE
    skip: bool = False
    flags: int = Flag.NONE
    rescale: float = 1.0
    payload_bytes: int = 0
    credit: int = 0  # bytes of the server's credit that this part holds
    asked: bool = False  # after a connection was re-made, and not answered yet
    began: float = 0.0  # when its step was submitted

    @property
    def ticket(self) -> int:
        """The place of its step in its layout's window."""
        return (self.step - 1) * self.turn + self.position


@dataclass(slots=True)
class _Server:
    up: bool = False
    queues: bool = False  # whether payloads wait in the connection's queue, and ``departed`` tells when one has left it
    unsent: int = 0  # payloads in that queue
    in_flight: int = 0
    parts_in_flight: int = 0
    queue: list[tuple[int, int, int]] = field(default_factory=list)  # heap of (-priority, sequence, key)
    windows: dict[int, int] = field(default_factory=dict)  # layout -> limit
    moved: float = float("-inf")  # when it last answered, or its connection's queue last moved
    named: Reminder | None = None  # of what has been awaited from it, until that is a while ago
    pace: Pace | None = None  # set once there is a connection to measure
    measured: bool = False  # also True for a connection that needs no measurement
    transfers: Transfers = field(default_factory=Transfers)


@dataclass(slots=True)
class Client:
    """See the module's text. credit_bytes 0: no limit. credit_parts: -1 no limit, 0 first come first served, else a limit."""

    rank: int
    job: int
    epoch: int
    server_count: int
    credit_bytes: int = 0
    credit_parts: int = -1
    silence_s: float = 5.0
    parts: dict[int, PartState] = field(default_factory=dict)
    servers: list[_Server] = field(init=False)
    resent: int = 0  # contributions that were lost with a connection and sent again on the next one
    asked: int = 0  # PULLs about parts that were unanswered when a connection was replaced
    gradient_bytes: int = 0  # payload bytes of completed steps of optimizers' layouts, both directions
    uncompressed_bytes: int = 0  # the same steps' bytes if they were uncompressed
    _sequence: int = 0
    _outstanding: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.servers = [_Server() for _ in range(self.server_count)]

    def add_layout(self, layout: Layout, push_codec_ids: dict[int, int]) -> None:
        """Add the parts of ``layout``. push_codec_ids: by key."""
        for bucket, part in layout.parts():
            name = layout.tensors[bucket.tensors[0]].name
            self.parts[part.key] = PartState(
                part.key, part.server, layout.id, part.round, part.position,
                layout.parts_on_server[part.server], bucket.priority, push_codec_ids[part.key], name,
                layout.kind in OF_MODELS, layout.kind == "weights", 0 if part.round or bucket.over_groups else 2 * part.numel * ITEM_BYTES[bucket.dtype],
            )  # fmt: skip

    def submit(
        self, key: int, now: float, payload_bytes: int = 0, *, nonfinite: bool = False, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> list[Action]:  # fmt: skip
        """Begin the part's next step, whose payload is there; a non-finite one travels without payload. Raises LocalProtocolError if the previous step is not
        decoded yet."""
        part = self.parts[key]
        if part.phase is not Phase.IDLE:
            raise LocalProtocolError(f"part {key_text(key)} was submitted again while step {part.step} is {part.phase.value}")
        part.step += 1
        part.skip, part.rescale, part.credit, part.asked = skip, rescale, 0, False
        part.flags = (
            Flag.WANT_RESULT
            | (Flag.PREVIOUS_SKIPPED if previous_skipped else Flag.NONE)
            | (Flag.RAISED if previous_skipped == RAISED else Flag.NONE)
        )
        part.began = now
        self._outstanding.add(key)
        if skip:
            part.phase, part.payload_bytes = Phase.SENT, 0
            return [self._push(part)] if self.servers[part.server].up else []
        part.phase, part.payload_bytes = Phase.QUEUED, payload_bytes
        if nonfinite:
            part.payload_bytes = 0
            part.flags |= Flag.NONFINITE
        self._enqueue(part)
        return self._pump(part.server)

    def prioritise(self, keys: Iterable[int], priority: int) -> None:
        """From their next submission on, these parts have another priority on this rank."""
        for key in keys:
            self.parts[key].priority = priority

    def transfer(self, transfers: list[Transfer], now: float) -> list[Action]:
        """Ask the servers for residuals, or set them. Each is answered with Transferred. No step of their keys may be under way."""
        actions: list[Action] = []
        for server, state in enumerate(self.servers):
            state.transfers.add([transfer for transfer in transfers if self.parts[transfer.key].server == server], now)
            actions += self._say_transfers(server)
        return actions

    def departed(self, server: int, unsent: int, now: float) -> list[Action]:
        """The kernel has taken payloads from the connection's queue, which now holds ``unsent`` payloads."""
        state = self.servers[server]
        if unsent == state.unsent:
            return []
        state.unsent, state.moved = unsent, now
        return self._pump(server)

    def moved(self, server: int, now: float) -> float:
        """The time at which something last got through to or from a server; ``now`` if nothing is awaited from it."""
        state = self.servers[server]
        waits = state.queue or state.transfers.said or any(True for _ in self._unanswered(server))
        return state.moved if waits else now

    @property
    def measured(self) -> bool:
        """Whether every server has a connection, and each connection that needs measuring has been measured."""
        return all(state.measured for state in self.servers)

    @property
    def rate(self) -> int:
        """Bytes a second of the slowest connection that has been measured; 0 if none has been."""
        rates = [state.pace.rate for state in self.servers if state.pace is not None and state.pace.done]
        return max(1, int(min(rates))) if rates and min(rates) < math.inf else 0

    def receive(self, server: int, header: Header, payload: Any, now: float) -> list[Action]:
        """Handle one message from a server. Repeats and answers that are out of date are dropped. Raises RemoteProtocolError for a message that
        does not fit the protocol."""
        if header.job != self.job or header.sender != SERVER_SENDER + server:
            raise RemoteProtocolError(f"message of job {header.job}, sender {header.sender:#x}; expected {self.job}, server {server}")
        if header.epoch != self.epoch:
            return []  # said before the epoch changed
        if header.kind == Kind.WINDOW:
            windows = self.servers[server].windows
            windows[header.plan] = max(windows.get(header.plan, 0), header.step)
            return self._pump(server)
        if header.kind == Kind.ERROR:
            return self._error(header, payload)
        if header.kind == Kind.MEASURE:
            return self._echoed(server, header.payload_bytes, now)
        self.servers[server].moved = now
        part = self.parts.get(header.key)
        if part is None or part.server != server:
            raise RemoteProtocolError(f"server {server}: {Kind(header.kind).name} for key {key_text(header.key)}, which is not there")
        if header.kind == Kind.ACK:
            return self._acked(part, header.step)
        if header.kind == Kind.RESULT:
            return self._result(part, header, payload)
        if header.kind in (Kind.RESIDUAL, Kind.RESTORE):
            transfer = self.servers[server].transfers.answered(header, payload)
            return [] if transfer is None else [Transferred(transfer), *self._say_transfers(server)]
        raise RemoteProtocolError(f"server {server}: a server does not send {Kind(header.kind).name} to a worker")

    def taken(self, key: int) -> None:
        """The part's result has been taken: its next step may begin."""
        part = self.parts[key]
        assert part.phase is Phase.DECODING, part
        part.phase = Phase.IDLE
        self._outstanding.discard(key)

    def disconnected(self, server: int) -> None:
        """Send nothing until the connection is back. Messages that were in flight may be lost."""
        self.servers[server].up = False

    def connected(self, server: int, now: float, *, queues: bool = False) -> list[Action]:
        """A connection is up, for the first time or again: greet, then ask about everything that may have been lost. The first connection is
        measured. queues: whether payloads wait in a queue of the connection's own; ``departed`` is then called when one leaves it."""
        state = self.servers[server]
        state.up, state.queues, state.unsent = True, queues, 0
        actions: list[Action] = [Greet(server)]
        for part in self._unanswered(server):  # a skip is as short as a question
            actions.append(self._push(part) if part.skip and part.phase is Phase.SENT else self._ask(part))
        actions += map(self._say, state.transfers.said)
        return [*actions, *self._measure(server, now), *self._say_transfers(server), *self._pump(server)]

    def _measure(self, server: int, now: float) -> list[Action]:
        state = self.servers[server]
        if state.measured:
            return []
        if not state.queues:  # shared memory
            state.measured = True
            return [Measured()] if self.measured else []
        state.pace = state.pace or Pace()
        nbytes = state.pace.say(now)
        header = Header(Kind.MEASURE, job=self.job, epoch=self.epoch, sender=self.rank, payload_bytes=nbytes)
        return [Transmit(server, header, body=bytes(nbytes))]

    def _echoed(self, server: int, nbytes: int, now: float) -> list[Action]:
        state = self.servers[server]
        if state.pace is None or state.measured:
            return []
        state.pace.echoed(nbytes, now)
        if not state.pace.done:
            return self._measure(server, now)
        state.measured = True
        return [Measured()] if self.measured else []

    def tick(self, now: float, told: float = float("-inf")) -> list[str]:
        """Name what this worker has awaited for long. told: when the servers, through the scheduler, last named what they await themselves."""
        return self._name_awaited(now, told)

    def _unanswered(self, server: int) -> Iterator[PartState]:
        for key in sorted(self._outstanding):
            part = self.parts[key]
            if part.server == server and part.phase in (Phase.SENT, Phase.ACKED):
                yield part

    def _name_awaited(self, now: float, told: float) -> list[str]:
        texts = []
        for server, state in enumerate(self.servers):
            if (text := state.transfers.awaited(server, now, self.silence_s)) is not None:
                texts.append(text if state.up else f"{text}; its connection is down")
            late = [p for k in self._outstanding if (p := self.parts[k]).server == server and self._is_late(p, now, told)]
            if state.named is not None and now - state.named.since > 2 * LONGEST_S:
                state.named = None
            if late:
                state.named = state.named or Reminder(min(p.began for p in late))
            if late and state.named is not None and state.named.due(now, self.silence_s):
                first = min(late, key=lambda p: p.began)
                more = f" and {len(late) - 1} more" if len(late) > 1 else ""
                link = "" if state.up else "; its connection is down"
                texts.append(
                    f"waiting for server {server} for {now - first.began:.0f} s: step {first.step} of {first.name!r} "
                    f"(key {key_text(first.key)}{more}) is {first.phase.value}{link}"
                )
        return texts

    def _is_late(self, part: PartState, now: float, told: float) -> bool:
        """Whether the part should be named as awaited. A part that a server has accepted mostly waits for other ranks; the server names those
        itself, so it gets the time to. No part is late while others make progress: over a slow link each of them may take minutes."""
        state = self.servers[part.server]
        waited = now - max(part.began, state.moved)
        if part.phase is Phase.ACKED and state.up:
            return waited >= self.silence_s + NAMED_BY_SERVER_S and now - told > self.silence_s + LONGEST_S
        return waited >= self.silence_s

    def _say_transfers(self, server: int) -> list[Action]:
        state = self.servers[server]
        return [self._say(transfer) for transfer in state.transfers.pump()] if state.up else []

    def _say(self, transfer: Transfer) -> Transmit:
        part, payload = self.parts[transfer.key], transfer.payload
        header = Header(
            transfer.kind, transfer.flags, self.job, self.epoch, part.layout, part.key, transfer.step, part.round, 0, self.rank,
            transfer.first, transfer.rescale if payload is not None else 1.0, 0 if payload is None else len(payload),
        )  # fmt: skip
        return Transmit(part.server, header, body=payload)

    def _enqueue(self, part: PartState) -> None:
        self._sequence += 1
        rank = 0 if self.credit_parts == 0 else -part.priority
        heapq.heappush(self.servers[part.server].queue, (rank, self._sequence, part.key))

    def _pump(self, server: int) -> list[Action]:
        """Send what window, credit and the connection's queue allow, the highest priority first."""
        state = self.servers[server]
        if not state.up:
            return []
        actions: list[Action] = []
        outside: list[tuple[int, int, int]] = []
        while state.queue:
            entry = heapq.heappop(state.queue)
            part = self.parts[entry[2]]
            if part.ticket >= state.windows.get(part.layout, 0):
                outside.append(entry)
                continue
            if not self._has_credit(state, part.payload_bytes):
                outside.append(entry)
                break
            part.phase = Phase.SENT
            self._spend(part)
            actions.append(self._push(part))
        for entry in outside:
            heapq.heappush(state.queue, entry)
        return actions

    def _has_credit(self, state: _Server, payload_bytes: int) -> bool:
        if payload_bytes and state.unsent >= MOST_UNSENT:
            return False
        if state.parts_in_flight == 0:
            return True  # a part larger than the credit must pass, too
        if self.credit_parts > 0 and state.parts_in_flight >= self.credit_parts:
            return False
        return not self.credit_bytes or state.in_flight + payload_bytes <= self.credit_bytes

    def _spend(self, part: PartState) -> None:
        state = self.servers[part.server]
        part.credit = part.payload_bytes + 1  # + 1: a part without payload counts as a part in flight, too
        state.in_flight += part.payload_bytes
        state.parts_in_flight += 1
        if state.queues and part.payload_bytes:
            state.unsent += 1

    def _return_credit(self, part: PartState) -> None:
        if part.credit:
            state = self.servers[part.server]
            state.in_flight -= part.credit - 1
            state.parts_in_flight -= 1
            part.credit = 0

    def _acked(self, part: PartState, step: int) -> list[Action]:
        if step != part.step or part.phase not in (Phase.SENT, Phase.ACKED):
            return []
        part.phase, part.asked = Phase.ACKED, False
        self._return_credit(part)
        return self._pump(part.server)

    def _result(self, part: PartState, header: Header, payload: Any) -> list[Action]:
        if header.step > part.step or (header.step == part.step and part.phase is Phase.QUEUED):
            raise RemoteProtocolError(
                f"server {part.server}: result of step {header.step} of key {key_text(part.key)}, which is at step {part.step}, {part.phase.value}"
            )
        if header.step < part.step or part.phase not in (Phase.SENT, Phase.ACKED):
            return []
        self._return_credit(part)
        part.phase = Phase.DECODING
        self._count(part, header)
        return [Result(part.key, part.step, header.flags, payload), *self._pump(part.server)]

    def _count(self, part: PartState, header: Header) -> None:
        if part.of_gradients and not header.flags & Flag.SKIPPED:
            self.gradient_bytes += part.payload_bytes + header.payload_bytes
            self.uncompressed_bytes += part.plain_bytes

    def _error(self, header: Header, payload: Any) -> list[Action]:
        notice = decode_body(Notice, payload if payload is not None else b"")
        if notice.code == ErrorCode.PUSH_MISSING:
            part = self.parts.get(header.key)
            current = part is not None and part.step == header.step and part.phase in (Phase.SENT, Phase.ACKED)
            return self._again(part) if part is not None and current and part.asked else []
        if notice.code in (ErrorCode.NOT_ADMITTED, ErrorCode.STALE_EPOCH):
            return []  # about a connection or an epoch that is over; the worker asks about its parts on the new connection
        return [Failed(notice.text)]

    def _again(self, part: PartState) -> list[Action]:
        """The server lacks a contribution, which therefore goes back to the queue. Each question leads to one payload at most, even if the
        server answers it several times."""
        part.asked = False
        self.resent += 1
        if part.skip:
            part.phase = Phase.SENT
            return [self._push(part)]
        self._return_credit(part)
        part.phase = Phase.QUEUED
        self._enqueue(part)
        return self._pump(part.server)

    def _ask(self, part: PartState) -> Transmit:
        part.asked = True
        self.asked += 1
        return Transmit(part.server, self._header(Kind.PULL, part))

    def _push(self, part: PartState) -> Transmit:
        header = self._header(Kind.SKIP if part.skip else Kind.PUSH, part)
        codec = 0 if part.skip or (part.of_weights and part.step == 1) else part.codec
        return Transmit(part.server, header._replace(codec=codec, payload_bytes=part.payload_bytes), part.payload_bytes > 0)

    def _header(self, kind: Kind, part: PartState) -> Header:
        return Header(
            kind, int(part.flags), self.job, self.epoch, part.layout, part.key, part.step, part.round, 0, self.rank, 0, part.rescale, 0
        )
