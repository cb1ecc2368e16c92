"""A worker's or a server's membership of a ps-lite job: joins, learns its id and the others' addresses, meets at barriers, sends heartbeats.

Pure: no sockets, clocks or threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psgc.errors import JobFailed, RemoteProtocolError
from psgc.pslite import nodes
from psgc.pslite.actions import Action, Connect, Send
from psgc.pslite.meta import ADD_NODE, BARRIER, EMPTY, HEARTBEAT, MAX_NODES, ROLES, SCHEDULER, WORKER, Meta, Node


@dataclass(slots=True)
class Member:
    """See the module's text. own: this process's node, without an id until it has joined. passed: barriers that it has passed. listed: all
    nodes of the job, as the scheduler last told of them, by id; peers: those to which this process has connections."""

    own: Node
    workers: int
    servers: int
    joined: bool = False
    passed: int = 0
    peers: dict[int, Node] = field(default_factory=dict)
    listed: dict[int, Node] = field(default_factory=dict)
    _timestamp: int = 0

    def join(self) -> Send:
        """The first message, to the scheduler."""
        return Send(nodes.SCHEDULER_ID, Meta(command=ADD_NODE, nodes=(self.own,), timestamp=self._next()))

    def barrier(self, group: int) -> Send:
        meta = Meta(command=BARRIER, request=True, barrier_group=group, app_id=0, customer_id=0, timestamp=self._next())
        return Send(nodes.SCHEDULER_ID, meta)

    def heartbeat(self) -> Send:
        return Send(nodes.SCHEDULER_ID, Meta(command=HEARTBEAT, nodes=(self.own,), timestamp=self._next()))

    def receive(self, sender: int, meta: Meta) -> list[Action]:
        """Take a control message. Raises RemoteProtocolError for one that changes nothing; JobFailed on a worker if another implementation's node takes a dead
        one's place, for sums may depend on who counts them."""
        if sender != nodes.SCHEDULER_ID:
            raise RemoteProtocolError(f"{meta} from node {sender}; control messages are the scheduler's")
        if meta.command == ADD_NODE:
            return self._learn(meta.nodes)
        if meta.command == BARRIER and not meta.request:
            self.passed += 1
            return []
        if meta.command == HEARTBEAT:
            return []
        raise RemoteProtocolError(f"{meta} from the scheduler; a {ROLES[self.own.role]} expects ADD_NODE, BARRIER replies and HEARTBEAT")

    def _learn(self, listed: tuple[Node, ...]) -> list[Action]:
        """The scheduler's list: of all nodes, or of the one that takes a dead one's place."""
        ids = [node.id for node in listed]
        if len(set(ids)) < len(ids) or EMPTY in ids or any(nodes.role_of(node.id) != node.role for node in listed):
            raise RemoteProtocolError(f"the scheduler lists nodes {ids}; expected different ids that fit the nodes' roles")
        if not self.joined:
            found = next((node for node in listed if node.role == self.own.role and node.address == self.own.address), None)
            if found is None or len(listed) > MAX_NODES + 1:
                raise RemoteProtocolError(f"the scheduler lists {len(listed)} nodes, but not this one, {self.own}")
            counts = tuple(sum(node.role == role for node in listed) for role in (0, 1))
            if counts != (self.servers, self.workers):
                raise RemoteProtocolError(
                    f"the scheduler lists {counts[1]} workers and {counts[0]} servers, but DMLC_NUM_WORKER={self.workers} and "
                    f"DMLC_NUM_SERVER={self.servers} here; set them alike everywhere"
                )
            self.own, self.joined = found, True
        connects: list[Action] = []
        for node in listed:
            before = self.listed.setdefault(node.id, node)
            if self.own.role == WORKER and node.endpoint_name != before.endpoint_name:
                raise JobFailed(
                    f"{node} took the place of {before}, but only one of the two is psgc's; start the job again, or replace a node by one of its kind"
                )
            self.listed[node.id] = node
        for node in listed:
            if node.id != self.own.id and (node.role == SCHEDULER or node.role != self.own.role) and self.peers.get(node.id) != node:
                self.peers[node.id] = node
                connects.append(Connect(node))
        return connects

    def _next(self) -> int:
        self._timestamp += 1
        return self._timestamp - 1
