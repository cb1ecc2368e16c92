"""Servers with standbys, and machines that are lost: what server/serving.py does with ``Held``, and as a standby, around the simulation's named memory.

What goes to the standby is read when it arrives there, as the kernel reads memory some time after it was told to send it: whoever writes it before is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from sim_link import Client, Host, HostSocket, Line, SimLink, SimSocket
from sim_members import DATA_KEY, EPOCH, SimServer, check
from sim_network import TORN, Place
from sim_worker import SimWorker
from simulation import Scenario, World

from psgc.layout import Layout
from psgc.scheduler.roster import Member
from psgc.server.held import Held
from psgc.server.replica import GO_ON, What
from psgc.server.state import Commit, Effect, Fold, Restore, specs_of
from psgc.server.step import NO_SLOT
from psgc.transport.security.handshake import ServerProof, WorkerProof, worker_key
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import Topology, decode_json

DEAD_S = 20.0
REPLICA_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses(Scenario):
    """lost: how many machines are lost, one after another, once steps are under way. standby_crashes: of standbys' processes, which others follow. aimed at
    "link": a connection to a standby is cut that carries something, and the server's machine is lost soon after that; at "process": the server's process
    ends then, and the machine is lost soon after the next one serves; at "sent": the connection is cut, and the machine is lost soon after another has
    brought all that is kept."""

    lost: int = 1
    lost_after_s: float = 0.1
    standby_crashes: int = 0
    aimed: str = ""


class _Copy(Place):
    """Everything that one message carries: of a key, the buffers by name, whose values are read when it arrives."""

    @property
    def bytes(self) -> Any:
        return {place: self.memory[place[0]].get(place[1]) for place in self.name[0]}, self.name[1]


class ReplicatedServer(SimServer):
    """Also as a standby, until it takes its server's place. machine: its number."""

    def __init__(self, world: World, index: int, standby: bool = False) -> None:
        assert isinstance(world, ReplicatedWorld)
        self.replicated, self.standby = world, standby
        self.number = index  # of its machine
        self.mirroring = False
        self.held: Held | None = None
        self._waits = False  # for GO_ON
        self._newest: ServerProof | None = None  # of the server's last connection
        self._adding: set[int] = set()  # keys of the layout that it is about to serve
        self._halves: dict[tuple[int, int], Any] = {}  # a residual's two buffers, as of the store's; which of them counts: ``_half``
        self._half: dict[int, int] = {}
        self.line: Line | None = None  # to its standby
        self.lost = False
        self.mirror_host = Host(self._ready_server, lambda _: None, self._server_proof)
        super().__init__(world, index)

    @property
    def machine(self) -> str:  # type: ignore[override]
        return f"machine{self.number}"

    @property
    def address(self) -> str:
        return f"{'b' if self.standby else 's'}{self.number}"

    def _begin(self) -> None:
        self.more = {"launcher": 1 + self.number}
        if self.standby:
            self.more |= {"standby": True, "lineage": 100 + self.number, "index": -1, "address": self.address}
            self.host.away = self.mirror_host.away = True
        self.mirroring, self.held, self._waits, self._adding = False, None, False, set()
        super()._begin()

    def crash(self) -> None:
        if self.line is not None:
            self.line.cut()
            self.line.close()
        self.mirror_host.away = True
        for line in [line for line in self.world.network.lines if isinstance(line, Line) and line.host is self.mirror_host]:
            line.cut()
        super().crash()

    def _follow(self) -> None:
        if not self.lost:
            super()._follow()

    def lose(self) -> None:
        """Its machine is lost, with all memory: nobody begins anything from that again."""
        self.lost = self.ended = True
        if not self.down:
            self.crash()

    def _tick(self) -> None:
        if self.mirroring:
            self._say(Kind.HEARTBEAT)
            self._after(1.0, self._tick)
        else:
            super()._tick()

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.BYE and self.mirroring:
            if not self.ended:
                self.ended = True
                self._say(Kind.BYE)
            return
        if header.kind != Kind.TOPOLOGY:
            super()._handle(header, body)
            return
        topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
        if topology.stands_by:
            if not self.mirroring:
                self.mirroring, self.index = True, topology.rank
                self.mirror_host.back()
            return
        if self.state is not None:
            if not topology.standby and self.held is not None:
                held, self.held = self.held, None
                super()._apply(held.let_go())
            return
        if self.standby:
            self.mirroring, self.mirror_host.away = False, True
            self.index = topology.rank
            self.replicated.servers[self.index] = self
        if topology.standby:
            self.held = Held()
            self._connect_standby(topology.standby)
        super()._handle(header, body)

    # as a server

    def _connect_standby(self, address: str) -> None:
        standby = self.replicated.by_address[address]
        incarnation = self.incarnation

        def mine() -> bool:
            return self.incarnation == incarnation and not self.down and self.held is not None

        def proof() -> WorkerProof:
            rank = self.world.scenario.workers
            return WorkerProof("sim", self.index, EPOCH, rank, worker_key(DATA_KEY, rank, EPOCH), "host", self.world.nonce())

        ears = Client(
            lambda: self._alive(self._standby_up) if mine() else None, lambda: self.held.disconnected() if mine() and self.held else None,
            lambda link: self._alive(self._hear_standby, link) if mine() else None, lambda _: None, proof,
        )  # fmt: skip
        self.line = Line(self.world.network, ears, standby.mirror_host, (SimSocket, HostSocket))

    def _standby_up(self) -> None:
        assert self.held is not None
        self.held.connected(self._known)
        self._feed()

    @property
    def _known(self) -> list[int]:
        """Keys that this process serves, and of which something is kept."""
        return [] if self.state is None else [key for key in {*self.committed, *self.kept} if key in self.state.keys or key in self._adding]

    def _feed(self) -> None:
        """One key, or none of them is left."""
        assert self.held is not None
        key = self.held.next_key()
        self._waits = key is not None
        if key is not None:
            self._replicate(key, True)
        self._mark(GO_ON if self._waits else self.held.all_sent())

    def _add(self, layout: Layout) -> None:
        assert self.state is not None
        if self.held is not None:
            self._adding = {spec.key for spec in specs_of(layout, self.index, self.state.workers)[0]}
            self._take_up([key for key in self._known if key in self._adding])
        super()._add(layout)
        self._adding = set()

    def _take_up(self, keys: list[int]) -> None:
        """A former process has kept these."""
        assert self.held is not None
        self.held.taken_up(keys)
        if self.held.connection and not self._waits:
            self._feed()

    def _replicate(self, key: int, everything: bool, commit: Commit | None = None) -> None:
        """Send what is named by the key's newest record, or what the commit has written, and the record."""
        assert self.line is not None
        kept, places = self.kept.get(key), []
        slot = commit.result.slot if commit is not None else kept.newest if kept is not None else NO_SLOT
        if slot != NO_SLOT:
            places.append(("slots", (key, slot)))
        if key in self.residuals and (commit is None or commit.residual):
            places.append(("residuals", (key, self._half.get(key, 0))))
        memory = {"slots": self.slots, "residuals": self._halves}
        header = Header(Kind.REPLICA, key=key, contributors=What.RECORD, payload_bytes=REPLICA_BYTES * len(places))
        self.line.send(header, None, _Copy(memory, (places, (self.committed.get(key), kept))))

    # of a residual two buffers, so that what is on its way to the standby stays until the next but one

    def _begin_fold(self, fold: Fold) -> None:
        if fold.last:
            self._halves[fold.key, 1 - self._half.get(fold.key, 0)] = TORN
        super()._begin_fold(fold)

    def _commit(self, commit: Commit) -> None:
        super()._commit(commit)
        if commit.residual:
            self._half[commit.key] = 1 - self._half.get(commit.key, 0)
            self._halves[commit.key, self._half[commit.key]] = self.residuals[commit.key]

    def _mark(self, mark: int) -> None:
        assert self.line is not None
        self.line.send(Header(Kind.REPLICA, contributors=What.MARK, step=mark))

    def _hear_standby(self, link: SimLink) -> None:
        for header, _ in link.receive():
            if self.held is None or self.line is None or not self.line.is_current(link):
                continue
            if header.step == GO_ON:
                self._feed()
            else:
                super()._apply(self.held.acknowledged(header.step))

    def _apply(self, effects: Iterable[Effect]) -> None:
        if self.held is None:
            super()._apply(effects)
            return
        for effect in effects:
            if self.held.holds(effect):
                continue
            super()._apply([effect])
            if isinstance(effect, Restore):
                self._halves[effect.key, self._half.get(effect.key, 0)] = self.residuals[effect.key]
            if isinstance(effect, Commit | Restore) and self.held is not None and (mark := self.held.committed(effect.key)) is not None:
                self._replicate(effect.key, False, effect if isinstance(effect, Commit) else None)
                self._mark(mark)

    # as a standby

    def _server_proof(self) -> ServerProof:
        workers = self.world.scenario.workers + 1
        proof = ServerProof("sim", self.index, EPOCH, workers, lambda rank: worker_key(DATA_KEY, rank, EPOCH), self.world.nonce())
        self._newest = proof
        return proof

    def _ready_server(self, link: SimLink) -> None:
        if self.down or not self.mirroring or link.proof is not self._newest:
            return  # of a connection that the server has given up, nothing is heard any more once it has another
        for header, payload in link.receive():
            if header.contributors == What.MARK:
                link.send(Header(Kind.ACK, step=header.step))
                continue
            values, (committed, kept) = payload
            check(
                TORN not in values.values(),
                lambda said=(header, values): f"the standby of server {self.index} gets what is being written: {said}",
            )
            for (memory, name), value in values.items():
                if memory == "slots":
                    self.slots[name] = value
                else:
                    self.residuals[header.key] = self._halves[name] = value
                    self._half[header.key] = name[1]
            if committed is not None:
                self.committed[header.key] = committed
            if kept is not None:
                self.kept[header.key] = kept


class MovingWorker(SimWorker):
    """A worker that is told where servers have moved."""

    def joined(self, topology: Topology) -> None:
        super().joined(topology)
        assert isinstance(self.world, ReplicatedWorld)
        self._addresses = [server.address for server in self.world.servers if isinstance(server, ReplicatedServer)]
        self._go_to(topology)

    def moved(self, topology: Topology) -> None:
        self._go_to(topology)

    def _go_to(self, topology: Topology) -> None:
        world = self.world
        assert isinstance(world, ReplicatedWorld) and self.client is not None
        for index, server in enumerate(topology.servers):
            if server.address != self._addresses[index]:
                self._addresses[index] = server.address
                former = self.links[index]
                former.cut()
                former.close()
                self.client.disconnected(index)
                self.links[index] = Line(world.network, former.client, world.by_address[server.address].host, (SimSocket, HostSocket))
                world.moves += 1


class ReplicatedWorld(World):
    """A World in which servers have standbys on each other's machines, and machines are lost."""

    scenario: Losses
    of_scheduler = {"replicas": True, "dead_s": DEAD_S}  # noqa: RUF012

    def __init__(self, scenario: Losses) -> None:
        self.moves = self.losses = 0
        self._losses_left, self._standby_crashes_left = scenario.lost, scenario.standby_crashes
        with patch("simulation.SimWorker", MovingWorker), patch("simulation.SimServer", ReplicatedServer):
            super().__init__(scenario)
        self.standbys = [ReplicatedServer(self, number, standby=True) for number in range(scenario.servers)]
        self.by_address: dict[str, ReplicatedServer] = {server.address: server for server in (*self.servers, *self.standbys)}  # type: ignore[attr-defined]
        self._stuck_s += 3 * DEAD_S

    def begin_cuts(self) -> None:
        if not self._cutting:
            if self.scenario.aimed:
                self.clock.after(self._until_loss(), self._aim)
            elif self._losses_left:
                self.clock.after(self._until_loss(), self._lose)
            if self._standby_crashes_left:
                self.clock.after(self._until_loss(), self._crash_standby)
        super().begin_cuts()

    def _until_loss(self) -> float:
        return self.scenario.lost_after_s * 2 * self.rng.random()

    def _aim(self) -> None:
        servers = [server for server in self.servers if isinstance(server, ReplicatedServer) and server.line is not None]
        for server in servers:
            if server.line is not None and server.line.busy and server.held is not None and server.held.up:
                if self.scenario.aimed == "process":
                    server.crash()
                else:
                    server.line.cut()
                if self.scenario.aimed != "link":
                    self.clock.after(self.scenario.weather.delay_s, self._lose_soon, server)
                else:
                    self.clock.after(self.scenario.weather.reconnect_s * (0.5 + 2 * self.rng.random()), self._lose, server)
                return
        self.clock.after(self.scenario.weather.delay_s * self.rng.random(), self._aim)

    def _lose_soon(self, server: ReplicatedServer) -> None:
        held = server.held
        is_so = not server.down and not server.host.away and (self.scenario.aimed == "process" or held is None or held.up)
        soon = self.scenario.weather.delay_s * self.rng.random()
        self.clock.after(10 * soon if is_so else soon, self._lose if is_so else self._lose_soon, server)

    def _lose(self, aimed: ReplicatedServer | None = None) -> None:
        """Of servers that were not moved yet, one's machine."""
        able = [server for server in self.servers if isinstance(server, ReplicatedServer) and not server.standby and not server.lost]
        able = [server for server in able if server is (aimed or server)]
        if not self._losses_left or not able or all(worker.coordinator.left for worker in self.workers):
            return
        if self.scheduler.state.agreements is None:  # a job that is not complete ends where a member dies
            self.clock.after(self._until_loss(), self._lose)
            return
        self._losses_left -= 1
        self.losses += 1
        victim = self.rng.choice(able)
        for process in (victim, self.standbys[victim.number]):
            process.lose()

    def _crash_standby(self) -> None:
        up = [standby for standby in self.standbys if standby.mirroring and not standby.down and not standby.lost and not standby.ended]
        if self._standby_crashes_left and up and not all(worker.coordinator.left for worker in self.workers):
            self._standby_crashes_left -= 1
            self.rng.choice(up).crash()
            self.clock.after(self._until_loss(), self._crash_standby)

    def standby_member(self, server: int) -> Member | None:
        return self.scheduler.state.roster.standby_of(server)
