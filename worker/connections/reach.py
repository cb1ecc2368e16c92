"""Which servers this worker has reached. A server out of reach is named, and in the end it ends the job. Pure: ``now`` is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psgc.processes.absence import Absence, younger
from psgc.processes.breaks import Breaks
from psgc.processes.reminder import Reminder

NAMED_AFTER_S: Final = 3.0  # even the slowest link answers sooner, and a user who waits wants to know why
AT_LEAST_S: Final = 10.0  # to reach the servers, even if the time to register is almost over


class _Limits(NamedTuple):
    """For how long a server may be out of reach: until it is named, at first until the job must end, and once it has answered."""

    silence_s: float
    register_timeout_s: float
    step_timeout_s: float


@dataclass(slots=True)
class _Connection:
    """The connection to one server. since: when it went down; None while it is up. reached: whether the server has ever answered. breaks: without any
    progress."""

    since: float | None
    reached: bool = False
    named: Reminder | None = None
    breaks: Breaks = field(default_factory=Breaks)


class Reach:
    """See the module's text. addresses: of the servers. began: when this worker began to join the job; now: when it heard of the servers.
    every_s: from one tick to the next."""

    def __init__(
        self, rank: int, addresses: Sequence[str], began: float, now: float, silence_s: float, register_timeout_s: float, step_timeout_s: float,
        every_s: float = 0.25,
    ) -> None:  # fmt: skip
        self.addresses, self._rank, self._began = list(addresses), rank, began
        self._limits = _Limits(silence_s, register_timeout_s, step_timeout_s)
        self._connections = [_Connection(now) for _ in addresses]
        self._deadline = max(began + register_timeout_s, now + min(AT_LEAST_S, register_timeout_s))
        self._absence = Absence(every_s)

    @property
    def all_answered(self) -> bool:
        return all(connection.reached for connection in self._connections)

    def up(self, server: int) -> None:
        """The server has answered on a new connection."""
        connection = self._connections[server]
        connection.reached, connection.since, connection.named = True, None, None

    def down(self, server: int, now: float) -> None:
        """The connection has broken."""
        connection = self._connections[server]
        if connection.since is None:
            connection.since = now
            connection.breaks.broke(now)

    def moved(self, server: int, address: str, now: float) -> None:
        """Another process serves in its place, at this address."""
        self.addresses[server] = address
        self._connections[server] = _Connection(now, reached=True)

    @property
    def unsteady(self) -> list[int]:
        """Servers whose connections have broken since something came through."""
        return [server for server, connection in enumerate(self._connections) if connection.breaks.count]

    def progress(self, server: int, moved: float) -> None:
        """moved: when something last got through to or from the server, or when nothing was awaited from it."""
        self._connections[server].breaks.came_through(moved)

    def tick(self, now: float, remedy: Callable[[int], str]) -> tuple[list[tuple[int, str]], str | None]:
        """Lines about servers that cannot be reached, and the reason why the job must end, or None. remedy: what is wrong with the connection to
        a server, and how to mend it."""
        if away := self._absence.ended(now):
            self._deadline += away
            for connection in self._connections:
                connection.since = None if connection.since is None else younger(connection.since, away, now)
                connection.breaks.was_away(away, now)
        texts: list[tuple[int, str]] = []
        for server, connection in enumerate(self._connections):
            if connection.breaks.last(now, self._limits.step_timeout_s):
                return texts, (
                    f"rank {self._rank}: the connection to server {server} at {self.addresses[server]} {connection.breaks.text(now)}: "
                    f"{remedy(server)}; gave up (PSGC_STEP_TIMEOUT_S)"
                )
            if connection.since is None:
                continue
            waited = now - connection.since
            connection.named = connection.named or Reminder(connection.since)
            late = waited > self._limits.step_timeout_s if connection.reached else now > self._deadline
            if late:
                name, since = ("PSGC_STEP_TIMEOUT_S", connection.since) if connection.reached else ("PSGC_REGISTER_TIMEOUT_S", self._began)
                return texts, f"{self._text(server, waited, remedy(server))}; gave up after {now - since:.0f} s ({name})"
            if connection.named.due(now, min(NAMED_AFTER_S, self._limits.silence_s)):
                texts.append((server, self._text(server, waited, remedy(server))))
        return texts, None

    def _text(self, server: int, waited: float, remedy: str) -> str:
        return f"rank {self._rank} cannot reach server {server} at {self.addresses[server]}, for {waited:.0f} s so far: {remedy}"
