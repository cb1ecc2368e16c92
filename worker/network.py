"""The network thread: the only place of a worker that does I/O. It holds the GIL for headers, never for payloads.

It carries out the actions of the client's state machine and of the coordinator, hands encoding and decoding to the pool, and takes
calls from other threads through its mailbox. docs/design.md says why it is a thread and not a process, and what that costs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import zmq

from psgc.checkpoints import SAVES, Watchdog
from psgc.codecs import Encoded
from psgc.config import Config
from psgc.errors import DeviceError, JobFailed, PsgcError, RemoteProtocolError
from psgc.layout import Declaration, Layout
from psgc.mailbox import Mailbox
from psgc.observe.worker_trace import worker_trace
from psgc.pool import Pool, threads_of
from psgc.report import Launcher
from psgc.transport.control.voice import PARTS
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.arena import Arena
from psgc.transport.pacing import PacedLink
from psgc.transport.watch import Watch
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import ErrorCode, Topology
from psgc.wire.reports import Report
from psgc.worker.bucket import BucketWork, Slot, make_slots
from psgc.worker.client import Action, Client, Decode, Encode, Failed, Greet, Measured, Transferred, Transmit
from psgc.worker.connections.links import ServerLink, connect_server
from psgc.worker.connections.reach import Reach
from psgc.worker.contributions import Contribution, Contributions
from psgc.worker.coordinator import TICK_S, Coordinator, Waiting
from psgc.worker.residuals.transfers import Transfer
from psgc.worker.submission import Submission
from psgc.worker.tickets import StepTicket, TicketBoard

logger = logging.getLogger(__name__)
TURN_S = 0.02  # time for one source's messages in one turn of the loop
LOST_S = 0.5
ENCODE_PRIORITY = 0
HERE_NUMEL = 16384  # a kernel takes about as long for so many elements as another thread takes to wake up
DECODE_PRIORITY = 1 << 40  # before encoding: decoding a result frees memory and lets the next step begin


class _Running:
    """A bucket known to the network thread, and the submissions that wait for its step under way."""

    def __init__(self, work: BucketWork) -> None:
        self.work = work
        self.waiting: deque[Submission] = deque()
        self.current: Submission | None = None
        self.stored = False  # the last result of the step under way has been decoded


@dataclass(slots=True)
class _Transferring:
    """Transfers that one call waits for."""

    ticket: StepTicket
    left: int


class Network(threading.Thread):
    """Start it, then ``ready`` is set once the scheduler has everyone, or ``error`` says why not."""

    def __init__(self, config: Config, board: TicketBoard) -> None:
        super().__init__(name="psgc-network", daemon=True)
        self.config, self.board = config, board
        self.mailbox = Mailbox()
        self.ready, self.stopped = threading.Event(), threading.Event()
        self.error: PsgcError | None = None
        self.topology: Topology | None = None
        self.layouts: dict[str, Layout] = {}
        self.links: list[ServerLink] = []
        self._connections = LinkSet(PacedLink.of(config.link_mbit, config.link_fd) if config.link_mbit else None)
        self.client: Client | None = None
        self.trace = worker_trace(config)
        self.waiting = Waiting()
        self.reporter: Callable[[], Report] | None = None  # what this rank tells of itself once a heartbeat
        # says what else this rank has waited for, given the time and how long after the begin it is said first
        self.lookout: Callable[[float, float], list[str]] | None = None
        self.on_turn: Callable[[int], None] | None = None  # takes the key whose next step has its turn
        self._buckets: dict[tuple[int, int], _Running] = {}
        self._by_key: dict[int, _Running] = {}
        self._arena = Arena("psgc-push")  # where payloads are encoded
        self._contributions = Contributions(self._arena)
        self._context: zmq.Context[Any] = zmq.Context()
        self._watch = Watch()
        self._coordinator = Coordinator(self._context, config, self)
        self._launcher = Launcher(config.launcher)
        SAVES.tell_to(self._launcher.tell_saving, config.save_timeout_s)
        self._pool = Pool("psgc-codec", pool_threads(config), self._broken)
        self._undeclared: list[tuple[Declaration, Callable[[Layout], None]]] = []  # they wait until the connections have been measured
        self._reach: Reach | None = None  # once the servers are known
        self._lost: dict[int, float] = {}  # server -> when its connection went down; removed once that has been logged
        self._closing_since: float | None = None
        self._end = False
        self._endings: list[Callable[[], None]] = []
        self._ending = threading.Lock()

    # called by other threads

    def declare(self, declaration: Declaration, then: Callable[[Layout], None]) -> None:
        """Declare the name, unless that has been done, then call ``then`` in the network thread."""
        self.mailbox.put(self._declare, declaration, then)

    def submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        self.mailbox.put(self._submit, layout, bucket, submission)

    def slot(self, key: int) -> Slot:
        """Where this rank's payloads of the key are encoded. Its layout has been laid out."""
        return self._contributions.slots.get(key) or self._by_key[key].work.slot(key)

    def contribute(self, contribution: Contribution) -> None:
        """See ``Servers``."""
        self.mailbox.put(self._contribute, contribution)

    def taken(self, key: int) -> None:
        """See ``Servers``."""
        self.mailbox.put(self._taken, key)

    def transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        """Ask the servers for residuals, or set them; the ticket is done when all are answered."""
        self.mailbox.put(self._transfer, transfers, ticket)

    def tell_broken(self, text: str) -> None:
        """Have the scheduler end the job because a collective broke; it knows who has left."""
        self.mailbox.put(self._coordinator.fault, text, ErrorCode.BROKEN_GROUP)

    def fault(self, text: str) -> None:
        """End the job: tell the scheduler, fail locally at once."""
        self.mailbox.put(self._fault, text)

    def barrier(self, number: int, passed: threading.Event, layout: int = 0) -> None:
        """Set ``passed`` when every worker has reached its barrier ``number`` (of ``layout``, or 0 for none), or when the job has failed."""
        self.mailbox.put(self._barrier, number, passed, layout)

    def ask_turn(self, key: int) -> None:
        """Have ``on_turn`` called when the key's next step has its turn; from now on it counts as submitted."""
        self.mailbox.put(self._ask_turn, key)

    def publish(self, name: str, value: bytes) -> None:
        """Have the scheduler keep a value for whoever looks it up."""
        self.mailbox.put(self._publish, name, value)

    def look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then`` in the network thread with a published value once it is there; never if the job fails before."""
        self.mailbox.put(self._look_up, name, then)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called by the next ``run_endings``; at once if the job has failed."""
        with self._ending:
            self._endings.append(call)
        if self.error is not None:
            self.run_endings()

    def run_endings(self) -> None:
        """Call what ``at_end`` was given, each once: when the job has failed, or before this process leaves it."""
        with self._ending:
            calls, self._endings = self._endings, []
        for call in calls:
            call()

    def close(self) -> None:
        self.mailbox.put(self._close)

    # called by the coordinator, in this thread

    def joined(self, topology: Topology) -> None:
        """Everyone is there: connect to the servers. ``ready`` when all have answered."""
        config = self.config
        self.topology = topology
        if self.trace is not None:
            self.trace.joined(topology.rank, topology.node_sizes)
        self.client = Client(
            topology.rank, config.job, topology.epoch, len(topology.servers), config.credit_bytes, config.credit_parts,
            silence_s=config.silence_s,
        )  # fmt: skip
        key = bytes.fromhex(topology.key)
        for server in topology.servers:
            self.links.append(connect_server(server, self._connections, config, rank=topology.rank, epoch=topology.epoch, key=key))
        self._reach = Reach(
            topology.rank, [link.address for link in self.links], self._coordinator.began, time.monotonic(), config.silence_s,
            config.register_timeout_s, config.step_timeout_s,
        )  # fmt: skip
        for link in self.links:
            self._look_at(link)
        if not self.links:
            self._joined(topology.rank)

    def laid_out(self, layout: Layout) -> None:
        """A layout has been agreed: make its slots and buckets."""
        assert self.client is not None
        if self.trace is not None:
            self.trace.laid_out(layout)
        alone = replace(layout, buckets=tuple(bucket for bucket in layout.buckets if not bucket.over_groups))
        slots = make_slots(alone, self._arena)
        works = {}
        for bucket in alone.buckets:
            work = BucketWork(layout, bucket, slots, self.client.rank)
            works[bucket.index] = work
            running = self._buckets[(layout.id, bucket.index)] = _Running(work)
            for part in bucket.parts:
                self._by_key[part.key] = running
        ids = {key: codec_id for work in works.values() for key, codec_id in work.push_codec_ids().items()}
        self.client.add_layout(layout.served, ids | self._contributions.add(layout, self.client.rank))
        self.layouts[layout.name] = layout

    def turn(self, key: int) -> None:
        """A key's next step has its turn among named tensors."""
        if self.on_turn is not None:
            self.on_turn(key)

    def failed(self, text: str) -> None:
        """The job has failed: release every waiter, and end the process if it does not end by itself."""
        if self.error is not None:
            return
        error = JobFailed(text)
        error.told = self._launcher.tell("job failed", text)
        self.error = error
        logger.log(logging.DEBUG if error.told else logging.ERROR, "job failed reason=%s", text)
        self.board.fail()
        self.ready.set()
        self._coordinator.release()
        if self._closing_since is None:
            last_words = "" if error.told else text
            Watchdog(SAVES, self.stopped, self.config.abort_grace_s, self.config.save_timeout_s, last_words).start()
        self.run_endings()

    # the thread

    def run(self) -> None:
        try:
            self._launcher.tell("joining")
            self._coordinator.register()
            next_tick = time.monotonic()
            while not self._end:
                self._turn(next_tick)
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + TICK_S
        except BaseException as error:
            logger.debug("network thread", exc_info=True)
            text = str(error) if isinstance(error, PsgcError) else f"network thread: {type(error).__name__}: {error}"
            self._fault(f"rank {self._rank_text()}: {text}")
        finally:
            self._shut()

    def _turn(self, next_tick: float) -> None:
        self._flush()
        things = [(self.mailbox.fileno(), zmq.POLLIN), (self._connections.fileno(), zmq.POLLIN), *self._coordinator.pollables()]
        ready = self._watch.wait(things, 0.0 if self._connections.pending else next_tick - time.monotonic())
        self._coordinator.receive(ready)
        if self.mailbox.fileno() in ready:
            for call, args in self.mailbox.drain(TURN_S):
                call(*args)
        if self._connections.fileno() in ready or self._connections.pending:
            self._serve_links(self._connections.ready())

    def _serve_links(self, ready: list[Link]) -> None:
        """Receive from the links in turn, for at most ``TURN_S``, so that the scheduler, ticks and other threads' calls never wait for them."""
        until = time.monotonic() + TURN_S
        for number, connection in enumerate(ready):
            self._serve_link(connection.owner)
            if time.monotonic() >= until:
                self._connections.defer(ready[number + 1 :])
                return

    def _flush(self) -> None:
        """Have the kernel take queued payloads, and refill the queues that they leave."""
        while touched := self._connections.flush():
            for connection in touched:
                link = connection.owner
                if connection.closed:
                    self._look_at(link)
                elif link.up and self.client is not None and self.error is None:
                    self._apply(self.client.departed(link.server, link.unsent, time.monotonic()))

    def _serve_link(self, link: ServerLink) -> None:
        client, server = self.client, link.server
        assert client is not None
        try:
            for header, payload in link.receive():
                if self.trace is not None:
                    self.trace.heard(server, header)
                if self.error is None:
                    self._apply(client.receive(server, header, payload, time.monotonic()))
        except RemoteProtocolError as error:
            self._fault(f"rank {client.rank}: server {server}: {error}")
        if self.trace is not None and link.receiving:
            self.trace.receiving(server)
        self._look_at(link)

    def _look_at(self, link: ServerLink) -> None:
        """Handle a connection's events; one that is down is made again."""
        client = self.client
        assert client is not None
        for event in link.events():
            if event == "up":
                self._reached(link.server)
                self._name_lost(link.server)
                self._apply(client.connected(link.server, time.monotonic(), queues=link.queues))
            else:
                self._lost.setdefault(link.server, time.monotonic())
                if self._reach is not None:
                    self._reach.down(link.server, time.monotonic())
                client.disconnected(link.server)

    def _reached(self, server: int) -> None:
        reach = self._reach
        assert reach is not None
        reach.up(server)
        if reach.all_answered and not self.ready.is_set():
            self._joined(reach.rank)

    def _joined(self, rank: int) -> None:
        """Everyone is there, and every server has answered."""
        self._launcher.tell("joined", rank=rank)
        self.ready.set()

    def _name_unreached(self, now: float) -> None:
        """Say which servers cannot be reached, and why: here, and by the scheduler to everyone; give up in the end."""
        reach = self._reach
        if reach is None or self.error is not None or self._closing_since is not None:
            return
        client = self.client
        assert client is not None
        for server in reach.unsteady:
            reach.progress(server, client.moved(server, now))
        texts, fault = reach.tick(now, lambda server: self.links[server].remedy)
        for server, text in texts:
            if self._coordinator.voice.speaks(f"server {server}"):
                logger.warning("%s", text)
            self._coordinator.tell(text)
        if fault is not None:
            self._fault(fault)

    def _name_lost(self, server: int) -> None:
        """Log lost connections, but only after ``LOST_S``: a server that ends closes its connections a moment before the scheduler tells of the job's
        end."""
        if self._lost.pop(server, None) is not None and self._closing_since is None and self.error is None:
            logger.warning("connection to server %d lost; it is re-made, and what was in flight is sent again", server)

    def _tick(self, now: float) -> None:
        self._coordinator.tick(now)
        for link in self.links:
            if not link.up:
                self._look_at(link)
        self._name_unreached(now)
        for server in [server for server, since in self._lost.items() if now - since > LOST_S]:
            self._name_lost(server)
        if self.client is not None and self.error is None:
            texts = self.client.tick(now, self._coordinator.told)
            for text in texts if texts and self._coordinator.voice.speaks(PARTS) else ():
                logger.warning("%s", text)
        if self.lookout is not None and self.error is None:
            for text in self.lookout(now, self.config.silence_s):
                if self._coordinator.voice.speaks("groups"):
                    logger.warning("%s", text)
                self._coordinator.tell(text)
        if self._closing_since is not None:
            patience_s = self._coordinator.farewell_s() if self.error is None else self.config.silence_s
            self._end = self._coordinator.left or now - self._closing_since > patience_s

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Transmit):
                slot = self.slot(action.header.key) if action.payload else None
                if self.trace is not None:
                    self.trace.sending(action.server, action.header)
                self.links[action.server].send(action.header, b"" if action.body is None else action.body, slot)
            elif isinstance(action, Encode) and (contribution := self._contributions.current.get(action.key)) is not None:
                self._encoded(action.key, contribution.payload_bytes, contribution.nonfinite)
            elif isinstance(action, Decode) and (contribution := self._contributions.current.get(action.key)) is not None:
                contribution.then(action.flags, action.payload)
            elif isinstance(action, Encode):
                running = self._by_key[action.key]
                assert self.client is not None
                self._work(ENCODE_PRIORITY + self.client.parts[action.key].priority, self._encode, running, action.key)
            elif isinstance(action, Decode):
                self._work(DECODE_PRIORITY, self._decode, self._by_key[action.key], action)
            elif isinstance(action, Greet):
                self._greet(action.server)
            elif isinstance(action, Transferred):
                self._transferred(action.transfer)
            elif isinstance(action, Measured):
                self._measured()
            elif isinstance(action, Failed):
                self._fault(action.text)

    def _work(self, priority: int, job: Callable[..., None], running: _Running, what: Any) -> None:
        """Run a codec's job in the pool, or in this thread if switching threads would cost more than the job.

        A bucket's first step always goes to the pool, because its kernels may have to be compiled.
        """
        submission = running.current
        if running.work.step == 1 or running.work.bucket.numel > HERE_NUMEL or submission is None or submission.buffer.waits:
            self._pool.submit(priority, job, running, what)
            return
        try:
            job(running, what)
        except Exception as error:
            self._broken(error)

    def _greet(self, server: int) -> None:
        assert self.client is not None
        self.links[server].send(Header(Kind.HELLO, job=self.config.job, epoch=self.client.epoch, sender=self.client.rank))

    def _declare(self, declaration: Declaration, then: Callable[[Layout], None]) -> None:
        """Send the declarations that waited for the connections' measurement: the scheduler cuts parts by the slowest rate."""
        if self.client is not None and self.client.measured:
            self._coordinator.declare(declaration, then, self.client.rate)
        else:
            self._undeclared.append((declaration, then))

    def _measured(self) -> None:
        assert self.client is not None
        logger.info("connections measured bytes_per_s=%d", self.client.rate)
        waiting, self._undeclared = self._undeclared, []
        for declaration, then in waiting:
            self._coordinator.declare(declaration, then, self.client.rate)

    def _submit(self, layout: Layout, bucket: int, submission: Submission) -> None:
        running = self._buckets[(layout.id, bucket)]
        running.waiting.append(submission)
        if running.current is None:
            self._begin(running)

    def _begin(self, running: _Running) -> None:
        submission = running.current = running.waiting.popleft()
        if self.error is not None:
            return
        assert self.client is not None
        work = running.work
        work.begin(submission.buffer, submission.previous_skipped, submission.rescale)
        now = time.monotonic()
        if submission.priority is not None:
            self.client.prioritise((part.key for part in work.bucket.parts), submission.priority)
        for part in work.bucket.parts:
            if part.round == 0:
                self._apply(
                    self.client.submit(
                        part.key, now, skip=submission.skip, previous_skipped=submission.previous_skipped, rescale=submission.rescale
                    )
                )

    def _contribute(self, contribution: Contribution) -> None:
        if self.error is not None:
            return
        assert self.client is not None
        self._contributions.current[contribution.key] = contribution
        skipped, rescale = contribution.previous_skipped, contribution.rescale
        self._apply(self.client.submit(contribution.key, time.monotonic(), previous_skipped=skipped, rescale=rescale))

    def _taken(self, key: int) -> None:
        if self.error is None and self.client is not None:
            del self._contributions.current[key]
            self._apply(self.client.decoded(key, time.monotonic()))

    def _transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        if self.error is not None or not transfers:
            ticket.finish()
            return
        assert self.client is not None
        left = _Transferring(ticket, len(transfers))
        for transfer in transfers:
            transfer.owner = left
        self._apply(self.client.transfer(transfers, time.monotonic()))

    @staticmethod
    def _transferred(transfer: Transfer) -> None:
        transfer.owner.left -= 1
        if transfer.owner.left == 0:
            transfer.owner.ticket.finish()

    # pool threads, this one, or the one that a device's events call back in

    def _encode(self, running: _Running, key: int) -> None:
        if self.error is not None:
            return
        began_ns = 0 if self.trace is None else time.monotonic_ns()
        running.work.encode(key, partial(self._after_encode, running, key, began_ns))

    def _after_encode(self, running: _Running, key: int, began_ns: int, encoded: Encoded | DeviceError) -> None:
        if isinstance(encoded, DeviceError):
            self._broken(encoded)
            return
        if self.trace is not None:
            self.trace.encoded(key, running.work.step, began_ns, encoded.payload_bytes)
        checked = encoded.nonfinite or not running.work.scheme.flags_nonfinite
        if self.config.nonfinite == "raise" and checked and (tensor := running.work.first_nonfinite(key)) is not None:
            what = "update" if running.work.layout.kind == "weights" else "gradient"
            self.fault(f"rank {self._rank_text()}: {what} of {tensor!r} holds NaN or infinity in its step {running.work.step}, "
                       f"and PSGC_NONFINITE=raise")  # fmt: skip
            return
        self._tell(self._encoded, key, encoded.payload_bytes, encoded.nonfinite)

    def _decode(self, running: _Running, action: Decode) -> None:
        if self.error is not None:
            return
        began_ns = 0 if self.trace is None else time.monotonic_ns()
        last = running.work.decode(action.key, action.flags, action.payload, action.own)
        if self.trace is not None:
            self.trace.decoded(action.key, action.step, began_ns)
        self._tell(self._decoded, running, action.key, last)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        if threading.current_thread() is self:
            call(*args)
        else:
            self.mailbox.put(call, *args)

    def _broken(self, error: BaseException) -> None:
        logger.debug("codec pool", exc_info=error)
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self.fault(f"rank {self._rank_text()}: {kind}{error}")

    # back in the network thread

    def _encoded(self, key: int, payload_bytes: int, nonfinite: bool) -> None:
        if self.client is not None and self.error is None:
            self._apply(self.client.encoded(key, payload_bytes, nonfinite))

    def _decoded(self, running: _Running, key: int, last: bool) -> None:
        assert self.client is not None
        self._apply(self.client.decoded(key, time.monotonic()))
        running.stored = running.stored or last
        # The pool may report earlier parts after the last one; the next step must find all of them idle.
        if running.stored and running.current is not None and self.client.idle(part.key for part in running.work.bucket.parts):
            running.stored = False
            ticket, running.current = running.current.ticket, None
            ticket.finish()
            if running.waiting:
                self._begin(running)

    def _fault(self, text: str) -> None:
        if self.error is None:
            try:
                self._coordinator.fault(text)
            finally:
                self.failed(text)

    def _barrier(self, number: int, passed: threading.Event, layout: int) -> None:
        if self.error is None:
            self._coordinator.barrier(number, passed, layout)
        else:
            passed.set()

    def _ask_turn(self, key: int) -> None:
        if self.error is None:
            self._coordinator.ask_turn(key)

    def _publish(self, name: str, value: bytes) -> None:
        if self.error is None:
            self._coordinator.publish(name, value)

    def _look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        if self.error is None:
            self._coordinator.look_up(name, then)

    def _close(self) -> None:
        if self._closing_since is None:
            self._closing_since = time.monotonic()
            if self.client is not None:
                for link in self.links:
                    link.send(Header(Kind.BYE, job=self.config.job, epoch=self.client.epoch, sender=self.client.rank))
            self._coordinator.leave()

    def _shut(self) -> None:
        self._pool.close(timeout_s=1.0)
        for link in self.links:
            link.close(linger_s=0.5)
        self._connections.close()
        self._coordinator.close()
        self._context.destroy(linger=500)
        self._arena.close()
        self.stopped.set()

    def _rank_text(self) -> str:
        return "?" if self.topology is None else str(self.topology.rank)

    def bucket_works(self) -> list[BucketWork]:
        """All buckets of all layouts so far. Their state may only be touched while none of their steps is under way."""
        return [running.work for running in list(self._buckets.values())]


def pool_threads(config: Config) -> int:
    """How many threads encode and decode."""
    return config.cpu_threads or threads_of(os.cpu_count() or 1, config.local_size)


__all__ = ["Network", "pool_threads"]
