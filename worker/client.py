"""The worker's side of the data protocol: the state of every part, which payloads may be sent now, and which must be sent again.

Pure: no sockets, clocks, threads or numbers; ``now`` is passed in. The network thread carries out the actions in order.

A part's step (``parts.py``) is submitted with its payload, which stays as it is until the step is decoded, so it can be sent again at any time; servers never
add a step twice. ``sending.py`` says what may leave for a server.

A living connection loses nothing, so the worker never asks because of silence. After a connection was replaced, the worker asks about every
part that is unanswered, and sends a payload again only if the server says that it lacks it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.layout import Layout, key_text
from psgc.layout.speed import UNKNOWN, Speed
from psgc.observe.lately import Busy
from psgc.processes.reminder import LONGEST_S, Reminder
from psgc.wire.frames import SERVER_SENDER, Flag, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, decode_body
from psgc.worker.connections.pace import Pace
from psgc.worker.parts import PartPlace, PartState, Phase, Said
from psgc.worker.residuals.transfers import Transfer, Transfers
from psgc.worker.sending import Credit, Sending
from psgc.worker.session import RAISED

NAMED_BY_SERVER_S: Final = 2.5  # a server looks once a heartbeat, and the scheduler passes its line on
MOST_RETIRED: Final = (
    64  # layouts; while a server is down none is agreed, so it misses those whose successors were: one of each optimizer at most
)
MAYBE_WITHOUT: Final = 2  # of each part, results that may be without a process that has taken another's place: see ``KeyState.replaced``


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
    """All servers' connections have been measured; ``Client.speed`` is now known."""


Action = Transmit | Result | Failed | Greet | Transferred | Measured


@dataclass(slots=True)
class _Server:
    """sending: what may leave for it; moved: when it last answered, or its connection's queue last moved; named: of what has been awaited from it, until that
    is a while ago; pace: set once there is a connection to measure; measured: also True for a connection that needs no measurement; greeted: the server has
    answered HELLO, as it does to a process that has taken another's place.

    has: steps of gradients that it has not answered; nbytes: payloads of gradients, both ways."""

    sending: Sending
    up: bool = False
    moved: float = float("-inf")
    named: Reminder | None = None
    pace: Pace | None = None
    measured: bool = False
    greeted: bool = False
    has: Busy = field(default_factory=Busy)
    nbytes: int = 0
    transfers: Transfers = field(default_factory=Transfers)


@dataclass(slots=True)
class Counts:
    """resent: contributions that were lost with a connection and sent again on the next one; asked: PULLs about parts that were unanswered when a connection
    was replaced; carried: by codec, payload bytes of completed steps of optimizers' layouts, both directions, and the same steps' bytes if they were
    uncompressed."""

    resent: int = 0
    asked: int = 0
    carried: dict[str, list[int]] = field(default_factory=dict)


class Client:
    """See the module's text. credit_bytes, credit_parts: as in ``Credit``."""

    def __init__(
        self, rank: int, job: int, epoch: int, server_count: int, credit_bytes: int = 0, credit_parts: int = -1, silence_s: float = 5.0,
        incarnation: int = 0,
    ) -> None:  # fmt: skip
        self.rank, self.job, self.epoch, self.silence_s = rank, job, epoch, silence_s
        self.incarnation = incarnation
        self.parts: dict[int, PartState] = {}
        self.servers = [_Server(Sending(Credit(credit_bytes, credit_parts))) for _ in range(server_count)]
        self.counts = Counts()
        self._outstanding: set[int] = set()
        self._retired: deque[int] = deque(maxlen=MOST_RETIRED)

    def add_layout(self, layout: Layout, push_codec_ids: dict[int, int], steps: int = 0) -> None:
        """Add the parts of ``layout``. push_codec_ids: by key. steps: that this rank has taken of it already, in another process."""
        for bucket, part in layout.parts():
            self.parts[part.key] = PartState(PartPlace.of(layout, bucket, part, push_codec_ids[part.key]), bucket.priority, steps)

    def retire(self, layout: int) -> list[Action]:
        """No rank uses the layout any more, and nothing of it is under way: tell the servers. A server that is down at the moment is down for every rank, so it
        is told on each new connection."""
        self._retired.append(layout)
        return [self._retire(server, layout) for server, state in enumerate(self.servers) if state.up]

    def _retire(self, server: int, layout: int) -> Transmit:
        return Transmit(server, Header(Kind.RETIRE, job=self.job, epoch=self.epoch, plan=layout, sender=self.rank))

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
        part.credit, part.asked, part.overwritten = 0, False, False
        flags = (
            Flag.WANT_RESULT
            | (Flag.PREVIOUS_SKIPPED if previous_skipped else Flag.NONE)
            | (Flag.RAISED if previous_skipped == RAISED else Flag.NONE)
            | (Flag.NONFINITE if nonfinite and not skip else Flag.NONE)
        )
        part.said = Said(skip, flags, rescale, 0 if skip or nonfinite else payload_bytes, now)
        self._outstanding.add(key)
        server = self.servers[part.place.server]
        if part.place.of_gradients:
            server.has.begin(now)
        if skip:
            part.phase = Phase.SENT
            return [self._push(part)] if server.up else []
        return self._enqueue(part)

    def prioritise(self, keys: Iterable[int], priority: int) -> None:
        """From their next submission on, these parts have another priority on this rank."""
        for key in keys:
            self.parts[key].priority = priority

    def transfer(self, transfers: list[Transfer], now: float) -> list[Action]:
        """Ask the servers for residuals, or set them. Each is answered with Transferred. No step of their keys may be under way."""
        actions: list[Action] = []
        for server, state in enumerate(self.servers):
            state.transfers.add([transfer for transfer in transfers if self.parts[transfer.key].place.server == server], now)
            actions += self._say_transfers(server)
        return actions

    def departed(self, server: int, unsent: int, now: float) -> list[Action]:
        """The kernel has taken payloads from the connection's queue, which now holds ``unsent`` payloads."""
        state = self.servers[server]
        if unsent == state.sending.unsent:
            return []
        state.sending.unsent, state.moved = unsent, now
        return self._pump(server)

    def moved(self, server: int, now: float) -> float:
        """The time at which something last got through to or from a server; ``now`` if nothing is awaited from it."""
        state = self.servers[server]
        waits = state.sending.waits or state.transfers.said or any(True for _ in self._unanswered(server))
        return state.moved if waits else now

    @property
    def greeted(self) -> bool:
        """Whether every server knows that this process has taken another's place, if it has."""
        return not self.incarnation or all(state.greeted for state in self.servers)

    @property
    def measured(self) -> bool:
        """Whether every server has a connection, and each connection that needs measuring has been measured."""
        return all(state.measured for state in self.servers)

    @property
    def queued(self) -> int:
        """Payloads that wait for a server's window or credit. Any thread may ask for this and the next one."""
        return sum(state.sending.queued for state in self.servers)

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes that servers have not accepted yet."""
        return sum(state.sending.in_flight for state in self.servers)

    def served(self, now: float) -> list[tuple[float, int]]:
        """By server: for how long it has had steps of gradients that were not answered, and their payloads' bytes, both ways. Any thread may ask: the numbers
        may be a message apart."""
        return [(state.has.so_far_s(now), state.nbytes) for state in self.servers]

    @property
    def speed(self) -> Speed:
        """What the slowest connections that have been measured have."""
        paces = [state.pace for state in self.servers if state.pace is not None and state.pace.done]
        rate = min((pace.rate for pace in paces), default=math.inf)
        return Speed(max(1, int(rate)), int(1e6 * max(pace.round_trip_s for pace in paces))) if rate < math.inf else UNKNOWN

    def receive(self, server: int, header: Header, payload: Any, now: float) -> list[Action]:
        """Handle one message from a server. Repeats and answers that are out of date are dropped. Raises RemoteProtocolError for a message that
        does not fit the protocol."""
        if header.job != self.job or header.sender != SERVER_SENDER + server:
            raise RemoteProtocolError(f"message of job {header.job}, sender {header.sender:#x}; expected {self.job}, server {server}")
        if header.epoch != self.epoch:
            return []  # said before the epoch changed
        if header.kind == Kind.WINDOW:
            windows = self.servers[server].sending.windows
            windows[header.plan] = max(windows.get(header.plan, 0), header.step)
            return self._pump(server)
        if header.kind == Kind.ERROR:
            return self._error(header, payload)
        if header.kind == Kind.MEASURE:
            return self._echoed(server, header.payload_bytes, now)
        if header.kind == Kind.HELLO:
            self.servers[server].greeted = True
            return []
        self.servers[server].moved = now
        part = self.parts.get(header.key)
        if part is None or part.place.server != server:
            raise RemoteProtocolError(f"server {server}: {Kind(header.kind).name} for key {key_text(header.key)}, which is not there")
        if header.kind == Kind.ACK:
            return self._acked(part, header.step)
        if header.kind == Kind.RESULT:
            return self._result(part, header, payload, now)
        if header.kind in (Kind.RESIDUAL, Kind.RESTORE):
            transfer = self.servers[server].transfers.answered(header, payload)
            return [] if transfer is None else [Transferred(transfer), *self._say_transfers(server)]
        raise RemoteProtocolError(f"server {server}: a server does not send {Kind(header.kind).name} to a worker")

    def awaits(self, server: int, header: Header) -> bool:
        """Whether the message that this begins is the result that its part awaits. From now on, whatever becomes of the message, the part's payload may be
        overwritten: a server that has the result does not ask for the push again."""
        part = self.parts.get(header.key)
        ours = (header.job, header.epoch, header.sender) == (self.job, self.epoch, SERVER_SENDER + server)
        if part is None or not ours or header.kind != Kind.RESULT:
            return False
        if part.place.server != server or part.step != header.step or part.phase not in (Phase.SENT, Phase.ACKED):
            return False
        part.overwritten = True
        return True

    def taken(self, key: int) -> None:
        """The part's result has been taken: its next step may begin."""
        part = self.parts[key]
        assert part.phase is Phase.DECODING, part
        part.phase, part.results = Phase.IDLE, part.results + 1
        self._outstanding.discard(key)

    def disconnected(self, server: int) -> None:
        """Send nothing until the connection is back. Messages that were in flight may be lost."""
        self.servers[server].up = False

    def connected(self, server: int, now: float, *, queues: bool = False) -> list[Action]:
        """A connection is up, for the first time or again: greet, then ask about everything that may have been lost. The first connection is
        measured. queues: whether payloads wait in a queue of the connection's own; ``departed`` is then called when one leaves it."""
        state = self.servers[server]
        state.up = True
        state.sending.connected(queues)
        actions: list[Action] = [Greet(server), *(self._retire(server, layout) for layout in self._retired)]
        for part in self._unanswered(server):  # a skip is as short as a question
            actions.append(self._push(part) if part.said.skip and part.phase is Phase.SENT else self._ask(part))
        actions += map(self._say, state.transfers.said)
        return [*actions, *self._measure(server, now), *self._say_transfers(server), *self._pump(server)]

    def _measure(self, server: int, now: float) -> list[Action]:
        state = self.servers[server]
        if state.measured:
            return []
        if not state.sending.queues:  # shared memory
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
            if part.place.server == server and part.phase in (Phase.SENT, Phase.ACKED):
                yield part

    def _name_awaited(self, now: float, told: float) -> list[str]:
        texts = []
        for server, state in enumerate(self.servers):
            if (text := state.transfers.awaited(server, now, self.silence_s)) is not None:
                texts.append(text if state.up else f"{text}; its connection is down")
            late = [p for k in self._outstanding if (p := self.parts[k]).place.server == server and self._is_late(p, now, told)]
            if state.named is not None and now - state.named.since > 2 * LONGEST_S:
                state.named = None
            if late:
                state.named = state.named or Reminder(min(p.said.began for p in late))
            if late and state.named is not None and state.named.due(now, self.silence_s):
                first = min(late, key=lambda p: p.said.began)
                more = f" and {len(late) - 1} more" if len(late) > 1 else ""
                link = "" if state.up else "; its connection is down"
                texts.append(
                    f"waiting for server {server} for {now - first.said.began:.0f} s: step {first.step} of {first.place.name!r} "
                    f"(key {key_text(first.place.key)}{more}) is {first.phase.value}{link}"
                )
        return texts

    def _is_late(self, part: PartState, now: float, told: float) -> bool:
        """Whether the part should be named as awaited. A part that a server has accepted mostly waits for other ranks; the server names those
        itself, so it gets the time to. No part is late while others make progress: over a slow link each of them may take minutes."""
        state = self.servers[part.place.server]
        waited = now - max(part.said.began, state.moved)
        if part.phase is Phase.ACKED and state.up:
            return waited >= self.silence_s + NAMED_BY_SERVER_S and now - told > self.silence_s + LONGEST_S
        return waited >= self.silence_s

    def _say_transfers(self, server: int) -> list[Action]:
        state = self.servers[server]
        return [self._say(transfer) for transfer in state.transfers.pump()] if state.up else []

    def _say(self, transfer: Transfer) -> Transmit:
        part, payload = self.parts[transfer.key], transfer.payload
        header = Header(
            transfer.kind, transfer.flags, self.job, self.epoch, part.place.layout, part.place.key, transfer.step, part.place.round, 0, self.rank,
            transfer.first, transfer.rescale if payload is not None else 1.0, 0 if payload is None else len(payload),
        )  # fmt: skip
        return Transmit(part.place.server, header, body=payload)

    def _enqueue(self, part: PartState) -> list[Action]:
        part.phase = Phase.QUEUED
        self.servers[part.place.server].sending.put(part)
        return self._pump(part.place.server)

    def _pump(self, server: int) -> list[Action]:
        """Send what may leave for the server."""
        state = self.servers[server]
        actions: list[Action] = []
        for part in state.sending.admit() if state.up else ():
            part.phase = Phase.SENT
            actions.append(self._push(part))
        return actions

    def _acked(self, part: PartState, step: int) -> list[Action]:
        if step != part.step or part.phase not in (Phase.SENT, Phase.ACKED):
            return []
        part.phase, part.asked = Phase.ACKED, False
        self.servers[part.place.server].sending.give_back(part)
        return self._pump(part.place.server)

    def _result(self, part: PartState, header: Header, payload: Any, now: float) -> list[Action]:
        if header.step > part.step or (header.step == part.step and part.phase is Phase.QUEUED):
            raise RemoteProtocolError(
                f"server {part.place.server}: result of step {header.step} of key {key_text(part.place.key)}, which is at step {part.step}, {part.phase.value}"
            )
        if header.step < part.step or part.phase not in (Phase.SENT, Phase.ACKED):
            return []
        # A step that was taken, or whose sum had come past this rank, while it had no process:
        may_be_without = self.incarnation and part.results < MAYBE_WITHOUT
        if header.flags & Flag.SKIPPED and not part.said.skip and not may_be_without:
            text = f"step {part.step} of {part.place.name!r} (key {key_text(part.place.key)})"
            return [
                Failed(f"server {part.place.server} says that every rank skipped {text}, to which this rank has contributed a gradient")
            ]
        self.servers[part.place.server].sending.give_back(part)
        part.phase = Phase.DECODING
        self._count(part, header, now)
        return [Result(part.place.key, part.step, header.flags, payload), *self._pump(part.place.server)]

    def _count(self, part: PartState, header: Header, now: float) -> None:
        if not part.place.of_gradients:
            return
        server = self.servers[part.place.server]
        server.has.end(now)
        server.nbytes += part.said.payload_bytes + header.payload_bytes
        if not header.flags & Flag.SKIPPED:
            carried = self.counts.carried.setdefault(part.place.by, [0, 0])
            carried[0] += part.said.payload_bytes + header.payload_bytes
            carried[1] += part.place.plain_bytes

    def _error(self, header: Header, payload: Any) -> list[Action]:
        notice = decode_body(Notice, payload if payload is not None else b"")
        if notice.code == ErrorCode.PUSH_MISSING:
            part = self.parts.get(header.key)
            current = part is not None and part.step == header.step and part.phase in (Phase.SENT, Phase.ACKED)
            if part is None or not current or not part.asked:
                return []
            if part.overwritten:
                text = f"step {part.step} of key {key_text(part.place.key)}"
                return [Failed(f"server {part.place.server} lacks this worker's push of {text}, whose result it had begun to send")]
            return self._again(part)
        if notice.code in (ErrorCode.NOT_ADMITTED, ErrorCode.STALE_EPOCH):
            return []  # about a connection or an epoch that is over; the worker asks about its parts on the new connection
        return [Failed(notice.text)]

    def _again(self, part: PartState) -> list[Action]:
        """The server lacks a contribution, which therefore goes back to the queue. Each question leads to one payload at most, even if the
        server answers it several times."""
        part.asked = False
        self.counts.resent += 1
        if part.said.skip:
            part.phase = Phase.SENT
            return [self._push(part)]
        self.servers[part.place.server].sending.give_back(part)
        return self._enqueue(part)

    def _ask(self, part: PartState) -> Transmit:
        part.asked = True
        self.counts.asked += 1
        return Transmit(part.place.server, self._header(Kind.PULL, part))

    def _push(self, part: PartState) -> Transmit:
        return Transmit(part.place.server, self._header(Kind.SKIP if part.said.skip else Kind.PUSH, part), part.said.payload_bytes > 0)

    def _header(self, kind: Kind, part: PartState) -> Header:
        return part.header(kind, job=self.job, epoch=self.epoch, sender=self.rank)
