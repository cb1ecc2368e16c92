"""A whole server as a state machine over workers, keys and windows: messages come in, actions go out.

Pure: no sockets, clocks, threads or numbers; ``now`` is passed in. The loop (``loop.py``) carries out the actions in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from psgc.errors import RemoteProtocolError
from psgc.layout import Layout
from psgc.layout.update_rule import UpdateRule
from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import LONGEST_S, Reminder
from psgc.server.late import HeldUp
from psgc.server.punctuality import KeyWaits, Punctuality
from psgc.server.step import FOLD_RANKS, NO_SLOT, SMALL_BYTES, Action, Commit, Fold, KeepLate, Kept, KeySpec, KeyState, Lend, Reply, Restore
from psgc.server.weights.kept import AnswerCommit, KeptWeights, VersionCommit
from psgc.server.weights.key import WeightsKey
from psgc.server.window import Window
from psgc.wire.frames import SERVER_SENDER, Header, Kind
from psgc.wire.messages import MEASURE_BYTES, ErrorCode, Notice, encode_body

NOTHING_KEPT: Final[Mapping[int, Kept | KeptWeights]] = MappingProxyType({})
_NEWER: Final = "the worker has a new connection"
_DEAD: Final = "worker {} counts as dead, and the job goes on without it"
Peer = Any  # a connection of the loop's; this module only compares and hashes it


class Send(NamedTuple):
    """Send to one connection. ``result`` names the key's result buffer that holds the payload, ``body`` is a control body."""

    peer: Peer
    header: Header
    body: bytes = b""
    result_slot: int | None = None


class Fault(NamedTuple):
    """Tell the scheduler: the job cannot go on. awaited: the ranks whose contributions have not come."""

    text: str
    awaited: tuple[int, ...] = ()


class SendResidual(NamedTuple):
    """Send ``header`` to one connection with elements of the key's residual, from element ``header.contributors`` on. add_back: the result
    buffer that is added to a copy of them, or NO_SLOT; the residual itself does not change."""

    peer: Peer
    header: Header
    add_back: int = NO_SLOT


class Retire(NamedTuple):
    """Forget these keys, and give their memory back."""

    keys: tuple[int, ...]


class Close(NamedTuple):
    """Close the connection, which this class has forgotten already. answered: it has been told why."""

    peer: Peer
    why: str
    answered: bool = False


Effect = Send | SendResidual | Close | Fold | Commit | KeepLate | VersionCommit | AnswerCommit | Restore | Retire | Fault


@dataclass(slots=True)
class _Key:
    state: KeyState | WeightsKey
    part: int  # its position among the layout's parts on this server
    since: float = 0.0  # of one that is active: when it became so, or when a rank that others awaited contributed
    waits: KeyWaits | None = None  # of a key whose steps wait for ranks that push their own gradients


@dataclass(slots=True)
class ServerState:
    """Workers by rank, keys by id. The loop, which knows codecs, passes ``specs``; to this class they are only numbers."""

    index: int
    workers: int
    job: int
    epoch: int
    window_bytes: int = 1 << 30
    silence_s: float = 5.0
    step_timeout_s: float = 600.0
    peers: dict[int, Peer] = field(default_factory=dict)
    ranks: dict[Peer, int] = field(default_factory=dict)
    coming: dict[int, Peer] = field(default_factory=dict)  # by rank, a proved connection that has not said yet whose process it is of
    unheard: dict[Peer, int] = field(default_factory=dict)  # the same, by connection
    keys: dict[int, _Key] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)  # keys whose step under way has a contribution
    contributed: dict[tuple[int, int], float] = field(
        default_factory=dict
    )  # layout, rank -> when the rank last contributed to one of its keys
    retired: set[int] = field(default_factory=set)  # layouts that no rank uses any more
    met: set[int] = field(default_factory=set)  # ranks that have been connected
    departed: set[int] = field(default_factory=set)  # ranks that have left the job in order
    incarnations: dict[int, int] = field(
        default_factory=dict
    )  # which of the processes in a rank's place has come last; not in it: the first
    absent: dict[int, int] = field(default_factory=dict)  # ranks that the job goes on without -> which of their processes has died
    absence: Absence = field(default_factory=lambda: Absence(1.0))  # of this server, which ticks once a heartbeat
    named: dict[tuple[int, ...], Reminder] = field(default_factory=dict)  # awaited ranks; kept for a while after they came
    held_up: dict[int, HeldUp] = field(default_factory=dict)  # by layout, of those whose steps do not wait for every rank
    punctuality: Punctuality = field(init=False)

    def __post_init__(self) -> None:
        self.punctuality = Punctuality(self.workers)

    def register(
        self, layout: Layout, specs: list[KeySpec], costs: list[int], kept: Mapping[int, Kept | KeptWeights] = NOTHING_KEPT
    ) -> list[Effect]:
        """Serve the parts of ``layout`` that are on this server, given in the plan's order with the room that each needs.
        A repeated registration changes nothing. Ad-hoc and broadcast keys have room of their own. kept: by key, what a former process has kept."""
        if layout.id in self.retired:
            return []
        if layout.id not in self.windows:
            budget = self._room(layout, specs) if layout.kind == "plan" else sum(costs)
            for part, spec in enumerate(specs):
                self.keys[spec.key] = _Key(KeyState(spec) if spec.rule is None else self._weights(spec, spec.rule), part)
            for key, of_key in kept.items():
                state = self.keys[key].state
                if isinstance(state, WeightsKey):
                    assert isinstance(of_key, KeptWeights)
                    state.take_up(of_key)
                else:
                    assert isinstance(of_key, Kept)
                    state.take_up(of_key)
            for rank in self.absent:
                for spec in specs:
                    if isinstance(of_spec := self.keys[spec.key].state, KeyState) and rank in spec.ranks:
                        of_spec.leave_out(rank)
            steps = [self.keys[spec.key].state.step - 1 for spec in specs] if kept and layout.kind != "weights" else []
            self.windows[layout.id] = Window(costs, budget, steps)
            self._watch(layout, specs)
        return [self._window(peer, layout.id) for peer in self.ranks]

    def _watch(self, layout: Layout, specs: Sequence[KeySpec]) -> None:
        """Have it noted for whom the layout's keys wait. Behind sums within nodes a rank may be late because of another; later rounds wait for the first."""
        if layout.kind != "plan" or layout.backup:
            return
        pushed = {part.key for bucket, part in layout.served.parts() if not part.round and not bucket.over_groups}
        watched = [self.keys[spec.key] for spec in specs if spec.key in pushed and len(spec.ranks) > 1]
        for entry in watched:
            entry.waits = KeyWaits(entry.state.spec.ranks)
        self._choose_last()

    def _choose_last(self) -> None:
        """Have a step count as over with that of the newest layout's last watched key, unless an older layout's key says so."""
        watched = [entry.waits for entry in self.keys.values() if entry.waits is not None]
        if watched and not any(waits.last for waits in watched):
            watched[-1].last = True

    def _room(self, layout: Layout, specs: Sequence[KeySpec]) -> int:
        """The payload bytes of steps under way that the layout's ranks may push."""
        if not layout.ahead:
            return self.window_bytes
        return min(self.window_bytes, layout.ahead * max((len(spec.ranks) for spec in specs), default=1))

    def forget(self, layout: int) -> None:
        """The layout was retired in the time of a former process."""
        self.retired.add(layout)

    def serves(self, layouts: int) -> bool:
        """Whether the job's first ``layouts`` layouts are served, or are retired."""
        return all(number in self.windows or number in self.retired for number in range(1, layouts + 1))

    def _weights(self, spec: KeySpec, rule: UpdateRule) -> WeightsKey:
        weights = WeightsKey(spec, rule, self.workers)
        for rank in self.departed:
            weights.leave(rank)
        return weights

    def receive(self, peer: Peer, header: Header, payload: Any, now: float) -> list[Effect]:
        """Handle one message from a worker's connection. An error in it becomes an ERROR reply; the server goes on."""
        try:
            if header.job != self.job:
                raise RemoteProtocolError(f"message of job {header.job}, this server is of job {self.job}", ErrorCode.WRONG_JOB)
            rank = self.ranks.get(peer, self.unheard.get(peer))
            if rank is None or header.sender != rank:
                raise RemoteProtocolError(
                    f"sender {header.sender} on a connection of {'nobody' if rank is None else f'rank {rank}'}", ErrorCode.NOT_ADMITTED
                )
            if header.epoch != self.epoch:
                raise RemoteProtocolError(f"epoch {header.epoch} is over, now it is {self.epoch}", ErrorCode.STALE_EPOCH)
            if header.kind == Kind.HELLO:
                return self._greeted(peer, rank, header, now)
            if peer in self.unheard:
                raise RemoteProtocolError(f"worker {rank} says {Kind(header.kind).name} before HELLO", ErrorCode.NOT_ADMITTED)
            if rank in self.absent:
                raise RemoteProtocolError(_DEAD.format(rank), ErrorCode.NOT_ADMITTED)
            return self._data(rank, header, payload, now)
        except RemoteProtocolError as error:
            return self._refuse(peer, header, error)

    def folded(self, key: int, last: bool, payload_bytes: int, nonfinite: bool, slot: int, now: float) -> list[Effect]:
        """The engine has carried out a Fold."""
        self.punctuality.folds.end(now)
        entry = self.keys[key]
        return self._effects(entry, entry.state.folded(last, payload_bytes, nonfinite, slot), now)

    def proved(self, peer: Peer, rank: int) -> list[Effect]:
        """The connection has proved that it is this rank's (``psgc/transport/security/handshake.py``), by a key that all processes in its place have.
        So it takes the place of the rank's connection only once HELLO has said that no newer process is known; before that nothing else is heeded."""
        assert 0 <= rank < self.workers, "the proof is of a rank that the job has"
        former = self.coming.get(rank)
        if former is not None:
            self.lost(former)
        self.coming[rank], self.unheard[peer] = peer, rank
        return [] if former is None else [Close(former, _NEWER)]

    def joined(self, peer: Peer, rank: int) -> None:
        """The connection is the rank's from now on, in place of an older one."""
        self.lost(peer)
        self.lost(self.peers.get(rank, peer))
        for entry in (
            self.keys.values() if rank in self.met else ()
        ):  # after a crash all ranks come at once: nothing has been queued for them yet
            entry.state.reconnected(rank)
        self.met.add(rank)
        self.peers[rank] = peer
        self.ranks[peer] = rank

    def _greeted(self, peer: Peer, rank: int, hello: Header, now: float) -> list[Effect]:
        """A rank says which of the processes in its place it is, where it is not the first; it goes on once every server knows. A process whose place another
        one has taken, or that counts as dead, may come back: it was stopped, or cut off from the scheduler. It does not get the rank's connection. What
        awaits a new process counts from now on: it has to prepare, and to get the job's state."""
        incarnation, known, effects = hello.step, self.incarnations.get(rank, 0), list[Effect]()
        if incarnation < known or self.absent.get(rank, 0) >= max(1, incarnation):
            why = f"another process has taken the place of worker {rank}" if incarnation < known else _DEAD.format(rank)
            self.lost(peer)
            return [*self._refuse(peer, hello, RemoteProtocolError(why, ErrorCode.NOT_ADMITTED)), Close(peer, why, answered=True)]
        if peer in self.unheard:
            former = self.peers.get(rank)
            self.joined(peer, rank)
            effects += [] if former is None else [Close(former, _NEWER)]
        if incarnation > known:
            self.incarnations[rank] = incarnation
            self.absent.pop(rank, None)
            for key, entry in self.keys.items():
                if isinstance(entry.state, KeyState) and rank in entry.state.spec.ranks:
                    entry.state.replaced(rank)
                    entry.since = now
                    if not entry.state.contributions:
                        self.active.discard(key)
        if incarnation:
            effects.append(Send(peer, self._stamp(Header(Kind.HELLO, step=incarnation))))
        return effects + [self._window(peer, layout) for layout in self.windows]

    def lost(self, peer: Peer) -> None:
        """The connection is gone. Its worker makes a new one."""
        for ranks, peers in ((self.ranks, self.peers), (self.unheard, self.coming)):
            rank = ranks.pop(peer, None)
            if rank is not None and peers.get(rank) == peer:
                del peers[rank]

    def tick(self, now: float) -> tuple[list[str], list[Fault]]:
        """Lines about contributions that have been awaited for long, one for each set of ranks, for the log and the scheduler; and faults for those
        that have been awaited for too long."""
        self._allow_for_absence(now)
        late: dict[tuple[int, ...], list[_Key]] = {}
        faults = []
        for key in sorted(self.active):
            entry = self.keys[key]
            if (root := entry.state.spec.root) in self.absent:
                faults.append(Fault(f"rank {root} died, and step {entry.state.step} of {entry.state.spec.describe()} awaits its values"))
            if now - entry.since < self.silence_s and not self.departed:
                continue  # with thousands of keys and ranks, asking each whom it awaits takes seconds
            missing = entry.state.awaited()
            age = now - self._stalled_since(entry, missing)
            gone = self.departed.intersection(missing)
            if gone:
                who = ", ".join(map(str, sorted(gone)))
                faults.append(Fault(entry.state.left_text(who)))
            if not missing or age < self.silence_s:
                continue
            late.setdefault(tuple(missing), []).append(entry)
            if age >= self.step_timeout_s:
                text = f"{self._awaits(entry, missing, now)}, more than the limit of {self.step_timeout_s:.0f} s (PSGC_STEP_TIMEOUT_S)"
                faults.append(Fault(f"server {self.index}: {text}", tuple(missing)))
        return [*self._name(late, now), *self._slow_ranks()], faults

    def _slow_ranks(self) -> Iterator[str]:
        """A line for each rank that steps wait for again and again although they may be closed without it."""
        for held_up in self.held_up.values():
            for rank, share in held_up.due():
                yield (
                    f"rank {rank} held up {share:.0%} of the last steps, though PSGC_BACKUP_WORKERS lets a step be closed without it: that hides pauses "
                    f"now and then, but every rank takes every step, and this one is slower in most of them; give it less work or another machine"
                )

    def _allow_for_absence(self, now: float) -> None:
        """This process received nothing while it did not run; no rank is late because of that."""
        if away := self.absence.ended(now):
            for key in self.active:
                self.keys[key].since = younger(self.keys[key].since, away, now)
            self.contributed = {which: younger(since, away, now) for which, since in self.contributed.items()}

    def _stalled_since(self, entry: _Key, missing: Sequence[int]) -> float:
        """Since when the step has made no progress. Over a slow link a rank's contributions may take minutes, so a step is not late while each rank
        that it awaits contributes to other keys."""
        layout = entry.state.spec.layout
        return max(entry.since, min((self.contributed.get((layout, rank), 0.0) for rank in missing), default=0.0))

    def _name(self, late: Mapping[tuple[int, ...], list[_Key]], now: float) -> Iterator[str]:
        """A line for each set of ranks that is due. A rank that is late repeatedly is named less and less often."""
        for missing in [ranks for ranks, reminder in self.named.items() if now - reminder.since > 2 * LONGEST_S]:
            del self.named[missing]
        for missing, entries in late.items():
            first = min(entries, key=lambda entry: entry.since)
            if self.named.setdefault(missing, Reminder(first.since)).due(now, self.silence_s):
                more = f" (and {len(entries) - 1} more keys)" if len(entries) > 1 else ""
                yield self._awaits(first, missing, now, more)

    @staticmethod
    def _awaits(entry: _Key, missing: Sequence[int], now: float, more: str = "") -> str:
        who = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return f"{entry.state.wait_text(who, more)} for {now - entry.since:.0f} s"

    def _data(self, rank: int, header: Header, payload: Any, now: float) -> list[Effect]:
        if header.kind == Kind.BYE:
            return self.left(rank, now)
        if header.kind == Kind.MEASURE:
            return [self._echo(rank, header)]
        if header.kind == Kind.RETIRE:
            return self._retire(rank, header.plan)
        if header.key >> 48 in self.retired:
            return []  # a repeat: its sender has gone on
        entry = self.keys.get(header.key)
        if entry is None:
            raise RemoteProtocolError(f"key {header.key:#x} is not on server {self.index}", ErrorCode.UNKNOWN_KEY)
        if header.kind == Kind.PULL:
            return self._effects(entry, entry.state.pull(rank, header.step), now)
        if header.kind == Kind.RESIDUAL:
            return self._effects(entry, entry.state.residual(rank, header), now)
        if header.kind == Kind.RESTORE:
            return self._effects(entry, entry.state.restore(rank, header, payload), now)
        if header.kind not in (Kind.PUSH, Kind.SKIP):
            raise RemoteProtocolError(f"a worker does not send {Kind(header.kind).name} to a server", ErrorCode.UNKNOWN_KIND)
        window = self.windows[entry.state.spec.layout]
        if header.kind == Kind.PUSH and not window.admits(entry.part, header.step):
            raise RemoteProtocolError(
                f"step {header.step} of {entry.state.spec.describe()} is outside the window", ErrorCode.OUTSIDE_WINDOW
            )
        if isinstance(entry.state, WeightsKey) and rank in entry.state.awaited():
            entry.since = now
        self.contributed[entry.state.spec.layout, rank] = now
        waits, state = entry.waits, entry.state
        new = waits is not None and header.step == state.step
        actions = state.contribute(rank, header, payload)
        if new and waits is not None:
            self.punctuality.came(waits, rank, state.contributions, self.absent, now)
        return self._effects(entry, actions, now)

    def left(self, rank: int, now: float) -> list[Effect]:
        """The rank has left the job in order: those who wait for its weights' deltas go on. It says so itself, and the scheduler says it again."""
        if rank in self.departed or not 0 <= rank < self.workers:
            return []
        self.departed.add(rank)
        effects: list[Effect] = []
        for entry in self.keys.values():
            if isinstance(entry.state, WeightsKey):
                effects += self._effects(entry, entry.state.leave(rank), now)
        return effects

    def leave_out(self, rank: int, process: int, now: float) -> list[Effect]:
        """A worker's process has died, and the job goes on without the rank. process: which of those in the rank's place it was, from 1; a later one may be
        there already. The scheduler says it again and again."""
        if not 0 <= rank < self.workers or process < max(1, self.incarnations.get(rank, 0)) or process <= self.absent.get(rank, 0):
            return []
        self.absent[rank] = process
        effects: list[Effect] = []
        for entry in self.keys.values():
            if isinstance(entry.state, KeyState) and rank in entry.state.spec.ranks:
                effects += self._effects(entry, entry.state.leave_out(rank), now)
        return effects

    @property
    def idle(self) -> bool:
        """Whether every rank that is in the job is connected, and none awaits anything."""
        return not self.active and len(self.departed.union(self.absent, self.peers)) == self.workers

    @property
    def deserted(self) -> bool:
        """Whether every rank has left the job in order, but for those that it goes on without."""
        return bool(self.departed) and len(self.departed.union(self.absent)) == self.workers

    def _retire(self, rank: int, layout: int) -> list[Effect]:
        """Every rank has declared the layout's successor, and so has decoded its last step of this one and read what is kept of it."""
        if layout not in self.windows:
            return []
        entries = {key: entry for key, entry in self.keys.items() if entry.state.spec.layout == layout}
        under_way = next(
            (entry.state for entry in entries.values() if entry.state.contributions or isinstance(entry.state, WeightsKey)), None
        )
        if under_way is not None:
            raise RemoteProtocolError(
                f"worker {rank}: retires layout {layout}, but {under_way.spec.describe()} is in use", ErrorCode.WRONG_STEP
            )
        for key in entries:
            del self.keys[key]
        self._choose_last()
        del self.windows[layout]
        self.held_up.pop(layout, None)
        self.contributed = {which: since for which, since in self.contributed.items() if which[0] != layout}
        self.retired.add(layout)
        return [Retire(tuple(entries))]

    def _echo(self, rank: int, header: Header) -> Send:
        """Answer a worker's measurement of its connection with as many bytes."""
        if header.payload_bytes > MEASURE_BYTES:
            raise RemoteProtocolError(f"MEASURE of {header.payload_bytes} bytes, at most {MEASURE_BYTES}", ErrorCode.BAD_PAYLOAD)
        reply = Header(Kind.MEASURE, payload_bytes=header.payload_bytes)
        return Send(self.peers[rank], self._stamp(reply), bytes(header.payload_bytes))

    def _effects(self, entry: _Key, actions: Sequence[Action | VersionCommit | AnswerCommit], now: float) -> list[Effect]:
        effects: list[Effect] = []
        grown = False
        for action in actions:
            if isinstance(action, Reply):
                peer = self.peers.get(action.rank)
                if peer is not None:  # a worker without a connection asks again once it has one
                    slot = action.result.slot if action.result is not None and action.result.payload_bytes else None
                    effects.append(Send(peer, self._stamp(action.header), b"", slot))
            elif isinstance(action, Lend):
                peer = self.peers.get(action.rank)
                if peer is not None:
                    effects.append(SendResidual(peer, self._stamp(action.header), action.add_back))
            else:
                effects.append(action)
                if isinstance(action, Fold):
                    self.punctuality.folds.begin(now)
                elif isinstance(action, Commit):
                    self._note_closing(entry)
                    if entry.waits is not None:
                        self.punctuality.over(entry.waits, now)
                    grown = self.windows[entry.state.spec.layout].complete(entry.part, action.result.step)
        if grown:
            effects.extend(self._window(peer, entry.state.spec.layout) for peer in self.ranks)
        self._note_activity(entry, now)
        return effects

    def _note_activity(self, entry: _Key, now: float) -> None:
        """A key may be active by what a former process has kept, as well as by a contribution: in each case somebody waits from now on."""
        key = entry.state.spec.key
        if not entry.state.contributions:
            self.active.discard(key)
        elif key not in self.active:
            self.active.add(key)
            entry.since = now

    def _note_closing(self, entry: _Key) -> None:
        if isinstance(entry.state, KeyState) and entry.state.late is not None:
            self.held_up.setdefault(entry.state.spec.layout, HeldUp()).note(entry.state.late.held_up_by, entry.state.step - 1)

    def _window(self, peer: Peer, layout: int) -> Send:
        return Send(peer, self._stamp(Header(Kind.WINDOW, plan=layout, step=self.windows[layout].limit)))

    def _refuse(self, peer: Peer, header: Header, error: RemoteProtocolError) -> list[Effect]:
        body = encode_body(Notice(error.code, f"server {self.index}: {error}"))
        reply = Header(Kind.ERROR, plan=header.plan, key=header.key, step=header.step, payload_bytes=len(body))
        effects: list[Effect] = [Send(peer, self._stamp(reply), body)]
        if error.code == ErrorCode.DISAGREE:
            effects.append(Fault(f"server {self.index}: {error}"))
        return effects

    def _stamp(self, header: Header) -> Header:
        return Header(header.kind, header.flags, self.job, self.epoch, *header[4:9], SERVER_SENDER + self.index, *header[10:])


def specs_of(layout: Layout, server: int, workers: int) -> tuple[list[KeySpec], list[int]]:
    """The parts of ``layout`` on ``server`` as key specs, in the plan's order, and the room (bytes) that each one's step needs."""
    specs, costs = [], []
    rule = UpdateRule.parse(layout.rule) if layout.kind == "weights" else None
    on_server = (each for each in layout.served.parts() if each[1].server == server)
    for bucket, part in sorted(on_server, key=lambda each: each[1].position):
        round_ = layout.scheme(bucket).rounds(part.numel)[part.round]
        pair = round_.pair
        broadcast = layout.kind == "broadcast"
        first = layout.tensors[bucket.tensors[0]].name
        more = f" and {len(bucket.tensors) - 1} more" if len(bucket.tensors) > 1 else ""
        ranks, bound = part.contributors or range(workers), pair.push.payload_bound(round_.numel)
        small = max(4 * round_.numel, bound * min(len(ranks), FOLD_RANKS)) <= SMALL_BYTES
        specs.append(
            KeySpec(
                part.key, round_.numel, ranks, pair.push.codec_id, pair.pull.codec_id,
                layout.counted(bucket) if layout.mean and round_.divides else 1, layout.root if broadcast or rule else None,
                pair.pull.feedback and not broadcast,
                layout.id, f"{first}{more}", rule, small and rule is None, layout.backup,
            )
        )  # fmt: skip
        costs.append(bound * (1 if broadcast else len(ranks)))
    return specs, costs


__all__ = ["Close", "Commit", "Effect", "Fault", "Fold", "Restore", "Retire", "Send", "SendResidual", "ServerState", "specs_of"]
