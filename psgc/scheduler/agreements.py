"""What the members of a complete job agree on through the scheduler: barriers, layouts, published values and the order of named tensors. Pure.

Turns members' words into calls of ``rendezvous.py``, ``published.py`` and ``submissions.py``, and what these return into messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration
from psgc.layout.speed import Speed
from psgc.program.agenda import Turn, Use
from psgc.scheduler.actions import Action, Keep, Send
from psgc.scheduler.post import Post
from psgc.scheduler.published import Values
from psgc.scheduler.records import LaidOut, Passed, Record, Served, Turned, TurnsSoFar, Value
from psgc.scheduler.rendezvous import Barriers, Declarations, Gathering, Name
from psgc.scheduler.roster import Member, Roster
from psgc.scheduler.submissions import Submissions
from psgc.wire.counts import cut, whole
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import Declare, ErrorCode, Lookup, Published, decode_body, decode_json, encode_body, pack


class Agreements:
    """See the module's text. Everyone in the roster must have a rank."""

    def __init__(self, roster: Roster, post: Post) -> None:
        self._roster, self._post = roster, post
        workers = roster.ranks.size
        self.absent: set[int] = set()  # ranks without a process, which nobody waits for
        self.barriers, self.values, self.submissions = Barriers(workers, self.absent), Values(workers, self.absent), Submissions(workers)
        self.declarations = Declarations(roster.ranks, roster.servers, roster.machines(), self.absent)

    def said(self, member: Member, header: Header, body: bytes, now: float) -> list[Action]:
        """Answer a member's word. Raises RemoteProtocolError for one that such a member does not say, and what the word itself is wrong by."""
        kind, worker = Kind(header.kind), member.register.role == "worker"
        if kind is Kind.BARRIER and worker:
            return self._arrived(member, header, now)
        if kind is Kind.DECLARE and worker:
            return self._declare(member, header, decode_body(Declare, body), now)
        if kind is Kind.DECLARATION and worker:
            return self._declared(member, Declaration.from_json(decode_json(body, "DECLARATION")), now)
        if kind is Kind.TURN and worker:
            return self._submitted(member, header, now)
        if kind is Kind.PUBLISH and worker:
            return self._publish(member, header, decode_body(Published, body))
        if kind is Kind.LOOKUP and worker:
            return self._look_up(member, header, decode_body(Lookup, body).name, now)
        if kind is Kind.KEYS_READY and not worker:
            name = self.declarations.server_ready(member.rank, header.plan)
            return [] if name is None else [Keep(Served(name.layout_id)), *self._layouts(name)]
        raise RemoteProtocolError(f"a {member.register.role} does not send {kind.name} to the scheduler", ErrorCode.UNKNOWN_KIND)

    def records(self) -> Iterator[Record]:
        """What another process of the scheduler has to know."""
        for name in self.declarations.names():
            assert name.layout is not None
            yield LaidOut.of(name.layout.name, name.digest, name.text)
            if name.ready:
                yield Served(name.layout_id)
        for layout, number in self.barriers.passed.items():
            yield Passed(layout, number)
        turns = self.submissions.turns
        first = turns.count - len(turns.known)
        for key, step in turns.keys:
            yield TurnsSoFar(first, key, step - sum(turn.use.key == key for turn in turns.known))
        for turn in turns.known:
            yield Turned(turn.number, *turn.use)
        for rank, published, value in self.values.kept():
            yield Value(rank, published, value)

    def heed(self, record: Record, now: float) -> None:
        """Know what another process of the scheduler has written down. Raises PsgcError for what does not fit."""
        if isinstance(record, LaidOut):
            self.declarations.laid_out(record.name, record.digest, record.body, now)
        elif isinstance(record, Served):
            self.declarations.served(record.layout)
        elif isinstance(record, Passed):
            self.barriers.have_passed(record.layout, record.number)
        elif isinstance(record, TurnsSoFar):
            self.submissions.turns.begin_at(record.number, record.key, record.step)
        elif isinstance(record, Turned):
            self.submissions.turns.given(Turn(record.number, Use(record.key, record.step)))
        elif isinstance(record, Value):
            self.values.publish(record.rank, record.name, record.value)
        else:
            raise RemoteProtocolError(f"a {type(record).__name__} in the middle of a journal")

    def again(self, server: Member) -> Iterator[Send]:
        """A server that registers again has a new connection: the old one may have lost layouts that were sent to it, or its answers."""
        for name in self.declarations.unready(server.rank):
            yield self._keys(name, server)

    def forget(self, rank: int) -> None:
        """The rank's process has died: nothing that it waits for is answered, and another will come to the barriers that are open."""
        self.barriers.forget(rank)
        self.declarations.forget(rank)
        self.values.give_up(rank)

    def leave_out(self, rank: int, now: float) -> list[Action]:
        """The rank's process has died, and nobody waits for it."""
        self.absent.add(rank)
        self.forget(rank)
        actions: list[Action] = []
        for layout, number, ranks in self.barriers.complete():
            actions += [Keep(Passed(layout, number)), *self._pass(layout, number, set(ranks))]
        before = self.declarations.layouts
        for name, ask in self.declarations.leave_out(rank, now):
            actions += self._ask(name, ask)
            if name.layout is not None:
                actions += self._built(name, before)
        return actions

    def come_back(self, rank: int) -> None:
        """Another process has taken the rank's place: it is awaited again."""
        self.forget(rank)
        if rank in self.absent:
            self.absent.discard(rank)
            self.declarations.awaited_again()

    def await_from(self, rank: int, now: float) -> None:
        """What awaits the rank counts from now on: its process is new, and has to prepare and to get the job's state."""
        for gathering in self.gatherings():
            if rank in gathering.missing:
                gathering.since = now

    def gatherings(self) -> list[Gathering]:
        """The barriers, declarations and steps at which some workers wait for others."""
        return self.barriers.open() + self.declarations.open() + self.submissions.open()

    def by_kind(self) -> tuple[list[Gathering], ...]:
        """All that somebody waits for, each kind by itself."""
        declarations = self.declarations
        values: list[Gathering] = [*self.values.open()]
        return self.barriers.open(), declarations.open(), declarations.awaiting_servers(), values, self.submissions.open()

    def _arrived(self, member: Member, header: Header, now: float) -> list[Action]:
        layout, number = header.plan, header.step
        before = self.barriers.passed.get(layout, 0)
        ranks = set(self.barriers.arrive(member.rank, number, now, layout, self.declarations.members_of(layout)))
        return [*([Keep(Passed(layout, number))] if ranks and number > before else []), *self._pass(layout, number, ranks)]

    def _pass(self, layout: int, number: int, ranks: set[int]) -> list[Send]:
        passing = [m for m in self._roster.workers() if m.rank in ranks] if ranks else []
        return [self._post.send(m.peer, Kind.BARRIER, plan=layout, step=number) for m in passing]

    def _declare(self, member: Member, header: Header, declare: Declare, now: float) -> list[Action]:
        before = self.declarations.layouts
        name, ask = self.declarations.declare(member.rank, header.plan, declare, now, Speed(header.step, header.key))
        if name.ready and self.declarations.layouts == before:
            return [self._layout(member, name)]
        return [*self._ask(name, ask), *self._built(name, before)]

    def _ask(self, name: Name, ask: list[int]) -> list[Send]:
        """Ask these ranks for their whole declarations."""
        asked = [m for m in self._roster.workers() if m.rank in ask and m.rank in name.requests] if ask else []
        return [self._post.send(m.peer, Kind.DECLARE, plan=name.requests[m.rank]) for m in asked]

    def _declared(self, member: Member, declaration: Declaration, now: float) -> list[Action]:
        before = self.declarations.layouts
        name = self.declarations.declared(member.rank, declaration, now)
        return [] if name is None else self._built(name, before)

    def _built(self, name: Name, before: int) -> list[Action]:
        if self.declarations.layouts == before:
            return []
        assert name.layout is not None
        kept = Keep(LaidOut.of(name.layout.name, name.digest, name.text))
        if name.ready:  # there is no server to prepare
            return [kept, *self._layouts(name)]
        return [kept, *(self._keys(name, m) for m in self._roster.server_members())]

    def _keys(self, name: Name, member: Member) -> Send:
        return self._post.send(member.peer, Kind.KEYS, name.text, plan=name.layout_id)

    def _layouts(self, name: Name) -> list[Action]:
        """To all that have declared it; behind another process of the scheduler, some may not have done so again yet."""
        return [self._layout(m, name) for m in self._roster.workers() if not m.left and m.rank in name.requests]

    def _layout(self, member: Member, name: Name) -> Send:
        return self._post.send(member.peer, Kind.LAYOUT, name.text, plan=name.requests[member.rank], key=name.layout_id)

    def _submitted(self, member: Member, header: Header, now: float) -> list[Action]:
        name = self.declarations.name_of(header.key >> 48)
        before = self.submissions.turns.count
        received = whole(header.plan, before)
        turns = self.submissions.submitted(member.rank, Use(header.key, header.step), received, name, now)
        peers = {m.rank: m.peer for m in self._roster.workers()} if turns else {}
        new = dict.fromkeys(turn for _, turn in turns if turn.number >= before)
        told = (
            self._post.send(peers[rank], Kind.TURN, plan=cut(turn.number), key=turn.use.key, step=turn.use.step) for rank, turn in turns
        )
        return [*(Keep(Turned(turn.number, *turn.use)) for turn in new), *told]

    def _publish(self, member: Member, header: Header, published: Published) -> list[Action]:
        known = published.name in self.values
        requests = self.values.publish(member.rank, published.name, published.value)
        answers = [self._value(m, requests[m.rank], published) for m in self._roster.workers() if m.rank in requests] if requests else []
        kept: list[Action] = [] if known else [Keep(Value(member.rank, published.name, published.value))]
        return [*kept, self._post.send(member.peer, Kind.PUBLISH, plan=header.plan), *answers]

    def _look_up(self, member: Member, header: Header, name: str, now: float) -> list[Action]:
        value = self.values.look_up(member.rank, header.plan, name, now)
        return [] if value is None else [self._value(member, header.plan, Published(name, value))]

    def _value(self, member: Member, request: int, published: Published) -> Send:
        return self._post.send(member.peer, Kind.LOOKUP, pack(encode_body(published)), plan=request)
