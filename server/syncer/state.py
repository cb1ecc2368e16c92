"""A syncer's conversations: who has enrolled, which pushes count, and who is answered when.

Pure: no sockets, clocks, threads or numbers. The loop decodes payloads before they come here, and carries out the effects in order.

Nobody waits for anybody, but for the initial values, which one learner brings: its own, or the last ones that it has of a syncer whose values are lost.
Invariants: a push counts once, whatever is repeated; an answer to a push has it in; a learner's name has one process at a time, the newest, and none that
another has taken the place of comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psgc import __version__
from psgc.errors import RemoteProtocolError
from psgc.wire.counts import cut, whole
from psgc.wire.frames import Header, Kind
from psgc.wire.learners import INITIAL, Enrol, Enrolled, learner_number
from psgc.wire.messages import ErrorCode, Notice, encode_body

Peer = Any  # a connection of the loop's; this module only compares and hashes it


class Send(NamedTuple):
    """Send to one connection."""

    peer: Peer
    header: Header
    body: bytes = b""


class Begin(NamedTuple):
    """Make room for fragments of so many elements."""

    sizes: tuple[int, ...]


class Apply(NamedTuple):
    """Apply what was decoded last to the fragment; staleness: how many updates its base lacks, or INITIAL_VALUES."""

    fragment: int
    staleness: int


class Answer(NamedTuple):
    """Send the fragment's values as they are now, with ``header``, whose payload's length is the loop's to fill in."""

    peer: Peer
    header: Header


class Drop(NamedTuple):
    """Close the connection. told: why is under way to its learner, which then closes it; else nobody is there any more."""

    peer: Peer
    told: bool


INITIAL_VALUES = -1
MAX_FORMER = 1000  # sessions kept of a learner, which that many processes were; whoever was cut off before all of them is not expected back
Effect = Send | Begin | Apply | Answer | Drop


@dataclass(slots=True)
class Learner:
    """session: of its newest process. applied: by fragment, the number of its last push that counts. pushes: in all, of all its processes; staleness: of the
    last one. former: sessions of the processes before, oldest first: these enrol no more."""

    session: int
    applied: list[int]
    pushes: int = 0
    staleness: int = 0
    former: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SyncerState:
    """See the module's text. model, sizes: as ``Enrol`` has them, of the first learner; versions: of each fragment, 0 until its initial values are there."""

    rule: str
    model: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    versions: list[int] = field(default_factory=list)
    learners: dict[str, Learner] = field(default_factory=dict)
    peers: dict[Peer, Enrol] = field(default_factory=dict)
    _bringer: Peer | None = None  # whose initial values are awaited
    _waiting: list[Answer] = field(default_factory=list)  # until these are there

    @property
    def begun(self) -> bool:
        """Whether all initial values are there."""
        return bool(self.versions) and all(self.versions)

    @property
    def awaited(self) -> str:
        """The learner whose initial values are awaited; "" where none are."""
        return "" if self.begun or self._bringer is None else self.peers[self._bringer].name

    @property
    def waiting(self) -> int:
        """How many learners wait for initial values."""
        return len({answer.peer for answer in self._waiting})

    def receive(self, peer: Peer, number: int, header: Header, enrol: Enrol | None = None) -> list[Effect]:
        """Handle one message. number: of the name that the connection has proved; enrol: the body of a REGISTER. An error becomes an ERROR reply."""
        try:
            if header.kind == Kind.REGISTER:
                assert enrol is not None
                return self._enrol(peer, number, enrol)
            mine = self.peers.get(peer)
            if mine is None:
                raise RemoteProtocolError("enrol first", ErrorCode.NOT_ADMITTED)
            if header.kind == Kind.BYE:
                return [Send(peer, Header(Kind.BYE)), *self.lost(peer)]
            if header.kind not in (Kind.PUSH, Kind.PULL):
                raise RemoteProtocolError(f"a learner does not send {Kind(header.kind).name}", ErrorCode.UNKNOWN_KIND)
            if header.key >= len(self.sizes):
                raise RemoteProtocolError(f"fragment {header.key}, but the model has {len(self.sizes)}", ErrorCode.UNKNOWN_KEY)
            if header.kind == Kind.PULL:
                return self._answer(peer, header)
            return self._bring(peer, header) if header.step == INITIAL else self._push(peer, self.learners[mine.name], header)
        except RemoteProtocolError as error:
            return refused(peer, error)

    def lost(self, peer: Peer) -> list[Effect]:
        """The connection is gone."""
        self.peers.pop(peer, None)
        self._waiting = [answer for answer in self._waiting if answer.peer != peer]
        if peer != self._bringer:
            return []
        self._bringer = next(iter(self.peers), None)
        if self.begun:
            return []
        if not self.peers:
            self.model, self.sizes, self.versions = (
                (),
                (),
                [],
            )  # nobody is held to the model of a learner that has left without bringing any values
            return []
        self.versions = [0] * len(self.sizes)  # another one's values will do, but all of them one learner's
        return [self._enrolled(other) for other in self.peers]

    def others(self, name: str) -> list[Peer]:
        """Connections that have enrolled under the name."""
        return [peer for peer, enrol in self.peers.items() if enrol.name == name]

    def _enrol(self, peer: Peer, number: int, enrol: Enrol) -> list[Effect]:
        if learner_number(enrol.name) != number:
            raise RemoteProtocolError(f"learner {enrol.name!r} has proved another name's token", ErrorCode.NOT_ADMITTED)
        if enrol.version != __version__:
            raise RemoteProtocolError(f"learner {enrol.name} runs psgc {enrol.version}, this syncer {__version__}", ErrorCode.DISAGREE)
        learner = self.learners.get(enrol.name)
        if learner is not None and enrol.session in learner.former:  # it was out of reach when its place was taken
            raise RemoteProtocolError(_taken(enrol.name), ErrorCode.DISAGREE)
        if not enrol.fragments or len(enrol.fragments) != len(enrol.sizes) or min(enrol.sizes) < 1:
            raise RemoteProtocolError(f"learner {enrol.name}: a model without parameters", ErrorCode.MALFORMED)
        free = not self.begun and all(one.name == enrol.name for one in self.peers.values())  # nobody else has given a model
        if not free and (difference := unlike(self.model, enrol.fragments)) is not None:
            raise RemoteProtocolError(f"learner {enrol.name} has another model than this syncer: {difference}", ErrorCode.DISAGREE)
        effects: list[Effect] = []
        for other in self.others(enrol.name):
            if other == peer:
                continue
            told = self.peers[other].session != enrol.session
            if told:
                effects.append(Send(other, Header(Kind.ERROR), encode_body(Notice(ErrorCode.DISAGREE, _taken(enrol.name)))))
            effects += [Drop(other, told), *self.lost(other)]
        if free:
            self.model, self.sizes, self.versions = enrol.fragments, enrol.sizes, [0] * len(enrol.sizes)
            for one in self.learners.values():  # of which nothing counts yet
                one.applied = [INITIAL] * len(enrol.sizes)
            effects.append(Begin(enrol.sizes))
        self.peers[peer] = enrol
        if learner is None:
            self.learners[enrol.name] = Learner(enrol.session, [INITIAL] * len(self.sizes))
        elif learner.session != enrol.session:
            former = [*learner.former, learner.session][-MAX_FORMER:]
            self.learners[enrol.name] = Learner(enrol.session, [INITIAL] * len(self.sizes), learner.pushes, former=former)
        if not self.begun and self._bringer is None:
            self._bringer = peer
        return [*effects, self._enrolled(peer)]

    def _enrolled(self, peer: Peer) -> Send:
        return Send(peer, Header(Kind.LAYOUT), encode_body(Enrolled(peer == self._bringer and not self.begun, self.rule, self.awaited)))

    def _bring(self, peer: Peer, header: Header) -> list[Effect]:
        effects: list[Effect] = []
        if not self.versions[header.key] and peer == self._bringer:
            self.versions[header.key] = 1
            effects.append(Apply(header.key, INITIAL_VALUES))
        began = self.begun and bool(effects)
        effects += self._answer(peer, header)
        if began:
            effects += [self._filled(waiting) for waiting in self._waiting]
            effects += [self._enrolled(each) for each in self.peers]  # so that pushes come which were kept back
            self._waiting = []
        return effects

    def _push(self, peer: Peer, learner: Learner, header: Header) -> list[Effect]:
        if not self.begun:
            raise RemoteProtocolError("the initial values have not come yet", ErrorCode.WRONG_STEP)
        if header.step <= learner.applied[header.key]:
            return self._answer(peer, header)  # a repeat
        learner.applied[header.key] = header.step
        learner.pushes += 1
        # A syncer that was started again from a file may hold older values than the learner's base.
        learner.staleness = max(0, self.versions[header.key] - whole(header.plan, self.versions[header.key]))
        self.versions[header.key] += 1
        return [Apply(header.key, learner.staleness), *self._answer(peer, header)]

    def _answer(self, peer: Peer, header: Header) -> list[Effect]:
        answer = Answer(peer, Header(Kind.RESULT, key=header.key, step=header.step))
        if not self.begun:
            self._waiting.append(answer)
            return []
        return [self._filled(answer)]

    def _filled(self, answer: Answer) -> Answer:
        return answer._replace(header=answer.header._replace(plan=cut(self.versions[answer.header.key])))


def _taken(name: str) -> str:
    return f"another process has enrolled as learner {name}: give each learner a name of its own"


def refused(peer: Peer, error: RemoteProtocolError) -> list[Effect]:
    """The answer to a message that is wrong."""
    return [Send(peer, Header(Kind.ERROR), encode_body(Notice(error.code, f"syncer: {error}")))]


def unlike(model: Sequence[str], other: Sequence[str]) -> str | None:
    """Where two models differ first, in words; None: they do not."""
    if len(model) != len(other):
        return f"{len(other)} fragments, and {len(model)} expected; give every learner the same number"
    for number, (one, two) in enumerate(zip(model, other, strict=True)):
        if one == two:
            continue
        ours, theirs = one.splitlines(), two.splitlines()
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                return f"in fragment {number} parameter {b}, where {a} is expected"
        return f"fragment {number} has {len(theirs)} parameters, and {len(ours)} expected"
    return None


def described(learners: Mapping[str, Learner]) -> str:
    """What is known of the learners, for the log."""
    return ", ".join(f"{name}: {one.pushes} pushes, the last {one.staleness} late" for name, one in learners.items())
