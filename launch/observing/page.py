"""The status page of a job, by aiohttp: a page, its document as JSON, and events by which the page follows it.

What a browser is given is the document of ``psgc top --json``; names in it are other people's, and the page shows them as text. A client that reads slowly
misses documents and holds up nobody (connections.py). Beyond loopback every request needs the token; on loopback a request must name a loopback host, so that
no web page elsewhere can read this one by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import HttpVersion10, HttpVersion11, web

from psgc.launch.observing.connections import PATIENCE_S, Connections
from psgc.launch.observing.following import Following
from psgc.launch.observing.live_table import document
from psgc.processes.addresses import is_loopback

PAGE: Final = Path(__file__).with_name("page.html")
MOST_FOLLOWERS: Final = 100
ALIVE_S: Final = 15.0  # an event that says nothing, so that a connection that is gone is noticed
COOKIE: Final = "psgc_status"
VERSIONS: Final = (HttpVersion10, HttpVersion11)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
logger = logging.getLogger("psgc.status")


class Page:
    """See the module's text. token: "" on loopback. It lives in one event loop."""

    def __init__(self, following: Following, token: str) -> None:
        self._following, self._token = following, token
        self._changed = asyncio.Event()
        self._followers = 0
        self._asking: asyncio.Task[object] | None = None
        self.connections: Connections | None = None
        self.app = web.Application(middlewares=[self._answer])
        self.app.add_routes([web.get("/", self._page), web.get("/status.json", self._status), web.get("/events", self._events)])

    def changed(self) -> None:
        """There is another view. In the loop."""
        self._changed.set()
        self._changed = asyncio.Event()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What fails in here is psgc's fault, and a line of the log; what fails around it is the request's (``_Connection``)."""
        try:
            return await self._guarded(request, handler)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            logger.error("status page: %s failed: %s: %s", request.rel_url.raw_path, type(error).__name__, error)
            return web.Response(status=500, text="the page failed; the scheduler's log says why\n")

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.connections is not None
        self.connections.asks(request.protocol)
        if request.version not in VERSIONS:  # aiohttp would answer in the client's version, which it does not speak
            raise ConnectionResetError
        if not self._token:
            host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
            if host.strip("[]") != "localhost" and not is_loopback(host.strip("[]")):
                return web.Response(status=403, text="this page is served on this machine alone; ask for it by localhost\n")
            return await handler(request)
        given = request.query.get("token", "")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        told = (given, bearer, request.cookies.get(COOKIE, ""))  # any bytes, those that are no UTF-8 as surrogates
        known = any(hmac.compare_digest(each.encode(errors="surrogatepass"), self._token.encode()) for each in told)
        if not known:
            return web.Response(status=401, text="this page needs its token: the scheduler has logged its address with it\n")
        if given and request.path == "/":  # out of the address, and of the browser's history
            answer = web.HTTPFound("/")
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
            raise answer
        return await handler(request)

    async def _page(self, _: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return web.Response(text=PAGE.read_text().replace("NONCE", nonce), content_type="text/html", headers=headers)

    async def _status(self, _: web.Request) -> web.Response:
        if self._asking is None or self._asking.done():  # one thread waits for a view, for however many
            self._asking = asyncio.create_task(asyncio.to_thread(self._following.fresh))
        await asyncio.shield(self._asking)
        return web.Response(text=self._document(), content_type="application/json", headers={"Cache-Control": "no-store"})

    def _document(self) -> str:
        view, over = self._following.view, self._following.over
        found: dict[str, Any] = {} if view is None else document(view)
        return json.dumps({**found, "over": over})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._followers >= MOST_FOLLOWERS:
            return web.Response(status=503, text=f"{MOST_FOLLOWERS} browsers follow this job already\n")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._followers += 1
        assert self.connections is not None
        self.connections.follows(request.protocol)
        try:
            await answer.prepare(request)
            said = ""
            while True:
                self._following.look()
                changed, now = self._changed, self._document()
                text = f"data: {now}\n\n" if now != said else ": nothing new\n\n"
                await asyncio.wait_for(answer.write(text.encode()), PATIENCE_S)
                said = now
                try:
                    await asyncio.wait_for(changed.wait(), ALIVE_S)
                except asyncio.TimeoutError:
                    continue
        except (ConnectionError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # closing would wait for a client that takes nothing
            return answer
        finally:
            self._followers -= 1
            self.connections.asks(request.protocol)


class _Connection(web.RequestHandler):
    """As aiohttp's, but that somebody else's nonsense is answered in a few words, where aiohttp gives it back, and is no line of the scheduler's log."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionResetError  # there is no other end, or it is in the middle of an answer
        logger.debug("status page: no request: %s: %s", type(exc).__name__, exc)
        answer = web.Response(status=400, text="this is no HTTP request\n")
        answer.force_close()
        return answer


class _Site(web.BaseSite):
    """As aiohttp's TCPSite, with room made for each connection."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, connections: Connections) -> None:
        super().__init__(runner)
        assert runner.server is not None
        self._host, self._port, self._connections, self._requests = host, port, connections, runner.server

    @property
    def name(self) -> str:
        return f"{self._host}:{self._port}"

    def _connection(self) -> asyncio.Protocol:
        self._connections.make_room()
        return _Connection(
            self._requests,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as its runner passes it
            lingering_time=0,  # nobody wants a body: it is neither waited for nor unpacked
            auto_decompress=False,
        )

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, self._host, self._port)
        self._sweep = loop.create_task(self._connections.sweep())

    async def stop(self) -> None:
        self._sweep.cancel()
        await super().stop()


async def serve(host: str, port: int, page: Page) -> web.AppRunner:
    """Serve it in the running loop. Raises OSError where the port cannot be had."""
    runner = web.AppRunner(page.app, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    server = runner.server
    assert server is not None
    page.connections = Connections(lambda: server.connections, asyncio.get_running_loop().time)
    await _Site(runner, host, port, page.connections).start()
    return runner
