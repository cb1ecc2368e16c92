"""Which servers this worker has reached, and what is said, and finally done, about one that it cannot reach. Pure: ``now`` is passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from psgc.reminder import Reminder

NAMED_AFTER_S: Final = 3.0  # of trying: the longest link answers sooner, and whoever waits wants to know why
AT_LEAST_S: Final = 10.0  # for the servers to be reached, however much of the time to register has passed by then


@dataclass(slots=True)
class _Connection:
    """To one server. since: when it went down; None while it is up."""

    since: float | None
    named: Reminder | None = None


@dataclass(slots=True)
class Reach:
    """See the module's text. addresses: of the servers. began: when this worker began to join the job; now: when it heard of the servers."""

    rank: int
    addresses: Sequence[str]
    began: float
    now: float
    silence_s: float
    register_timeout_s: float
    step_timeout_s: float
    reached: set[int] = field(default_factory=set)  # that have answered at least once
    _connections: list[_Connection] = field(init=False)
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._connections = [_Connection(self.now) for _ in self.addresses]
        self._deadline = max(self.began + self.register_timeout_s, self.now + min(AT_LEAST_S, self.register_timeout_s))

    @property
    def all_answered(self) -> bool:
        return len(self.reached) == len(self.addresses)

    def up(self, server: int) -> None:
        """The server has answered on a new connection."""
        self.reached.add(server)
        self._connections[server] = _Connection(None)

    def down(self, server: int, now: float) -> None:
        """The connection has broken."""
        if self._connections[server].since is None:
            self._connections[server].since = now

    def tick(self, now: float, remedy: Callable[[int], str]) -> tuple[list[tuple[int, str]], str | None]:
        """What is to be said of servers that cannot be reached, and why the job cannot go on, if so. remedy: what is wrong with the connection to a
        server, and how to mend it."""
        texts: list[tuple[int, str]] = []
        for server, connection in enumerate(self._connections):
            if connection.since is None:
                continue
            waited = now - connection.since
            connection.named = connection.named or Reminder(connection.since)
            late = now > self._deadline if server not in self.reached else waited > self.step_timeout_s
            if late:
                name, since = (
                    ("PSGC_STEP_TIMEOUT_S", connection.since) if server in self.reached else ("PSGC_REGISTER_TIMEOUT_S", self.began)
                )
                return texts, f"{self._text(server, waited, remedy(server))}; gave up after {now - since:.0f} s ({name})"
            if connection.named.due(now, min(NAMED_AFTER_S, self.silence_s)):
                texts.append((server, self._text(server, waited, remedy(server))))
        return texts, None

    def _text(self, server: int, waited: float, remedy: str) -> str:
        return f"rank {self.rank} cannot reach server {server} at {self.addresses[server]}, for {waited:.0f} s so far: {remedy}"
