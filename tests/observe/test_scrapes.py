"""Metrics are served to whoever asks rightly, whatever others do meanwhile."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from psgc.observe import scrapes
from psgc.observe.scrapes import CONTENT, MOST_ASKED_BYTES, ScrapeServer, answer, status_of
from tests.ports import free_port

HTTP = {
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n": 200, b"GET / HTTP/1.0\r\n\r\n": 200, b"HEAD /metrics?name[]=x HTTP/1.1\r\n\r\n": 200,
    b"GET /metrics HTTP/1.1\n\n": 200, b"GET /etc/passwd HTTP/1.1\r\n\r\n": 404, b"GET /metrics/../x HTTP/1.1\r\n\r\n": 404,
    b"POST /metrics HTTP/1.1\r\nContent-Length: 99\r\n\r\n": 405, b"GET /metrics HTTP/2.0\r\n": 400, b"GET /metrics\r\n": 400, b"\r\n": 400, b"\0\xff\n": 400,
    b"GET  / HTTP/1.1\r\n": 400, b"x" * MOST_ASKED_BYTES: 431, b"GET / HTTP/1.1\r\n" + b"x" * MOST_ASKED_BYTES: 431,
}  # fmt: skip


@pytest.mark.parametrize(("asked", "status"), HTTP.items(), ids=range(len(HTTP)))
def test_a_request_is_answered_once_its_first_line_or_its_end_decides(asked: bytes, status: int) -> None:
    assert status_of(asked) == status
    short = asked[: asked.index(b"\n")] if b"\n" in asked else asked[:-1]
    assert status_of(short) == 0, "before its first line has ended, nothing is decided"
    if status in (200, 404, 405):
        assert not any(status_of(asked[:cut]) for cut in range(len(asked)))


def test_an_answer_is_whole_and_says_how_long_it_is() -> None:
    head, _, body = answer(200, b"text\n").partition(b"\r\n\r\n")
    assert (body, head.split(b"\r\n")[0]) == (b"text\n", b"HTTP/1.1 200 OK")
    assert b"Content-Length: 5" in head.split(b"\r\n")
    assert answer(200, b"text\n", head_only=True) == head + b"\r\n\r\n"
    assert b"\r\nAllow: GET, HEAD\r\n" in answer(405, b"")


class Served:
    """Figures that are asked for ``made`` times."""

    def __init__(self) -> None:
        self.port, self.made = free_port(), 0
        self.body: bytes | Exception = b"psgc_steps_total 1\n"
        self.server = ScrapeServer("127.0.0.1", self.port, self.text)

    def text(self) -> bytes:
        self.made += 1
        if isinstance(self.body, Exception):
            raise self.body
        return self.body

    def scraped(self) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"] == CONTENT
            return bytes(answer.read())

    def client(self, said: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        client.sendall(said)
        return client


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.close()


def test_clients_that_stall_are_bounded_and_delay_no_scrape(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "MOST_CLIENTS", 8)
    served.body = bytes(20 << 20)  # more than the buffers of a connection hold
    threads = threading.active_count()
    stalled = [served.client(said) for said in (b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n\r\n") * 5]
    assert served.scraped() == served.body
    assert len(served.server._clients) <= 8
    assert threading.active_count() == threads
    assert stalled[0].recv(1) == b"", "the oldest has made room"
    for one in stalled:
        one.close()


def test_who_asks_or_takes_its_answer_too_slowly_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "PATIENCE_S", 0.3)
    one = Served()
    one.body = bytes(20 << 20)
    silent, slow = one.client(), one.client(b"GET / HTTP/1.1\r\n\r\n")
    assert silent.recv(1) == b""
    until = time.monotonic() + 60
    while one.server._clients:
        assert time.monotonic() < until, "a client that takes nothing is kept"
        time.sleep(0.05)
    for client in (silent, slow):
        client.close()
    one.server.close()


def test_a_body_that_nobody_reads_does_not_cost_its_sender_the_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "LINGER_S", 1000.0)
    client = served.client(b"POST / HTTP/1.1\r\nContent-Length: 10000\r\n\r\n" + bytes(5000))
    client.sendall(bytes(5000))
    heard = b""
    while more := client.recv(1 << 16):
        heard += more
    assert heard.startswith(b"HTTP/1.1 405 ")
    client.close()


def test_many_who_ask_at_once_get_one_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "NEW_S", 1000.0)
    served.server._made_at = -1000.0
    assert {served.scraped() for _ in range(20)} == {b"psgc_steps_total 1\n"}
    assert served.made == 1


def test_figures_that_cannot_be_collected_are_one_line_and_others_follow(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrapes, "NEW_S", 0.0)
    served.body = ValueError("as the test wants it")
    with pytest.raises(urllib.error.HTTPError, match="500"):
        served.scraped()
    assert [record.getMessage() for record in caplog.records] == [
        "metrics: the figures could not be collected: ValueError: as the test wants it"
    ]
    assert caplog.records[0].exc_info is None
    served.body = b"again\n"
    assert served.scraped() == b"again\n"
