"""The registered members: conflicts among them, missing ones, ranks, and the topology. Pure; knows no messages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psgc import __version__
from psgc.layout import Machines
from psgc.processes.reminder import Reminder
from psgc.program.ranks import Ranks, fault_of
from psgc.scheduler.elsewhere import elsewhere
from psgc.wire.messages import Register, ServerAddress, Topology, encode_body, plain
from psgc.wire.reports import Report

OF_AN_OLD_CONNECTION: Final = b"\0"  # names that ZeroMQ itself draws begin so; a member's superseded connection gets such a name, too
NAMED: Final = 8  # members in one line
OF_RECEIVER: Final = (
    "rank",
    "key",
    "layouts",
    "incarnation",
    "returns",
    "standby",
    "stands_by",
)  # fields of a Topology that differ from member to member


@dataclass(slots=True)
class Member:
    """One registered process. rank: a worker's rank or a server's index, from 0; -1 until everyone is there."""

    peer: bytes
    register: Register
    last_seen: float
    named: Reminder | None = None  # of its silence, since it was last heard
    gone: float | None = None  # since when its process is known to have ended
    mourned: bool = False  # it has been said that it has died and is awaited
    generation: int = 1  # which of the processes that follow one another in its place
    rank: int = -1
    left: bool = False
    absent: bool = False  # a worker that has died, and that the job goes on without
    waited_ms: int = 0  # how long a worker has waited for steps' results, by its own count, and those of the processes before it
    waited_before_ms: int = 0  # of that, what these had waited
    others_waited_ms: int = 0  # when it died, how long the one of the others had that had waited least
    report: Report | None = None  # its last one
    told_left: int = 0  # how often a server was told of a worker that has left

    @property
    def away(self) -> bool:
        """Whether nothing is awaited from it."""
        return self.left or self.absent

    @property
    def label(self) -> str:
        r = self.register
        where = f"pid {r.pid} on {r.hostname}"
        if r.standby:
            return f"the standby of server {r.index} ({where})" if r.index >= 0 else f"standby ({where})"
        if r.role == "server":
            number = self.rank if self.rank >= 0 else r.index
            return f"server {number} ({where})" if number >= 0 else f"server ({where})"
        return f"{'worker' if self.rank < 0 else f'worker {self.rank}'} (node {r.node}, local rank {r.local_rank}, {where})"


class Roster:
    """Members by the names of their connections. ``nodes``, ``servers``: how many the job has."""

    def __init__(self, nodes: int, servers: int, scheduler: tuple[str, int, int] = ("", 0, 0), replicas: bool = False) -> None:
        """scheduler: its host, its pid, and when it started. replicas: whether each server has a standby."""
        self.nodes, self.servers, self._scheduler, self.replicas = nodes, servers, scheduler, replicas
        self._members: list[Member] = []
        self._workers: list[Member] = []
        self._server_members: list[Member] = []
        self._standbys: list[Member] = []
        self._names: dict[bytes, Member] = {}
        self._registered: dict[Register, Member] = {}
        self._processes: dict[tuple[str, int, int], list[Member]] = {}
        self._past: set[Register] = set()  # of processes in whose place others are
        self._lost: dict[bytes | int, str] = {}  # labels of members whose machines are lost, by connections' names and by lineage
        self._present: dict[int, dict[int, Member]] = {}  # workers by node and local rank
        self.ranks = Ranks((1,))  # the workers of each node, once they are numbered
        self._epoch = 0
        self._topology = b""  # encoded, without the receiver's own fields

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def workers(self) -> list[Member]:
        return self._workers

    def server_members(self) -> list[Member]:
        return self._server_members

    def standbys(self) -> list[Member]:
        return self._standbys

    def standby_of(self, server: int) -> Member | None:
        return next((member for member in self._standbys if member.rank == server), None)

    def known_as(self, register: Register) -> Register:
        """What a server's process says of itself, with the place that it, or the process before it, was given."""
        if not register.lineage:
            return register
        found = next((m.register for m in (*self._server_members, *self._standbys) if m.register.lineage == register.lineage), None)
        return register if found is None else replace(register, index=found.index, standby=found.standby)

    def heard_from(self, peer: bytes, now: float) -> Member | None:
        """The member whose connection has this name, or None; notes that it was heard. Answers go to this connection, unless it is an old one."""
        member = self._names.get(peer)
        if member is not None:
            member.last_seen = now
            if not peer.startswith(OF_AN_OLD_CONNECTION):
                member.peer = peer
        return member

    def knows(self, peer: bytes) -> bool:
        """Whether a member has been heard under this name; what an old connection is called does not count."""
        return peer in self._names or peer.startswith(OF_AN_OLD_CONNECTION)

    def has(self, register: Register) -> bool:
        return register in self._registered

    def returns(self, peer: bytes, register: Register, now: float) -> Member | None:
        """The member that this registration repeats, or None. While a connection is replaced, messages of the old one may come under another name, so
        a process may have several names."""
        same = self._registered.get(register)
        if same is not None:
            self._names[peer] = same
        return self.heard_from(peer, now)

    def former(self, register: Register) -> Member | None:
        """The member of which another process has registered before, or None: a server, or once everyone was there, a worker."""
        if register.role == "worker":
            return self._present.get(register.node, {}).get(register.local_rank) if self._topology and register.incarnation else None
        if not register.lineage:
            return None
        members = (*self._server_members, *self._standbys)
        return next((member for member in members if member.register.lineage == register.lineage), None)

    def promote(self, server: Member, register: Register, peer: bytes, now: float) -> None:
        """The process that was the server's standby takes its place. register: the standby's, as a server's. Everyone must have a rank."""
        standby = next((member for member in self._standbys if member.register.lineage == register.lineage), None)
        self._lose(server)
        if standby is not None:
            self._take_out(standby)
        self.replace(server, peer, register, now)
        self._tell_addresses()

    def drop(self, standby: Member) -> None:
        """It is not heard any more."""
        self._lose(standby)
        self._take_out(standby)

    def _lose(self, member: Member) -> None:
        """Its machine is lost: nothing that it says is heeded."""
        names = [name for name, other in self._names.items() if other is member]
        self._lost |= dict.fromkeys([*names, member.register.lineage], member.label)

    def lost(self, peer: bytes, lineage: int = 0) -> str | None:
        """The label of the member that has come back from a lost machine, by this connection or with this lineage; None for others."""
        return self._lost.get(peer) or (self._lost.get(lineage) if lineage else None)

    def _take_out(self, standby: Member) -> None:
        self._standbys.remove(standby)
        self._members.remove(standby)
        self._processes[_process(standby.register)].remove(standby)
        del self._registered[standby.register]
        self._names = {name: other for name, other in self._names.items() if other is not standby}

    def least_waited(self, but: Member | None = None) -> Member | None:
        """Of the workers that are there, without ``but``, that which has waited least for steps' results."""
        return min((m for m in self._workers if not m.absent and m is not but), key=lambda m: m.waited_ms, default=None)

    def note_death(self, worker: Member) -> None:
        """A worker has died, and another process may take its place."""
        least = self.least_waited(worker)
        worker.others_waited_ms = 0 if least is None else least.waited_ms

    def _count_on(self, worker: Member) -> None:
        """Have the count of a worker's next process, which begins at 0, go on from that of the former one. What others waited while nobody was there says
        nothing of how fast either is; where this process of the scheduler has not heard the former one's count, it goes on from the least."""
        if (worker.mourned or not worker.waited_ms) and (least := self.least_waited(worker)) is not None:
            worker.waited_ms += max(0, least.waited_ms - worker.others_waited_ms)
        worker.waited_before_ms = worker.waited_ms

    def replace(self, member: Member, peer: bytes, register: Register, now: float) -> None:
        """Another process has taken the place of the member's, of which nothing that may still come is heeded."""
        self._count_on(member)
        del self._registered[member.register]
        self._processes[_process(member.register)].remove(member)
        self._processes.setdefault(_process(register), []).append(member)
        self._past.add(member.register)
        self._names = {name: other for name, other in self._names.items() if other is not member}
        member.peer, member.register, member.last_seen = peer, register, now
        member.named = member.gone = member.report = None
        member.mourned = member.absent = False
        self._names[peer] = self._registered[register] = member

    def is_past(self, register: Register) -> bool:
        """Whether this is a word, late, of a process in whose place another is."""
        return register in self._past

    def has_left(self, register: Register, over: bool) -> bool:
        """Whether the process that registers was a member, has left, and begins another session. over: all workers have left, so that a server has ended its
        session if it begins another, though its BYE, on the connection before, may come later."""
        if register in self._registered:
            return False
        return any(member.left or over for member in self._processes.get(_process(register), ()))

    def add(self, member: Member) -> None:
        register = member.register
        self._members.append(member)
        self._names[member.peer] = self._registered[register] = member
        self._processes.setdefault(_process(register), []).append(member)
        if register.role == "worker":
            self._workers.append(member)
            self._present.setdefault(register.node, {})[register.local_rank] = member
        elif register.standby:
            self._standbys.append(member)
        else:
            self._server_members.append(member)

    def conflict(self, new: Member) -> str | None:
        """Why ``new`` cannot join the members that have registered, or None."""
        r = new.register
        if r.version != __version__:
            return f"{new.label} runs psgc {r.version}, the scheduler {__version__}; install one version everywhere"
        if r.nodes != self.nodes:
            return f"{new.label} has DMLC_NUM_WORKER={r.nodes}, the scheduler has {self.nodes}; set the same number of nodes everywhere"
        if r.servers != self.servers:
            return f"{new.label} has DMLC_NUM_SERVER={r.servers}, the scheduler has {self.servers}; set the same number everywhere"
        first = next(iter(self), None)  # the others agree with it
        if first is not None and r.encrypt != first.register.encrypt:
            one, none = (new, first) if r.encrypt else (first, new)
            return f"{one.label} has PSGC_ENCRYPT=1, {none.label} has not; set it alike everywhere"
        return self._server_conflict(new) if r.role == "server" else self._worker_conflict(new)

    def _worker_conflict(self, new: Member) -> str | None:
        r = new.register
        if not 0 <= r.node < self.nodes:
            return f"{new.label}: DMLC_WORKER_ID={r.node}, but DMLC_NUM_WORKER={self.nodes}: nodes are numbered 0 to {self.nodes - 1}"
        if not 0 <= r.local_rank < r.local_size:
            return f"{new.label}: BYTEPS_LOCAL_RANK={r.local_rank}, but BYTEPS_LOCAL_SIZE={r.local_size}: local ranks start at 0"
        first = next(iter(self._workers), new)
        if first.register.planned != r.planned:
            one, none = (new, first) if r.planned else (first, new)
            return f"{one.label} has PSGC_PLAN, {none.label} has not; set it everywhere, though only rank 0's machine needs the file"
        if first.register.asynchronous != r.asynchronous:
            one, none = (new, first) if r.asynchronous else (first, new)
            return f"{one.label} has PSGC_ASYNC=1 (BYTEPS_ENABLE_ASYNC), {none.label} has not; set it for every worker, or for none"
        present = self._present.get(r.node, {})
        other = next(iter(present.values()), None)
        if other is not None and r.local_size != other.register.local_size:
            size = other.register.local_size
            return f"node {r.node}: {other.label} has BYTEPS_LOCAL_SIZE={size}, {new.label} has {r.local_size}; set one size a node"
        if other is not None and (r.roots, r.switch) != (other.register.roots, other.register.switch):
            return f"node {r.node}: {other.label} has {_inside(other.register)}, {new.label} has {_inside(r)}; set both alike for all workers of a node"
        if fault := fault_of(r.local_size, r.roots, r.switch):
            return f"{new.label}: {fault} ({_inside(r)}, BYTEPS_LOCAL_SIZE={r.local_size})"
        if (policy := _on_loss(first.register)) != _on_loss(r):
            return f"{first.label} has PSGC_ON_WORKER_LOSS={policy}, {new.label} has {_on_loss(r)}; set it alike everywhere"
        if (same := present.get(r.local_rank)) is not None:
            return (
                f"two workers have DMLC_WORKER_ID={r.node} and local rank {r.local_rank}: {same.label} and {new.label}; "
                f"number the nodes 0 to {self.nodes - 1}"
            )
        return None

    def _server_conflict(self, new: Member) -> str | None:
        r, last = new.register, self.servers - 1
        if not self.servers:
            return f"{new.label}: this job has no servers (DMLC_NUM_SERVER=0); start none, or set it to their number everywhere"
        if bool(r.launcher) != self.replicas:
            one, none = (new.label, "the scheduler") if r.launcher else ("the scheduler", new.label)
            return f"{one} has PSGC_REPLICAS=1, {none} has not; set it alike for the scheduler and on every machine that has a server"
        if r.launcher and not r.lineage:
            return f"{new.label} has PSGC_REPLICAS=1, but no launcher keeps its memory; start it with psgc-launch"
        if r.standby:
            return None if len(self._standbys) < self.servers else f"{new.label} is one standby too many: DMLC_NUM_SERVER={self.servers}"
        if not -1 <= r.index <= last:
            return f"{new.label}: DMLC_SERVER_ID={r.index}, but DMLC_NUM_SERVER={self.servers}: servers are numbered 0 to {last}"
        others = self.server_members()
        for other in others:
            if r.index >= 0 and r.index == other.register.index:
                return f"two servers have DMLC_SERVER_ID={r.index}: {other.label} and {new.label}; number them 0 to {last}"
        if len(others) >= self.servers:
            return f"{new.label} is one server too many: DMLC_NUM_SERVER={self.servers}; start as many as that, or raise it everywhere"
        return None

    @property
    def complete(self) -> bool:
        """Whether everyone has registered. A duplicate is a conflict, so none is counted twice."""
        return self.has_all_but_standbys and (not self.replicas or len(self._standbys) >= self.servers)

    @property
    def has_all_but_standbys(self) -> bool:
        if len(self._server_members) < self.servers or len(self._present) < self.nodes:
            return False
        return len(self._workers) == sum(map(self._size_of, self._present))

    def missing(self) -> str:
        """The members that have not registered yet. Of many, the first few are named: every member is told, again and again. The others are counted without
        being listed: a worker may have said that its node has any number."""
        processes = self._missing_processes()
        ranks = sum(self._size_of(node) - len(present) for node, present in self._present.items())
        missing = len(processes) + self.nodes - len(self._present) + ranks
        more = f" and {missing - NAMED} more" if missing > NAMED else ""
        return ", ".join(itertools.islice(itertools.chain(processes, self._missing_workers()), NAMED)) + more

    def _missing_processes(self) -> list[str]:
        """Servers come first, because everyone waits for them."""
        missing = []
        servers = self.servers - len(self.server_members())
        if servers:
            missing.append(f"{servers} of {self.servers} server(s)")
        if self.replicas and (standbys := self.servers - len(self._standbys)):
            missing.append(f"{standbys} of {self.servers} standby process(es) (PSGC_REPLICAS=1)")
        return missing

    def _missing_workers(self) -> Iterator[str]:
        for node in range(self.nodes):
            if (present := self._present.get(node)) is None:
                yield f"node {node} (DMLC_WORKER_ID={node})"
            else:
                yield from (f"local rank {i} of node {node}" for i in range(self._size_of(node)) if i not in present)

    def _size_of(self, node: int) -> int:
        """As its workers have said, who agree on it."""
        return next(iter(self._present[node].values())).register.local_size

    def number(self, epoch: int) -> int:
        """Give everyone a rank: workers by node and local rank; servers keep the index they came with, the others fill the gaps
        in order of arrival. epoch: of this membership. Returns the number of workers."""
        workers = sorted(self.workers(), key=lambda m: (m.register.node, m.register.local_rank))
        for rank, member in enumerate(workers):
            member.rank = rank
        servers = list(self.server_members())
        free = iter(sorted(set(range(self.servers)) - {m.register.index for m in servers}))
        for member in servers:
            member.rank = member.register.index if member.register.index >= 0 else next(free)
        self._epoch = epoch
        if self.replicas:
            self._place_standbys(sorted(servers, key=lambda m: m.rank))
        return self._tell_addresses()

    def _place_standbys(self, servers: Sequence[Member]) -> None:
        """Give each server a standby elsewhere, unless a former process of the scheduler has done so."""
        if any(standby.register.index < 0 for standby in self._standbys):
            placed = self._elsewhere(servers)
            assert placed is not None, "lonely() says so before"
            for index, number in enumerate(placed):
                standby = self._standbys[number]
                del self._registered[standby.register]
                standby.register = replace(standby.register, index=index)
                self._registered[standby.register] = standby
        for standby in self._standbys:
            standby.rank = standby.register.index

    def _elsewhere(self, servers: Sequence[Member]) -> list[int] | None:
        """The number of each server's standby: on another machine, else in another container (network) of one, else of another launcher."""
        for place in (_machine, _network, _launcher):
            if (found := elsewhere([place(m) for m in servers], [place(m) for m in self._standbys])) is not None:
                return found
        return None

    def lonely(self) -> str | None:
        """Why some server cannot have a standby elsewhere, or None. Everyone must have registered."""
        if not self.replicas or self._elsewhere(self._server_members) is not None:
            return None
        place, most = Counter(map(_launcher, self._server_members)).most_common(1)[0]
        one = next(member for member in self._server_members if _launcher(member) == place).register
        return (
            f"PSGC_REPLICAS=1, but {most} of {self.servers} servers are of one launcher (pid {one.launcher} on {one.hostname}): what they keep cannot "
            f"all be kept elsewhere; start at most half of the servers on one machine, or leave it at 0"
        )

    @property
    def at_one(self) -> bool:
        """Whether some server's standby is on its machine, though in another container or of another launcher."""
        servers = {member.rank: member for member in self._server_members}
        return any(_machine(standby) == _machine(servers[standby.rank]) for standby in self._standbys)

    def _tell_addresses(self) -> int:
        """Make what every member is told of all others. Returns the number of workers."""
        workers, servers = sorted(self._workers, key=lambda m: m.rank), sorted(self._server_members, key=lambda m: m.rank)
        addresses = tuple(ServerAddress(m.rank, r.host, r.address, r.local_address, r.more) for m in servers for r in (m.register,))
        nodes = [next(iter(self._present[node].values())).register for node in range(self.nodes)]
        sizes = tuple(len(self._present[node]) for node in range(self.nodes))
        roots, switches = tuple(node.roots for node in nodes), tuple(node.switch for node in nodes)
        self.ranks = Ranks(sizes, roots if any(roots) else (), switches if any(switches) else ())
        names = tuple(f"{m.register.node}.{m.register.local_rank}@{m.register.hostname}" for m in workers)
        host, pid, started = self._scheduler
        topology = Topology(
            0, len(workers), self.nodes, sizes, self._epoch, addresses, names, "", host, pid, started,
            tuple(",".join(map(str, of_node)) for of_node in self.ranks.roots), self.ranks.switches,
        )  # fmt: skip
        self._topology = encode_body({name: value for name, value in plain(topology).items() if name not in OF_RECEIVER})
        return len(workers)

    def machines(self) -> Machines:
        """Which machine each server and each worker is on. Everyone must have a rank. Containers of one machine that have networks of their own
        count as machines of their own."""
        servers = sorted(self._server_members, key=lambda member: member.rank)
        return Machines.of_hosts([_network(m) for m in servers], [_network(m) for m in self._workers], self.nodes)

    def topology(self, member: Member, key: bytes, layouts: int = 0, returns: bool = False) -> bytes:
        """The body of the TOPOLOGY message to ``member``. Everyone must have a rank. key: of the member's payload connections. The fields that are equal for
        all are encoded once, because they name every member. layouts, returns: as in Topology."""
        assert self._topology, "number() comes first"
        more: dict[str, int | str] = {
            "layouts": layouts, "incarnation": member.generation if member.generation > 1 else 0, "returns": returns,
            "stands_by": member.register.standby, "standby": self._standby_address(member),
        }  # fmt: skip
        own = encode_body({"rank": member.rank, "key": key.hex(), **{name: value for name, value in more.items() if value}})
        return own[:-1] + b"," + self._topology[1:]

    def _standby_address(self, server: Member) -> str:
        if server.register.role == "worker" or server.register.standby:
            return ""
        standby = self.standby_of(server.rank)
        return "" if standby is None else standby.register.address


def _inside(register: Register) -> str:
    """The reduction roots and the switch size that a worker announces for its node."""
    roots = ",".join(map(str, register.roots)) or "unset"
    return f"BYTEPS_REDUCE_ROOTS {roots} and BYTEPS_PCIE_SWITCH_SIZE {register.switch or 'unset'}"


def _on_loss(register: Register) -> str:
    """The PSGC_ON_WORKER_LOSS that a worker announces."""
    return "wait" if register.waits else "shrink" if register.shrinks else "stop"


def _process(register: Register) -> tuple[str, int, int]:
    return register.host, register.pid, register.pid_started


def _launcher(member: Member) -> str:
    return f"{_network(member)}/{member.register.launcher}"


def _machine(member: Member) -> str:
    """Names the machine by its boot id, which containers of one have in common."""
    return member.register.host.split("/")[0]


def _network(member: Member) -> str:
    """Names the network interfaces that the member uses: of its machine, in its network namespace."""
    return "/".join(member.register.host.split("/")[:2])
