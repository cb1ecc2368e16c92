"""Who has registered: conflicts, who is missing, the ranks, the topology. Pure; knows no messages, and time only as a note on members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from psgc import __version__
from psgc.reminder import Reminder
from psgc.wire.messages import Register, ServerAddress, Topology

EPOCH = 1


@dataclass(slots=True)
class Member:
    """One registered process. rank: a worker's rank or a server's index, from 0; -1 until everyone is there."""

    peer: bytes
    register: Register
    heard: float
    named: Reminder | None = None  # of its silence, since it was last heard
    rank: int = -1
    left: bool = False
    waited_ms: int = 0  # a worker's own count of what it waited for steps' results

    @property
    def label(self) -> str:
        r = self.register
        where = f"pid {r.pid} on {r.hostname}"
        if r.role == "server":
            number = self.rank if self.rank >= 0 else r.index
            return f"server {number} ({where})" if number >= 0 else f"server ({where})"
        return f"{'worker' if self.rank < 0 else f'worker {self.rank}'} (node {r.node}, local rank {r.local_rank}, {where})"


class Roster:
    """Members, by the names of their connections. ``nodes`` and ``servers`` are how many the job has."""

    def __init__(self, nodes: int, servers: int) -> None:
        self.nodes, self.servers = nodes, servers
        self._members: list[Member] = []
        self._names: dict[bytes, Member] = {}
        self._topology: Topology | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def workers(self) -> list[Member]:
        return [m for m in self if m.register.role == "worker"]

    def server_members(self) -> list[Member]:
        return [m for m in self if m.register.role == "server"]

    def heard_from(self, peer: bytes, now: float) -> Member | None:
        """The member that speaks under this name: it is there, and is answered here."""
        member = self._names.get(peer)
        if member is not None:
            member.peer, member.heard = peer, now
        return member

    def returns(self, peer: bytes, register: Register, now: float) -> Member | None:
        """The member that registers again, if it is one. While a connection is re-made, words of the old one may come under another
        name; so a process may have several, and the newest it has spoken under is the one it is answered at."""
        same = next((m for m in self if m.register == register), None)
        if same is not None:
            self._names[peer] = same
        return self.heard_from(peer, now)

    def add(self, member: Member) -> None:
        self._members.append(member)
        self._names[member.peer] = member

    def conflict(self, new: Member) -> str | None:
        """Why ``new`` cannot be in the job with those who are, or None."""
        r = new.register
        if r.version != __version__:
            return f"{new.label} runs psgc {r.version}, the scheduler {__version__}; install one version everywhere"
        if r.nodes != self.nodes:
            return f"{new.label} has DMLC_NUM_WORKER={r.nodes}, the scheduler has {self.nodes}; set the same number of nodes everywhere"
        if r.servers != self.servers:
            return f"{new.label} has DMLC_NUM_SERVER={r.servers}, the scheduler has {self.servers}; set the same number everywhere"
        return self._server_conflict(new) if r.role == "server" else self._worker_conflict(new)

    def _worker_conflict(self, new: Member) -> str | None:
        r = new.register
        if not 0 <= r.node < self.nodes:
            return f"{new.label}: DMLC_WORKER_ID={r.node}, but DMLC_NUM_WORKER={self.nodes}: nodes are numbered 0 to {self.nodes - 1}"
        if not 0 <= r.local_rank < r.local_size:
            return f"{new.label}: BYTEPS_LOCAL_RANK={r.local_rank}, but BYTEPS_LOCAL_SIZE={r.local_size}: local ranks start at 0"
        for other in self.workers():
            o = other.register
            if r.node == o.node and r.local_size != o.local_size:
                return f"node {r.node}: {other.label} has BYTEPS_LOCAL_SIZE={o.local_size}, {new.label} has {r.local_size}; set one size a node"
            if (r.node, r.local_rank) == (o.node, o.local_rank):
                return (
                    f"two workers have DMLC_WORKER_ID={r.node} and local rank {r.local_rank}: {other.label} and {new.label}; "
                    f"number the nodes 0 to {self.nodes - 1}"
                )
        return None

    def _server_conflict(self, new: Member) -> str | None:
        r, last = new.register, self.servers - 1
        if not -1 <= r.index <= last:
            return f"{new.label}: DMLC_SERVER_ID={r.index}, but DMLC_NUM_SERVER={self.servers}: servers are numbered 0 to {last}"
        others = self.server_members()
        for other in others:
            if r.index >= 0 and r.index == other.register.index:
                return f"two servers have DMLC_SERVER_ID={r.index}: {other.label} and {new.label}; number them 0 to {last}"
        if len(others) >= self.servers:
            return f"{new.label} is one server too many: DMLC_NUM_SERVER={self.servers}; start as many as that, or raise it everywhere"
        return None

    def missing(self) -> list[str]:
        """Who has not registered yet, in words."""
        missing = []
        there: dict[int, dict[int, int]] = {}  # node -> local rank -> local size
        for m in self.workers():
            there.setdefault(m.register.node, {})[m.register.local_rank] = m.register.local_size
        for node in range(self.nodes):
            if node not in there:
                missing.append(f"node {node} (DMLC_WORKER_ID={node})")
            else:
                size = next(iter(there[node].values()))
                missing += [f"local rank {i} of node {node}" for i in range(size) if i not in there[node]]
        servers = self.servers - len(self.server_members())
        if servers:
            missing.append(f"{servers} of {self.servers} server(s)")
        return missing

    def number(self) -> int:
        """Give everyone a rank: workers by node and local rank; servers keep the index they came with, the others fill the gaps
        in order of arrival. Returns the number of workers."""
        workers = sorted(self.workers(), key=lambda m: (m.register.node, m.register.local_rank))
        for rank, member in enumerate(workers):
            member.rank = rank
        servers = self.server_members()
        free = iter(sorted(set(range(self.servers)) - {m.register.index for m in servers}))
        for member in servers:
            member.rank = member.register.index if member.register.index >= 0 else next(free)
        servers.sort(key=lambda m: m.rank)
        sizes = [0] * self.nodes
        for member in workers:
            sizes[member.register.node] += 1
        addresses = tuple(ServerAddress(m.rank, m.register.host, m.register.address, m.register.local_address) for m in servers)
        names = tuple(f"{m.register.node}.{m.register.local_rank}@{m.register.hostname}" for m in workers)
        self._topology = Topology(-1, len(workers), self.nodes, tuple(sizes), EPOCH, addresses, names)
        return len(workers)

    def topology(self, member: Member, key: bytes) -> Topology:
        """What ``member`` is told once everyone has a rank. key: of its payload connections."""
        assert self._topology is not None, "number() comes first"
        return replace(self._topology, rank=member.rank, key=key.hex())
