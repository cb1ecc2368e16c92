"""What all workers must come to: barriers and declarations. Pure; knows ranks, not connections.

Everything may be said twice: an answer given is given again, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from psgc.layout import MAX_LAYOUTS, Declaration, Layout, build_layout, compare, used_by_every_rank


@dataclass(slots=True)
class Gathering:
    """Ranks that have come to one thing, and since when the first of them waits."""

    since: float
    ranks: dict[int, int] = field(default_factory=dict)  # rank -> its request id
    named: float = 0.0

    def missing(self, size: int) -> list[int]:
        return [rank for rank in range(size) if rank not in self.ranks]


class Barriers:
    """The n-th barrier of one worker is the n-th of all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.open: dict[int, Gathering] = {}
        self._passed = 0

    def arrive(self, rank: int, number: int, now: float) -> list[int]:
        """Ranks to be told that they may pass barrier ``number``."""
        if number <= self._passed:
            return [rank]
        gathering = self.open.setdefault(number, Gathering(now, named=now))
        gathering.ranks[rank] = 0
        if gathering.missing(self._size):
            return []
        self._passed = number
        del self.open[number]
        return list(range(self._size))


@dataclass(slots=True)
class _Name:
    gathering: Gathering
    declarations: dict[int, Declaration] = field(default_factory=dict)
    layout: Layout | None = None
    text: bytes = b""  # the layout as JSON
    servers_ready: set[int] = field(default_factory=set)


class Declarations:
    """Names on their way to layouts. A layout goes to the servers first; workers hear of it when all servers are ready."""

    def __init__(self, size: int, servers: int) -> None:
        self._size, self._servers = size, servers
        self._names: dict[str, _Name] = {}
        self._by_layout: dict[int, _Name] = {}

    def declare(self, rank: int, request: int, declaration: Declaration, now: float) -> Layout | None:
        """A rank's declaration; the layout if it completes one. Raises LayoutMismatch as soon as two ranks differ."""
        name = self._names.setdefault(declaration.name, _Name(Gathering(now, named=now)))
        name.gathering.ranks[rank] = request
        if name.layout is not None:
            return None
        for other, known in name.declarations.items():
            if other != rank:
                first, second = sorted([(other, known), (rank, declaration)], key=lambda pair: pair[0])
                compare(first[1], first[0], second[1], second[0])
                break
        name.declarations[rank] = declaration
        if len(name.declarations) < self._size:
            return None
        return self._build(name)

    def server_ready(self, server: int, layout_id: int) -> bool:
        """A server serves a layout; True if it was the last one awaited."""
        name = self._by_layout.get(layout_id)
        if name is None or server in name.servers_ready:
            return False
        name.servers_ready.add(server)
        return len(name.servers_ready) == self._servers

    def answer(self, layout_name: str, rank: int) -> tuple[int, int, bytes] | None:
        """(request id, layout id, layout JSON) for a rank, once servers are ready."""
        name = self._names.get(layout_name)
        if name is None or name.layout is None or len(name.servers_ready) < self._servers:
            return None
        return name.gathering.ranks[rank], name.layout.id, name.text

    def name_of(self, layout_id: int) -> str:
        layout = self._by_layout[layout_id].layout
        assert layout is not None
        return layout.name

    def unready(self) -> list[tuple[Layout, bytes, list[int]]]:
        """Layouts that some servers have not confirmed, and which."""
        return [
            (name.layout, name.text, [s for s in range(self._servers) if s not in name.servers_ready])
            for name in self._by_layout.values()
            if name.layout is not None and len(name.servers_ready) < self._servers
        ]

    def text(self, layout_id: int) -> bytes:
        return self._by_layout[layout_id].text

    def open(self) -> dict[str, Gathering]:
        """Names that some rank has not declared."""
        return {key: name.gathering for key, name in self._names.items() if name.layout is None}

    def _build(self, name: _Name) -> Layout:
        layout_id = len(self._by_layout) + 1
        assert layout_id < MAX_LAYOUTS
        declarations: Sequence[Declaration] = [name.declarations[rank] for rank in range(self._size)]
        used = used_by_every_rank(declarations) if declarations[0].kind == "plan" else None
        name.layout = build_layout(declarations[0], layout_id=layout_id, servers=self._servers, used_by_all=used)
        name.text = name.layout.to_json().encode()
        name.declarations.clear()
        self._by_layout[layout_id] = name
        return name.layout
