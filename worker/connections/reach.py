"""Which servers this worker has reached, and what is said, and in the end done, about one that it cannot reach. Pure: ``now`` is passed in."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from psgc.addresses import is_loopback, split
from psgc.reminder import Reminder
from psgc.wire.messages import ServerAddress

NAMED_AFTER_S: Final = 3.0  # of trying: the longest link answers sooner, and who waits wants to know why
AT_LEAST_S: Final = 10.0  # for the servers to be reached, however much of the time to register was needed for that
ADVERTISED: Final = "DMLC_NODE_HOST, DMLC_PORT or PSGC_ADVERTISE where the server is started"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a connection is not up. number: of the error; 0: the other machine accepted the connection, and then came nothing that proves whose it
    is; None: nothing has come back yet."""

    number: int | None
    text: str


@dataclass(slots=True)
class _Way:
    """To one server. since: from when on it has been down; None while it is up."""

    since: float | None
    named: Reminder | None = None


@dataclass(slots=True)
class Reach:
    """See the module's text. host: this worker's host id. began: when it began to join the job; now: when it heard of the servers."""

    rank: int
    host: str
    servers: Sequence[ServerAddress]
    began: float
    now: float
    silence_s: float
    register_timeout_s: float
    step_timeout_s: float
    reached: set[int] = field(default_factory=set)  # that have answered at least once
    _ways: list[_Way] = field(init=False)
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._ways = [_Way(self.now) for _ in self.servers]
        self._deadline = max(self.began + self.register_timeout_s, self.now + min(AT_LEAST_S, self.register_timeout_s))

    @property
    def all_answered(self) -> bool:
        return len(self.reached) == len(self.servers)

    def up(self, server: int) -> None:
        """The server has answered on a new connection."""
        self.reached.add(server)
        self._ways[server] = _Way(None)

    def down(self, server: int, now: float) -> None:
        """The connection has broken."""
        if self._ways[server].since is None:
            self._ways[server].since = now

    def tick(self, now: float, why: Callable[[int], Trouble]) -> tuple[list[tuple[int, str]], str | None]:
        """What is to be said of servers that cannot be reached, and why the job cannot go on, if so. why: a server's trouble."""
        texts: list[tuple[int, str]] = []
        for server, way in enumerate(self._ways):
            if way.since is None:
                continue
            waited = now - way.since
            way.named = way.named or Reminder(way.since)
            late = now > self._deadline if server not in self.reached else waited > self.step_timeout_s
            if late:
                name, since = ("PSGC_STEP_TIMEOUT_S", way.since) if server in self.reached else ("PSGC_REGISTER_TIMEOUT_S", self.began)
                return texts, f"{self._text(server, waited, why(server))}; gave up after {now - since:.0f} s ({name})"
            if way.named.due(now, min(NAMED_AFTER_S, self.silence_s)):
                texts.append((server, self._text(server, waited, why(server))))
        return texts, None

    def _text(self, server: int, waited: float, trouble: Trouble) -> str:
        address = self.servers[server].address
        return f"rank {self.rank} cannot reach server {server} at {address}, for {waited:.0f} s so far: {self._reason(server, trouble)}"

    def _reason(self, server: int, trouble: Trouble) -> str:
        """What is wrong, and how to mend it."""
        found, number = self.servers[server], trouble.number
        try:
            host, port = split(found.address)
        except ValueError:
            return f"that is no address; check {ADVERTISED}"
        if is_loopback(host) and found.host != self.host:
            return (
                f"that is this machine itself, and the server runs on another one; set {ADVERTISED} to an address that reaches it from here"
            )
        if number == 0:
            return (
                f"what accepts connections there does not answer as that server ({trouble.text}); is it stopped or busy, or another program? "
                f"Check {ADVERTISED}"
            )
        if number == errno.ECONNREFUSED:
            return f"nobody listens there; is the server alive, and is the address right? Check {ADVERTISED}"
        if number in (None, errno.ETIMEDOUT):
            return f"nothing comes back from there; open port {port} in the firewall (DMLC_PORT fixes the number), or mend the address: check {ADVERTISED}"
        if number == errno.EADDRNOTAVAIL:
            return f"{host!r} cannot be looked up here; give an address that can: check {ADVERTISED}"
        return f"{trouble.text}; is there a route to it? Check the network, and {ADVERTISED}"
