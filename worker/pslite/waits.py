"""What a worker over ps-lite waits for: ps-lite tells nobody who is late, so each worker names it itself, and gives up in the end."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from psgc.processes.reminder import Reminder
from psgc.worker.tickets import StepTicket

logger = logging.getLogger(__name__)
MOST_DONE: Final = 4096  # tickets that are kept although they may be done


class Waits:
    """silence_s: until the first message; timeout_s: until this rank gives up."""

    def __init__(self, rank: int, silence_s: float, timeout_s: float) -> None:
        self._rank, self._silence_s, self._timeout_s = rank, silence_s, timeout_s
        self._lock = threading.Lock()
        self._waits: dict[StepTicket, tuple[float, str]] = {}
        self._reminder: Reminder | None = None

    def add(self, ticket: StepTicket, what: str) -> None:
        with self._lock:
            if len(self._waits) > MOST_DONE:
                self._waits = {known: value for known, value in self._waits.items() if not known.done}
            self._waits[ticket] = (time.monotonic(), what)

    def tick(self, now: float) -> str | None:
        """Say what this rank waits for. Returns why it gives up, if it does. In the van's thread."""
        with self._lock:
            self._waits = {ticket: value for ticket, value in self._waits.items() if not ticket.done}
            oldest = min(self._waits.values(), default=None)
        if oldest is None or now - oldest[0] < self._silence_s:
            self._reminder = None
            return None
        text = f"rank {self._rank}: {oldest[1]} has not come for {now - oldest[0]:.0f} s; {len(self._waits)} requests are under way"
        if now - oldest[0] > self._timeout_s:
            return f"{text}; ps-lite does not tell who is late: see the servers' output"
        self._reminder = self._reminder or Reminder(now - self._silence_s)
        if self._reminder.due(now, self._silence_s):
            logger.warning("%s", text)
        return None
