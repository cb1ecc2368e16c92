"""A transport between threads of one process: what somebody who adds a transport writes. It takes this file and one row of the registry.

Payloads are handed over where they lie. Each end wakes the other by an eventfd, which stays readable while there is something to hear.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from psgc.config import Config
from psgc.transport.link import MAX_BYTES, MAX_MESSAGES, Dial, Link, Listener, Transport
from psgc.transport.memory.segment import Place
from psgc.transport.security.handshake import Proof
from psgc.wire.frames import Header

SCHEME = "within://"
LOCK = threading.Lock()  # of all ends: whoever wakes another must find its descriptor open
LISTENERS: dict[str, WithinListener] = {}
CARRIED: list[Header] = []  # all that links have carried, for the test


class Bell:
    """A descriptor that is readable once it has been rung."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def settle(self, quiet: bool) -> None:
        if quiet and self.fd >= 0:
            os.eventfd_write(self.fd, 1)
            os.eventfd_read(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class WithinLink(Link):
    def __init__(self, proof: Proof, peer: str) -> None:
        super().__init__(proof, peer)
        self._other: WithinLink | None = None  # None: not accepted yet, or gone
        self._bell = Bell()
        self._said = bytearray()  # of the handshake, by the other end
        self._inbox: deque[tuple[Header, Any]] = deque()
        self._ended = False

    def meet(self, other: WithinLink) -> None:
        with LOCK:
            self._other, other._other = other, self
            self._bell.ring()
            other._bell.ring()

    def fileno(self) -> int:
        return self._bell.fd

    def _say(self, data: bytes) -> int:
        with LOCK:
            if self._other is None:
                raise BlockingIOError
            self._other._said += data
            self._other._bell.ring()
        return len(data)

    def _hear(self, nbytes: int) -> bytes:
        with LOCK:
            data = bytes(self._said[:nbytes])
            del self._said[:nbytes]
            self._bell.settle(not self._said and not self._inbox and not self._ended)
        if not data and not self._ended:
            raise BlockingIOError
        return data

    def send(self, header: Header, body: Any = None, place: Place | None = None) -> None:
        payload = place.bytes[: header.payload_bytes] if place is not None else body or None
        with LOCK:
            if self._other is not None:
                CARRIED.append(header)
                self._other._inbox.append((header, payload))
                self._other._bell.ring()

    @property
    def queued(self) -> bool:
        return False

    def flush(self) -> None:
        return

    def receive(self, messages: int = MAX_MESSAGES, nbytes: int = MAX_BYTES) -> Iterator[tuple[Header, Any]]:
        for _ in range(messages):
            with LOCK:
                message = self._inbox.popleft() if self._inbox else None
                self._bell.settle(not self._inbox and not self._ended)
            if message is None:
                break
            yield message
        self.more = bool(self._inbox)
        if self._ended and not self.more:
            self.fail("closed by the peer")

    def close(self) -> None:
        self.fail("closed")
        with LOCK:
            other, self._other = self._other, None
            if other is not None:
                other._other, other._ended = None, True
                other._bell.ring()
            self._bell.close()


class WithinListener(Listener):
    def __init__(self, name: str) -> None:
        self.transport = TRANSPORT
        self.name, self._bell = name, Bell()
        self._waiting: deque[WithinLink] = deque()
        LISTENERS[name] = self

    @property
    def address(self) -> str:
        return SCHEME + self.name

    def fileno(self) -> int:
        return self._bell.fd

    def connect(self, proof: Proof) -> WithinLink:
        link = WithinLink(proof, self.name)
        with LOCK:
            self._waiting.append(link)
            self._bell.ring()
        return link

    def accept(self, proof: Proof) -> WithinLink:
        with LOCK:
            other = self._waiting.popleft() if self._waiting else None
            self._bell.settle(not self._waiting)
        if other is None:
            raise BlockingIOError
        link = WithinLink(proof, "a thread")
        link.meet(other)
        return link

    def close(self) -> None:
        LISTENERS.pop(self.name, None)
        self._bell.close()


class Within(Transport):
    name = "within"
    label = "within"
    local = True

    def listen(self, config: Config) -> WithinListener:
        return WithinListener(f"{config.job}/{os.urandom(4).hex()}")

    def dialer(self, address: str, config: Config) -> Dial:
        return partial(self._connect, address.removeprefix(SCHEME))

    @staticmethod
    def _connect(name: str, proof: Proof) -> WithinLink:
        if name not in LISTENERS:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no server listens at {name} in this process")
        return LISTENERS[name].connect(proof)

    def reaches(self, address: str, same_host: bool) -> bool:
        return address.removeprefix(SCHEME) in LISTENERS


TRANSPORT = Within()
