"""Barriers and declarations, which all members must reach. Pure; knows ranks, not connections.

Every message may come twice: its answer is then repeated, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from psgc.errors import LayoutMismatch, RemoteProtocolError, UsageError
from psgc.layout import MAX_LAYOUTS, Declaration, Layout, Machines, build_layout, compare
from psgc.layout.speed import UNKNOWN, Speed
from psgc.program.ranks import Ranks
from psgc.wire.messages import Declare, ErrorCode, pack


@dataclass(slots=True)
class Gathering:
    """The workers' ranks, or servers' indices, that have reached one barrier, declaration or layout, and since when the first of them waits. of: the ranks that
    are to come; (): all of ``size``. excused: those that are not awaited, as they are now."""

    what: str
    size: int
    since: float
    of_servers: bool = False
    came: set[int] = field(default_factory=set)
    of: tuple[int, ...] = ()
    excused: Set[int] = frozenset()

    @property
    def all(self) -> Sequence[int]:
        return self.of or range(self.size)

    @property
    def complete(self) -> bool:
        return len(self.came) == len(self.all) or bool(self.excused and not self.missing)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.all if rank not in self.came and rank not in self.excused]

    @property
    def awaited(self) -> str:
        missing = self.missing
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return f"{'server' if self.of_servers else 'rank'}(s) {', '.join(map(str, missing[:8]))}{more}"


class Barriers:
    """The n-th barrier of one worker is the n-th of all. Each layout's barriers are counted separately, because ranks reach layouts in different
    orders."""

    def __init__(self, size: int, absent: Set[int] = frozenset()) -> None:
        """absent: ranks that are not awaited, as they are now."""
        self._size, self._absent = size, absent
        self._open: dict[tuple[int, int], Gathering] = {}
        self._passed: dict[int, int] = {}  # layout, or 0 -> number of the last barrier that all have come to

    def arrive(self, rank: int, number: int, now: float, layout: int = 0, members: tuple[int, ...] = ()) -> list[int]:
        """A rank has reached barrier ``number`` (of ``layout``, or 0 for none). members: the ranks that declared the layout; (): all. Returns the ranks to tell
        that they may pass it."""
        if number <= self._passed.get(layout, 0):
            return [rank]
        what = f"barrier {number}" + (f" of layout {layout}" if layout else "")
        gathering = self._open.setdefault((layout, number), Gathering(what, self._size, now, of=members, excused=self._absent))
        gathering.came.add(rank)
        return self._passing(layout, number)

    def complete(self) -> list[tuple[int, int, list[int]]]:
        """Barriers at which all have come to be that are awaited, once a rank is absent: layout, number, and the ranks to tell."""
        return [(layout, number, ranks) for layout, number in list(self._open) if (ranks := self._passing(layout, number))]

    def _passing(self, layout: int, number: int) -> list[int]:
        gathering = self._open[layout, number]
        if not gathering.complete or not gathering.came:
            return []
        self._passed[layout] = number
        del self._open[layout, number]
        return [rank for rank in gathering.all if rank not in self._absent]

    def forget(self, rank: int) -> None:
        """The rank's process has died: another will come to the barriers that are open."""
        for gathering in self._open.values():
            gathering.came.discard(rank)

    def open(self) -> list[Gathering]:
        return list(self._open.values())

    @property
    def passed(self) -> dict[int, int]:
        """By layout (0: of none) the number of the last barrier that all have come to."""
        return dict(self._passed)

    def have_passed(self, layout: int, number: int) -> None:
        """All have come to this barrier, as another process of the scheduler has seen."""
        self._passed[layout] = max(self._passed.get(layout, 0), number)


@dataclass(slots=True)
class Name:
    """One declared name, until it has a layout. Every rank whose it is declares it by a digest; the first is asked for the whole declaration; then every server
    prepares to serve the layout. Ranks whose digests differ are asked, too, so that the error can name the difference."""

    ranks: Gathering  # a rank that was asked counts once it has answered
    requests: dict[int, int] = field(default_factory=dict)  # rank -> its request id
    digests: dict[int, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    whole: dict[int, Declaration] = field(default_factory=dict)  # answers of ranks that were asked
    differing: tuple[int, int] | None = None  # the first two ranks found whose digests differ
    speed: Speed = UNKNOWN  # of the slowest connection that a rank has measured
    unused: set[int] = field(default_factory=set)  # tensors that some rank had no gradient for
    digest: str = ""  # of the declaration that the layout was built from
    layout: Layout | None = None
    text: bytes = b""  # the layout as it travels
    servers: Gathering | None = None

    @property
    def layout_id(self) -> int:
        assert self.layout is not None, "asked for before every rank has declared"
        return self.layout.id

    @property
    def ready(self) -> bool:
        return self.servers is not None and self.servers.complete


class Declarations:
    """All declarations. A layout goes to the servers first; workers receive it when all servers are ready."""

    def __init__(self, ranks: Ranks, servers: int, machines: Machines | None = None, absent: Set[int] = frozenset()) -> None:
        """machines: of the servers and workers, which decide where parts lie; None if nothing is known of them. absent: ranks that are not awaited, as they
        are now."""
        self._absent = absent
        self._ranks, self._size, self._servers, self._machines = ranks, ranks.size, servers, machines
        self._names: dict[str, Name] = {}
        self._open: dict[str, Name] = {}  # names that have no layout yet
        self._by_layout: dict[int, Name] = {}
        self._unready: dict[int, Name] = {}  # names whose layouts some servers do not serve yet
        self._again: dict[int, set[int]] = {}  # by server that began anew: layouts that it has served before and does not serve again yet

    def declare(self, rank: int, request: int, declare: Declare, now: float, speed: Speed = UNKNOWN) -> tuple[Name, list[int]]:
        """A rank declares a name. Returns the ranks that are now to be asked for their whole declarations. speed: of the rank's
        slowest connection. Builds the layout if nothing else is missing."""
        name = self._names.get(declare.name)
        if name is None:
            name = Name(Gathering(f"the declaration of {declare.name!r}", self._size, now, of=self._members(declare), excused=self._absent))
            self._names[declare.name] = self._open[declare.name] = name
        if rank not in name.ranks.all:
            raise RemoteProtocolError(f"rank {rank} declares {declare.name!r}, which is of other ranks", ErrorCode.MALFORMED)
        name.requests[rank] = request
        if name.layout is not None:
            if declare.digest != name.digest:  # by a process that has taken another's place
                raise LayoutMismatch(
                    f"rank {rank} declares {declare.name!r} again, and differently: all processes of a rank must run the same script"
                )
            return name, []
        other = next((r for r in name.digests if r != rank and r not in self._absent), None)
        if name.digests.setdefault(rank, declare.digest) != declare.digest:
            raise RemoteProtocolError(f"rank {rank} declares {declare.name!r} again, and differently", ErrorCode.MALFORMED)
        name.unused.update(declare.unused)
        name.speed = name.speed.slower(speed)
        if other is not None and name.digests[other] != declare.digest and name.differing is None:
            name.differing = (min(rank, other), max(rank, other))
        wanted = self._wanted(name)
        # A rank that repeats its declaration has not received the question.
        ask = sorted((wanted.difference(name.asked) | {rank}).intersection(wanted, name.requests))
        name.asked.update(ask)
        name.ranks.came.difference_update(wanted)
        if rank not in wanted:
            name.ranks.came.add(rank)
        self._build_if_complete(name, now)
        return name, ask

    def _first(self, name: Name) -> int:
        """The rank whose declaration counts; -1: none of the name's is there."""
        return next((rank for rank in name.ranks.all if rank not in self._absent), -1)

    def _wanted(self, name: Name) -> set[int]:
        """Ranks whose whole declarations are needed."""
        return {self._first(name), *(name.differing or ())}.intersection(name.digests).difference(name.whole)

    def leave_out(self, rank: int, now: float) -> list[tuple[Name, list[int]]]:
        """The rank is absent from now on. Returns the names that go on because of that, and whom to ask for their whole declarations."""
        found = []
        for name in list(self._open.values()):
            name.digests.pop(rank, None)
            name.whole.pop(rank, None)
            if name.differing is not None and rank in name.differing:
                one = next(iter(name.digests), rank)
                other = next((r for r, digest in name.digests.items() if digest != name.digests[one]), None)
                name.differing = None if other is None else (min(one, other), max(one, other))
            # Whose process before has declared it is asked when its own declaration comes: until then there is no request to ask by.
            ask = sorted(self._wanted(name).difference(name.asked).intersection(name.requests))
            name.asked.update(ask)
            self._count(name)
            self._build_if_complete(name, now)
            found.append((name, ask))
        return found

    def awaited_again(self) -> None:
        """A rank is not absent any more."""
        for name in self._open.values():
            self._count(name)

    def _count(self, name: Name) -> None:
        """Who has come, once it has changed who is asked."""
        name.ranks.came.clear()
        name.ranks.came.update(set(name.digests) - self._wanted(name))

    def declared(self, rank: int, declaration: Declaration, now: float) -> Name | None:
        """Take a rank's whole declaration; None for one that nobody here has asked for: another process of the scheduler did, and the rank says its digest
        again. Raises LayoutMismatch for two that differ, RemoteProtocolError for one that does not match its digest."""
        name = self._names.get(declaration.name)
        if name is not None and name.layout is not None:
            return name
        if name is None or rank not in name.digests:
            return None
        if name.digests[rank] != declaration.digest():
            raise RemoteProtocolError(f"the declaration of {declaration.name!r} is not what rank {rank} announced", ErrorCode.MALFORMED)
        if declaration.members != name.ranks.of:
            raise RemoteProtocolError(
                f"the declaration of {declaration.name!r} is of other ranks than rank {rank} announced", ErrorCode.MALFORMED
            )
        name.whole[rank] = declaration
        if name.differing is not None:
            first, other = name.differing
            if first in name.whole and other in name.whole:
                compare(name.whole[first], first, name.whole[other], other)
                raise LayoutMismatch(f"{declaration.name!r}: ranks {first} and {other} declare different things under this name")
            if rank in name.differing:
                return name
        name.ranks.came.add(rank)
        self._build_if_complete(name, now)
        return name

    def _members(self, declare: Declare) -> tuple[int, ...]:
        """Those that are to declare it. Raises RemoteProtocolError for ranks that the job lacks."""
        members = declare.members
        if any(not 0 <= rank < self._size for rank in members) or list(members) != sorted(set(members)):
            raise RemoteProtocolError(
                f"{declare.name!r} is declared for ranks {list(members)}, the job has {self._size}", ErrorCode.MALFORMED
            )
        return members

    def members_of(self, layout_id: int) -> tuple[int, ...]:
        """The ranks that have declared a layout; (): all, or there is none."""
        name = self._by_layout.get(layout_id)
        return () if name is None else name.ranks.of

    def server_ready(self, server: int, layout_id: int) -> Name | None:
        """A server is ready to serve a layout. Returns the layout's name if this was the last server awaited, else None."""
        self._again.get(server, set()).discard(layout_id)
        name = self._by_layout.get(layout_id)
        if name is None or name.servers is None or server in name.servers.came:
            return None
        name.servers.came.add(server)
        if not name.ready:
            return None
        del self._unready[layout_id]
        return name

    def unready(self, server: int) -> Iterator[Name]:
        """The names whose layouts this server does not serve yet, or not again."""
        again = self._again.get(server, set())
        return (
            name for number, name in self._by_layout.items()
            if number in again or (number in self._unready and name.servers is not None and server not in name.servers.came)
        )  # fmt: skip

    def begins_anew(self, server: int) -> None:
        """Another process has taken this server's place: it serves no layout yet."""
        for name in self._unready.values():
            if name.servers is not None:
                name.servers.came.discard(server)
        self._again[server] = set(self._by_layout)

    def forget(self, rank: int) -> None:
        """The rank's process has died: another will declare what it needs under request ids of its own."""
        for name in self._names.values():
            name.requests.pop(rank, None)
            name.asked.discard(rank)

    def begun_anew(self) -> list[int]:
        """The servers that do not serve again yet what a former process has served."""
        return [server for server, layouts in self._again.items() if layouts]

    def names(self) -> list[Name]:
        """Those that have layouts, in the order of these."""
        return [self._by_layout[number] for number in sorted(self._by_layout)]

    def laid_out(self, declared: str, digest: str, text: bytes, now: float) -> None:
        """A name that another process of the scheduler has given its layout. Ranks that have not got it declare the name again."""
        layout = Layout.from_json(text)
        members = layout.members
        came = set(members or range(self._size))
        name = Name(Gathering(f"the declaration of {declared!r}", self._size, now, came=came, of=members), layout=layout, text=text)
        name.digest = digest
        self._names[declared] = name
        self._lay_out(name, now)

    def served(self, layout_id: int) -> None:
        """Every server was ready for the layout once."""
        if (name := self._unready.pop(layout_id, None)) is not None and name.servers is not None:
            name.servers.came.update(range(self._servers))

    def awaiting_servers(self) -> list[Gathering]:
        """The layouts that some server does not serve yet."""
        return [name.servers for name in self._unready.values() if name.servers is not None]

    def name_of(self, layout_id: int) -> str:
        """The name that has this layout. Raises RemoteProtocolError where none has."""
        name = self._by_layout.get(layout_id)
        if name is None or name.layout is None:
            raise RemoteProtocolError(f"a step of layout {layout_id}, which there is not", ErrorCode.UNKNOWN_KEY)
        return name.layout.name

    @property
    def layouts(self) -> int:
        """How many layouts have been built."""
        return len(self._by_layout)

    def open(self) -> list[Gathering]:
        """The names that some rank has not declared yet."""
        return [name.ranks for name in self._open.values()]

    def _build_if_complete(self, name: Name, now: float) -> None:
        first = self._first(name)
        if not name.ranks.complete or first not in name.whole:
            return
        declaration = name.whole[first]
        layout_id = len(self._by_layout) + 1
        if layout_id >= MAX_LAYOUTS:
            raise UsageError(f"{declaration.name!r} is name number {layout_id}, at most {MAX_LAYOUTS - 1} can be declared; use names again")
        used = frozenset(range(len(declaration.tensors))).difference(name.unused) if declaration.kind == "plan" else None
        name.layout = build_layout(
            declaration, layout_id=layout_id, servers=self._servers, workers=self._size, used_by_all=used, speed=name.speed,
            ranks=self._ranks, machines=self._machines,
        )  # fmt: skip
        name.text = pack(name.layout.to_json().encode())
        name.digest = name.digests[first]
        name.digests.clear()
        name.whole.clear()
        del self._open[declaration.name]
        self._lay_out(name, now)

    def _lay_out(self, name: Name, now: float) -> None:
        assert name.layout is not None
        name.servers = Gathering(f"the layout of {name.layout.name!r}", self._servers, now, of_servers=True)
        self._by_layout[name.layout_id] = name
        if not name.ready:
            self._unready[name.layout_id] = name
