"""What members must come to together: barriers and declarations. Pure; knows ranks, not connections.

Everything may be said twice: an answer given is given again, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from psgc.errors import UsageError
from psgc.layout import MAX_LAYOUTS, Declaration, Layout, build_layout, compare, used_by_every_rank
from psgc.reminder import Reminder


@dataclass(slots=True)
class Gathering:
    """Ranks (workers', or indices of servers) that have come to one thing, and since when the first of them waits."""

    what: str
    size: int
    since: float
    of_servers: bool = False
    came: set[int] = field(default_factory=set)
    named: Reminder = field(init=False)
    asked: float = field(init=False)  # when the missing were last told what is wanted of them

    def __post_init__(self) -> None:
        self.named, self.asked = Reminder(self.since), self.since

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.came]

    @property
    def awaited(self) -> str:
        missing = self.missing
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return f"{'server' if self.of_servers else 'rank'}(s) {', '.join(map(str, missing[:8]))}{more}"


class Barriers:
    """The n-th barrier of one worker is the n-th of all; those of a layout are counted apart, for ranks come to layouts in any order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[tuple[int, int], Gathering] = {}
        self._passed: dict[int, int] = {}  # layout, or 0 -> number of the last barrier that all have come to

    def arrive(self, rank: int, number: int, now: float, layout: int = 0) -> list[int]:
        """Ranks to be told that they may pass barrier ``number`` (of ``layout``, or 0 for none)."""
        if number <= self._passed.get(layout, 0):
            return [rank]
        what = f"barrier {number}" + (f" of layout {layout}" if layout else "")
        gathering = self._open.setdefault((layout, number), Gathering(what, self._size, now))
        gathering.came.add(rank)
        if gathering.missing:
            return []
        self._passed[layout] = number
        del self._open[layout, number]
        return list(range(self._size))

    def open(self) -> list[Gathering]:
        return list(self._open.values())


@dataclass(slots=True)
class Name:
    """One declared name on its way to a layout: first every rank declares it, then every server makes ready to serve it."""

    ranks: Gathering
    requests: dict[int, int] = field(default_factory=dict)  # rank -> its request id
    declarations: dict[int, Declaration] = field(default_factory=dict)
    rate: int = 0  # bytes a second of the slowest connection that a rank has measured; 0: none has
    layout: Layout | None = None
    text: bytes = b""  # the layout as JSON
    servers: Gathering | None = None

    @property
    def layout_id(self) -> int:
        assert self.layout is not None, "asked for before every rank has declared"
        return self.layout.id

    @property
    def ready(self) -> bool:
        return self.servers is not None and not self.servers.missing


class Declarations:
    """A layout goes to the servers first; workers hear of it when all servers are ready."""

    def __init__(self, size: int, servers: int) -> None:
        self._size, self._servers = size, servers
        self._names: dict[str, Name] = {}
        self._by_layout: dict[int, Name] = {}

    def declare(self, rank: int, request: int, declaration: Declaration, now: float, rate: int = 0) -> Name:
        """A rank's declaration, and bytes a second of its slowest connection (0: not known); builds the layout if it completes one. Raises
        LayoutMismatch as soon as two ranks differ."""
        name = self._names.get(declaration.name)
        if name is None:
            name = self._names[declaration.name] = Name(Gathering(f"the declaration of {declaration.name!r}", self._size, now))
        name.requests[rank] = request
        name.rate = min(filter(None, (name.rate, rate)), default=0)
        name.ranks.came.add(rank)
        if name.layout is None:
            self._check(name, rank, declaration)
            name.declarations[rank] = declaration
            if not name.ranks.missing:
                self._build(name, now)
        return name

    def server_ready(self, server: int, layout_id: int) -> Name | None:
        """A server serves a layout; the layout's name if it was the last server awaited."""
        name = self._by_layout.get(layout_id)
        if name is None or name.servers is None or server in name.servers.came:
            return None
        name.servers.came.add(server)
        return name if name.ready else None

    def unready(self) -> Iterator[tuple[Name, Gathering]]:
        """Names whose layouts some servers do not serve yet."""
        for name in self._by_layout.values():
            if name.servers is not None and name.servers.missing:
                yield name, name.servers

    @property
    def layouts(self) -> int:
        """How many layouts have been built."""
        return len(self._by_layout)

    def open(self) -> list[Gathering]:
        """Names that some rank has not declared."""
        return [name.ranks for name in self._names.values() if name.layout is None]

    @staticmethod
    def _check(name: Name, rank: int, declaration: Declaration) -> None:
        """One comparison is enough: those who came before agree with each other."""
        other = next((r for r in name.declarations if r != rank), None)
        if other is not None:
            pair = sorted([(rank, declaration), (other, name.declarations[other])], key=lambda each: each[0])
            compare(pair[0][1], pair[0][0], pair[1][1], pair[1][0])

    def _build(self, name: Name, now: float) -> None:
        layout_id = len(self._by_layout) + 1
        declarations = [name.declarations[rank] for rank in range(self._size)]
        if layout_id >= MAX_LAYOUTS:
            raise UsageError(
                f"{declarations[0].name!r} is name number {layout_id}, at most {MAX_LAYOUTS - 1} can be declared; use names again"
            )
        used = used_by_every_rank(declarations) if declarations[0].kind == "plan" else None
        name.layout = build_layout(
            declarations[0], layout_id=layout_id, servers=self._servers, workers=self._size, used_by_all=used, rate=name.rate
        )  # fmt: skip
        name.text = name.layout.to_json().encode()
        name.declarations.clear()
        name.servers = Gathering(f"the layout of {declarations[0].name!r}", self._servers, now, of_servers=True)
        self._by_layout[layout_id] = name
