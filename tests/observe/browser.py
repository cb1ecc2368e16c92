"""A real Chromium for tests of pages: without a window, told what to do over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
HANG_S = 60.0


class Browser:
    """One page. Use it as an asynchronous context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        assert CHROMIUM is not None
        self._popen = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0",
             f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._number = 0
        self.errors: list[str] = []  # that the page's script has met, or the policy has refused

    async def __aenter__(self) -> Browser:
        told = Path(self._folder.name, "DevToolsActivePort")
        until = time.monotonic() + HANG_S
        while not told.is_file() or "\n" not in told.read_text():
            assert time.monotonic() < until, "Chromium did not start"
            await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self.ask(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        self._popen.kill()
        self._popen.wait()
        self._folder.cleanup()

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await asyncio.wait_for(self._socket.receive(), HANG_S)).data)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:400])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found

    async def open(self, address: str, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        await self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        await self.ask("Page.navigate", url=address)

    async def evaluate(self, expression: str) -> Any:
        return (await self.ask("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until the expression is true in the page."""
        until = time.monotonic() + HANG_S
        while not await self.evaluate(expression):
            assert time.monotonic() < until, (expression, await self.evaluate("document.body.innerText"), self.errors)
            await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = await self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))
