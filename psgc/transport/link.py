"""The interface of payload connections: what workers and servers may expect of a transport, and what a new transport must provide.

A transport is three classes: a ``Transport`` that listens and dials, its ``Listener`` and its ``Link``. ``registry.py`` names each transport;
worker and server know none of them. A link is one connection; a broken link is discarded, and a new one is made. It proves both ends first,
then carries messages, and it never blocks. Links know headers, not their meaning.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.transport.memory.segment import Place
from psgc.transport.pacing import PacedLink
from psgc.transport.receive_buffers import ReceiveBuffers
from psgc.transport.security.handshake import Proof
from psgc.wire.frames import Header

MAX_MESSAGES: Final = 64  # that one link receives in one turn, before the other links have theirs
# Payloads of so many bytes are worth being sent from, and received, where they are wanted; below, a copy takes less than asking.
IN_PLACE_BYTES: Final = 64 << 10
MAX_BYTES: Final = 8 << 20  # of payloads that one link receives in one turn; a turn then takes some milliseconds


Posted = Callable[["Link", Header], NDArray[np.uint8] | None]
"""Where a connection's message is to be received; see ``Link.posted``."""


def nothing_posted(_link: Link, _header: Header) -> None:
    """Every payload is received into the connection's buffers."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a connection is not up. number: the error number; 0: the other end accepted the connection, but did not prove its identity;
    None: nothing has come back yet."""

    number: int | None
    text: str


class Link(ABC):
    """One end of a payload connection. See the module's text. proof: this end's side of the handshake. peer: who is at the other end, for logs.

    closed: nothing is sent or received any more; ``why`` says why; ``number``: the error number, or 0 if the peer was reached.
    more: ``receive`` stopped early, and polling would not show that more has come.
    unsent: how many payloads were queued and have not been taken completely by the kernel yet; 0 if the transport has no such queue.
    owner: the object that keeps the link, for the loop that finds it ready.
    buffers: what payloads are received into, if they do not lie in the peer's memory; the connections of a ``LinkSet`` share it.
    posted: asked for memory of exactly the length of a payload that has begun to come, to receive it into; None: ``buffers``. Only large payloads are asked
    for, and none that is encrypted: whoever posts memory may read it before a forged payload has been refused.
    """

    queues: ClassVar[bool] = False  # whether payloads wait in the link for a slow peer: see ``unsent``

    def __init__(self, proof: Proof, peer: str) -> None:
        self.proof, self.peer = proof, peer
        self.closed, self.why, self.number = False, "", 0
        self.more = False
        self.unsent = 0
        self.owner: Any = None
        self.buffers = ReceiveBuffers()
        self.posted: Posted = nothing_posted
        self.pace: PacedLink | None = None  # the simulated link that it shares, if any
        self.held_out = self.held_in = False  # the simulated link lets nothing more pass in that direction now
        self._greeting = proof.begin()

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that polls readable when ``prove`` or ``receive`` has something to do, and writable when ``flush`` has room."""

    @abstractmethod
    def _say(self, data: bytes) -> int:
        """Send bytes of the handshake. Returns how many were taken. Raises BlockingIOError if there is no room, or OSError."""

    @abstractmethod
    def _hear(self, nbytes: int) -> bytes:
        """Receive at most ``nbytes`` of the handshake. Returns none once the peer has closed. Raises BlockingIOError if none have come, or OSError."""

    @abstractmethod
    def send(self, header: Header, body: Any = None, place: Place | None = None) -> None:
        """Queue one message, with the ``header.payload_bytes`` bytes of ``body``, or of ``place`` from its beginning on, or with neither.

        body: bytes or a uint8 array. Both must not change until the peer has answered, so they need not be copied. ``flush`` sends the queue.
        """

    @property
    @abstractmethod
    def queued(self) -> bool:
        """Whether messages wait for room to be sent."""

    @property
    def receiving(self) -> bool:
        """Whether the beginning of a message has come, but not all of it."""
        return False

    def leaving_s(self, now: float) -> float:
        """For how long, in all, what was sent had not arrived at the other end, and not because that had no room; 0 where the transport cannot tell."""
        return 0.0

    @abstractmethod
    def flush(self) -> None:
        """Send queued messages, as far as there is room."""

    @abstractmethod
    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        """The messages that have come: a header with a payload (uint8 array), a body (bytes) or None. At most ``messages`` of them, with payloads of
        about ``nbytes`` bytes.

        Raises RemoteProtocolError for bytes that are no message; the connection is then unusable.
        """

    def prove(self) -> bool:
        """Continue the handshake. True once both ends have proved their identity; nothing else is sent or received before that.

        Raises Refused if the peer cannot prove who it is.
        """
        while not self.closed:
            try:
                if self._greeting:
                    self._greeting = self._greeting[self._say(self._greeting) :]
                    continue
                if self.proof.done:
                    return True
                data = self._hear(self.proof.wants)
            except BlockingIOError:
                return False
            except OSError as error:
                self.fail(error.strerror or str(error), error.errno or 0)
                return False
            if not data:
                self.fail("closed by the peer before it had proved itself")
                return False
            self._greeting = self.proof.receive(data)
        return False

    @property
    def source(self) -> str:
        """Where the peer is, as far as that is known of a peer that has proved nothing. Connections of one source count as one peer's."""
        return self.peer

    @property
    def reached(self) -> bool:
        """Whether the other end has accepted the connection."""
        return not self.closed

    def slow_down(self, pace: PacedLink) -> None:  # noqa: B027 - most transports have nothing to slow down
        """Share a simulated link. Only transports whose traffic the simulation paces do anything here."""

    def fail(self, why: str, number: int = 0) -> None:
        """The connection is unusable; its owner closes it."""
        if not self.closed:
            self.closed, self.why, self.number = True, why, number

    def see_off(self, patience_s: float) -> None:
        """Before an orderly close: give the peer time, but at most so long, to receive what is queued."""
        if not self.closed and self.proof.done:
            self.flush()

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Queued messages are dropped, and their memory is not read any more."""


class Listener(ABC):
    """The end that links connect to, at a server."""

    transport: Transport

    @property
    @abstractmethod
    def address(self) -> str:
        """Where workers connect, as a URL whose scheme is the transport's name."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that polls readable when ``accept`` has a connection."""

    @property
    def listening(self) -> socket.socket | None:
        """What another process can go on listening with (``Transport.listen_with``); None if there is no such socket."""
        return None

    @abstractmethod
    def accept(self, proof: Proof) -> Link:
        """A new connection. Raises BlockingIOError if there is none, Refused if the peer may not have one, or OSError."""

    @abstractmethod
    def close(self) -> None:
        """Accept nothing more. Links that were accepted stay."""


Dial = Callable[[Proof], Link]
"""Begins a new connection to one address; ``Link.prove`` finds out whether it was made. Raises OSError if that fails at once."""


class Transport(ABC):
    """One kind of payload connection.

    name: its value of PSGC_TRANSPORT, and the scheme of its addresses. label: its name in handshakes, at most 8 ASCII letters; a proof is valid
    on one transport only. copies: payloads may lie anywhere, since their bytes are sent, and are received where they are wanted. local: payloads never leave
    the host, so that PSGC_ENCRYPT=1 needs no encryption here. encrypts: its links encrypt
    payloads if ``Proof.encrypted``. Under PSGC_ENCRYPT=1 a transport that neither is local nor encrypts is refused.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    copies: ClassVar[bool] = False
    local: ClassVar[bool] = False
    encrypts: ClassVar[bool] = False

    @abstractmethod
    def listen(self, config: Config) -> Listener:
        """At a server: begin to listen. Raises PsgcError if that is not possible."""

    def listen_with(self, config: Config, listening: socket.socket) -> Listener:
        """At a server that takes the place of a process which has ended: go on listening with its listener's ``listening``, at the same address."""
        raise NotImplementedError(f"listeners of {self.name} have no socket to go on with")

    @abstractmethod
    def dialer(self, address: str, config: Config) -> Dial:
        """At a worker: a dialer that begins connections to a server's address, as often as needed."""

    def reaches(self, address: str, same_host: bool) -> bool:
        """Whether a worker can connect to the address, as far as that is known without waiting. same_host: the server runs on the worker's host."""
        return True

    def remedy(self, address: str, same_host: bool, trouble: Trouble) -> str:
        """The end of a sentence that says what is wrong with a connection that is not up, and how to mend it."""
        return trouble.text
