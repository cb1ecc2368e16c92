"""ps-lite's ZeroMQ van: one ROUTER that everybody's messages come to, and one DEALER to each node that this one sends to.

One thread owns the sockets; others put calls into its mailbox. Three kinds of sending, as in ps-lite: control messages and requests go by the DEALER
to the receiver; a server's replies to a worker go by the server's own ROUTER, over the connection that the worker's DEALER has made. So a
worker reads its ROUTER (the scheduler's messages) and its DEALERs (replies).

Whoever reaches the ROUTER can send to it: ps-lite has no authentication. Frames are bounded in size and number, and what is no message is dropped.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from psgc.errors import PsgcError, RemoteProtocolError
from psgc.processes.addresses import endpoint, needs_ipv6
from psgc.processes.mailbox import Mailbox
from psgc.pslite import nodes
from psgc.pslite.meta import DATA, EMPTY, MAX_DATA_FRAMES, WORKER, Meta, Node, read_meta

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 512 << 20
COPY_BELOW_BYTES: Final = 64 << 10
TICK_S: Final = 0.05
TURN_S: Final = 0.01  # no socket, nor the mailbox, keeps the thread from the others for longer
BIND_RETRIES: Final = 40  # as in ps-lite, for a node that chooses its port itself
MAX_DROP_REPORTS: Final = 20  # lines in the log about messages that are none

Received = Callable[[int, Meta, list[memoryview]], None]  # sender, message, data frames


class Van:
    """See the module's text. receive, tick and fail are called in the van's thread; receive may raise RemoteProtocolError to have a message dropped."""

    def __init__(
        self, receive: Received, tick: Callable[[float], None], fail: Callable[[BaseException], None], local_files: bool = False
    ) -> None:
        self._receive, self._tick, self._fail, self._local_files = receive, tick, fail, local_files
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._dealers: dict[int, zmq.Socket[Any]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._mailbox = Mailbox()
        self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
        self._stopping = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="psgc-pslite-van", daemon=True)
        self.own_id = EMPTY

    def bind(self, host: str, port: int) -> int:
        """Listen; returns the port. port: 0 for any that is free. Raises PsgcError if it is taken, or the address is not this machine's."""
        try:
            address = host if self._local_files else socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
            self._router.setsockopt(zmq.IPV6, not self._local_files and needs_ipv6(str(address)))
            for last in range(BIND_RETRIES, -1, -1):
                chosen = port or _free_port()
                try:
                    self._router.bind(self._endpoint(str(address), chosen))
                except zmq.ZMQError:
                    if port or not last:
                        raise
                    continue
                return chosen
        except (OSError, zmq.ZMQError) as error:
            raise PsgcError(
                f"cannot listen on {host}:{port or 'any port'} for ps-lite: {getattr(error, 'strerror', None) or error}; is another job using the port, or "
                f"is the address another machine's?"
            ) from None
        raise AssertionError("the last attempt returns or raises")

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have the van's thread call ``function(*args)``. From any thread; in order."""
        self._mailbox.put(function, *args)

    def connect(self, node: Node) -> None:
        """Make a connection, in place of an earlier one to the same id. In the van's thread."""
        old = self._dealers.pop(node.id, None)
        if old is not None:
            self._poller.unregister(old)
            old.close(0)
        dealer = self._socket(zmq.DEALER)
        if self.own_id != EMPTY:
            dealer.setsockopt(zmq.ROUTING_ID, nodes.identity(self.own_id))
        dealer.setsockopt(zmq.IPV6, not self._local_files and needs_ipv6(node.hostname.strip("[]")))
        dealer.connect(self._endpoint(node.hostname.strip("[]"), node.port))
        self._dealers[node.id] = dealer
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, receiver: int, meta: Meta, frames: Sequence[Any] = ()) -> None:
        """Send one message. Data frames are not copied if they are large: they must stay as they are until the reply has come. In the van's thread."""
        head: list[bytes] = []
        if meta.command == DATA and nodes.role_of(self.own_id) != WORKER and nodes.role_of(receiver) == WORKER:
            outlet, head = self._router, [nodes.identity(receiver), nodes.identity(self.own_id)]
        elif receiver in self._dealers:
            outlet = self._dealers[receiver]
        else:
            logger.warning("ps-lite message dropped: no connection receiver=%d message=%s", receiver, meta)
            return
        parts = [*head, meta.pack(), *frames]
        try:
            for part in parts[:-1]:
                outlet.send(part, zmq.SNDMORE, copy=len(part) < COPY_BELOW_BYTES)
            outlet.send(parts[-1], copy=len(parts[-1]) < COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.warning("ps-lite message dropped: node is not connected receiver=%d message=%s", receiver, meta)

    def stop(self) -> None:
        """End the thread once what is in the mailbox has been done, and give what was sent a moment to leave. From any other thread."""
        self._mailbox.put(self._stop)
        if self._thread.ident is None:
            self._close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _stop(self) -> None:
        self._stopping = True

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        made: zmq.Socket[Any] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 2000)
        made.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by those who send it
        made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        return made

    def _endpoint(self, host: str, port: int) -> str:
        return f"ipc:///tmp/{port}" if self._local_files else endpoint(host, port)

    def _run(self) -> None:
        try:
            ticked = time.monotonic()
            while not self._stopping:
                ready = dict(self._poller.poll(int(1000 * TICK_S)))
                for function, args in self._mailbox.drain(TURN_S):
                    function(*args)
                for source in ready:
                    if isinstance(source, zmq.Socket) and not source.closed:
                        self._drain(source)
                now = time.monotonic()
                if now - ticked >= TICK_S:
                    ticked = now
                    self._tick(now)
        except BaseException as error:  # the van's thread must not die unheard
            self._fail(error)
        finally:
            self._close()

    def _drain(self, source: zmq.Socket[Any]) -> None:
        until = time.monotonic() + TURN_S
        while not source.closed and not self._stopping and time.monotonic() < until:
            try:
                identity, *frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender = nodes.sender_of(bytes(identity.buffer))
            try:
                if not 1 <= len(frames) <= 1 + MAX_DATA_FRAMES:
                    raise RemoteProtocolError(f"a ps-lite message of {len(frames)} frames; expected 1 to {1 + MAX_DATA_FRAMES}")
                meta = read_meta(frames[0].buffer)
                data = [frame.buffer for frame in frames[1:]]
                if len(data) != len(meta.data_types) or (data and meta.command != DATA):
                    raise RemoteProtocolError(f"{meta} with {len(data)} data frames, of which it announces {len(meta.data_types)}")
                self._receive(sender, meta, data)
            except RemoteProtocolError as error:
                self._note_dropped(sender, error)

    def _note_dropped(self, sender: int, error: RemoteProtocolError) -> None:
        self._dropped += 1
        if self._dropped <= MAX_DROP_REPORTS:
            more = "; no more of them are reported" if self._dropped == MAX_DROP_REPORTS else ""
            logger.warning("ps-lite message dropped sender=%s reason=%s%s", "unknown" if sender == EMPTY else sender, error, more)

    def _close(self) -> None:
        for each in (self._router, *self._dealers.values()):
            each.close()
        self._context.term()  # waits for what was sent, for LINGER at most


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
