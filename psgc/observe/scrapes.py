"""Answers scrapes: an HTTP server of one text, in one thread of a process that has other work to do.

It trusts nobody who connects. Of a request only the first line is read, and no header: there is nothing to choose. Threads, descriptors and memory are bounded,
whatever clients do: one that has not asked, or has not taken its answer, within ``PATIENCE_S`` is closed, and earlier if ``MOST_CLIENTS`` newer ones have
come. So a client that stalls never delays another. The text is made once in ``NEW_S`` at most, so a flood of requests costs the process little.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from psgc.processes.addresses import BACKLOG, lookup
from psgc.processes.mailbox import Mailbox

logger = logging.getLogger(__name__)
PATIENCE_S: Final = 30.0
LINGER_S: Final = 2.0  # for a client to close after its answer: closing while it still sends would take the answer away from it
MOST_CLIENTS: Final = 128
MOST_ASKED_BYTES: Final = 16 << 10  # of a request's head, and of what follows it
NEW_S: Final = 0.1
TURN_CLIENTS: Final = 16  # accepted before others are heard
CONTENT: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's text format
_PATHS: Final = (b"/", b"/metrics")
_FIRST_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.[01]\Z")
_HEAD_ENDS: Final = re.compile(rb"\n\r?\n")
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
}  # fmt: skip
_BODIES: Final = {
    400: "this is no HTTP request\n", 404: "the figures are at /metrics\n", 405: "GET or HEAD\n", 431: "the request is too long\n",
    500: "the figures could not be collected; the process's log says why\n",
}  # fmt: skip


def status_of(asked: bytes) -> int:
    """What a request's bytes, as far as they have come, are answered with; 0: more of them is awaited. Pure."""
    line, end, _ = asked.partition(b"\n")
    if end:
        found = _FIRST_LINE.match(line.removesuffix(b"\r"))
        if found is None:
            return 400
        if _HEAD_ENDS.search(asked):
            if found[1] not in (b"GET", b"HEAD"):
                return 405
            return 200 if found[2].partition(b"?")[0] in _PATHS else 404
    return 431 if len(asked) >= MOST_ASKED_BYTES else 0


def answer(status: int, body: bytes, head_only: bool = False) -> bytes:
    """The whole answer, after which the connection ends."""
    fields = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Type: {CONTENT}", f"Content-Length: {len(body)}", "Connection: close"]
    if status == 405:
        fields.append("Allow: GET, HEAD")
    return "\r\n".join((*fields, "", "")).encode() + (b"" if head_only else body)


class _Client:
    """asked: of a request that is not answered yet. left: of the answer; None before there is one."""

    __slots__ = ("asked", "beyond", "left", "socket", "until")

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.socket, self.until = sock, until
        self.asked = bytearray()
        self.left: memoryview | None = None
        self.beyond = 0  # bytes that came after the request


class ScrapeServer:
    """Serves ``text()``, which is called in the server's thread, until ``close``. Raises OSError, or OverflowError, where the port cannot be had."""

    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        family, address = lookup(host, port)[0]
        self._listening = socket.create_server(address, family=family, backlog=BACKLOG)
        self._listening.setblocking(False)
        self._text, self._made, self._made_at = text, (500, b""), -NEW_S
        self._clients: dict[socket.socket, _Client] = {}  # oldest first
        self._over, self._mailbox, self._selector = False, Mailbox(), selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="psgc-scrapes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From any other thread; the port is free then."""
        self._over = True
        self._mailbox.wake()
        self._thread.join()

    def _serve(self) -> None:
        while not self._over:
            self._turn()
        for client in list(self._clients.values()):
            self._end(client)
        self._listening.close()
        self._selector.close()

    def _turn(self) -> None:
        until = min((client.until for client in self._clients.values()), default=None)
        ready = self._selector.select(None if until is None else max(0.0, until - time.monotonic()))
        for key, _ in ready:
            if key.fileobj is self._listening:
                self._accept()
            elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._serve_one(client)
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.until <= now]:
            self._end(client)

    def _accept(self) -> None:
        for _ in range(TURN_CLIENTS):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(NEW_S)  # the process has no descriptor left: the connection waits, and so may others
                return
            if len(self._clients) >= MOST_CLIENTS:
                self._end(next(iter(self._clients.values())))
            sock.setblocking(False)
            client = self._clients[sock] = _Client(sock, time.monotonic() + PATIENCE_S)
            self._selector.register(sock, selectors.EVENT_READ)
            self._serve_one(client)  # most have asked by now

    def _serve_one(self, client: _Client) -> None:
        try:
            if client.left:
                self._send(client)
            else:
                self._hear(client)
        except OSError:
            self._end(client)

    def _hear(self, client: _Client) -> None:
        try:
            data = client.socket.recv(8192)
        except BlockingIOError:
            return
        if not data:
            self._end(client)
        elif client.left is not None:  # answered: what it still sends is not read
            client.beyond += len(data)
            if client.beyond > MOST_ASKED_BYTES:
                self._end(client)
        else:
            client.asked += data
            if status := status_of(bytes(client.asked)):
                self._answer(client, status)

    def _answer(self, client: _Client, status: int) -> None:
        head_only = client.asked.startswith(b"HEAD ")
        body = _BODIES.get(status, "").encode()
        if status == 200:
            status, body = self._newest()
        client.left, client.asked = memoryview(answer(status, body, head_only)), bytearray()
        self._send(client)

    def _send(self, client: _Client) -> None:
        assert client.left is not None
        with contextlib.suppress(BlockingIOError):
            client.left = client.left[client.socket.send(client.left) :]
        if client.left:
            self._selector.modify(client.socket, selectors.EVENT_WRITE)
            return
        client.socket.shutdown(socket.SHUT_WR)
        client.until = min(client.until, time.monotonic() + LINGER_S)
        self._selector.modify(client.socket, selectors.EVENT_READ)

    def _newest(self) -> tuple[int, bytes]:
        """Status and body. Whoever asks while the text is made gets the same one: they ask one after the other."""
        if time.monotonic() - self._made_at >= NEW_S:
            try:
                self._made = 200, self._text()
            except Exception as error:  # whatever it is, it ends neither the process nor the serving
                logger.warning("metrics: the figures could not be collected: %s: %s", type(error).__name__, error)
                self._made = 500, _BODIES[500].encode()
            self._made_at = time.monotonic()
        return self._made

    def _end(self, client: _Client) -> None:
        if self._clients.pop(client.socket, None) is not None:
            self._selector.unregister(client.socket)
            client.socket.close()
