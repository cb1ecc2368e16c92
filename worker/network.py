"""The network thread: the only place of a worker that does I/O. It holds the GIL for headers, never for payloads.

It takes calls from other threads through its mailbox, and says when the job has failed. What is pushed to servers and pulled (``push_pull.py``) and the
conversation with the scheduler (``coordinator.py``) run in it.
docs/design.md says why it is a thread and not a process, and what that costs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from psgc.config import Config
from psgc.diagnostics.place import main_place
from psgc.errors import JobFailed, PsgcError
from psgc.layout import Bucket, Declaration, Layout
from psgc.observe.worker_trace import worker_trace
from psgc.processes.checkpoints import SAVES, Watchdog
from psgc.processes.mailbox import Mailbox
from psgc.transport.control.voice import PARTS
from psgc.transport.memory.segment import Place
from psgc.transport.watch import Watch
from psgc.wire.frames import Kind
from psgc.wire.messages import ErrorCode, Topology
from psgc.worker.admission import TICK_S
from psgc.worker.contributions import Contribution, Slot
from psgc.worker.coordinator import Coordinator
from psgc.worker.membership import Membership
from psgc.worker.outcome import Outcome
from psgc.worker.push_pull import PushPull
from psgc.worker.residuals.transfers import Transfer
from psgc.worker.session import Handover
from psgc.worker.tickets import StepTicket

logger = logging.getLogger(__name__)
LINGER_MS = 2000  # limit on getting rid of the last messages, as why this rank ends; on a busy machine this may take a while
TURN_S = 0.02  # time for other threads' calls in one turn of the loop


class Steps(Protocol):
    """What the network thread asks of the executor."""

    def turn(self, key: int) -> None:
        """The key's next step has its turn."""

    def late(self, now: float, first_s: float) -> list[str]:
        """What to say of that which this rank waits for. first_s: how long after its begin it is said first."""


class Stages:
    """How far this worker has come: everyone is there (``ready``), it is leaving, the network thread has ended (``stopped``)."""

    def __init__(self) -> None:
        self.ready, self.stopped = threading.Event(), threading.Event()
        self.leaving_since: float | None = None


class Network(threading.Thread):
    """Start it, then ``stages.ready`` is set once the scheduler has everyone, or the outcome says why not. steps_of: the executor, once it is there."""

    def __init__(self, config: Config, outcome: Outcome) -> None:
        super().__init__(name="psgc-network", daemon=True)
        self.config, self.outcome = config, outcome
        self.mailbox = Mailbox()
        self.stages = Stages()
        self.membership = Membership()
        self.trace = worker_trace(config)
        self.steps_of: Steps | None = None
        self.handovers: Callable[[Handover], None] | None = None  # set by the session
        self._watch = Watch()
        self._context: zmq.Context[Any] = zmq.Context()
        self._coordinator = Coordinator(self._context, config, self.membership, self)
        self._push_pull = PushPull(config, self.trace, self)

    # called by other threads

    def declare(self, declaration: Declaration, then: Callable[[Layout], None]) -> None:
        """Declare the name, unless that has been done, then call ``then`` in the network thread."""
        self.mailbox.put(self._declare, declaration, then)

    def slot(self, key: int) -> Slot:
        """See ``Servers``. The key's layout has been laid out."""
        return self._push_pull.contributions.slot(key)

    def in_place(self, key: int) -> bool:
        """See ``Servers``."""
        return self._push_pull.in_place(key)

    def memory(self, layout: Layout, bucket: Bucket) -> Place | None:
        """See ``Session.memory``."""
        return self._push_pull.memory(layout, bucket)

    def contribute(self, contribution: Contribution) -> None:
        """See ``Servers``."""
        self._soon(self._push_pull.contribute, contribution)

    def taken(self, key: int) -> None:
        """See ``Servers``."""
        self._soon(self._push_pull.taken, key)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call it in this thread: at once, if it is the one that asks."""
        if threading.get_ident() == self.ident:
            call(*args)
        else:
            self.mailbox.put(call, *args)

    def transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        """Ask the servers for residuals, or set them; the ticket is done when all are answered."""
        self.mailbox.put(self._push_pull.transfer, transfers, ticket)

    def retire(self, layout: Layout) -> None:
        """Give back what the layout takes here and on the servers. Every rank has declared its successor, and none of its steps is under way."""
        self.mailbox.put(self._push_pull.retire, layout)

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

    def give_up_look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        self._ask(self._coordinator.requests.give_up_look_up, name, then)

    def _ask(self, call: Callable[..., None], *args: Any) -> None:
        """Call it in this thread, unless the job has failed."""
        self.mailbox.put(lambda: None if self.outcome.failed else call(*args))

    def ask_state(self, failed: int) -> None:
        """Ask who gives this process the job's state. failed: how many handovers have failed."""
        self._ask(self._coordinator.requests.ask_state, failed)

    def tell_state(self) -> None:
        """This process has the job's state."""
        self._ask(self._coordinator.requests.tell_state)

    def steps(self, layout: Layout) -> int:
        """See ``PushPull.steps``."""
        return self._push_pull.steps(layout)

    def close(self) -> None:
        self.mailbox.put(self._close)

    # called by the coordinator, in this thread

    def joined(self, topology: Topology) -> None:
        """Everyone is there: connect to the servers. ``ready`` when all have answered."""
        if self.trace is not None:
            self.trace.joined(topology.rank, topology.node_sizes, topology.incarnation > 1)
        self._push_pull.begin(topology, self._coordinator.began)
        if not topology.servers:
            self.reached()

    def moved(self, topology: Topology) -> None:
        """A server's machine is lost, and another process serves in its place."""
        if not self.outcome.failed:
            self._push_pull.connections.move(topology.servers)

    def laid_out(self, layout: Layout) -> None:
        """A layout has been agreed."""
        taken = self.membership.taken.get(layout.name, 0)
        if self.trace is not None:
            self.trace.laid_out(layout, taken)
        self._push_pull.add(layout, taken)

    def hand_over(self, handover: Handover) -> None:
        """The scheduler has said who gives the job's state to whom."""
        if self.handovers is not None:
            self.handovers(handover)

    def turn(self, key: int) -> None:
        """A key's next step has its turn among named tensors."""
        if self.steps_of is not None:
            self.steps_of.turn(key)

    def failed(self, text: str, cut_off: bool = False) -> None:
        """The job has failed, or goes on without this process, as far as it knows (cut_off): release every waiter, and end the process if it does not end by
        itself."""
        error = JobFailed(text)
        if not self.outcome.fail(error, event="cut off" if cut_off and self.config.on_worker_loss != "stop" else "job failed"):
            return
        spoken_for = error.told or (self.config.torchrun and self.config.local_rank > 0)  # by the launcher, or by its node's first worker
        logger.log(logging.DEBUG if spoken_for else logging.ERROR, "job failed reason=%s", text)
        self.outcome.board.fail()
        self.stages.ready.set()
        self._coordinator.release()
        if not self.leaving:
            last_words = "" if error.told else text
            Watchdog(
                SAVES, self.stages.stopped, self.config.abort_grace_s, self.config.save_timeout_s, last_words, self._tell_where_it_hung
            ).start()
        self.outcome.run_calls()

    def _tell_where_it_hung(self) -> None:
        """For a script that Ctrl-C did not interrupt: it is in a call that does not return to Python, or its signal came just before it fell asleep."""
        if (topology := self.membership.topology) is not None and (where := main_place()):
            self.outcome.launcher.tell("hung", where, topology.rank)

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
            self.end_job(f"rank {self.membership.rank_text}: {text}")
        finally:
            self._shut()

    def _turn(self, next_tick: float) -> None:
        connections = self._push_pull.connections
        connections.flush()
        things = [(self.mailbox.fileno(), zmq.POLLIN), (connections.fileno(), zmq.POLLIN), *self._coordinator.pollables()]
        ready = self._watch.wait(things, 0.0 if connections.pending else next_tick - time.monotonic())
        self._coordinator.receive(ready)
        if self.mailbox.fileno() in ready:
            for call, args in self.mailbox.drain(TURN_S):
                call(*args)
        if connections.fileno() in ready or connections.pending:
            connections.serve()

    def _tick(self, now: float) -> bool:
        """Returns whether this worker has left the job."""
        self._coordinator.tick(now)
        self._push_pull.connections.tick(now)
        client, since = self._push_pull.client, self.stages.leaving_since
        if client is not None and not self.outcome.failed:
            texts = client.tick(now, self._coordinator.told)
            for text in texts if texts and self._coordinator.voice.speaks(PARTS) else ():
                logger.warning("%s", text)
        if self.steps_of is not None and not self.outcome.failed:
            for text in self.steps_of.late(now, self.config.silence_s):
                self.say("groups", text)
        if since is None:
            return False
        patience_s = self.config.silence_s if self.outcome.failed else self._coordinator.farewell_s()
        return self._coordinator.left or now - since > patience_s

    # called by connections and steps, in this thread

    @property
    def leaving(self) -> bool:
        """Whether this worker is leaving the job."""
        return self.stages.leaving_since is not None

    def reached(self) -> None:
        """Everyone is there, and every server has answered."""
        if not self.stages.ready.is_set():
            topology = self.membership.topology
            assert topology is not None
            self.outcome.launcher.tell("joined", rank=topology.rank)
            self.stages.ready.set()

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

    def _declare(self, declaration: Declaration, then: Callable[[Layout], None]) -> None:
        """When the connections have been measured: the scheduler cuts parts by the slowest."""
        self._push_pull.with_speed(lambda speed: self._coordinator.declare(declaration, then, speed))

    def _barrier(self, number: int, passed: threading.Event, layout: int) -> None:
        if not self.outcome.failed:
            self._coordinator.requests.barrier(number, passed, layout)
        else:
            passed.set()

    def _close(self) -> None:
        if not self.leaving:
            self.stages.leaving_since = time.monotonic()
            self._push_pull.connections.send_to_all(Kind.BYE)
            self._coordinator.leave()

    def _shut(self) -> None:
        self._push_pull.connections.close()
        self._coordinator.close(LINGER_MS)
        self._context.destroy(linger=LINGER_MS)
        self._push_pull.contributions.close()
        if not self.outcome.failed:
            self.outcome.launcher.tell("left")
        self.stages.stopped.set()

    def statistics(self) -> dict[str, int]:
        """Bytes that this rank has moved, parts that were sent again, connections that were made again, and what waits or is under way."""
        client = self._push_pull.client
        assert client is not None
        return {
            "wire_bytes": self._push_pull.connections.wire_bytes, "resent": client.counts.resent,
            "reconnects": self._push_pull.connections.reconnects, "queued": client.queued, "in_flight_bytes": client.in_flight_bytes,
        }  # fmt: skip

    def served(self, now: float) -> list[tuple[float, int, float]]:
        """By server, see ``Client.served`` and ``Link.leaving_s``."""
        client, connections = self._push_pull.client, self._push_pull.connections
        assert client is not None
        return [
            (has_s, nbytes, leaving_s) for (has_s, nbytes), leaving_s in zip(client.served(now), connections.leaving_s(now), strict=True)
        ]

    def carried(self) -> dict[str, tuple[int, int]]:
        """By codec, bytes of gradients that this rank has exchanged with servers, and what they stand for."""
        client = self._push_pull.client
        assert client is not None
        return {codec: (moved, plain) for codec, (moved, plain) in client.counts.carried.copy().items()}
