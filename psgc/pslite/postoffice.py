"""One process's place in a ps-lite job: starts the van, joins, meets the others at barriers, and hands data messages to their customers.

As ps-lite's Postoffice, but an object instead of one for each process: several may live in one process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final

from psgc.errors import JobFailed, PsgcError, RemoteProtocolError, UsageError
from psgc.processes.reminder import Reminder
from psgc.pslite import nodes
from psgc.pslite.actions import Action, Connect
from psgc.pslite.member import Member
from psgc.pslite.meta import BARRIER, DATA, EMPTY, ROLES, Meta, Node
from psgc.pslite.resend import Resender
from psgc.pslite.scheduler import Scheduler
from psgc.pslite.settings import Settings
from psgc.pslite.van import Van

logger = logging.getLogger(__name__)

Handler = Callable[[int, Meta, list[memoryview]], None]
FOREVER: Final = float("inf")


class Customer:
    """Takes the data messages of one application, in a thread of its own, in the order in which they came."""

    def __init__(self, handle: Handler, fail: Callable[[BaseException], None]) -> None:
        self._handle, self._fail = handle, fail
        self._queue: SimpleQueue[tuple[int, Meta, list[memoryview]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="psgc-pslite-customer", daemon=True)
        self._thread.start()

    def accept(self, sender: int, meta: Meta, frames: list[memoryview]) -> None:
        self._queue.put((sender, meta, frames))

    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._handle(*message)
            except RemoteProtocolError as error:
                self._fail(JobFailed(f"ps-lite node {message[0]}: {error}"))
            except BaseException as error:
                self._fail(error)
            del message


class Postoffice:
    """See the module's text. ``start`` first, ``finalize`` at the end; both meet all nodes of the job at a barrier unless they are told not to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.num_workers, self.num_servers = settings.workers, settings.servers
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._customers: dict[int, Customer] = {}
        self._van = Van(self._receive, self._tick, self.fail, settings.local_files)
        self._scheduler: Scheduler | None = None
        self._member: Member | None = None
        self._resender: Resender | None = None
        self._passed = 0  # barriers
        self._beat = 0.0
        self._waited_for: dict[int, Reminder] = {}
        self._joined = self._closed = False
        self.endpoint_name = b""  # of this process's node, which all others of the job get to know; to be set before ``start``
        self.on_fail: Callable[[BaseException], None] | None = None
        self.on_tick: Callable[[float], None] | None = None  # called in the van's thread, a few times a second

    @property
    def node_id(self) -> int:
        """Of this process; known once it has joined."""
        return self._van.own_id

    @property
    def my_rank(self) -> int:
        """Among the nodes of this process's role."""
        return nodes.rank_of(self.node_id)

    @property
    def is_worker(self) -> bool:
        return self.settings.role == "worker"

    @property
    def is_server(self) -> bool:
        return self.settings.role == "server"

    @property
    def is_scheduler(self) -> bool:
        return self.settings.role == "scheduler"

    @property
    def error(self) -> BaseException | None:
        return self._error

    def server_key_ranges(self) -> tuple[range, ...]:
        return nodes.key_ranges(self.num_servers)

    def node_ids(self, group: int) -> tuple[int, ...]:
        """Of a group: the sum of 1 (scheduler), 2 (servers), 4 (workers)."""
        return nodes.group_ids(group, self.num_workers, self.num_servers)

    def listed(self, group: int) -> tuple[Node, ...]:
        """The nodes of a group of workers and servers, as they have joined."""
        known = self._member.listed if self._member is not None else {}
        if self._scheduler is not None:
            known = {node.id: node for node in self._scheduler.joined}
        return tuple(known[node_id] for node_id in self.node_ids(group))

    def start(self, barrier: bool = True) -> None:
        """Join the job; returns when all nodes have. Raises PsgcError if the port is taken, JobFailed if somebody is missing for too long."""
        settings = self.settings
        port = self._van.bind(settings.host, settings.port)
        own = Node(role=ROLES.index(settings.role), hostname=settings.host, port=port, endpoint_name=self.endpoint_name)
        if self.is_scheduler:
            own = replace(own, id=nodes.SCHEDULER_ID)
            self._scheduler = Scheduler(own, self.num_workers, self.num_servers, settings.dead_s)
            self._van.own_id = own.id
            self._van.start()
        else:
            self._member = Member(own, self.num_workers, self.num_servers)
            root = Node(role=ROLES.index("scheduler"), hostname=settings.root_host, port=settings.root_port, id=nodes.SCHEDULER_ID)
            self._van.start()
            self._van.call(self._act, [Connect(root), self._member.join()])
        self.wait_for(lambda: self.node_id != EMPTY and self._all_there, self._who_is_missing, settings.join_timeout_s)
        if settings.resend_s:
            self._resender = Resender(self.node_id, settings.resend_s)
        self._joined = True
        logger.info("ps-lite node joined id=%d role=%s address=%s", self.node_id, settings.role, own.address)
        if barrier:
            self.barrier()

    def barrier(self, group: int = nodes.ALL, timeout_s: float = FOREVER) -> None:
        """Wait until every node of the group has called it as often as this one. This node must be in the group."""
        members = self.node_ids(group)
        if self.node_id not in members:
            raise UsageError(f"barrier of group {group}: this {self.settings.role} is not in it")
        if len(members) == 1:
            return
        with self._changed:
            wanted = self._passed + 1
        self._van.call(self._ask_barrier, group)
        self.wait_for(lambda: self._passed >= wanted, lambda: f"the barrier of all of nodes {list(members)[:16]}", timeout_s)

    def finalize(self, barrier: bool = True, timeout_s: float = FOREVER) -> None:
        """Leave the job, by default together with all nodes; then end the threads. Again: does nothing. Raises JobFailed if others do not leave within
        ``timeout_s``."""
        if self._closed:
            return
        try:
            if barrier and self._error is None and self._joined:
                self.barrier(timeout_s=timeout_s)
        finally:
            self._closed = True
            for customer in self._customers.values():
                customer.close()
            self._van.stop()

    def add_customer(self, app_id: int, handle: Handler) -> None:
        """Have an application's data messages handled, in a thread of their own. Raises UsageError for a number that is taken."""
        if app_id in self._customers:
            raise UsageError(f"application {app_id} has a customer already; give each KVWorker or KVServer a number of its own")
        self._customers[app_id] = Customer(handle, self.fail)

    def send(self, receiver: int, meta: Meta, frames: Sequence[Any] = ()) -> None:
        """From any thread. Large frames are not copied and must stay as they are until they are answered."""
        self._van.call(self._send, receiver, meta, frames)

    def check(self) -> None:
        """Raise what has ended this node's membership, if anything has."""
        if isinstance(self._error, PsgcError):
            raise self._error
        if self._error is not None:
            raise JobFailed(f"this ps-lite {self.settings.role} failed: {self._error!r}") from self._error

    def fail(self, error: BaseException) -> None:
        """This node cannot go on: whoever waits gets ``error``. ps-lite has no message that would tell the others."""
        with self._changed:
            first, self._error = self._error is None, self._error or error
            self._changed.notify_all()
        if first and self.on_fail is not None:
            self.on_fail(error)

    def wait_for(self, predicate: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
        """Sleep until ``predicate``, which ``notify`` has looked at again. After a while the log says ``what`` is waited for, now and then; after
        ``timeout_s`` JobFailed does."""
        began = time.monotonic()
        reminder = Reminder(began)
        with self._changed:
            while not predicate():
                self.check()
                now = time.monotonic()
                if now - began >= timeout_s:
                    raise JobFailed(
                        f"this ps-lite {self.settings.role} has waited {now - began:.0f} s for {what()}; see that process's own output"
                    )
                if timeout_s != FOREVER and reminder.due(now, self.settings.silence_s):
                    logger.warning("%s%s: waiting for %s", self.settings.role, "" if self.node_id == EMPTY else f" {self.node_id}", what())
                self._changed.wait(0.2)
            self.check()

    def notify(self) -> None:
        """Have all who wait look at what they wait for again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def _all_there(self) -> bool:
        return self._scheduler is None or self._scheduler.ready

    def _who_is_missing(self) -> str:
        if self._scheduler is not None:
            return f"{self._scheduler.missing()} to join at {self.settings.root_host}:{self.settings.root_port}"
        return (
            f"the ps-lite scheduler at {self.settings.root_host}:{self.settings.root_port}, which answers once all {self.num_workers} workers and "
            f"{self.num_servers} servers have joined"
        )

    def _ask_barrier(self, group: int) -> None:
        if self._scheduler is not None:
            meta = Meta(command=BARRIER, request=True, barrier_group=group, app_id=0, customer_id=0)
            self._act(self._scheduler.receive(nodes.SCHEDULER_ID, meta, time.monotonic()))
        else:
            assert self._member is not None
            self._act([self._member.barrier(group)])

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                self._van.connect(action.node)
            elif action.receiver == self.node_id:
                self._pass_barrier()  # the only thing that a scheduler tells itself
            else:
                self._send(action.receiver, action.meta)

    def _send(self, receiver: int, meta: Meta, frames: Sequence[Any] = ()) -> None:
        if self._resender is not None:
            self._resender.sending(receiver, meta, frames, time.monotonic())
        self._van.send(receiver, meta, frames)

    def _pass_barrier(self) -> None:
        with self._changed:
            self._passed += 1
            self._changed.notify_all()

    def _receive(self, sender: int, meta: Meta, frames: list[memoryview]) -> None:
        if self._resender is not None and sender != EMPTY:
            fresh, acknowledgement = self._resender.receive(sender, meta)
            if acknowledgement is not None:
                self._van.send(sender, acknowledgement)
            if not fresh:
                return
        if meta.command == DATA:
            self._deliver(sender, meta, frames)
        elif self._scheduler is not None:
            ready = self._scheduler.ready
            self._act(self._scheduler.receive(sender, meta, time.monotonic()))
            if self._scheduler.ready != ready:
                self.notify()
        elif self._member is not None:
            self._receive_as_member(self._member, sender, meta)

    def _receive_as_member(self, member: Member, sender: int, meta: Meta) -> None:
        actions, passed = member.receive(sender, meta), member.passed
        self._van.own_id = member.own.id
        self._act(actions)
        with self._changed:
            self._passed = passed
            self._changed.notify_all()

    def _deliver(self, sender: int, meta: Meta, frames: list[memoryview]) -> None:
        customer = self._customers.get(meta.app_id)
        if customer is None or sender not in self.node_ids(nodes.WORKER_GROUP + nodes.SERVER_GROUP) or meta.request != self.is_server:
            raise RemoteProtocolError(
                f"{meta} of application {meta.app_id} from {'a process without an id' if sender == EMPTY else f'node {sender}'}; this "
                f"{self.settings.role} expects {'requests' if self.is_server else 'replies'} of nodes of the job"
            )
        customer.accept(sender, meta, frames)

    def _tick(self, now: float) -> None:
        if self._member is not None and self._member.joined and self.settings.heartbeat_s and now - self._beat >= self.settings.heartbeat_s:
            self._beat = now
            self._act([self._member.heartbeat()])
        if self._resender is not None:
            for receiver, meta, frames in self._resender.due(now):
                logger.warning("ps-lite message sent again receiver=%d message=%s", receiver, meta)
                self._van.send(receiver, meta, frames)
        if self._scheduler is not None:
            for node in self._scheduler.dead(now):
                if self._waited_for.setdefault(node.id, Reminder(now - self.settings.silence_s)).due(now, self.settings.silence_s):
                    logger.warning("ps-lite %s sends no heartbeat; another may take its place", node)
        if self.on_tick is not None:
            self.on_tick(now)
