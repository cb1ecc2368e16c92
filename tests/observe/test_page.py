"""The status page: in a real browser, beside a real job, for strangers, and for clients that take nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psgc.observe.live import View, view
from psgc.wire.reports import Event, Observed, Report, ReportOf
from tests.observe.browser import CHROMIUM, Browser
from tests.observe.test_top import be_outside
from tests.ports import free_port

aiohttp = pytest.importorskip("aiohttp")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")
MARKUP = '<img src=x onerror="document.title=1">'


def observed(*silent_ms: int, text: str = "everyone is there", hostname: str = "here") -> View:
    """A job of workers that have been silent for so long, and a server."""
    report = {
        "up_ms": 10_000,
        "wire_bytes": 5,
        "steps": 40,
        "step_us": 25_000,
        "codecs": {MARKUP: [5, 10, 1]},
        "residuals": {MARKUP: 1.5},
        "travels": text,
    }
    plain = {name: report.get(name, getattr(Report(1, 1), name)) for name in Report.__dataclass_fields__}
    rows = [ReportOf("worker", rank, hostname, 1, False, ms, plain) for rank, ms in enumerate(silent_ms)]
    rows.append(ReportOf("server", 0, hostname, 2, False, 0, {}))
    return view(Observed(1, "v", len(silent_ms), 1, True, tuple(rows), 1000, (Event(3, 30, text),)))


class Following:
    """In place of the thread that asks a scheduler."""

    def __init__(self, shown: View) -> None:
        self.view, self.over = shown, ""

    def look(self) -> None: ...

    def fresh(self) -> View:
        return self.view


class Served:
    """A page of its own, in the running loop."""

    def __init__(self, shown: View, token: str = "") -> None:
        from psgc.launch.observing import page

        self.following, self._serve = Following(shown), page.serve
        self.page = page.Page(self.following, token)  # type: ignore[arg-type]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Served:
        self._runner = await self._serve("127.0.0.1", self.port, self.page)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def show(self, shown: View) -> None:
        self.following.view = shown
        self.page.changed()


def until_page(url: str, found: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The page's document, once that is so."""
    until = time.monotonic() + 100
    document: dict[str, Any] = {}
    while not document or not found(document):
        assert time.monotonic() < until, document
        try:
            with urllib.request.urlopen(f"{url}/status.json", timeout=30) as answer:
                document = json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    return document


@needs_chromium
@pytest.mark.timeout(300)
def test_a_browser_follows_a_job_and_shows_other_peoples_names_as_text(tmp_path: Path) -> None:
    async def run() -> None:
        async with Served(observed(0, 0, text=MARKUP, hostname=MARKUP)) as served, Browser() as browser:
            for width, dark in ((1200, False), (400, True)):
                served.show(observed(0, 0, text=MARKUP, hostname=MARKUP))
                await browser.open(served.url, width, dark=dark)
                await browser.until("document.getElementById('state').textContent == 'live'")
                text = await browser.evaluate("document.body.innerText")
                assert text.count(MARKUP) >= 6, "host names, codec, bucket, layout, event"
                assert await browser.evaluate("document.images.length") == 0
                assert await browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing is to be scrolled sideways"
                assert await browser.evaluate("document.getElementById('notice').hidden")
                served.show(observed(0, 7_000))
                await browser.until("document.getElementById('notice').textContent == 'The job waits for rank 1'")
                assert await browser.evaluate("document.querySelector('tr.awaited td').textContent") == "rank 1"
                await browser.picture(tmp_path / f"{width}.png")
                back = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (back == "rgb(18, 21, 27)") is dark
            served.following.over = "the job has failed: as the test wants it"
            served.page.changed()
            await browser.until("document.getElementById('notice').textContent.includes('as the test wants it')")
            assert browser.errors == []

    asyncio.run(run())


def test_beyond_loopback_everything_needs_the_token_which_leaves_the_address() -> None:
    async def run() -> None:
        async with (
            Served(observed(0), token="secret") as served,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
        ):
            for path in ("/", "/status.json", "/events", "/status.json?token=wrong"):
                async with session.get(served.url + path) as answer:
                    assert answer.status == 401
                    assert "here" not in await answer.text()
            async with session.get(f"{served.url}/status.json", headers={"Authorization": "Bearer secret"}) as answer:
                assert (await answer.json())["workers"][0]["steps"] == 40
            async with session.get(f"{served.url}/?token=secret") as answer:
                assert answer.status == 200
                assert answer.url.query_string == ""
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            async with session.get(f"{served.url}/status.json") as answer:
                assert answer.status == 200, "by the cookie"

    asyncio.run(run())


def test_on_loopback_a_name_of_somebody_elses_is_refused() -> None:
    async def run() -> None:
        async with Served(observed(0)) as served, aiohttp.ClientSession() as session:
            for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("10.0.0.1:80", 403)):
                async with session.get(f"{served.url}/status.json", headers={"Host": host}) as answer:
                    assert answer.status == status, host

    asyncio.run(run())


def test_a_client_that_takes_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.launch.observing import page

    monkeypatch.setattr(page, "PATIENCE_S", 0.5)

    async def run() -> None:
        async with Served(observed(0, text="x" * 400)) as served, aiohttp.ClientSession() as session:
            slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
            for one in slow:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for number in range(2000):  # far more than their connections' buffers hold
                served.show(observed(number, text="y" * 400))
                await asyncio.sleep(0)
                if number % 200 == 0:
                    async with session.get(f"{served.url}/status.json") as answer:
                        assert (await answer.json())["workers"][0]["silent_s"] == number / 1e3
            for one in slow:
                one.close()

    asyncio.run(run())


def test_connections_that_stall_are_bounded_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from psgc.launch.observing import connections

    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 10)
    large = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000

    async def gone(one: socket.socket) -> None:
        until = time.monotonic() + 60
        while True:
            assert time.monotonic() < until, "it is kept"
            try:
                if not one.recv(1 << 16):
                    return
            except BlockingIOError:
                await asyncio.sleep(0.05)
            except ConnectionError:
                return

    async def run() -> None:
        async with Served(observed(0)) as served, aiohttp.ClientSession() as session:
            said = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", large) * 10
            stalled = []
            for each in said:
                one = socket.create_connection(("127.0.0.1", served.port))
                one.setblocking(False)
                one.send(each)
                stalled.append(one)
                await asyncio.sleep(0.01)
                there = [each for each in served.page.connections._alive() if each.transport is not None]  # type: ignore[union-attr]
                assert len([each for each in there if not each.transport.is_closing()]) <= 11
            await gone(stalled[0])
            async with session.get(f"{served.url}/status.json", headers={"Connection": "close"}) as answer:
                assert answer.status == 200
            monkeypatch.setattr(connections, "PATIENCE_S", 0.2)
            last = socket.create_connection(("127.0.0.1", served.port))
            last.setblocking(False)
            await gone(last)
            for one in (*stalled, last):
                one.close()
            until = time.monotonic() + 60
            while served.page.connections._alive():  # type: ignore[union-attr]
                assert time.monotonic() < until, "nothing is left of a connection"
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_requests_that_are_no_http_are_answered_in_a_few_words_and_logged_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def told(served: Served, said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(said)
        heard = await reader.read()
        writer.close()
        return heard

    async def run() -> None:
        async with Served(observed(0), token="secret") as served:
            for bearer in (b"\xff", b"\xed\xa0\x80", "é".encode()):
                request = b"GET /status.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + bearer + b"\r\n\r\n"
                assert (await told(served, request)).startswith(b"HTTP/1.1 401 "), bearer
            expects = b"GET /x HTTP/1.1\r\nConnection: close\r\nExpect: 100\xadcontinue\r\n\r\n"  # aiohttp cannot say that it does not
            for nonsense in (expects, b"\0" * 5000, b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX" + b"x" * 20_000 + b": a\r\n\r\n"):
                heard = await told(served, nonsense)
                assert re.match(rb"HTTP/1\.[01] 400 ", heard), heard
                assert heard.endswith(b"\r\n\r\nthis is no HTTP request\n")
            assert await told(served, b"GET / HTTP/2.0\r\nHost: x\r\n\r\n") == b"", "no answer in a version that is not spoken"

    asyncio.run(run())
    assert not caplog.records


def test_a_page_that_fails_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with Served(observed(0)) as served, aiohttp.ClientSession() as session:
            served.following.view = "no view"  # type: ignore[assignment]
            async with session.get(f"{served.url}/status.json") as answer:
                assert answer.status == 500
                assert await answer.text() == "the page failed; the scheduler's log says why\n"

    asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage().startswith("status page: /status.json failed: AttributeError: ")
    assert record.exc_info is None


@pytest.mark.timeout(300)
def test_a_stopped_worker_is_the_one_that_is_awaited_and_the_page_ends_with_the_scheduler(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    job = make_job(env={"PSGC_STATUS_PORT": str(port), "PSGC_SILENCE_S": "5"})
    job.whole("--until", str(tmp_path / "enough"), job="trains.py")
    be_outside(monkeypatch, job)
    url = f"http://127.0.0.1:{port}"
    document = until_page(url, lambda found: found.get("complete") and all(row["steps"] for row in found["workers"]))
    stopped = document["workers"][1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        until_page(url, lambda found: found["awaited"] == ["rank 1"] and found["workers"][1]["silent_s"] > 1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    until_page(url, lambda found: found["workers"][1]["silent_s"] < 1)
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=30)
    assert f"status page: {url}/" in job.text()


@pytest.mark.timeout(300)
def test_a_taken_port_is_one_line_and_the_job_goes_on_and_a_killed_scheduler_leaves_no_page(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = make_job(env={"PSGC_STATUS_PORT": str(taken.getsockname()[1])})
        job.scheduler().read_until("there is no status page, because nothing can listen at 127.0.0.1 port")
        job.server()
        for node in range(2):
            job.worker(node, "--steps", "5", job="trains.py")
        assert set(job.end().values()) == {0}, job.text()
    port = free_port()
    job = make_job(env={"PSGC_STATUS_PORT": str(port)})
    scheduler = job.scheduler()
    until_page(f"http://127.0.0.1:{port}", lambda found: found.get("complete") is False)
    scheduler.kill()
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < until, "the page outlives its scheduler"
        time.sleep(0.1)
    job.end()
