"""Anybody asks the status page and the metrics anything: who asks rightly is answered rightly meanwhile, and nobody is told what is not documented.

Requests begin as right ones and are changed: methods, paths, headers, sizes, bytes. They come whole, in pieces, several at once, or are never finished; some
clients take no answer. The servers are the real ones, in threads of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import random
import re
import select
import socket
import sys
import threading
from collections import deque
from typing import Any, Final

import pytest

from psgc.config import Config
from psgc.observe.exporter import export
from psgc.observe.table import member_families
from psgc.processes.descriptors import raise_limit
from tests.attacks.mutations import flipped, noise, repeat
from tests.observe.test_metrics import REPORT
from tests.observe.test_page import Following, observed
from tests.ports import free_port

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

TOKEN: Final = "token-of-the-page"
SECRET: Final = "in-the-environment"
PRIVATE: Final = (b"root:x:0", SECRET.encode(), b"Traceback", b"site-packages", b'File "', b"def ")
DOORS: Final = ("metrics", "page", "guarded")
PEERS: Final = 8
STALLED: Final = 300  # clients of each door that have connected, and have gone to sleep
MOST_DESCRIPTORS: Final = 800  # of all servers for their clients, at any time
MOST_THREADS: Final = 40
PATIENCE_S: Final = 100.0  # for an answer, on a machine that does much else

METHODS = ("HEAD", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "get", "G\0T", "")
RIGHT_PATHS = ("/metrics", "/", "/status.json", "/events")
PATHS = (
    "/favicon.ico", "/page.html", "/../../../../etc/passwd",
    "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/proc/self/environ", "/%00", "/%ff%fe", "*", "http://localhost/metrics", "localhost:80",
    "/metrics?name[]=x", "/metrics?name[]=psgc_steps_total", "/?token=%ff", "/?token=wrong", "/status.json?token=\udcff", "/\0", "/é", "", "/" + "x" * 9000,
    "/?" + "a=b&" * 3000, "/status.json#x", "/;/", "/status.json/", "/%", "/%zz",
)  # fmt: skip
VERSIONS = ("HTTP/1.0", "HTTP/1.0", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1x", "http/1.1", "")
HOSTS = ("127.0.0.1:80", "[::1]:1", "[::1", "evil.example", "", "a b", "\udcff", "²", "localhost:99999999999999999999", ":" * 300)
HEADERS = (
    "Accept: */*", "Accept: text/html", "Accept: application/openmetrics-text; version=1.0.0", "Accept: application/openmetrics-text; version=abc",
    "Accept: text/plain; version=1.x; escaping=values", "Accept: application/openmetrics-text; version=1.0.\r\n 0", "Accept: " + "," * 4000,
    "Accept-Encoding: gzip", "Accept-Encoding: snappy, br;q=nan", "Authorization: Bearer wrong", "Authorization: Bearer \udcff", "Authorization: \0",
    "Cookie: psgc_status=wrong", "Cookie: psgc_status=\udcff", "Cookie: ;;==\"\\", "Cookie: psgc_status=\"\\377\"", "Content-Length: 0", "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: abc", "Content-Length: 1\r\nContent-Length: 2", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity", "Content-Encoding: deflate", "Content-Encoding: br", "Expect: 100-continue", "Expect: x",
    "Expect: \udcff", "Connection: close", "Connection: keep-alive",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x",
    "Connection: upgrade\r\nUpgrade: h2c", "Range: bytes=0-1", "If-None-Match: *", "If-Modified-Since: x", "X: a\r\n b", " X: a", "X : a", "X", ": a", "X:\0",
    "X: " + "a" * 20_000, "X-" + "a" * 9000 + ": b", "\r\n".join(f"X-{number}: a" for number in range(300)), "Origin: http://evil.example",
    "Content-Type: multipart/form-data; boundary=x", "Content-Type: \udcff", "X-Forwarded-For: 127.0.0.1", "Host: other",
)  # fmt: skip
RIGHT = (f"Authorization: Bearer {TOKEN}", f"Cookie: psgc_status={TOKEN}")
BODIES = (b"",) * 18 + (
    b"hello",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-5\r\nx",
    b"zz\r\n",
    b"5;" + b"x" * 5000 + b"\r\nhello",
    bytes(70_000),
)


class Door:
    """What a client may be told at one of the ports."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.right = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        if name != "metrics":
            self.right = f"GET /status.json HTTP/1.1\r\nHost: localhost\r\n{RIGHT[0]}\r\nConnection: close\r\n\r\n".encode()

    def allows(self, status: int, body: bytes, knows: bool) -> bool:
        """Whether this is an answer that it has. knows: the client has said the token."""
        if status != 200:
            return len(body) < 1000
        if self.name == "metrics":
            return body.startswith(b"# HELP psgc_") and b"\npsgc_steps_total{" in body
        if self.name == "guarded" and not knows:
            return False
        return body.startswith((b"<!doctype html>", b"data: {", b": nothing")) or "workers" in json.loads(body)


class Fuzzed:
    """The ports of a scheduler's machine, and all that they say to the log and to stderr."""

    def __init__(self) -> None:
        raise_limit()
        self.answers = self.refusals = self.scrapes = 0
        self.said: list[str] = []
        os.environ["PSGC_FUZZED"] = SECRET
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.said.append(logging.Formatter().format(record))  # type: ignore[method-assign]
        logging.getLogger().addHandler(self._handler)
        self._stderr, sys.stderr = sys.stderr, io.StringIO()
        self.doors = [Door(name, free_port()) for name in DOORS]
        config = Config(metrics_port=self.doors[0].port)
        exporter = export(config, 0, lambda: member_families("worker", "rank 0", 1, REPORT))
        assert exporter is not None
        self._exporter = exporter
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._runners = [self._call(self._open(door.port, token)) for door, token in zip(self.doors[1:], ("", TOKEN), strict=True)]
        self.stalled: deque[socket.socket] = deque()
        for door in self.doors:
            self.ask(door)
        self.threads = threading.active_count()

    @staticmethod
    async def _open(port: int, token: str) -> Any:
        from psgc.launch.observing import page

        return await page.serve("127.0.0.1", port, page.Page(Following(observed(0, 7_000)), token))  # type: ignore[arg-type]

    def _call(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)

    def ask(self, door: Door) -> None:
        """As Prometheus and browsers do: the answer comes, whoever else is there."""
        with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as client:
            client.sendall(door.right)
            heard = b""
            while more := client.recv(1 << 16):
                heard += more
        (answer,) = answers(heard, door.right)
        assert answer is not None
        assert answer[0] == 200, heard[:300]
        assert door.allows(*answer, knows=True), heard[:300]
        self.scrapes += 1

    def check(self, own: int) -> None:
        """own: sockets of the clients."""
        assert threading.active_count() <= self.threads + MOST_THREADS
        assert len(os.listdir("/proc/self/fd")) - own <= MOST_DESCRIPTORS
        assert not self.said, self.said[:3]
        assert not sys.stderr.getvalue(), sys.stderr.getvalue()[:2000]  # type: ignore[attr-defined]

    def close(self) -> None:
        for client in self.stalled:
            client.close()
        for runner in self._runners:
            self._call(runner.cleanup())
        self._exporter.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        sys.stderr = self._stderr
        logging.getLogger().removeHandler(self._handler)
        del os.environ["PSGC_FUZZED"]


class Peer:
    """A client that says what it likes."""

    def __init__(self, door: Door) -> None:
        self.door, self.dead, self.knows = door, False, False
        self.socket = socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S)
        self.socket.setblocking(False)
        self.asked, self.heard = bytearray(), bytearray()

    def say(self, data: bytes) -> None:
        try:
            self.asked += data[: self.socket.send(data)]
        except BlockingIOError:
            pass
        except OSError:
            self.dead = True

    def hear(self, within_s: float) -> None:
        """What has been said to it, and what is said in that time."""
        if within_s:
            poll = select.poll()  # select takes no descriptor beyond 1023
            poll.register(self.socket, select.POLLIN)
            poll.poll(1e3 * within_s)
        try:
            while more := self.socket.recv(1 << 16):
                self.heard += more
            self.dead = True
        except BlockingIOError:
            return
        except OSError:
            self.dead = True

    def end(self, rng: random.Random) -> None:
        """Some say that they have said all, and wait a moment."""
        if not self.dead and rng.random() < 0.3:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
                self.hear(0.02)
        self.socket.close()

    def verdict(self, server: Fuzzed) -> None:
        heard = bytes(self.heard)
        for private in PRIVATE:
            assert private not in heard, heard
        assert self.knows or TOKEN.encode() not in heard, heard
        for answer in answers(heard, bytes(self.asked)):
            if answer is None:
                break  # the connection has ended within it
            assert self.door.allows(*answer, self.knows), (self.door.name, answer, self.asked)
            server.answers += answer[0] == 200
            server.refusals += answer[0] != 200


STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d) [ -~]*\Z")
FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[\t -~\x80-\xff]*\Z")


def answers(heard: bytes, asked: bytes) -> list[tuple[int, bytes] | None]:
    """What a client was told: status and body of each answer; None for one that is not whole. Fails where it is not HTTP."""
    found: list[tuple[int, bytes] | None] = []
    while heard:
        head, blank, rest = heard.partition(b"\r\n\r\n")
        first, *fields = head.split(b"\r\n")
        if not blank:
            assert first.startswith(b"HTTP/1."[: len(first)]), heard[:300]
            return [*found, None]
        matched = STATUS_LINE.match(first)
        assert matched, heard[:300]
        assert all(FIELD.match(field) for field in fields), heard[:300]
        status = int(matched[1])
        named = {name.lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
        if status < 200 or (b"HEAD" in asked and (not rest or rest.startswith(b"HTTP/1."))):
            heard = rest
            continue
        if named.get(b"transfer-encoding") == b"chunked":
            body, rest = unchunked(rest)
        elif b"content-length" not in named:  # up to the connection's end
            body, rest = rest or None, b""
        else:
            length = int(named[b"content-length"])
            body, rest = (rest[:length], rest[length:]) if len(rest) >= length else (None, b"")
        if body is None:
            return [*found, None]
        found.append((status, body))
        heard = rest
    return found


def unchunked(data: bytes) -> tuple[bytes | None, bytes]:
    """A body and what follows it; of a stream that goes on, what has come of it. None: nothing has."""
    body = b""
    while matched := re.match(rb"([0-9a-fA-F]+)\r\n", data):
        size, begin = int(matched[1], 16), matched.end()
        if len(data) < begin + size + 2:
            break
        assert data[begin + size : begin + size + 2] == b"\r\n", data
        body, data = body + data[begin : begin + size], data[begin + size + 2 :]
        if not size:
            return body, data
    return body or None, b""


def anything(rng: random.Random) -> tuple[bytes, bool]:
    """From a right request to noise; and whether it has the token."""

    def some(right: str, wrong: tuple[str, ...]) -> str:
        return right if rng.random() < 0.85 else rng.choice(wrong)

    knows = rng.random() < 0.3
    path = some(rng.choice(RIGHT_PATHS), PATHS)
    headers = rng.choices(HEADERS, k=rng.choice([0, 0, 0, 1, 1, 2]))
    if rng.random() < 0.95:
        headers.append(f"Host: {some('localhost', HOSTS)}")
    if knows and rng.random() < 0.8:
        headers.append(rng.choice(RIGHT))
    elif knows:
        path = f"/?token={TOKEN}"
    rng.shuffle(headers)
    first = " ".join((some("GET", METHODS), path, some("HTTP/1.1", VERSIONS)))
    end = "\r\n" if rng.random() < 0.95 else rng.choice(["\n", "\r", "\r\n\r\n", "\0"])
    data = end.join((first, *headers, "", "")).encode(errors="surrogateescape") + rng.choice(BODIES)
    chance = rng.random()
    if chance < 0.15:
        return flipped(rng, data), knows
    if chance < 0.25:
        return data[: rng.randrange(len(data))], knows
    if chance < 0.28:
        return noise(rng), False
    if chance < 0.3:
        return b"\x16\x03\x01" + noise(rng), False
    if chance < 0.35:
        return data * rng.choice([2, 3, 40]), knows
    return data, knows


def fuzz(requests: int, seed: int) -> Fuzzed:
    rng = random.Random(seed)
    server = Fuzzed()
    peers: dict[int, Peer] = {}
    waiting: dict[int, bytes] = {}  # what is left to say, of requests that come in pieces

    def once(number: int) -> None:
        place = rng.randrange(PEERS)
        peer = peers.get(place)
        if peer is None or peer.dead or rng.random() < 0.1:
            waiting.pop(place, None)
            if peer is not None and not peer.dead and rng.random() < 0.2:  # it goes to sleep
                peer.verdict(server)
                server.stalled.append(peer.socket)
                if len(server.stalled) > STALLED * len(DOORS):
                    server.stalled.popleft().close()
            elif peer is not None:
                peer.end(rng)
                peer.verdict(server)
            peer = peers[place] = Peer(rng.choice(server.doors))
        data, knows = (waiting.pop(place), False) if place in waiting else anything(rng)
        peer.knows |= knows
        if len(data) > 1 and rng.random() < 0.2:
            cut = rng.randrange(1, len(data))
            data, waiting[place] = data[:cut], data[cut:]
        peer.say(data)
        peer.hear(0.005 if rng.random() < 0.2 else 0.0)
        if number % 100 == 99:
            server.ask(rng.choice(server.doors))
            server.check(len(peers) + len(server.stalled))

    try:
        repeat(requests, once)
        for peer in peers.values():
            peer.end(rng)
            peer.verdict(server)
        for door in server.doors:
            server.ask(door)
        server.check(len(server.stalled))
    finally:
        server.close()
    return server


def test_some_thousand_requests_break_nothing() -> None:
    server = fuzz(3000, seed=1)
    assert server.answers > 100, "some were right"
    assert server.refusals > 100, "and some were not"
    assert server.scrapes > 30, "and who asks rightly is answered meanwhile"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_requests_break_nothing_and_leave_nothing_behind() -> None:
    fuzz(1_000_000, seed=int.from_bytes(os.urandom(4), "little"))
