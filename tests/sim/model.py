"""Every interleaving of a small job in which processes die: the real state machines of workers and servers, explored state by state.

Two workers take two steps of one key on each of two servers, over connections that keep their order. At any moment, also between any two actions of one
message, a process may end, as often as ``Deaths`` allows it. What a server's process had sent arrives up to any point. Another process follows: a server's
from what was committed, a worker's from the state of the other worker, once every server has greeted it. The scheduler is left out: it only says who
follows, which happens here at once. A worker's process that counts as dead may come back, as often as ``Deaths`` allows it: it was stopped, or cut off.

Payloads are names: (rank, step, process). In every state that can be reached, each sum that a server makes is that of both ranks' contributions to that step,
by processes in whose place no other is known when it begins, each
result that a worker decodes is that of its step and still whole where it lies, nobody reports a fault, and as long as somebody is not done something can
happen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pieces import Numbers, Pieces, Shown

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.server.state import Close, Fault, Send, ServerState, specs_of
from psgc.server.step import NO_SLOT, Commit, Fold, Kept
from psgc.wire.frames import Flag, Header, Kind
from psgc.worker.client import Client, Failed, Greet, Result, Transmit
from psgc.worker.parts import Phase

JOB, EPOCH, STEPS, RANKS, SERVERS = 7, 1, 2, (0, 1), (0, 1)
TENSORS = tuple(TensorSpec(name, (4,), "float32") for name in ("a", "b"))
LAYOUT = build_layout(Declaration("model", "plan", TENSORS, "none", False, fuse_bytes=1), layout_id=1, servers=2, workers=2)
KEYS = {part.server: part.key for _, part in LAYOUT.parts()}
CODECS = {key: LAYOUT.scheme(LAYOUT.buckets[0]).rounds(4)[0].pair.push.codec_id for key in KEYS.values()}
PAYLOAD_BYTES = 16
FORMER = -1  # as a connection's number: of a process that counts as dead
assert sorted(KEYS) == list(SERVERS)


class WrongError(Exception):
    """The protocol allows what must never happen."""


def check(right: bool, text: object) -> None:
    if not right:
        raise WrongError(text)


@dataclass(frozen=True)
class Deaths:
    """How many processes may end: of each server, of workers; and how many connections workers' processes may make which count as dead."""

    servers: tuple[int, int] = (0, 0)
    workers: int = 0
    returns: int = 0


@dataclass
class Line:
    """A connection. number: which of the pair's it is; heard: whether the server's present process has it; up: whether the worker has. others: what
    may still come on the pair's other connections, by number: the one before, and one of a process that counts as dead."""

    number: int = 0
    heard: bool = False
    up: bool = False
    to_server: deque[Any] = None  # type: ignore[assignment]
    to_worker: deque[Any] = None  # type: ignore[assignment]
    others: dict[int, deque[Any]] = field(default_factory=dict)


@dataclass
class Server:
    state: ServerState | None  # None: dead
    kept: Kept  # what is committed, with the contents of its buffers
    slots: dict[int, Any]
    folding: Fold | None = None


@dataclass
class Worker:
    """began: the step that it is in; 0 before its first, and in a process that has not got its state yet. snapshot: the step after which the state is that it
    would give another process. alive: False until another process follows. died_in: the step in which the process before has counted as dead."""

    client: Client
    began: int = 0
    snapshot: int = 0
    alive: bool = True
    has_state: bool = True
    incarnation: int = 1
    died_in: int = 0

    @property
    def done(self) -> bool:
        return self.has_state and self.began == STEPS and idle(self)


@dataclass
class State:
    """lines: by rank and server."""

    workers: MutableMapping[int, Worker]
    servers: MutableMapping[int, Server]
    lines: MutableMapping[tuple[int, int], Line]
    deaths: Deaths


def idle(worker: Worker) -> bool:
    return all(part.phase is Phase.IDLE for part in worker.client.parts.values())


def _client(rank: int, incarnation: int, taken: int) -> Client:
    """The first process has no number, as in a job in which nobody is followed."""
    client = Client(rank, JOB, EPOCH, len(SERVERS), incarnation=incarnation if incarnation > 1 else 0)
    if taken >= 0:
        client.add_layout(LAYOUT, CODECS, taken)
    return client


def _server(index: int, kept: Kept | None) -> ServerState:
    state = ServerState(index, len(RANKS), JOB, EPOCH)
    specs, costs = specs_of(LAYOUT, index, len(RANKS))
    state.register(LAYOUT, specs, costs, {} if kept is None else {KEYS[index]: kept})
    return state


def first(deaths: Deaths) -> State:
    """All connections are there and greeted, and nobody has begun."""
    state = State(
        {rank: Worker(_client(rank, 1, 0)) for rank in RANKS}, {index: Server(_server(index, None), Kept(None), {}) for index in SERVERS},
        {(rank, index): Line() for rank in RANKS for index in SERVERS}, deaths,
    )  # fmt: skip
    for rank in RANKS:
        for index in SERVERS:
            connect(state, rank, index)
    greetings = {Kind.HELLO, Kind.WINDOW}
    for (rank, index), line in state.lines.items():
        while line.to_server:
            effects = hear(state, rank, index)
            server_does(state, index, effects, len(effects))
        while line.to_worker and line.to_worker[0][0].kind in greetings:
            answer(state, rank, index)
    return state


# what happens: each changes the state in place


def connect(state: State, rank: int, index: int) -> None:
    """A worker connects to a server that lives, for the first time or again."""
    line, server = state.lines[rank, index], state.servers[index].state
    assert server is not None
    others = {**line.others, line.number: line.to_server} if line.heard and line.to_server else line.others
    state.lines[rank, index] = new = Line(line.number + 1, True, True, deque(), deque(), others)
    effects = server.proved((rank, index, new.number), rank)
    server_does(state, index, effects, len(effects))
    worker_does(state, rank, state.workers[rank].client.connected(index, 0.0))


def worker_does(state: State, rank: int, actions: list[Any]) -> None:
    worker = state.workers[rank]
    for action in actions:
        if isinstance(action, Transmit):
            key = action.header.key
            line = state.lines[rank, action.server]
            if line.up:
                line.to_server.append(
                    (action.header, (rank, worker.client.parts[key].step, worker.incarnation) if action.payload else action.body)
                )
        elif isinstance(action, Greet):
            header = Header(Kind.HELLO, job=JOB, epoch=EPOCH, sender=rank, step=worker.client.incarnation)
            state.lines[rank, action.server].to_server.append((header, None))
        elif isinstance(action, Result):
            index = next(index for index, key in KEYS.items() if key == action.key)
            check(
                state.servers[index].slots.get(action.payload) == ((0, action.step), (1, action.step)),
                (rank, action, state.servers[index].slots),
            )
            worker.client.taken(action.key)
        elif isinstance(action, Failed):
            raise WrongError(f"worker {rank}: {action.text}")


def submit(state: State, rank: int) -> None:
    """The worker begins its next step."""
    worker = state.workers[rank]
    worker.snapshot = worker.began
    worker.began += 1
    for key in KEYS.values():
        worker_does(state, rank, worker.client.submit(key, 0.0, PAYLOAD_BYTES))


def server_does(state: State, index: int, effects: list[Any], most: int) -> int:
    """Carry out the first ``most`` effects. Returns how many there were."""
    server = state.servers[index]
    for effect in effects[:most]:
        if isinstance(effect, Send):
            rank, _, number = effect.peer
            line = state.lines[rank, index]
            payload = effect.body if effect.result_slot is None else effect.result_slot
            if effect.header.kind == Kind.RESULT:
                check(server.kept.result is not None and server.kept.result.step == effect.header.step, f"{effect} before its commit")
            if line.number == number and line.up:
                line.to_worker.append((effect.header, payload))
        elif isinstance(effect, Close):
            rank, _, number = effect.peer
            line = state.lines[rank, index]
            line.others.pop(number, None)
            if line.number == number:
                line.heard = False
                line.to_server.clear()
        elif isinstance(effect, Fold):
            assert server.state is not None
            for rank, _, incarnation in effect.payloads:
                check(
                    incarnation == server.state.incarnations.get(rank, 1),
                    f"{effect}, and another process has taken the place of rank {rank}",
                )
            server.folding = effect
        elif isinstance(effect, Commit):
            newest = effect.result.slot if effect.result.slot != NO_SLOT else server.kept.newest
            server.kept = Kept(effect.result, newest, effect.add_back, effect.rescale)
        elif isinstance(effect, Fault):
            raise WrongError(f"server {index}: {effect.text}")
    return len(effects)


def hear(state: State, rank: int, index: int) -> list[Any]:
    """The server hears the next message of a connection: what it does then."""
    line, server = state.lines[rank, index], state.servers[index].state
    assert server is not None
    header, payload = line.to_server.popleft()
    return server.receive((rank, index, line.number), header, payload, 0.0)


def former_returns(state: State, rank: int, index: int) -> list[Any]:
    """A process of the rank that counts as dead connects to the server, with what it could say of the step in which it was: what the server does then."""
    worker, server = state.workers[rank], state.servers[index].state
    assert server is not None
    state.deaths = replace(state.deaths, returns=state.deaths.returns - 1)
    former, step = worker.incarnation - worker.alive, worker.died_in
    said = {"job": JOB, "epoch": EPOCH, "sender": rank}
    part = {"plan": LAYOUT.id, "key": KEYS[index], "step": step, **said}
    pushes = Header(Kind.PUSH, Flag.WANT_RESULT, codec=CODECS[KEYS[index]], payload_bytes=PAYLOAD_BYTES, **part)
    hello = Header(Kind.HELLO, step=former if former > 1 else 0, **said)
    state.lines[rank, index].others[FORMER] = deque([(hello, None), (Header(Kind.PULL, **part), None), (pushes, (rank, step, former))])
    return server.proved((rank, index, FORMER), rank)


def hear_other(state: State, number: int, rank: int, index: int) -> list[Any]:
    """The server hears the next message of another connection than the pair's newest."""
    line, server = state.lines[rank, index], state.servers[index].state
    assert server is not None
    header, payload = line.others[number].popleft()
    if not line.others[number]:
        del line.others[number]
    return server.receive((rank, index, number), header, payload, 0.0)


def fold(state: State, index: int) -> list[Any]:
    """The server's pool has made a sum: what the server does then."""
    server = state.servers[index]
    effect, server.folding = server.folding, None
    assert effect is not None
    assert server.state is not None
    payloads = tuple(payload[:2] for payload in effect.payloads)
    check(payloads == ((0, effect.step), (1, effect.step)), effect)
    server.slots[effect.slot] = payloads
    return server.state.folded(KEYS[index], True, PAYLOAD_BYTES, False, effect.slot, 0.0)


def answer(state: State, rank: int, index: int) -> None:
    """The worker hears the next message of a connection."""
    header, payload = state.lines[rank, index].to_worker.popleft()
    client = state.workers[rank].client
    client.awaits(index, header)
    worker_does(state, rank, client.receive(index, header, payload, 0.0))


def server_dies(state: State, index: int) -> None:
    server = state.servers[index]
    server.state = server.folding = None
    left = list(state.deaths.servers)
    left[index] -= 1
    state.deaths = replace(state.deaths, servers=(left[0], left[1]))
    for rank in RANKS:
        state.lines[rank, index].heard = False
        state.lines[rank, index].others.clear()
        state.lines[rank, index].to_server.clear()


def notice(state: State, rank: int, index: int) -> None:
    """The worker notices that a connection is gone, with what had not arrived."""
    line = state.lines[rank, index]
    line.up = False
    line.to_worker.clear()
    state.workers[rank].client.disconnected(index)


def worker_dies(state: State, rank: int) -> None:
    worker = state.workers[rank]
    worker.alive, worker.died_in = False, worker.began
    state.deaths = replace(state.deaths, workers=state.deaths.workers - 1)
    for index in SERVERS:
        line = state.lines[rank, index]
        line.up = False
        line.to_worker.clear()


def worker_follows(state: State, rank: int) -> None:
    """What the former process had said may still be heard, until the new one's connection takes the place of the old."""
    incarnation, died_in = state.workers[rank].incarnation + 1, state.workers[rank].died_in
    state.workers[rank] = Worker(_client(rank, incarnation, -1), has_state=False, incarnation=incarnation, died_in=died_in)


def take_state(state: State, rank: int) -> None:
    """From the other worker, as of the beginning of its present step, or as it was given if it has begun none since."""
    worker, giver = state.workers[rank], state.workers[1 - rank]
    worker.client.add_layout(LAYOUT, CODECS, giver.snapshot)
    worker.began = worker.snapshot = giver.snapshot
    worker.has_state = True


Name = tuple[Any, ...]


def possible(state: State) -> Iterator[Name]:
    """Names of all that may happen next."""
    for rank, worker in state.workers.items():
        other = state.workers[1 - rank]
        if not worker.alive:
            yield "worker follows", rank
            continue
        if worker.has_state and worker.began < STEPS and idle(worker):
            yield "submit", rank
        if not worker.has_state and worker.client.greeted and other.alive and other.has_state:
            yield "take state", rank
        if state.deaths.workers and worker.has_state and other.alive and other.has_state and not (worker.done or other.done):
            yield "worker dies", rank
        for index, server in state.servers.items():
            line = state.lines[rank, index]
            if line.up and line.to_worker:
                yield "answer", rank, index
            if line.up and not line.heard:
                yield "notice", rank, index
            if not line.up and server.state is not None:
                yield "connect", rank, index
    for (rank, index), line in state.lines.items():
        if line.heard and line.to_server:
            yield "hear", rank, index
        for number in line.others:
            yield "hear other", number, rank, index
        if FORMER not in line.others and state.deaths.returns and state.workers[rank].died_in and state.servers[index].state is not None:
            yield "former returns", rank, index
    for index, server in state.servers.items():
        if server.state is None:
            yield "server follows", index
        elif server.folding is not None:
            yield "fold", index
        if server.state is not None and state.deaths.servers[index]:
            yield "server dies", index


def enough(state: State, names: list[Name]) -> list[Name]:
    """Those of ``names`` that have to be explored here: a persistent set (Godefroid 1996).

    What a server, its deaths and its connections do changes nothing that belongs to the other. So where each worker awaits a result of one server, or submits
    nothing any more, all that may come before something else of that server is in the names that are its own; the rest may as well come later. And what has
    been sent to a worker over a connection that cannot break any more may as well come at once. Not while workers may die, or come back, which concerns both
    servers.
    """
    disturbed = state.deaths.workers or state.deaths.returns or any(line.others for line in state.lines.values())
    if disturbed or not all(worker.alive and worker.has_state for worker in state.workers.values()):
        return names
    for index, key in KEYS.items():
        heard = [name for name in names if name[0] == "answer" and name[-1] == index]
        if heard and not state.deaths.servers[index] and all(state.lines[rank, index].heard for rank in RANKS):
            return heard[:1]  # nothing can take it away any more, and it disturbs nobody
        if all(worker.began == STEPS or worker.client.parts[key].phase is not Phase.IDLE for worker in state.workers.values()):
            own = [name for name in names if name[0] != "submit" and name[-1] == index]
            if own:
                return own
    return names


class Packed(NamedTuple):
    """A state: the numbers of its pieces, of which WORKERS, ALL_SERVERS and LINES say the places."""

    numbers: Numbers
    deaths: Deaths


WORKERS = {rank: rank for rank in RANKS}
ALL_SERVERS = {index: len(RANKS) + index for index in SERVERS}
LINES = {(rank, index): len(RANKS) + len(SERVERS) + rank * len(SERVERS) + index for rank in RANKS for index in SERVERS}


def packed_first(pieces: Pieces, state: State) -> Packed:
    every = {
        **{WORKERS[rank]: worker for rank, worker in state.workers.items()},
        **{ALL_SERVERS[index]: server for index, server in state.servers.items()},
    }
    every.update((LINES[between], line) for between, line in state.lines.items())
    return Packed(tuple(pieces.number(every[place]) for place in range(len(every))), state.deaths)


def shown(pieces: Pieces, packed: Packed, own: dict[int, Any] | None = None) -> State:
    """own: where pieces go that are taken from it to be changed; None: it is to look at."""
    return State(*(Shown(pieces, places, packed.numbers, own) for places in (WORKERS, ALL_SERVERS, LINES)), packed.deaths)  # type: ignore[arg-type]


def touched(name: Name) -> tuple[int, ...]:
    """The places of all pieces that what has this name may look at or change."""
    what, *arguments = name
    if what in ("hear", "hear other", "former returns", "fold", "server follows", "server dies"):
        index = arguments[-1]
        if what == "former returns":
            return ALL_SERVERS[index], WORKERS[arguments[0]], *(LINES[rank, index] for rank in RANKS)
        return ALL_SERVERS[index], *(LINES[rank, index] for rank in RANKS)
    rank = arguments[0]
    own = (WORKERS[rank], *(LINES[rank, index] for index in SERVERS))
    if what == "take state":
        return *own, WORKERS[1 - rank]
    return own if len(arguments) < 2 else (*own, ALL_SERVERS[arguments[1]])


Changes = tuple[dict[int, int], Deaths]


class After:
    """What follows from what, each known once: what happens depends on the pieces that it touches alone, and states share most of theirs."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._known: dict[Any, list[Changes]] = {}

    def __call__(self, packed: Packed, name: Name) -> Iterator[Packed]:
        """The states that follow: one, and those in which the server ends in the middle."""
        places = touched(name)
        of = (name, packed.deaths, *(packed.numbers[place] for place in places))
        changes = self._known.get(of)
        if changes is None:
            changes = self._known[of] = list(self._changes(packed, name, set(places)))
        for pieces, deaths in changes:
            yield Packed(tuple(pieces.get(place, number) for place, number in enumerate(packed.numbers)), deaths)

    def _changes(self, packed: Packed, name: Name, places: set[int]) -> Iterator[Changes]:
        def again() -> tuple[State, dict[int, Any]]:
            own: dict[int, Any] = {}
            return shown(self._pieces, packed, own), own

        def changed(state: State, own: dict[int, Any]) -> Changes:
            if not own.keys() <= places:
                raise RuntimeError(f"{name} touches {sorted(own)}, and was said to touch {sorted(places)}")
            return {place: self._pieces.number(piece) for place, piece in own.items()}, state.deaths

        state, own = again()
        what, *arguments = name
        serves = {"hear": hear, "fold": fold, "hear other": hear_other, "former returns": former_returns}
        if what in serves:
            index = arguments[-1]
            effects = serves[what](state, *arguments)
            if state.deaths.servers[index]:
                for most in range(1, len(effects)):
                    half, of_half = again()
                    server_does(half, index, serves[what](half, *arguments), most)
                    server_dies(half, index)
                    yield changed(half, of_half)
            server_does(state, index, effects, len(effects))
        elif what == "server follows":
            state.servers[arguments[0]].state = _server(arguments[0], state.servers[arguments[0]].kept)
        else:
            {
                "worker follows": worker_follows, "submit": submit, "take state": take_state, "worker dies": worker_dies, "answer": answer,
                "notice": notice, "connect": connect, "server dies": server_dies,
            }[what](state, *arguments)  # fmt: skip
        yield changed(state, own)


LEFT_OUT = frozenset(
    {"absence", "named", "contributed", "since", "moved", "counts", "pace", "place", "spec", "has", "nbytes", "punctuality", "waits"}
)  # times, figures, and what is always the same


@dataclass
class Explored:
    states: int = 0
    transitions: int = 0
    ends: int = 0
    names: Counter[str] = None  # type: ignore[assignment]


def explore(deaths: Deaths, most: int = 10**9, reduce: bool = True) -> Explored:
    """Visit every state, but for those that differ only in the order of what does not depend on each other (``enough``, unless ``reduce`` is False). most: of
    them. Raises WrongError with what led to one that must not be."""
    found, pieces = Explored(names=Counter()), Pieces(LEFT_OUT)

    def known(packed: Packed) -> int:
        return hash((pieces.kinds(packed.numbers), packed.deaths))

    after, begin = After(pieces), packed_first(pieces, first(deaths))
    seen = {known(begin)}
    stack: list[tuple[Packed, tuple[Any, ...]]] = [(begin, ())]
    while stack and found.states < most:
        packed, path = stack.pop()
        state = shown(pieces, packed)
        found.states += 1
        names = list(possible(state))
        if all(worker.alive and worker.done for worker in state.workers.values()):
            found.ends += 1
        elif not names:
            raise WrongError(f"nobody goes on after {told(path)}")
        for name in enough(state, names) if reduce else names:
            try:
                for following in after(packed, name):
                    found.transitions += 1
                    found.names[name[0]] += 1
                    if (one := known(following)) not in seen:
                        seen.add(one)
                        stack.append((following, (name, path)))
            except (WrongError, RemoteProtocolError, AssertionError, KeyError) as error:
                raise WrongError(f"{type(error).__name__}: {error} after {told((name, path))}") from error
    return found


def told(path: tuple[Any, ...]) -> str:
    names = []
    while path:
        name, path = path
        names.append(" ".join(map(str, name)))
    return ", ".join(reversed(names))
