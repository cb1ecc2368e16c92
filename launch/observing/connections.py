"""Which of the status page's connections stay: descriptors and memory are bounded, whatever clients do.

A connection that has not asked, or has not taken its answer, within ``PATIENCE_S`` ends, and earlier if ``MOST_CONNECTIONS`` newer ones have come. So a client
that stalls delays nobody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

PATIENCE_S: Final = 30.0
MOST_CONNECTIONS: Final = 256
SWEEP_S: Final = 1.0
Connection = Any  # aiohttp's RequestHandler: its transport is None once it is gone


class Connections:
    """See the module's text. alive: those that are there. It lives in one event loop."""

    def __init__(self, alive: Callable[[], Sequence[Connection]], now: Callable[[], float]) -> None:
        self._alive, self._now = alive, now
        self._until: dict[Connection, float] = {}

    def make_room(self, coming: int = 1) -> None:
        """End what is late, and with as many to come, if they are too many, those that will be late first."""
        late = now = self._now()
        there = [each for each in self._alive() if each.transport is not None and not each.transport.is_closing()]
        self._until = {each: self._until.get(each, now + PATIENCE_S) for each in there}
        if (excess := len(there) + coming - MOST_CONNECTIONS) > 0:
            late = max(now, sorted(self._until.values())[excess - 1])
        for each, until in self._until.items():
            if until <= late and until < math.inf:
                each.transport.abort()  # closing would wait for a client that takes nothing

    def asks(self, connection: Connection) -> None:
        """It has asked, and has its time for the answer."""
        self._until[connection] = self._now() + PATIENCE_S

    def follows(self, connection: Connection) -> None:
        """Its answer goes on until somebody ends it."""
        self._until[connection] = math.inf

    async def sweep(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.make_room(coming=0)
