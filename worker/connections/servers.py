"""A worker's connections to all of its job's servers: served in turn, kept up, and named when they are lost or cannot be reached.

Runs in the network thread. Knows connections and how long each has been down; what messages mean is the client's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from psgc.config import Config
from psgc.errors import RemoteProtocolError
from psgc.observe.worker_trace import WorkerTrace
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Place
from psgc.transport.pacing import PacedLink
from psgc.transport.registry import FALLBACK
from psgc.transport.server_link import ServerLink, connect_server
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import ServerAddress, Topology
from psgc.worker.client import Action, Client
from psgc.worker.connections.reach import Reach
from psgc.worker.outcome import Outcome

logger = logging.getLogger(__name__)
TURN_S: Final = 0.02  # time for messages of all connections in one turn of the network thread
LOST_S: Final = 0.5


class Owner(Protocol):
    """What connections ask of the network thread, and tell it."""

    @property
    def outcome(self) -> Outcome: ...

    @property
    def leaving(self) -> bool:
        """Whether this worker is leaving the job."""

    def reached(self) -> None:
        """Every server has answered at least once."""

    def say(self, topic: str, text: str) -> None:
        """Warn here, and have the scheduler tell the other members."""

    def end_job(self, text: str) -> None: ...


class ServerConnections:
    """See the module's text. Without servers until ``connect``. apply: carries out what the client's state machine says; posted: memory of the length of a
    payload that a server has begun to send, to receive it into, as of ``Link.posted``."""

    def __init__(
        self, config: Config, trace: WorkerTrace | None, owner: Owner, apply: Callable[[list[Action]], None], posted: Callable[[int, Header], Any]
    ) -> None:  # fmt: skip
        self._config, self._trace, self._owner, self._apply = config, trace, owner, apply
        self.links: list[ServerLink] = []
        pace = PacedLink.of(config.link_mbit, config.link_fd) if config.link_mbit else None
        self._set = LinkSet(pace, lambda link, header: posted(link.owner.server, header))
        self._client: Client
        self._addresses: Sequence[ServerAddress] = ()
        self._connect: Callable[..., ServerLink]
        self._reach: Reach | None = None  # once the servers are known
        self._met: set[int] = set()  # servers to which there has been a connection
        self.reconnects = 0  # connections that were made again
        self._lost: dict[int, float] = {}  # server -> when its connection went down; removed once that has been logged

    def connect(self, topology: Topology, client: Client, began: float) -> None:
        """Begin to connect to the servers. began: when this worker began to join the job."""
        config, self._client = self._config, client
        key = bytes.fromhex(topology.key)
        self._addresses = topology.servers
        self._connect = partial(connect_server, links=self._set, rank=topology.rank, epoch=topology.epoch, key=key)
        for server in topology.servers:
            self.links.append(self._connect(server, config=config))
        self._reach = Reach(
            topology.rank, [link.route.address for link in self.links], began, time.monotonic(), config.silence_s,
            config.register_timeout_s, config.step_timeout_s,
        )  # fmt: skip
        for link in self.links:
            self._look_at(link)

    def move(self, servers: Sequence[ServerAddress]) -> None:
        """Other processes have taken servers' places: connect to them, by a transport that carries payloads wherever they lie."""
        assert self._reach is not None
        over_tcp = replace(self._config, transport=FALLBACK)
        for index, (server, before) in enumerate(zip(servers, self._addresses, strict=True)):
            if server != before:
                former = self.links[index]
                former.close(linger_s=0.0)
                self.links[index] = self._connect(server, config=over_tcp)
                self.links[index].wire_bytes = former.wire_bytes
                self._lost.pop(index, None)
                self._reach.moved(index, server.address, time.monotonic())
                self._client.disconnected(index)
                self._look_at(self.links[index])
        self._addresses = servers

    def fileno(self) -> int:
        """Readable when a connection is ready."""
        return self._set.fileno()

    @property
    def pending(self) -> bool:
        """Whether there is something to serve that ``fileno`` does not tell of."""
        return self._set.pending

    def serve(self) -> None:
        """Receive from the connections that are ready, for at most ``TURN_S``, so that the scheduler, ticks and other threads' calls never wait for them."""
        ready: list[Link] = self._set.ready()
        until = time.monotonic() + TURN_S
        for number, connection in enumerate(ready):
            self._serve_one(connection.owner)
            if time.monotonic() >= until:
                self._set.defer(ready[number + 1 :])
                return

    def flush(self) -> None:
        """Have the kernel take queued payloads, and refill the queues that they leave."""
        while touched := self._set.flush():
            for connection in touched:
                link = connection.owner
                if connection.closed:
                    self._look_at(link)
                elif link.up and not self._owner.outcome.failed:
                    self._apply(self._client.departed(link.server, link.unsent, time.monotonic()))

    def tick(self, now: float) -> None:
        """Make connections again that are down, and name what is lost or out of reach."""
        for link in self.links:
            if not link.up:
                self._look_at(link)
        self._name_unreached(now)
        for server in [server for server, since in self._lost.items() if now - since > LOST_S]:
            self._name_lost(server)

    def send(self, server: int, header: Header, body: bytes = b"", place: Place | None = None) -> None:
        """See ``ServerLink.send``."""
        if self._trace is not None:
            self._trace.sending(server, header)
        self.links[server].send(header, body, place)

    def send_to_all(self, kind: Kind) -> None:
        """A header alone, to every server."""
        for server in range(len(self.links)):
            self.greet(server, kind)

    def greet(self, server: int, kind: Kind) -> None:
        """A header that says who this worker is; HELLO, also which of the processes in its rank's place, where that is not the first."""
        client, step = self._client, self._client.incarnation if kind is Kind.HELLO else 0
        self.links[server].send(Header(kind, job=self._config.job, epoch=client.epoch, step=step, sender=client.rank))

    @property
    def wire_bytes(self) -> int:
        """Headers and payloads, in both directions."""
        return sum(link.wire_bytes for link in self.links)

    def leaving_s(self, now: float) -> list[float]:
        """By server, see ``Link.leaving_s``."""
        return [link.leaving_s(now) for link in self.links]

    def close(self) -> None:
        for link in self.links:
            link.close(linger_s=0.5)
        self._set.close()

    def _serve_one(self, link: ServerLink) -> None:
        client, server = self._client, link.server
        try:
            for header, payload in link.receive():
                if self._trace is not None:
                    self._trace.received(server, header)
                if not self._owner.outcome.failed:
                    self._apply(client.receive(server, header, payload, time.monotonic()))
                if header.kind == Kind.HELLO:
                    self._reached_if_all()
        except RemoteProtocolError as error:
            self._owner.end_job(f"rank {client.rank}: server {server}: {error}")
        if self._trace is not None and link.receiving:
            self._trace.receiving(server)
        self._look_at(link)

    def _look_at(self, link: ServerLink) -> None:
        """Handle a connection's events; one that is down is made again."""
        client, reach = self._client, self._reach
        assert reach is not None
        for event in link.events():
            if event == "up":
                reach.up(link.server)
                self.reconnects += link.server in self._met
                self._met.add(link.server)
                self._reached_if_all()
                self._name_lost(link.server)
                self._apply(client.connected(link.server, time.monotonic(), queues=link.queues))
            else:
                self._lost.setdefault(link.server, time.monotonic())
                reach.down(link.server, time.monotonic())
                client.disconnected(link.server)

    def _reached_if_all(self) -> None:
        if self._reach is not None and self._reach.all_answered and self._client.greeted:
            self._owner.reached()

    def _name_unreached(self, now: float) -> None:
        """Say which servers cannot be reached, and why: here, and by the scheduler to everyone; give up in the end."""
        reach = self._reach
        if reach is None or self._owner.outcome.failed or self._owner.leaving:
            return
        for server in reach.unsteady:
            reach.progress(server, self._client.moved(server, now))
        texts, fault = reach.tick(now, lambda server: self.links[server].remedy)
        for server, text in texts:
            self._owner.say(f"server {server}", text)
        if fault is not None:
            self._owner.end_job(fault)

    def _name_lost(self, server: int) -> None:
        """Log lost connections, but only after ``LOST_S``: a server that ends closes its connections a moment before the scheduler tells of the job's
        end."""
        if self._lost.pop(server, None) is not None and not self._owner.leaving and not self._owner.outcome.failed:
            logger.warning("connection to server %d lost; it is re-made, and what was in flight is sent again", server)
