"""Members of a simulated job: the real state machines, with memory, pools and a trainer played around them.

What a pool would do takes random time and is checked: nobody may write what another still reads, or read what is being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from sim_network import TORN, Client, Host, Link, Ref, read
from sim_oracle import Outcome, name_of_residual, name_of_result, payload_of

from psgc import __version__
from psgc.config import Config
from psgc.layout import Declaration, Layout
from psgc.scheduler.actions import End, Send
from psgc.scheduler.membership import Membership
from psgc.server import state as server_state
from psgc.server.state import Commit, Effect, Fault, Fold, ServerState, specs_of
from psgc.server.step import NO_SLOT, Result
from psgc.wire.frames import SERVER_SENDER, UNASSIGNED_SENDER, Flag, Header, Kind
from psgc.wire.messages import Hello, Notice, Register, Topology, decode_body, decode_json, encode_body
from psgc.worker import client as worker_client
from psgc.worker.client import Decode, Encode, Failed, Greet, Transmit
from psgc.worker.coordinator import Coordinator

if TYPE_CHECKING:
    from simulation import World

PAYLOAD_BYTES = 100_000
HEARTBEAT_S = 1.0
WORKER_TICK_S = 0.25


class WrongError(AssertionError):
    """The simulated job did what must never happen."""


def check(holds: bool, what: Callable[[], str]) -> None:
    if not holds:
        raise WrongError(what())


class SimScheduler:
    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self.world, self.clock = world, world.clock
        self.state = Membership(scenario.workers, scenario.servers, world.job, world.token, self.clock.now)
        self.host = Host(self._hear, lambda _: None)
        self.ended: End | None = None
        self._peers: dict[bytes, Any] = {}
        self._names: dict[Any, bytes] = {}
        self.clock.after(HEARTBEAT_S, self._tick)

    def _hear(self, peer: Any, header: Header, body: Any) -> None:
        name = self._names.setdefault(peer, b"%d" % len(self._names))
        self._peers[name] = peer
        self._apply(self.state.receive(name, header, body or b"", self.clock.now))

    def _tick(self) -> None:
        self._apply(self.state.tick(self.clock.now))
        self.clock.after(HEARTBEAT_S, self._tick)

    def _apply(self, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                peer = self._peers[action.peer]
                refuses = action.header.kind in (Kind.ABORT, Kind.ERROR) and isinstance(peer, Link)
                check(not refuses, lambda text=action.body: f"the scheduler says {text!r}")
                peer.reply(action.header, action.body)
            elif isinstance(action, End):
                self.ended = self.ended or action


class SimServer:
    """What server/loop.py does around ServerState, with named results in place of memory."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.rng
        self.index = index
        self.state: ServerState | None = None
        self.host = Host(self._hear_worker, self._lost)
        self.slots: dict[tuple[int, int], Any] = {}
        self.committed: dict[int, Result] = {}
        self.residuals: dict[int, Any] = {}
        self.ended = False
        self._pending: dict[int, Any] = {}  # residuals written with a result that is not committed yet
        self._blocks: dict[int, list[Any]] = {}
        self._early: list[tuple[Any, Header, Any]] = []
        self._preparing: set[int] = set()
        self.link = Link(world.network, Client(self._up, lambda: None, self._hear_scheduler), world.scheduler.host, local=False)
        self.clock.after(HEARTBEAT_S * self.rng.random(), self._tick)

    # the scheduler

    def _up(self) -> None:
        if self.state is None:
            self._register()

    def _register(self) -> None:
        scenario = self.world.scenario
        body = Register(
            "server", self.world.token, __version__, "host", "host", 1000 + self.index, 1, scenario.workers, scenario.servers,
            index=self.index, address=f"s{self.index}",
        )  # fmt: skip
        self._say(Kind.REGISTER, encode_body(body))

    def _say(self, kind: Kind, body: bytes = b"", plan: int = 0) -> None:
        sender = UNASSIGNED_SENDER if self.state is None else SERVER_SENDER + self.index
        self.link.send(Header(kind, job=self.world.job, plan=plan, sender=sender, payload_bytes=len(body)), body)

    def _hear_scheduler(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.TOPOLOGY and self.state is None:
            topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
            scenario = self.world.scenario
            self.state = ServerState(
                topology.rank, topology.size, self.world.job, topology.epoch, self.world.token, scenario.window_bytes
            )  # fmt: skip
            early, self._early = self._early, []
            for message in early:
                self._hear_worker(*message)
        elif header.kind == Kind.KEYS and self.state is not None:
            self._prepare(Layout.from_json(body))
        elif header.kind == Kind.BYE and not self.ended:
            self.ended = True
            self._say(Kind.BYE)

    def _prepare(self, layout: Layout) -> None:
        """Kernels are loaded in a pool thread; then the layout is added."""
        assert self.state is not None
        if layout.id in self.state.windows:
            self._say(Kind.KEYS_READY, plan=layout.id)
        elif layout.id not in self._preparing:
            self._preparing.add(layout.id)
            self.clock.after(10 * self.world.work_time(), self._add, layout)

    def _add(self, layout: Layout) -> None:
        assert self.state is not None
        specs, costs = specs_of(layout, self.index, self.state.workers)
        self.world.oracle.know(layout, specs)
        self._apply(self.state.register(layout, specs, costs))
        self._say(Kind.KEYS_READY, plan=layout.id)

    def _tick(self) -> None:
        if self.ended:
            return
        if self.state is None:
            self._register()
        else:
            faults = self.state.tick(self.clock.now)[1]
            check(not faults, lambda: f"server {self.index}: {faults}")
            self._say(Kind.HEARTBEAT)
        self.clock.after(HEARTBEAT_S, self._tick)

    # the workers

    def _hear_worker(self, peer: Any, header: Header, payload: Any) -> None:
        if self.state is None:
            self._early.append((peer, header, payload))
            return
        self._apply(self.state.receive(peer, header, payload, self.clock.now))
        if self.world.scenario.window_bytes < 1 << 30:
            self._check_room()

    def _lost(self, peer: Any) -> None:
        if self.state is not None:
            self.state.lost(peer)

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, server_state.Send):
                self._send(effect)
            elif isinstance(effect, Fold):
                self._begin_fold(effect)
            elif isinstance(effect, Commit):
                self._commit(effect)
            else:
                assert isinstance(effect, Fault)
                raise WrongError(f"server {self.index} ends the job: {effect.text}")

    def _send(self, send: server_state.Send) -> None:
        header, payload = send.header, send.body or None
        if header.kind == Kind.RESULT:
            kept = self.committed.get(header.key)
            check(kept is not None and kept.step == header.step, lambda: f"server {self.index}: {header} is sent, what it keeps is {kept}")
            assert kept is not None
            check(kept.slot == (NO_SLOT if send.result_slot is None else send.result_slot), lambda: f"{send} is not of {kept}")
            if send.result_slot is not None:
                payload = Ref(self.slots, (header.key, send.result_slot))
        send.peer.reply(header, payload)  # type: ignore[attr-defined]

    def _commit(self, commit: Commit) -> None:
        result = commit.result
        if result.slot != NO_SLOT:
            check(self.slots[commit.key, result.slot] != TORN, lambda: f"{commit} while its slot is being written")
        if commit.residual:
            self.residuals[commit.key] = self._pending.pop(commit.key)
        self.committed[commit.key] = result

    def _begin_fold(self, fold: Fold) -> None:
        """The engine: reads its inputs when it begins and once more when it ends, and must find the same."""
        if fold.last:
            self.slots[fold.key, fold.slot] = TORN
        self.clock.after(self.world.work_time(), self._end_fold, fold, self._inputs(fold))

    def _inputs(self, fold: Fold) -> Any:
        owed = None if fold.add_back == NO_SLOT else self.slots[fold.key, fold.add_back]
        return [read(payload) for payload in fold.payloads], owed, self.residuals.get(fold.key)

    def _end_fold(self, fold: Fold, inputs: Any) -> None:
        assert self.state is not None
        check(inputs == self._inputs(fold), lambda: f"server {self.index}: what {fold} reads changes under it: {inputs}")
        payloads, owed, residual = inputs
        check(TORN not in (*payloads, owed), lambda: f"server {self.index}: {fold} reads what is being written: {inputs}")
        blocks = self._blocks.setdefault(fold.key, [])
        if fold.fresh:
            blocks.clear()
        if payloads:
            blocks.append(tuple(payloads))
        nonfinite = False
        if fold.last:
            nonfinite = self.world.oracle.overflows(fold.key, fold.step)
            self.slots[fold.key, fold.slot] = self._result(fold, tuple(blocks), owed, residual)
            blocks.clear()
        self._apply(self.state.folded(fold.key, fold.last, PAYLOAD_BYTES, nonfinite, fold.slot, self.clock.now))

    def _result(self, fold: Fold, tree: Any, owed: Any, residual: Any) -> Any:
        assert self.state is not None
        spec = self.state.keys[fold.key].state.spec
        if spec.root is not None:
            return tree[0][0]
        name = name_of_result(fold.key, fold.step)
        if not spec.pull_feedback:
            return (*name, tree)
        self._pending[fold.key] = name_of_residual(fold.key, fold.step)
        return (*name, tree, residual, None if owed is None else owed[:3], fold.rescale)

    def _check_room(self) -> None:
        """A plan's contributions never take more room than there is, or than one key's."""
        assert self.state is not None
        for layout, window in self.state.windows.items():
            entries = [e for e in self.state.keys.values() if e.state.spec.layout == layout]
            held = [sum(c.payload is not None for c in e.state.contributions.values()) for e in entries]
            room = sum(n * window._costs[e.part] // self.state.workers for n, e in zip(held, entries, strict=True))
            most = max(window._budget, *window._costs) if window._costs else 0
            check(room <= most, lambda: f"server {self.index}: holds {room} bytes of a plan, has room for {most}")  # noqa: B023


class Ticket:
    """Something a trainer waits for. ``set`` as a barrier's event has it."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.done = worker, False

    def set(self) -> None:
        self.done = True
        self.worker.finished(self)


class _Bucket:
    def __init__(self, layout: Layout, index: int) -> None:
        self.layout, self.bucket = layout, layout.buckets[index]
        self.waiting: deque[Ticket] = deque()
        self.current: Ticket | None = None
        self.step = self.left = 0


class SimWorker:
    """What worker/network.py does around Client and Coordinator, with named payloads, and a trainer that follows a script."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.rng
        self.node = node
        self.layouts: dict[str, Layout] = {}
        self.client: worker_client.Client | None = None
        self.links: list[Link] = []
        self.slots: dict[int, Any] = {}
        self.results = 0
        self.ended = False
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._by_key: dict[int, _Bucket] = {}
        self._open: set[Ticket] = set()
        self._script: Generator[float | list[Ticket], None, None] = iter(())  # type: ignore[assignment]
        scenario = world.scenario
        config = Config(
            nodes=scenario.workers,
            servers=scenario.servers,
            root_host="scheduler",
            root_port=1,
            node=node,
            job=world.job,
            token=world.token,
        )
        self.dealer = SimDealer(self)
        self.coordinator = Coordinator(self.dealer, config, self)  # type: ignore[arg-type]
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
            ears = Client(lambda s=server: self._up(s), lambda s=server: self._down(s), lambda h, p, s=server: self._hear(s, h, p))
            self.links.append(Link(self.world.network, ears, self.world.servers[server].host, self.rng.random() < scenario.local))
        self._script = self.world.script(self)
        self._resume()

    def laid_out(self, layout: Layout) -> None:
        assert self.client is not None
        for bucket in layout.buckets:
            running = self._buckets[layout.id, bucket.index] = _Bucket(layout, bucket.index)
            for part in bucket.parts:
                self._by_key[part.key] = running
        self.client.add_layout(layout, self.world.push_codecs(layout))
        self.layouts[layout.name] = layout

    def failed(self, text: str) -> None:
        raise WrongError(f"worker {self.node} failed: {text}")

    # servers

    def _up(self, server: int) -> None:
        assert self.client is not None
        self._apply(self.client.connected(server, self.clock.now))

    def _down(self, server: int) -> None:
        assert self.client is not None
        self.client.disconnected(server)

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
            self._apply(self.client.tick(self.clock.now)[0])
        self.clock.after(WORKER_TICK_S, self._tick)

    def _apply(self, actions: Iterable[worker_client.Action]) -> None:
        for action in actions:
            if isinstance(action, Transmit):
                self._transmit(action)
            elif isinstance(action, Encode):
                self.slots[action.key] = TORN
                self.clock.after(self.world.work_time(), self._encoded, action)
            elif isinstance(action, Decode):
                self.clock.after(self.world.work_time(), self._decoded, action, read(action.payload))
            elif isinstance(action, Greet):
                body = encode_body(Hello(self.world.token, self.node, "host"))
                self.links[action.server].send(Header(Kind.HELLO, job=self.world.job, sender=self.node, payload_bytes=len(body)), body)
            elif isinstance(action, Failed):
                self.failed(action.text)

    def _transmit(self, action: Transmit) -> None:
        assert self.client is not None
        limit, server = self.client.credit_parts, self.client.servers[action.server]
        if limit > 0 and action.header.kind == Kind.PUSH:
            check(server.parts_in_flight <= limit, lambda: f"worker {self.node}: {server.parts_in_flight} parts in flight, credit {limit}")
        self.links[action.server].send(action.header, Ref(self.slots, action.header.key) if action.payload else None)

    # pools

    def _encoded(self, action: Encode) -> None:
        assert self.client is not None
        running = self._by_key[action.key]
        number = action.key & 0xFFFFFF
        word = self.world.oracle.word(running.layout, running.bucket.index, running.step)
        check(running.step == action.step, lambda: f"worker {self.node}: {action} in step {running.step} of its bucket")
        self.slots[action.key] = payload_of(action.key, action.step, self.node)
        self._apply(self.client.encoded(action.key, PAYLOAD_BYTES, self.node in word.poisoned[number], self.clock.now))

    def _decoded(self, action: Decode, payload: Any) -> None:
        """The pool read the result when it began and reads it again when it ends, and must find the same, and the right one."""
        assert self.client is not None
        running = self._by_key[action.key]
        wanted = self.world.oracle.outcome(action.key, action.step)
        got = Outcome(action.flags, wanted.contributors, payload)
        check(got == wanted, lambda: f"worker {self.node}, key {action.key:#x}, step {action.step}: got {got}, right is {wanted}")
        check(read(action.payload) == payload, lambda: f"worker {self.node}: the result of {action} changes under it")
        word = self.world.oracle.word(running.layout, running.bucket.index, action.step)
        own = self.node not in word.skipping and self.node not in word.poisoned[action.key & 0xFFFFFF]
        check(action.own == own, lambda: f"worker {self.node}: {action} says own={action.own}")
        self.results += 1
        self.world.progress()
        self._apply(self.client.decoded(action.key, self.clock.now))
        running.left -= 1
        if running.left == 0:
            assert running.current is not None
            ticket, running.current = running.current, None
            ticket.set()
            if running.waiting and running.current is None:
                self._begin(running)

    # the trainer

    def submit(self, layout: Layout, bucket: int) -> Ticket:
        """The bucket's next step; what this rank says of it is the oracle's."""
        ticket = Ticket(self)
        running = self._buckets[layout.id, bucket]
        running.waiting.append(ticket)
        if running.current is None:
            self._begin(running)
        return ticket

    def declare(self, declaration: Declaration) -> Ticket:
        ticket = Ticket(self)
        self.coordinator.declare(declaration, lambda _: ticket.set())
        return ticket

    def submit_named(self, declaration: Declaration) -> Ticket:
        """Declare at first use, then submit, without waiting in between."""
        ticket = Ticket(self)
        self.coordinator.declare(declaration, lambda layout: self._chain(self.submit(layout, 0), ticket))
        return ticket

    def barrier(self, number: int) -> Ticket:
        ticket = Ticket(self)
        self.coordinator.barrier(number, ticket)  # type: ignore[arg-type]
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
        assert self.client is not None
        running.current = running.waiting.popleft()
        running.step += 1
        running.left = len(running.bucket.parts)
        word = self.world.oracle.word(running.layout, running.bucket.index, running.step)
        for part in running.bucket.parts:
            if part.round == 0:
                skip = self.node in word.skipping
                self._apply(
                    self.client.submit(part.key, self.clock.now, skip=skip, previous_skipped=word.previous_skipped, rescale=word.rescale)
                )


class SimDealer:
    """What the coordinator takes for its connection to the scheduler."""

    socket, monitor = "socket", "monitor"

    def __init__(self, worker: SimWorker) -> None:
        self.worker = worker
        self._heard: list[tuple[Header, Any]] = []
        self._events: list[str] = []

    def connect(self) -> None:
        world = self.worker.world
        ears = Client(lambda: self._event("up"), lambda: self._event("down"), self._hear)
        self.link = Link(world.network, ears, world.scheduler.host, local=False)

    def send(self, header: Header, payload: Any = None) -> None:
        self.link.send(header, payload)

    def receive(self) -> list[tuple[Header, Any]]:
        heard, self._heard = self._heard, []
        return heard

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


__all__ = ["Flag", "SimScheduler", "SimServer", "SimWorker", "WrongError"]
