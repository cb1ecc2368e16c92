"""A worker of a simulated job: the real state machines, and a trainer played around them that follows a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from sim_link import Client, ControlLine, HostSocket, Line, SimLink, SimSocket
from sim_members import DATA_KEY, WrongError, check
from sim_network import TORN, Place, read
from sim_oracle import Outcome, payload_of

from psgc.config import Config
from psgc.layout import Declaration, Layout
from psgc.transport.security.handshake import WorkerProof, worker_key
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import Notice, Topology, decode_body
from psgc.worker import client as worker_client
from psgc.worker.client import Failed, Greet, Measured, Result, Transferred, Transmit
from psgc.worker.coordinator import Coordinator
from psgc.worker.membership import Membership
from psgc.worker.residuals.transfers import Transfer

if TYPE_CHECKING:
    from simulation import World

WORKER_TICK_S = 0.25


class Ticket:
    """Something a trainer waits for. ``set`` as a barrier's event has it."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.done = worker, False

    def set(self) -> None:
        self.done = True
        self.worker.finished(self)


class _Bucket:
    def __init__(self, layout: Layout, index: int, rank: int) -> None:
        self.layout, self.bucket = layout, layout.buckets[index]
        self.parts = [part for part in self.bucket.parts if rank in (part.contributors or range(layout.workers))]
        self.waiting: deque[Ticket] = deque()
        self.current: Ticket | None = None
        self.step = self.left = 0


class SimWorker:
    """What worker/network.py does around Client and Coordinator, with named payloads, and a trainer that follows a script."""

    def __init__(self, world: World, node: int, incarnation: int = 0) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.rng
        self.node = node
        self.membership = Membership()
        self.layouts: dict[str, Layout] = {}  # as servers see them
        self.client: worker_client.Client | None = None
        self.links: list[Line] = []
        self.slots: dict[int, Any] = {}
        self.results = self.residuals = 0
        self.ended = False
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._by_key: dict[int, _Bucket] = {}
        self._open: set[Ticket] = set()
        self._script: Generator[float | list[Ticket], None, None] = iter(())  # type: ignore[assignment]
        scenario = world.scenario
        place = world.places[node]
        config = Config(
            nodes=len(scenario.nodes),
            servers=scenario.servers,
            root_host="scheduler",
            root_port=1,
            node=place[0],
            local_rank=place[1],
            local_size=scenario.nodes[place[0]],
            job=world.job,
            token=world.token,
            incarnation=incarnation,
            on_worker_loss=world.on_worker_loss,
        )
        self.dealer = SimDealer(self)
        self.coordinator = Coordinator(self.dealer, config, self.membership, self)  # type: ignore[arg-type]
        self.dealer.connect()
        self.clock.after(WORKER_TICK_S * self.rng.random(), self._tick)

    # what the coordinator tells its owner

    def joined(self, topology: Topology) -> None:
        scenario = self.world.scenario
        self.client = worker_client.Client(
            topology.rank, self.world.job, topology.epoch, len(topology.servers), scenario.credit_bytes, scenario.credit_parts
        )  # fmt: skip
        check(topology.rank == self.node, lambda: f"node {self.node} got rank {topology.rank}")
        for server in range(len(topology.servers)):
            ears = Client(
                lambda s=server: self._up(s), lambda s=server: self._down(s), lambda link, s=server: self._ready(s, link),
                lambda unsent, s=server: self._departed(s, unsent), lambda s=server: self._proof(s),
            )  # fmt: skip
            local = self.rng.random() < scenario.local
            ends = (SimLink, SimLink) if local else (SimSocket, HostSocket)
            self.links.append(Line(self.world.network, ears, self.world.servers[server].host, ends))
        self._script = self.world.script(self)

    def moved(self, topology: Topology) -> None:
        raise WrongError(f"worker {self.node} hears that servers have moved: {topology.servers}")

    def laid_out(self, layout: Layout) -> None:
        assert self.client is not None
        layout = layout.served
        for bucket in layout.buckets:
            running = self._buckets[layout.id, bucket.index] = _Bucket(layout, bucket.index, self.node)
            for part in bucket.parts:
                self._by_key[part.key] = running
        self.client.add_layout(layout, self.world.push_codecs(layout))
        self.layouts[layout.name] = layout

    def failed(self, text: str, cut_off: bool = False) -> None:
        raise WrongError(f"worker {self.node} failed: {text}")

    # servers

    def _up(self, server: int) -> None:
        assert self.client is not None
        self._apply(self.client.connected(server, self.clock.now, queues=self.links[server].queues))

    def _down(self, server: int) -> None:
        assert self.client is not None
        self.client.disconnected(server)

    def _departed(self, server: int, unsent: int) -> None:
        assert self.client is not None
        self._apply(self.client.departed(server, unsent, self.clock.now))

    def _proof(self, server: int) -> WorkerProof:
        assert self.client is not None
        rank, epoch = self.client.rank, self.client.epoch
        return WorkerProof("sim", server, epoch, rank, worker_key(DATA_KEY, rank, epoch), "host", self.world.nonce())

    def _ready(self, server: int, link: SimLink) -> None:
        for header, payload in link.receive():
            self._hear(server, header, payload)

    def _hear(self, server: int, header: Header, payload: Any) -> None:
        assert self.client is not None
        if header.kind == Kind.ERROR:
            check(not self._fatal(payload), lambda: f"worker {self.node} hears {bytes(payload)!r} from server {server}")
        if header.kind == Kind.RESULT:
            wanted = self.world.oracle.outcome(header.key, header.step).contributors
            check(header.contributors == wanted, lambda: f"worker {self.node}: {header} has not {wanted} contributors")
        self._apply(self.client.receive(server, header, payload, self.clock.now))

    def _fatal(self, payload: Any) -> bool:
        return decode_body(Notice, payload).code not in self.world.scenario.expected_errors

    def _tick(self) -> None:
        if self.ended:
            return
        self.coordinator.tick(self.clock.now)
        if self.client is not None:
            self.client.tick(self.clock.now)
        self.clock.after(WORKER_TICK_S, self._tick)

    def _apply(self, actions: Iterable[worker_client.Action]) -> None:
        for action in actions:
            if isinstance(action, Transmit):
                self._transmit(action)
            elif isinstance(action, Result):
                self.clock.after(self.decode_time(), self._decoded, action, read(action.payload))
            elif isinstance(action, Greet):
                assert self.client is not None
                hello = Header(Kind.HELLO, job=self.world.job, epoch=self.client.epoch, step=self.client.incarnation, sender=self.node)
                self.links[action.server].send(hello)
            elif isinstance(action, Transferred):
                self._transferred(action.transfer)
            elif isinstance(action, Measured):
                self._resume()
            elif isinstance(action, Failed):
                self.failed(action.text)

    def _transmit(self, action: Transmit) -> None:
        assert self.client is not None
        limit, server = self.world.scenario.credit_parts, self.client.servers[action.server].sending
        if limit > 0 and action.header.kind == Kind.PUSH:
            check(server.parts_in_flight <= limit, lambda: f"worker {self.node}: {server.parts_in_flight} parts in flight, credit {limit}")
        if action.payload and self.links[action.server].queues:
            check(server.unsent <= 2, lambda: f"worker {self.node}: {server.unsent} payloads wait in a connection's queue")
        self.links[action.server].send(action.header, action.body, Place(self.slots, action.header.key) if action.payload else None)

    def _transferred(self, transfer: Transfer) -> None:
        if transfer.kind is Kind.RESIDUAL:
            wanted = self.world.oracle.kept(transfer.key, transfer.step, bool(transfer.flags & Flag.PREVIOUS_SKIPPED))
            got = (transfer.answer, transfer.rescale)
            check(got == wanted, lambda: f"worker {self.node} hears that the residual of {transfer} is {got}, right is {wanted}")
            self.residuals += 1
        self.world.progress()
        transfer.owner[0] -= 1
        if transfer.owner[0] == 0:
            transfer.owner[1].set()

    # pools

    def decode_time(self) -> float:
        return self.world.work_time()

    def _encoded(self, running: _Bucket, key: int) -> None:
        self.slots[key] = payload_of(key, running.step, self.node)
        self._submit(running, key, False)

    def _submit(self, running: _Bucket, key: int, skip: bool) -> None:
        assert self.client is not None
        word = self.world.oracle.word(running.layout, running.bucket.index, running.step)
        poisoned = not skip and self.node in word.poisoned[self.world.oracle.number(key)]
        nbytes = 0 if skip else self.world.sizes[key][0]
        flags = {"previous_skipped": word.previous_skipped, "rescale": word.rescale}
        self._apply(self.client.submit(key, self.clock.now, nbytes, nonfinite=poisoned, skip=skip, **flags))
        check(
            self.client.parts[key].step == running.step,
            lambda: f"worker {self.node}: key {key:#x} is not in step {running.step} of its bucket",
        )

    def _round(self, running: _Bucket, key: int) -> None:
        """Begin a round of a slice: encode, unless this rank skips."""
        if self.node in self.world.oracle.word(running.layout, running.bucket.index, running.step).skipping:
            self._submit(running, key, True)
            return
        self.slots[key] = TORN
        self.clock.after(self.world.work_time(), self._encoded, running, key)

    def _decoded(self, action: Result, payload: Any) -> None:
        """The pool read the result when it began and reads it again when it ends, and must find the same, and the right one."""
        assert self.client is not None
        running = self._by_key[action.key]
        wanted = self.world.oracle.outcome(action.key, action.step)
        got = Outcome(action.flags, wanted.contributors, payload)
        check(got == wanted, lambda: f"worker {self.node}, key {action.key:#x}, step {action.step}: got {got}, right is {wanted}")
        check(read(action.payload) == payload, lambda: f"worker {self.node}: the result of {action} changes under it")
        self.results += 1
        self.world.progress()
        self.client.taken(action.key)
        running.left -= 1
        after = next((part for part, last in zip(running.parts[1:], running.parts, strict=False) if last.key == action.key), None)
        if running.left == 0:
            self._through(running)
        elif after is not None and after.round:
            self._round(running, after.key)

    def _through(self, running: _Bucket) -> None:
        assert running.current is not None
        ticket, running.current = running.current, None
        ticket.set()
        if running.waiting and running.current is None:
            self._begin(running)

    # the trainer

    def submit(self, layout: Layout, bucket: int) -> Ticket:
        """The bucket's next step; what this rank says of it is the oracle's."""
        self.world.begin_cuts()
        ticket = Ticket(self)
        running = self._buckets[layout.id, bucket]
        running.waiting.append(ticket)
        if running.current is None:
            self._begin(running)
        return ticket

    def declare(self, declaration: Declaration) -> Ticket:
        ticket = Ticket(self)
        assert self.client is not None
        self.coordinator.declare(declaration, lambda _: ticket.set(), self.client.speed)
        return ticket

    def submit_named(self, declaration: Declaration) -> Ticket:
        """Declare at first use, then submit, without waiting in between."""
        ticket = Ticket(self)
        assert self.client is not None
        self.coordinator.declare(declaration, lambda layout: self._chain(self.submit(layout, 0), ticket), self.client.speed)
        return ticket

    def transfer(self, transfers: list[Transfer]) -> Ticket:
        """Residuals to and from their servers."""
        assert self.client is not None
        self.world.begin_cuts()
        ticket = Ticket(self)
        left = [len(transfers), ticket]
        for transfer in transfers:
            transfer.owner = left
        if transfers:
            self._apply(self.client.transfer(transfers, self.clock.now))
        else:
            ticket.done = True
        return ticket

    def barrier(self, number: int) -> Ticket:
        ticket = Ticket(self)
        self.coordinator.requests.barrier(number, ticket)  # type: ignore[arg-type]
        return ticket

    def publish(self) -> Ticket:
        """Tell where this rank is; done when the next rank's place is known, which must be the right one."""
        self.world.begin_cuts()
        ticket = Ticket(self)
        other = (self.node + 1) % self.world.scenario.workers
        wanted = b"place %d " % other * 3000

        def found(value: bytes) -> None:
            check(value == wanted, lambda: f"worker {self.node} looked up where worker {other} is and heard {value[:9]!r}")
            ticket.set()

        self.coordinator.requests.look_up(f"place {other}", found)
        self.clock.after(
            50 * self.world.work_time(), lambda: self.coordinator.requests.publish(f"place {self.node}", b"place %d " % self.node * 3000)
        )
        return ticket

    def leave(self) -> None:
        for link in self.links:
            link.send(Header(Kind.BYE, job=self.world.job, epoch=1, sender=self.node))
        self.coordinator.leave()

    def end(self) -> None:
        """The process is gone, in order."""
        self.ended = True
        for link in (*self.links, self.dealer.link):
            link.close()

    def finished(self, ticket: Ticket) -> None:
        for follower in self.world.followers.pop(ticket, ()):
            follower.set()
        if ticket in self._open:
            self._open.discard(ticket)
            if not self._open:
                self.clock.after(0.0, self._resume)

    def _chain(self, first: Ticket, then: Ticket) -> None:
        if first.done:
            then.set()
        else:
            self.world.followers.setdefault(first, []).append(then)

    def _resume(self) -> None:
        wanted = next(self._script, None)
        if wanted is None:
            return
        if isinstance(wanted, float):
            self.clock.after(wanted, self._resume)
            return
        self._open = {ticket for ticket in wanted if not ticket.done}
        if not self._open:
            self.clock.after(0.0, self._resume)

    def _begin(self, running: _Bucket) -> None:
        running.current = running.waiting.popleft()
        running.step += 1
        running.left = len(running.parts)
        if not running.parts:
            self._through(running)
        for part in running.parts:
            if part.round == 0:
                self._round(running, part.key)


class SimDealer:
    """What the coordinator takes for its connection to the scheduler."""

    socket, monitor = "socket", "monitor"

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._heard: list[tuple[Header, Any]] = []
        self._events: list[str] = []

    def connect(self) -> None:
        world = self.worker.world
        self.link = ControlLine(world.network, self._event, self._hear, world.scheduler.hear)

    def send(self, header: Header, payload: Any = None) -> None:
        self.link.send(header, payload)

    def receive(self) -> list[tuple[Header, Any]]:
        heard, self._heard = self._heard, []
        return heard

    def tick(self, now: float) -> None:
        """Nothing is given up here."""

    def turned_away(self, silent: bool = True) -> str:
        return ""

    def nobody_listens(self, now: float) -> bool:
        return False

    def events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    def _event(self, event: str) -> None:
        self._events.append(event)
        self.worker.coordinator.receive({self.monitor})

    def _hear(self, header: Header, payload: Any) -> None:
        self._heard.append((header, memoryview(payload) if payload else None))
        self.worker.coordinator.receive({self.socket})
        if self.worker.coordinator.left and not self.worker.ended:
            self.worker.end()
