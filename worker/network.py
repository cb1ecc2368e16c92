"""The network thread: the only place of a worker that does I/O. It holds the GIL for headers, never for payloads.

It carries out the actions of the client's state machine, takes calls from other threads through its mailbox, and says when the job has failed. It carries
contributions (``contributions.py``) and knows no codecs and no buckets. Connections to servers (``connections/servers.py``) and the conversation with the
scheduler (``coordinator.py``) run in it.
docs/design.md says why it is a thread and not a process, and what that costs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from psgc.config import Config
from psgc.diagnostics.place import main_place
from psgc.errors import JobFailed, PsgcError
from psgc.layout import Declaration, Layout
from psgc.observe.worker_trace import worker_trace
from psgc.processes.checkpoints import SAVES, Watchdog
from psgc.processes.mailbox import Mailbox
from psgc.transport.control.voice import PARTS
from psgc.transport.watch import Watch
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Topology
from psgc.wire.reports import Report
from psgc.worker.admission import TICK_S
from psgc.worker.client import Action, Client, Failed, Greet, Measured, Result, Transferred, Transmit
from psgc.worker.connections.servers import ServerConnections
from psgc.worker.contributions import Contribution, Contributions, Slot
from psgc.worker.coordinator import Coordinator, Waiting
from psgc.worker.outcome import Outcome
from psgc.worker.residuals.transfers import Transfer
from psgc.worker.tickets import StepTicket

logger = logging.getLogger(__name__)
LINGER_MS = 2000  # limit on getting rid of the last messages, as why this rank ends; on a busy machine this may take a while
TURN_S = 0.02  # time for other threads' calls in one turn of the loop


@dataclass(slots=True)
class _Transferring:
    """Transfers that one call waits for."""

    ticket: StepTicket
    left: int


class Steps(Protocol):
    """What the network thread asks of the executor."""

    def turn(self, key: int) -> None:
        """The key's next step has its turn."""

    def late(self, now: float, first_s: float) -> list[str]:
        """What to say of that which this rank waits for. first_s: how long after its begin it is said first."""


class Network(threading.Thread):
    """Start it, then ``ready`` is set once the scheduler has everyone, or the outcome says why not."""

    def __init__(self, config: Config, outcome: Outcome) -> None:
        super().__init__(name="psgc-network", daemon=True)
        self.config, self.outcome = config, outcome
        self.mailbox = Mailbox()
        self.ready, self.stopped = threading.Event(), threading.Event()
        self.topology: Topology | None = None
        self.layouts: dict[str, Layout] = {}
        self.client: Client | None = None
        self.trace = worker_trace(config)
        self.waiting = Waiting()
        self.reporter: Callable[[], Report] | None = None  # what this rank tells of itself once a heartbeat
        self.steps: Steps | None = None
        self._contributions = Contributions()
        self._watch = Watch()
        self._context: zmq.Context[Any] = zmq.Context()
        self._coordinator = Coordinator(self._context, config, self)
        self._connections = ServerConnections(config, self.trace, self)
        self._undeclared: list[tuple[Declaration, Callable[[Layout], None]]] = []  # they wait until the connections have been measured
        self._closing_since: float | None = None

    # called by other threads

    def declare(self, declaration: Declaration, then: Callable[[Layout], None]) -> None:
        """Declare the name, unless that has been done, then call ``then`` in the network thread."""
        self.mailbox.put(self._declare, declaration, then)

    def slot(self, key: int) -> Slot:
        """See ``Servers``. The key's layout has been laid out."""
        return self._contributions.slot(key)

    def contribute(self, contribution: Contribution) -> None:
        """See ``Servers``."""
        self._soon(self._contribute, contribution)

    def taken(self, key: int) -> None:
        """See ``Servers``."""
        self._soon(self._taken, key)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call it in this thread: at once, if it is the one that asks."""
        if threading.get_ident() == self.ident:
            call(*args)
        else:
            self.mailbox.put(call, *args)

    def transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        """Ask the servers for residuals, or set them; the ticket is done when all are answered."""
        self.mailbox.put(self._transfer, transfers, ticket)

    def retire(self, layout: Layout) -> None:
        """Give back what the layout takes here and on the servers. Every rank has declared its successor, and none of its steps is under way."""
        self.mailbox.put(self._retire, layout)

    def tell_broken(self, text: str) -> None:
        """Have the scheduler end the job because a collective broke; it knows who has left."""
        self.mailbox.put(self._coordinator.fault, text, ErrorCode.BROKEN_GROUP)

    def fault(self, text: str) -> None:
        """End the job: tell the scheduler, fail locally at once."""
        self.mailbox.put(self.end_job, text)

    def barrier(self, number: int, passed: threading.Event, layout: int = 0) -> None:
        """Set ``passed`` when every worker has reached its barrier ``number`` (of ``layout``, or 0 for none), or when the job has failed."""
        self.mailbox.put(self._barrier, number, passed, layout)

    def ask_turn(self, key: int) -> None:
        """Have ``Steps.turn`` called when the key's next step has its turn; from now on it counts as submitted."""
        self._ask(self._coordinator.requests.ask_turn, key)

    def publish(self, name: str, value: bytes) -> None:
        """Have the scheduler keep a value for whoever looks it up."""
        self._ask(self._coordinator.requests.publish, name, value)

    def look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then`` in the network thread with a published value once it is there; never if the job fails before."""
        self._ask(self._coordinator.requests.look_up, name, then)

    def _ask(self, call: Callable[..., None], *args: Any) -> None:
        """Call it in this thread, unless the job has failed."""
        self.mailbox.put(lambda: None if self.outcome.failed else call(*args))

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
        self._connections.connect(topology, self.client, self._coordinator.began)
        if not topology.servers:
            self.reached()

    def laid_out(self, layout: Layout) -> None:
        """A layout has been agreed: make its slots."""
        assert self.client is not None
        if self.trace is not None:
            self.trace.laid_out(layout)
        self.client.add_layout(layout.served, self._contributions.add(layout, self.client.rank))
        self.layouts[layout.name] = layout

    def turn(self, key: int) -> None:
        """A key's next step has its turn among named tensors."""
        if self.steps is not None:
            self.steps.turn(key)

    def failed(self, text: str) -> None:
        """The job has failed: release every waiter, and end the process if it does not end by itself."""
        error = JobFailed(text)
        if not self.outcome.fail(error):
            return
        logger.log(logging.DEBUG if error.told else logging.ERROR, "job failed reason=%s", text)
        self.outcome.board.fail()
        self.ready.set()
        self._coordinator.release()
        if self._closing_since is None:
            last_words = "" if error.told else text
            Watchdog(
                SAVES, self.stopped, self.config.abort_grace_s, self.config.save_timeout_s, last_words, self._tell_where_it_hung
            ).start()
        self.outcome.run_calls()

    def _tell_where_it_hung(self) -> None:
        """For a script that Ctrl-C did not interrupt: it is in a call that does not return to Python, or its signal came just before it fell asleep."""
        if self.topology is not None and (where := main_place()):
            self.outcome.launcher.tell("hung", where, self.topology.rank)

    # the thread

    def run(self) -> None:
        try:
            self.outcome.launcher.tell("joining")
            self._coordinator.register()
            next_tick = time.monotonic()
            ended = False
            while not ended:
                self._turn(next_tick)
                now = time.monotonic()
                if now >= next_tick:
                    ended = self._tick(now)
                    next_tick = now + TICK_S
        except BaseException as error:
            logger.debug("network thread", exc_info=True)
            text = str(error) if isinstance(error, PsgcError) else f"network thread: {type(error).__name__}: {error}"
            self.end_job(f"rank {self._rank_text()}: {text}")
        finally:
            self._shut()

    def _turn(self, next_tick: float) -> None:
        self._connections.flush()
        things = [(self.mailbox.fileno(), zmq.POLLIN), (self._connections.fileno(), zmq.POLLIN), *self._coordinator.pollables()]
        ready = self._watch.wait(things, 0.0 if self._connections.pending else next_tick - time.monotonic())
        self._coordinator.receive(ready)
        if self.mailbox.fileno() in ready:
            for call, args in self.mailbox.drain(TURN_S):
                call(*args)
        if self._connections.fileno() in ready or self._connections.pending:
            self._connections.serve()

    def _tick(self, now: float) -> bool:
        """Returns whether this worker has left the job."""
        self._coordinator.tick(now)
        self._connections.tick(now)
        if self.client is not None and not self.outcome.failed:
            texts = self.client.tick(now, self._coordinator.told)
            for text in texts if texts and self._coordinator.voice.speaks(PARTS) else ():
                logger.warning("%s", text)
        if self.steps is not None and not self.outcome.failed:
            for text in self.steps.late(now, self.config.silence_s):
                self.say("groups", text)
        if self._closing_since is None:
            return False
        patience_s = self.config.silence_s if self.outcome.failed else self._coordinator.farewell_s()
        return self._coordinator.left or now - self._closing_since > patience_s

    # called by connections and steps, in this thread

    @property
    def closing(self) -> bool:
        """See ``ServerConnections``' owner."""
        return self._closing_since is not None

    def reached(self) -> None:
        """Everyone is there, and every server has answered."""
        if self.topology is not None and not self.ready.is_set():
            self.outcome.launcher.tell("joined", rank=self.topology.rank)
            self.ready.set()

    def say(self, topic: str, text: str) -> None:
        """Warn here, and have the scheduler tell the other members."""
        if self._coordinator.voice.speaks(topic):
            logger.warning("%s", text)
        self._coordinator.tell(text)

    def end_job(self, text: str) -> None:
        """As ``fault``, at once."""
        if not self.outcome.failed:
            try:
                self._coordinator.fault(text)
            finally:
                self.failed(text)

    def apply(self, actions: list[Action]) -> None:
        """Carry out what the client's state machine says."""
        assert self.client is not None
        for action in actions:
            if isinstance(action, Transmit):
                slot = self.slot(action.header.key) if action.payload else None
                self._connections.send(action.server, action.header, b"" if action.body is None else action.body, slot)
            elif isinstance(action, Result):
                self._contributions.current[action.key].then(action.flags, action.payload)
            elif isinstance(action, Greet):
                self._connections.greet(action.server, Kind.HELLO)
            elif isinstance(action, Transferred):
                self._transferred(action.transfer)
            elif isinstance(action, Measured):
                self._measured()
            elif isinstance(action, Failed):
                self.end_job(action.text)

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

    def _contribute(self, contribution: Contribution) -> None:
        if self.outcome.failed:
            return
        assert self.client is not None
        key = contribution.key
        self._contributions.current[key] = contribution
        if contribution.priority is not None:
            self.client.prioritise([key], contribution.priority)
        actions = self.client.submit(
            key, time.monotonic(), contribution.payload_bytes, nonfinite=contribution.nonfinite, skip=contribution.skip,
            previous_skipped=contribution.previous_skipped, rescale=contribution.rescale,
        )  # fmt: skip
        self.apply(actions)

    def _taken(self, key: int) -> None:
        if not self.outcome.failed and self.client is not None:
            del self._contributions.current[key]
            self.client.taken(key)

    def _transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        if self.outcome.failed or not transfers:
            ticket.finish()
            return
        assert self.client is not None
        left = _Transferring(ticket, len(transfers))
        for transfer in transfers:
            transfer.owner = left
        self.apply(self.client.transfer(transfers, time.monotonic()))

    def _retire(self, layout: Layout) -> None:
        self._contributions.remove(layout)
        if not self.outcome.failed and any(True for _ in layout.served.parts()):
            self._connections.send_to_all(Kind.RETIRE, layout.id)

    @staticmethod
    def _transferred(transfer: Transfer) -> None:
        transfer.owner.left -= 1
        if transfer.owner.left == 0:
            transfer.owner.ticket.finish()

    def _barrier(self, number: int, passed: threading.Event, layout: int) -> None:
        if not self.outcome.failed:
            self._coordinator.requests.barrier(number, passed, layout)
        else:
            passed.set()

    def _close(self) -> None:
        if self._closing_since is None:
            self._closing_since = time.monotonic()
            self._connections.send_to_all(Kind.BYE)
            self._coordinator.leave()

    def _shut(self) -> None:
        self._connections.close()
        self._coordinator.close(LINGER_MS)
        self._context.destroy(linger=LINGER_MS)
        self._contributions.close()
        if not self.outcome.failed:
            self.outcome.launcher.tell("left")
        self.stopped.set()

    def _rank_text(self) -> str:
        return "?" if self.topology is None else str(self.topology.rank)

    @property
    def wire_bytes(self) -> int:
        """See ``ServerConnections.wire_bytes``."""
        return self._connections.wire_bytes
