"""``python -m psgc.launch.observing.station``: a job's status page and the scheduler's metrics, in a process beside the scheduler.

The scheduler starts it, and it is an observer of the scheduler like any other: however many look, and however slowly, the scheduler's loop answers a question
now and then and never waits. It ends when its stdin does, so also where the scheduler is killed. It never ends a job: what it cannot do it says in one line.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from psgc.config import Config
from psgc.diagnostics.lines import log_everything
from psgc.launch.observing.following import Following
from psgc.observe.exporter import INSTALL, export
from psgc.observe.table import Family, job_families
from psgc.processes.addresses import is_loopback

if TYPE_CHECKING:
    from psgc.launch.observing.page import Page

logger = logging.getLogger("psgc.status")
TOKEN_BYTES: Final = 16


class Station:
    """See the module's text."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._page: Page | None = None
        self._following = Following(config, self._changed)

    def run(self) -> None:
        """Serve until the process ends."""
        config = self._config
        exporter = export(config, 0, self._families)
        if config.status_port and importlib.util.find_spec("aiohttp") is None:
            logger.warning("PSGC_STATUS_PORT=%d: there is no status page, because aiohttp is missing: %s", config.status_port, INSTALL)
        elif config.status_port:
            asyncio.run(self._serve())
        if exporter is not None:
            threading.Event().wait()

    async def _serve(self) -> None:
        from psgc.launch.observing import page

        config = self._config
        local = is_loopback(config.status_host)
        token = "" if local else config.status_token or secrets.token_urlsafe(TOKEN_BYTES)
        made = page.Page(self._following, token)
        try:
            await page.serve(config.status_host, config.status_port, made)
        except (OSError, OverflowError) as error:
            logger.warning(
                "PSGC_STATUS_PORT=%d: there is no status page, because nothing can listen at %s port %d (%s); the job goes on; choose another port",
                config.status_port, config.status_host, config.status_port, getattr(error, "strerror", None) or error,
            )  # fmt: skip
            return
        self._page, self._loop = made, asyncio.get_running_loop()
        host = config.status_host if local else socket.gethostname()
        drawn = f"?token={token}" if token and not config.status_token else ""
        logger.info("status page: http://%s:%d/%s", host, config.status_port, drawn)
        await asyncio.Event().wait()

    def _changed(self) -> None:
        if self._loop is not None and self._page is not None:
            self._loop.call_soon_threadsafe(self._page.changed)

    def _families(self) -> list[Family]:
        view = self._following.fresh()
        if view is None:
            return []
        there = [row for row in view.rows if not row.left]
        return job_families(
            self._config.job,
            {row.member: row.silent_s for row in there},
            view.awaited,
            view.slow,
            Counter(row.role for row in there),
            view.warnings,
        )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler decides when it is over
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_scheduler, daemon=True).start()
    config = Config.from_env(role="scheduler")
    log_everything(config)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))  # where the page is, is heard where warnings are
    Station(config).run()
    threading.Event().wait()  # nothing is served; what ends it is the scheduler's end


def _end_with_scheduler() -> None:
    while os.read(0, 4096):
        continue
    os._exit(0)


if __name__ == "__main__":
    main()
