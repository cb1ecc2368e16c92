"""The scheduler of a ps-lite job: gives ids to the nodes that join, counts barriers, answers heartbeats, lets a node take a dead one's place.

Pure: no sockets, clocks or threads. The postoffice feeds it messages, and sends what it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from psgc.errors import JobFailed, RemoteProtocolError
from psgc.pslite import nodes
from psgc.pslite.actions import Action, Connect, Send
from psgc.pslite.meta import ADD_NODE, BARRIER, EMPTY, HEARTBEAT, MAX_NODES, ROLES, SCHEDULER, SERVER, WORKER, Meta, Node


def _before(a: Node, b: Node) -> int:
    """ps-lite's order of nodes: its comparator says (a.hostname.compare(b.hostname) | (a.port < b.port)) > 0. For names of one host that is
    ascending ports; for others, descending names."""
    if a.hostname == b.hostname:
        return -1 if a.port < b.port else int(a.port > b.port)
    return -1 if a.hostname > b.hostname else 1


def in_order(joined: Iterable[Node]) -> list[Node]:
    """The order in which nodes get their ranks."""
    return sorted(joined, key=functools.cmp_to_key(_before))


@dataclass(slots=True)
class Scheduler:
    """See the module's text. timeout_s: a node that has sent no heartbeat for so long counts as dead; 0: none ever does."""

    own: Node
    workers: int
    servers: int
    timeout_s: float = 0.0
    ready: bool = False
    joined: list[Node] = field(default_factory=list)
    _timestamp: int = 0
    _arrived: dict[int, set[int]] = field(default_factory=dict)  # senders at each group's barrier
    _heartbeats: dict[int, float] = field(default_factory=dict)  # when each node's last heartbeat came

    def __post_init__(self) -> None:
        if self.workers + self.servers > MAX_NODES:
            raise JobFailed(
                f"a ps-lite job of {self.workers} workers and {self.servers} servers; psgc takes part in jobs of up to {MAX_NODES} nodes"
            )

    def receive(self, sender: int, meta: Meta, now: float) -> list[Action]:
        """Take a control message. Raises RemoteProtocolError for one that changes nothing and gets no answer."""
        if meta.command == ADD_NODE:
            return self._add(sender, meta, now)
        if sender != nodes.SCHEDULER_ID and (not self.ready or sender not in {node.id for node in self.joined}):
            raise RemoteProtocolError(f"{meta} from {_name(sender)}, which has not joined the job")
        if meta.command == HEARTBEAT:
            self._heartbeats[sender] = now
            return [Send(sender, Meta(command=HEARTBEAT, nodes=(self.own,), timestamp=self._next()))]
        if meta.command == BARRIER and meta.request:
            return self._arrive(sender, meta)
        raise RemoteProtocolError(f"{meta} from {_name(sender)}; a scheduler expects ADD_NODE, BARRIER requests and HEARTBEAT")

    def dead(self, now: float) -> list[Node]:
        """Nodes whose heartbeats have stopped."""
        if not self.timeout_s or not self.ready:
            return []
        return [node for node in self.joined if now - self._heartbeats[node.id] > self.timeout_s]

    def missing(self) -> str:
        """The nodes that have not joined yet, in words; "" when all have."""
        lacks = [
            f"{wanted - count} of {wanted} {ROLES[role]}s"
            for role, wanted in ((WORKER, self.workers), (SERVER, self.servers))
            if (count := sum(node.role == role for node in self.joined)) < wanted
        ]
        return " and ".join(lacks)

    def waiting(self) -> dict[int, list[int]]:
        """The ids that each group's current barrier waits for."""
        return {
            group: [node_id for node_id in nodes.group_ids(group, self.workers, self.servers) if node_id not in arrived]
            for group, arrived in self._arrived.items() if arrived
        }  # fmt: skip

    def _add(self, sender: int, meta: Meta, now: float) -> list[Action]:
        if sender != EMPTY or len(meta.nodes) != 1 or meta.nodes[0].role == SCHEDULER:
            raise RemoteProtocolError(
                f"ADD_NODE from {_name(sender)} with {len(meta.nodes)} nodes; expected one worker or server, which has no id yet"
            )
        node = replace(meta.nodes[0], id=EMPTY, is_recovery=False)
        if self.ready:
            return self._replace_dead(node, now)
        if any(known.address == node.address for known in self.joined):
            raise RemoteProtocolError(
                f"a second {ROLES[node.role]} joins as {node.address}; psgc carries one customer of ps-lite in each process"
            )
        if sum(known.role == node.role for known in self.joined) == (self.workers if node.role == WORKER else self.servers):
            wanted = f"DMLC_NUM_{ROLES[node.role].upper()}={self.workers if node.role == WORKER else self.servers}"
            raise RemoteProtocolError(f"a {node} joins, but {wanted} have joined already; start as many as that everywhere")
        self.joined.append(node)
        return [] if self.missing() else self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        """Assign ids once all nodes have come, and send every node the list of all nodes."""
        ranks = {WORKER: 0, SERVER: 0}
        placed: list[Node] = []
        for node in in_order(self.joined):
            make_id = nodes.worker_id if node.role == WORKER else nodes.server_id
            placed.append(replace(node, id=make_id(ranks[node.role])))
            ranks[node.role] += 1
        self.joined, self.ready = placed, True
        self._heartbeats = {node.id: now for node in placed}
        connects: list[Action] = [Connect(node) for node in placed]
        everybody = (*placed, self.own)
        return connects + [self._tell(node_id, everybody) for node_id in self._members()]

    def _replace_dead(self, node: Node, now: float) -> list[Action]:
        dead = self.dead(now)
        place = next((known for known in dead if known.role == node.role), None)
        if place is None:
            raise RemoteProtocolError(
                f"a {node} joins, but the job has all of its nodes; it could take the place of a dead one, which PS_HEARTBEAT_INTERVAL and "
                f"PS_HEARTBEAT_TIMEOUT show"
            )
        fresh = replace(node, id=place.id, is_recovery=True)
        self.joined = [fresh if known.id == place.id else known for known in self.joined]
        self._heartbeats[fresh.id] = now
        others = {known.id for known in dead} - {fresh.id}
        announcements: list[Action] = [
            self._tell(node_id, (*self.joined, self.own) if node_id == fresh.id else (fresh,))
            for node_id in self._members()
            if node_id not in others
        ]
        return [Connect(fresh), *announcements]

    def _members(self) -> tuple[int, ...]:
        return nodes.group_ids(nodes.WORKER_GROUP + nodes.SERVER_GROUP, self.workers, self.servers)

    def _tell(self, receiver: int, about: tuple[Node, ...]) -> Send:
        return Send(receiver, Meta(command=ADD_NODE, nodes=about, timestamp=self._next()))

    def _arrive(self, sender: int, meta: Meta) -> list[Action]:
        """A sender counts once at a barrier: one that asks again (its reply was lost) does not stand for another."""
        members = nodes.group_ids(meta.barrier_group, self.workers, self.servers)
        if sender not in members:
            raise RemoteProtocolError(f"a barrier of group {meta.barrier_group} from {_name(sender)}, which is not in it")
        arrived = self._arrived.setdefault(meta.barrier_group, set())
        arrived.add(sender)
        if len(arrived) < len(members):
            return []
        arrived.clear()
        return [
            Send(
                member,
                Meta(
                    command=BARRIER,
                    barrier_group=meta.barrier_group,
                    app_id=meta.app_id,
                    customer_id=meta.customer_id,
                    timestamp=self._next(),
                ),
            )
            for member in members
        ]

    def _next(self) -> int:
        self._timestamp += 1
        return self._timestamp - 1


def _name(sender: int) -> str:
    return "a process without an id" if sender == EMPTY else f"{ROLES[nodes.role_of(sender)]} {sender}"
