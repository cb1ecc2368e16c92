"""Values that workers publish under names for each other, kept to the end of the job. Pure; knows ranks, not connections.

Everything may be said twice: a value published again is the same value, a question asked again is answered again.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final

from psgc.errors import UsageError
from psgc.scheduler.rendezvous import Gathering

MAX_VALUES: Final = 1 << 16
MAX_VALUES_BYTES: Final = 64 << 20  # of all values and names


@dataclass(slots=True)
class Awaited(Gathering):
    """A value that some ranks look up (they have come) and nobody has published."""

    requests: dict[int, int] = field(default_factory=dict)  # rank -> its request id

    @property
    def awaited(self) -> str:
        return f"its publication, for rank(s) {', '.join(map(str, sorted(self.came)))},"


class Values:
    """The published values, and the ranks that wait for each."""

    def __init__(self, size: int, absent: Set[int] = frozenset()) -> None:
        """absent: ranks that publish nothing, as they are now."""
        self._size, self._absent = size, absent
        self._values: dict[str, tuple[int, str]] = {}  # name -> the rank that published it first, and the value
        self._awaited: dict[str, Awaited] = {}
        self._bytes = 0

    def publish(self, rank: int, name: str, value: str) -> dict[int, int]:
        """Keep a value; request ids of the ranks that wait for it. Raises UsageError for a name with another value, and for too many."""
        first, known = self._values.get(name, (rank, value))
        if known != value:
            who = f"rank {rank}" if first == rank else f"rank {first} and rank {rank}"
            raise UsageError(f"{who} published two different values under the name {name!r}; a name has one value in a job")
        if name not in self._values:
            self._bytes += len(name) + len(value)
            if len(self._values) >= MAX_VALUES or self._bytes > MAX_VALUES_BYTES:
                raise UsageError(
                    f"rank {rank} published {name!r}, but a job keeps at most {MAX_VALUES} values of {MAX_VALUES_BYTES} bytes together; publish fewer"
                )
            self._values[name] = (rank, value)
        awaited = self._awaited.pop(name, None)
        return {} if awaited is None else awaited.requests

    def look_up(self, rank: int, request: int, name: str, now: float) -> str | None:
        """The value; None if nobody has published it yet, and the rank now waits for it."""
        if name in self._values:
            return self._values[name][1]
        awaited = self._awaited.setdefault(name, Awaited(f"the value {name!r}", self._size, now, excused=self._absent))
        awaited.requests[rank] = request
        awaited.came.add(rank)
        return None

    def give_up(self, rank: int) -> None:
        """The rank waits for no value any more: its process has ended, or has given up what it asked for."""
        for name, awaited in list(self._awaited.items()):
            awaited.came.discard(rank)
            awaited.requests.pop(rank, None)
            if not awaited.came:
                del self._awaited[name]

    def kept(self) -> list[tuple[int, str, str]]:
        """All values: rank, name, value."""
        return [(rank, name, value) for name, (rank, value) in self._values.items()]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def open(self) -> list[Gathering]:
        """Values that somebody waits for."""
        return list(self._awaited.values())
