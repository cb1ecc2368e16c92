"""The scheduler and the servers of a simulated job: the real state machines, with memory and pools played around them.

What a pool would do takes random time and is checked: nobody may write what another still reads, or read what is being written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sim_link import ControlLine, Host, Line, SimLink
from sim_network import TORN, Place, read
from sim_oracle import name_of_residual, name_of_restored, name_of_result, name_of_unit, restored_of

from psgc import __version__
from psgc.layout import Layout
from psgc.scheduler.actions import End, Keep, Send
from psgc.scheduler.membership import Membership
from psgc.scheduler.post import FIRST_EPOCH as EPOCH
from psgc.scheduler.records import Record, from_json, to_json
from psgc.server import state as server_state
from psgc.server.state import Commit, Effect, Fault, Fold, Restore, SendResidual, ServerState, specs_of
from psgc.server.step import NO_SLOT, KeepLate, Kept, Result
from psgc.transport.security.handshake import ServerProof, worker_key
from psgc.wire.frames import SERVER_SENDER, UNASSIGNED_SENDER, Header, Kind
from psgc.wire.messages import Register, Topology, decode_json, encode_body

if TYPE_CHECKING:
    from simulation import World

HEARTBEAT_S = 1.0
WRITTEN_ANEW = 0.02  # chance that a journal is written anew
DATA_KEY = bytes(32)


class WrongError(AssertionError):
    """The simulated job did what must never happen."""


def check(holds: bool, what: Callable[[], str]) -> None:
    if not holds:
        raise WrongError(what())


class SimScheduler:
    def __init__(self, world: World) -> None:
        self.world, self.clock = world, world.clock
        self.journal: list[bytes] = []  # outlives each process
        self.processes = 1
        self.state = self._begin()
        self.ended: End | None = None
        self._peers: dict[bytes, Any] = {}
        self._names: dict[Any, bytes] = {}
        self.clock.after(HEARTBEAT_S, self._tick)

    def _begin(self) -> Membership:
        """A process, which goes on from what the one before has written down."""
        scenario, now = self.world.scenario, self.clock.now
        state = Membership(len(scenario.nodes), scenario.servers, self.world.job, now, self.world.alive, **self.world.of_scheduler)
        state.resume(map(from_json, map(json.loads, self.journal)), now)
        self.journal = [_written(record) for record in state.records()]
        return state

    def crash(self) -> None:
        """The process ends. Its launcher starts another after a while; members' connections wait in the kernel until then."""
        network = self.world.network
        network.desk.leave()
        for line in [line for line in network.lines if isinstance(line, ControlLine)]:
            line.cut()
        self.clock.after(self.world.scenario.restart_s * 2 * self.world.rng.random(), self._follow)

    def _follow(self) -> None:
        self.processes += 1
        self.state = self._begin()
        self.world.network.desk.back()

    def hear(self, peer: Any, header: Header, body: Any) -> None:
        name = self._names.setdefault(peer, (b"" if isinstance(peer, ControlLine) else b"\0") + b"%d" % len(self._names))
        self._peers[name] = peer
        self._apply(self.state.receive(name, header, body or b"", self.clock.now))

    def _tick(self) -> None:
        if not self.world.network.desk.away:
            self._apply(self.state.tick(self.clock.now))
        self.clock.after(HEARTBEAT_S, self._tick)

    def _apply(self, actions: list[Any]) -> None:
        if self.world.scheduler_crashes_here():
            self.crash()
            return
        self.journal += [_written(action.record) for action in actions if isinstance(action, Keep)]
        if self.world.scenario.scheduler_crashes and self.world.rng.random() < WRITTEN_ANEW:
            self.journal = [_written(record) for record in self.state.records()]
        for action in actions:
            if self.world.scheduler_crashes_here():
                self.crash()
                return
            if isinstance(action, Send):
                peer = self._peers[action.peer]
                refuses = action.header.kind in (Kind.ABORT, Kind.ERROR) and isinstance(peer, ControlLine) and not peer.closed
                check(not refuses or self.world.may_say(action.body), lambda text=action.body: f"the scheduler says {text!r}")
                peer.reply(action.header, action.body)
            elif isinstance(action, End):
                self.ended = self.ended or action


def _written(record: Record) -> bytes:
    return json.dumps(to_json(record)).encode()


class CrashedError(Exception):
    """The server's process has ended in the middle of what it was doing."""


class SimServer:
    """What server/serving.py does around ServerState, with named results in place of memory. Its processes end, and others follow: ``slots``, ``committed``,
    ``before``, ``residuals``, ``kept`` and ``late`` are what the launcher keeps; everything else is a process's own."""

    machine = "host"

    def __init__(self, world: World, index: int) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.rng
        self.index = index
        self.more: dict[str, Any] = {}  # that it says of itself when it registers
        self.host = Host(self._ready, self._lost, self._proof)
        self.slots: dict[tuple[int, int], Any] = {}
        self.committed: dict[int, Result] = {}
        self.residuals: dict[int, Any] = {}
        self.kept: dict[int, Kept] = {}
        self.before: dict[int, Result] = {}  # results before those in ``committed``
        self.late: dict[tuple[int, int], Any] = {}  # by key and slot, payloads that came late
        self.ended = self.down = False
        self.incarnation = 0
        self._begin()

    def _begin(self) -> None:
        """Start a process."""
        self.incarnation += 1
        self.state: ServerState | None = None
        self._former_layouts = 0
        self._pending: dict[int, Any] = {}  # residuals written with a result that is not committed yet
        self._blocks: dict[int, list[Any]] = {}
        self._early: list[tuple[Any, Header, Any]] = []
        self._preparing: set[int] = set()
        self._proved: set[Any] = set()  # connections, each once
        self._proofs: list[ServerProof] = []  # of connections that this process has accepted
        self.control = ControlLine(self.world.network, self._event, self._hear_scheduler, self.world.scheduler.hear)
        self._after(HEARTBEAT_S * self.rng.random(), self._tick)

    def _after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """As the clock's, in this process: what a process has begun ends with it."""
        incarnation = self.incarnation

        def later() -> None:
            if self.incarnation == incarnation and not self.down:
                self._alive(call, *args)

        self.clock.after(delay, later)

    def _alive(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except CrashedError:
            self.crash()

    def crash(self) -> None:
        """The process ends. Its launcher starts another after a while; until that one lets workers in, their connections wait in the kernel."""
        self.down = self.host.away = True
        self.world.crashes += 1
        self.control.close()
        for line in [line for line in self.world.network.lines if isinstance(line, Line) and line.host is self.host]:
            line.cut()
        self.clock.after(self.world.scenario.restart_s * 2 * self.rng.random(), self._follow)

    def _follow(self) -> None:
        self.down = False
        self._begin()

    def _open_gate(self) -> None:
        if self.host.away and self.state is not None and self.state.serves(self._former_layouts):
            self.host.back()

    # the scheduler

    def _event(self, event: str) -> None:
        if event == "up" and not self.down:
            self._register()

    def _register(self) -> None:
        scenario = self.world.scenario
        fields: dict[str, Any] = {
            "pid": 1000 + self.index + 10 * self.incarnation, "index": self.index, "address": f"s{self.index}", "incarnation": self.incarnation,
            "lineage": 7 + self.index, **self.more,
        }  # fmt: skip
        body = Register(
            "server", __version__, self.machine, "host", pid_started=1, nodes=len(scenario.nodes), servers=scenario.servers, **fields
        )
        self._say(Kind.REGISTER, encode_body(body))

    def _say(self, kind: Kind, body: bytes = b"", plan: int = 0) -> None:
        sender = UNASSIGNED_SENDER if self.state is None else SERVER_SENDER + self.index
        self.control.send(Header(kind, job=self.world.job, plan=plan, sender=sender, payload_bytes=len(body)), body)

    def _hear_scheduler(self, header: Header, body: bytes) -> None:
        self._alive(self._handle, header, body)

    def _handle(self, header: Header, body: bytes) -> None:
        if header.kind == Kind.TOPOLOGY and self.state is None:
            topology = Topology.from_body(decode_json(body, "TOPOLOGY"))
            scenario = self.world.scenario
            self.state = ServerState(
                topology.rank, topology.size, self.world.job, topology.epoch, scenario.window_bytes
            )  # fmt: skip
            self._former_layouts = topology.layouts
            early, self._early = self._early, []
            for message in early:
                self._hear_worker(*message)
            self._open_gate()
        elif header.kind == Kind.HEARTBEAT and header.step == 2 and self.state is not None:
            self._apply(self.state.leave_out(header.plan, header.key, self.clock.now))
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
            self._after(10 * self.world.work_time(), self._add, layout)

    def _add(self, layout: Layout) -> None:
        assert self.state is not None
        specs, costs = specs_of(layout, self.index, self.state.workers)
        self.world.oracle.know(layout.served, specs)
        kept = {spec.key: self.kept[spec.key] for spec in specs if spec.key in self.kept}
        self._apply(self.state.register(layout, specs, costs, kept))
        self._say(Kind.KEYS_READY, plan=layout.id)
        self._open_gate()

    def _tick(self) -> None:
        if self.ended:
            return
        if self.state is None:
            self._register()
        else:
            faults = self.state.tick(self.clock.now)[1]
            check(not faults, lambda: f"server {self.index}: {faults}")
            self._say(Kind.HEARTBEAT)
        self._after(HEARTBEAT_S, self._tick)

    # the workers

    def _proof(self) -> ServerProof:
        workers = self.world.scenario.workers
        proof = ServerProof("sim", self.index, EPOCH, workers, lambda rank: worker_key(DATA_KEY, rank, EPOCH), self.world.nonce())
        self._proofs.append(proof)
        return proof

    def _ready(self, link: SimLink) -> None:
        if not self.down and any(proof is link.proof for proof in self._proofs):
            self._alive(self._hear, link)

    def _hear(self, link: SimLink) -> None:
        for header, payload in link.receive():
            self._hear_worker(link, header, payload)

    def _hear_worker(self, peer: Any, header: Header, payload: Any) -> None:
        if self.state is None:
            self._early.append((peer, header, payload))
            return
        if peer not in self._proved:
            self._proved.add(peer)
            self._apply(self.state.proved(peer, peer.proof.rank))
        if header.kind == Kind.PUSH and header.payload_bytes and peer in self.state.ranks and not self.world.network.repeating:
            state = self.state.keys[header.key].state
            lacks = header.step == state.step and header.sender not in state.contributions
            if state.late is not None:
                lacks = state.late.owes(header.sender) if header.step == state.step - 1 else lacks and header.sender not in state.late.tardy
            late = not peer.owner.is_current(peer)  # the worker has given it up, and asked on another since
            again = (
                header.sender in self.state.incarnations or header.sender in self.state.absent
            )  # of a former process, or of its step once more
            check(lacks or late or again, lambda: f"server {self.index}: the payload of {header} comes though the server has it")
        self._apply(self.state.receive(peer, header, payload, self.clock.now))
        if self.world.scenario.window_bytes < 1 << 30:
            self._check_room()

    def _lost(self, peer: Any) -> None:
        if self.state is not None:
            self.state.lost(peer)

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if self.world.crashes_here():
                raise CrashedError
            if isinstance(effect, server_state.Send):
                self._send(effect)
            elif isinstance(effect, server_state.Close):
                if effect.peer.owner.is_current(effect.peer):
                    effect.peer.owner.cut()
            elif isinstance(effect, Fold):
                self._begin_fold(effect)
            elif isinstance(effect, Commit):
                self._commit(effect)
            elif isinstance(effect, KeepLate):
                self._keep_late(effect)
            elif isinstance(effect, SendResidual):
                self._send_residual(effect)
            elif isinstance(effect, Restore):
                self.residuals[effect.key] = name_of_restored(effect.key, {*restored_of(self.residuals.get(effect.key)), effect.first})
                self.kept[effect.key] = Kept(None, rescale=effect.rescale)
            else:
                assert isinstance(effect, Fault)
                raise WrongError(f"server {self.index} ends the job: {effect.text}")

    def _send(self, send: server_state.Send) -> None:
        header, place = send.header, None
        if header.kind == Kind.RESULT:
            kept = self.committed.get(header.key)
            if (before := self.before.get(header.key)) is not None and before.step == header.step:
                assert self.state is not None
                late = self.state.keys[header.key].state.late
                check(
                    late is not None and late.earlier == before,
                    lambda: f"server {self.index}: {header} is sent again after the next result",
                )
                kept = before
            check(kept is not None and kept.step == header.step, lambda: f"server {self.index}: {header} is sent, what it keeps is {kept}")
            assert kept is not None
            check(kept.slot == (NO_SLOT if send.result_slot is None else send.result_slot), lambda: f"{send} is not of {kept}")
            if send.result_slot is not None:
                place = Place(self.slots, (header.key, send.result_slot))
        send.peer.send(header, send.body, place)

    def _send_residual(self, send: SendResidual) -> None:
        key = send.header.key
        owed = None if send.add_back == NO_SLOT else self.slots[key, send.add_back]
        check(owed != TORN, lambda: f"server {self.index}: {send} reads what is being written")
        send.peer.send(send.header, (self.residuals.get(key), None if owed is None else owed[:3]))

    def _commit(self, commit: Commit) -> None:
        result = commit.result
        if result.slot != NO_SLOT:
            check(self.slots[commit.key, result.slot] != TORN, lambda: f"{commit} while its slot is being written")
        if commit.residual:
            self.residuals[commit.key] = self._pending.pop(commit.key)
        if commit.key in self.committed:
            self.before[commit.key] = self.committed[commit.key]
        self.committed[commit.key] = result
        before = self.kept.get(commit.key, Kept(None))
        newest = before.newest if result.slot == NO_SLOT else result.slot
        self.kept[commit.key] = Kept(result, newest, commit.add_back, commit.rescale, commit.late)

    def _keep_late(self, keep: KeepLate) -> None:
        kept = self.kept[keep.key]
        check(kept.result == keep.commit.result, lambda: f"server {self.index}: {keep}, but what is kept is {kept}")
        if keep.payload is not None:
            self.late[keep.key, keep.slot] = read(keep.payload)
        self.kept[keep.key] = kept._replace(late=keep.commit.late)

    def _begin_fold(self, fold: Fold) -> None:
        """The engine: reads its inputs when it begins and once more when it ends, and must find the same."""
        if fold.last:
            self.slots[fold.key, fold.slot] = TORN
        self._after(self.world.work_time(), self._end_fold, fold, self._inputs(fold))

    def _inputs(self, fold: Fold) -> Any:
        owed = None if fold.add_back == NO_SLOT else self.slots[fold.key, fold.add_back]
        payloads = [read(payload) for payload in fold.payloads] + [self.late[fold.key, slot] for slot in fold.late]
        return payloads, owed, self.residuals.get(fold.key)

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
        if fold.late and fold.rescale != 1:
            blocks.append((name_of_unit(fold.rescale),))
        nonfinite = False
        if fold.last:
            nonfinite = self.world.oracle.overflows(fold.key, fold.step)
            self.slots[fold.key, fold.slot] = self._result(fold, tuple(blocks), owed, residual)
            blocks.clear()
        self._apply(self.state.folded(fold.key, fold.last, self.world.sizes[fold.key][1], nonfinite, fold.slot, self.clock.now))

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
            room = sum(n * window._costs[e.part] // len(e.state.spec.ranks) for n, e in zip(held, entries, strict=True))
            most = max(window._budget, *window._costs) if window._costs else 0
            check(room <= most, lambda: f"server {self.index}: holds {room} bytes of a plan, has room for {most}")  # noqa: B023
