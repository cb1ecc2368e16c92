"""Which servers this worker has reached. A server out of reach is named, and in the end it ends the job. Pure: ``now`` is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from psgc.processes.absence import Absence, younger
from psgc.processes.reminder import Reminder

NAMED_AFTER_S: Final = 3.0  # even the slowest link answers sooner, and a user who waits wants to know why
REMADE: Final = 3  # a connection that breaks so often without progress may end the job
AT_LEAST_S: Final = 10.0  # to reach the servers, even if the time to register is almost over


class _Limits(NamedTuple):
    """For how long a server may be out of reach: until it is named, at first until the job must end, and once it has answered."""

    silence_s: float
    register_timeout_s: float
    step_timeout_s: float


@dataclass(slots=True)
class _Connection:
    """The connection to one server. since: when it went down; None while it is up. reached: whether the server has ever answered. remade: how often it was made
    again without any progress; first: when the first of these was made."""

    since: float | None
    reached: bool = False
    named: Reminder | None = None
    remade: int = 0
    first: float = 0.0


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
            connection.first = connection.first if connection.remade else now
            connection.remade += 1

    def moved(self, server: int, address: str, now: float) -> None:
        """Another process serves in its place, at this address."""
        self.addresses[server] = address
        self._connections[server] = _Connection(now, reached=True)

    @property
    def unsteady(self) -> list[int]:
        """Servers whose connections have broken since something came through."""
        return [server for server, connection in enumerate(self._connections) if connection.remade]

    def progress(self, server: int, moved: float) -> None:
        """moved: when something last got through to or from the server, or when nothing was awaited from it."""
        connection = self._connections[server]
        if moved > connection.first:
            connection.remade = 0

    def tick(self, now: float, remedy: Callable[[int], str]) -> tuple[list[tuple[int, str]], str | None]:
        """Lines about servers that cannot be reached, and the reason why the job must end, or None. remedy: what is wrong with the connection to
        a server, and how to mend it."""
        if away := self._absence.ended(now):
            self._deadline += away
            for connection in self._connections:
                connection.since = None if connection.since is None else younger(connection.since, away, now)
        texts: list[tuple[int, str]] = []
        for server, connection in enumerate(self._connections):
            if connection.remade >= REMADE and now - connection.first > self._limits.step_timeout_s:
                return texts, (
                    f"rank {self._rank}: the connection to server {server} at {self.addresses[server]} broke {connection.remade} times in "
                    f"{now - connection.first:.0f} s and nothing came through: {remedy(server)}; gave up (PSGC_STEP_TIMEOUT_S)"
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
